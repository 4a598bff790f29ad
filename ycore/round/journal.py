"""The journal: every round is on disk before the optimizer sees it, so that a step can be taken again after a kill.

A record holds the groups that a rank trains on (token ids, logprobs, rewards by source, rows, positions, policy
versions) and the controller's state after the round. Generating a round again would not give the same tokens in
general: an engine's arithmetic depends on what else is in its batch. Reading it gives them to the bit.

A part of the state is an object of the controller with `state_dict()`, which returns plain JSON values, and
`load_state_dict(state)`. Where the number of ranks changes, no position of the prompts' order is lost, none comes twice,
and those to come keep their order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from ycore.errors import ConfigError, RunFolderError
from ycore.round.peers import GroupSummary, deal_groups
from ycore.round.sampling import Shard
from ycore.run.files import make_folder
from ycore.run.resuming import (
    damaged_round,
    drop_rounds,
    read_round,
    round_file,
    write_round,
)
from ycore.types import Group, JsonObject, Record, from_json, to_json

# -- the parts of a controller's state, and what another number of ranks makes of them ---------------------------------

State = Record


class CheckpointPart(NamedTuple):
    of: Callable[[Any], Any]
    """Returns the part of a controller; None where the run has none."""
    reshard: Callable[[Sequence[Any], int], list[Any]]
    """Returns the states for this number of ranks, from the states of all ranks before."""
    of_rows: bool = False
    """Whether it grows with the rows that the run has seen: only checkpoints have it. A round's file has its groups'
    summaries, from which `Controller.learn_order` gives it again."""


def states_of(controller: Any, *, of_rows: bool = True) -> JsonObject:
    """Return the state of every part; None for one that the run does not have, or that is not wanted (`of_rows`)."""
    states: JsonObject = dict.fromkeys(PARTS)
    for name, part in PARTS.items():
        owner = part.of(controller)
        if owner is not None and (of_rows or not part.of_rows):
            states[name] = owner.state_dict()
    return states


def load_states(controller: Any, states: State) -> None:
    for name, part in PARTS.items():
        owner = part.of(controller)
        if owner is not None and states[name] is not None:
            owner.load_state_dict(states[name])


def reshard_states(states: Sequence[State], *, world: int) -> list[JsonObject]:
    """Return the states for `world` ranks, from those of all ranks before them, in order."""
    parts = {
        name: part.reshard([state[name] for state in states], world)
        for name, part in PARTS.items()
    }
    return [{name: of_ranks[rank] for name, of_ranks in parts.items()} for rank in range(world)]


def _same(states: Sequence[Any], world: int) -> list[Any]:
    """Give all ranks the first state that is known: all ranks have the same, or only the first has any."""
    return [next((state for state in states if state is not None), None)] * world


def _dealt_out(states: Sequence[Any], world: int) -> list[Any]:
    """Deal lists of groups out by their positions."""
    groups = sorted((group for state in states for group in state or ()), key=_position)
    return [groups[rank::world] for rank in range(world)]


def _position(item: State) -> int:
    draw = item["group"]["draw"] if "group" in item else item["draw"]
    return int(draw["position"])


def _reshard_draws(states: Sequence[State], world: int) -> list[Any]:
    first = states[0]
    gaps, start = positions_to_come(
        [state["cursor"] for state in states], first["gaps"], first["start"]
    )
    return [{"cursor": 0, "gaps": list(gaps), "start": start}] * world


PARTS: Mapping[str, CheckpointPart] = {
    "draws": CheckpointPart(attrgetter("draws"), _reshard_draws),
    "acceptance": CheckpointPart(attrgetter("acceptance"), _same),
    "leftover_groups": CheckpointPart(attrgetter("leftover_groups"), _dealt_out),
    # Nobody begins with any, so that all ranks have as many.
    "reuse_buffer": CheckpointPart(attrgetter("reuse_buffer"), lambda _, world: [[]] * world),
    "placement": CheckpointPart(attrgetter("slots"), _same),
    "curriculum": CheckpointPart(attrgetter("draws.curriculum"), _same, of_rows=True),
    "lengths": CheckpointPart(attrgetter("lengths"), _same, of_rows=True),
    "unfinished_groups": CheckpointPart(attrgetter("in_flight"), _dealt_out),
    "constraints": CheckpointPart(attrgetter("rules.constraints"), _same),
}
"""To add a part: give its class the two methods, and add it here."""


def positions_to_come(
    cursors: Sequence[int], gaps: Sequence[int], start: int
) -> tuple[tuple[int, ...], int]:
    """Return the positions that no rank has drawn, as a new `Shard`'s `gaps` and `start`.

    Args:
        cursors: how many positions each rank has drawn from its shard.
        gaps, start: of the shards that they drew from.
    """
    world = len(cursors)
    all_positions = Shard(gaps=tuple(gaps), start=start)
    end = max(len(gaps), max(cursors) * world)
    left = [
        all_positions.position(place)
        for place in range(end)
        if place // world >= cursors[place % world]
    ]
    start = all_positions.position(end)
    while left and left[-1] == start - 1:
        start = left.pop()
    return tuple(left), start


def reshard_round(rounds: Sequence[Sequence[Group]], *, world: int) -> list[list[Group]]:
    """Return a round's groups for `world` ranks, about the same number of tokens each, from all ranks' groups.

    Groups are dropped from the end where they cannot be divided evenly; such a round has another size and is not used.
    """
    groups = sorted(
        (group for rank_groups in rounds for group in rank_groups),
        key=lambda group: group.draw.position,
    )
    summaries = [
        GroupSummary(
            number % world, number // world, group.draw.position, group.num_tokens, teaches=True
        )
        for number, group in enumerate(groups)
    ]
    deal = deal_groups(summaries, world=world, per_rank=len(groups) // world)
    return [
        [groups[summary.index * world + summary.rank] for summary in rank_summaries]
        for rank_summaries in deal.chosen
    ]


# -- the rounds --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Committed:
    groups: list[Group]
    state: JsonObject
    metrics: Mapping[str, float]
    summaries: Sequence[GroupSummary] = ()
    """Summaries of the groups that all ranks finished in the round."""
    problems: Mapping[str, int] = field(default_factory=dict)
    """Reasons why completions have no reward, with their numbers; not in the journal."""
    is_replayed: bool = False
    """Whether it comes from the journal."""


@dataclass(frozen=True)
class Journal:
    """One file a round and rank, named by its step and renamed into place (`run.resuming` has its format).

    `seed` is the run's; each completion's own follows from it and from the position of its prompt.
    """

    folder: Path
    _: KW_ONLY
    rank: int
    world: int = 1
    seed: int = 0

    def path(self, step: int) -> Path:
        return round_file(self.folder, step, self.rank)

    def world_of(self, step: int) -> int | None:
        """The number of ranks that committed the round of that step; None where not all of them did."""
        first = round_file(self.folder, step, 0)
        if not first.is_file():
            return None
        _, content = read_round(first)
        world: int = content["world"]
        is_whole = all(round_file(self.folder, step, rank).is_file() for rank in range(world))
        return world if is_whole else None

    def commit(
        self,
        step: int,
        groups: list[Group],
        state: JsonObject,
        metrics: Mapping[str, float] | None = None,
        summaries: Sequence[GroupSummary] = (),
    ) -> None:
        """Write the round of this step, with the controller's state after it, as plain JSON values.

        It returns once the file is flushed to the disk under its name. An OSError, for example because the disk is
        full, leaves no file of that name.
        """
        make_folder(self.folder)
        content = {
            "world": self.world,  # here it is under the sha256
            "groups": [to_json(group) for group in groups],
            "state": state,
            "metrics": dict(metrics or {}),
            "summaries": list(map(to_json, summaries)),
        }
        label = {"step": step, "rank": self.rank, "world": self.world, "seed": self.seed}
        write_round(self.path(step), label, content)

    def read(self, step: int) -> Committed | None:
        """This rank's part of the round of that step; RunFolderError where a file of it is damaged.

        A round that another number of ranks committed is dealt anew. None where some rank did not commit its part; a
        part that is left from such a round may be there, and counts for nothing.
        """
        world = self.world_of(step)
        if world is None:
            return None
        if world == self.world:
            return self._part(step, self.rank, world)
        parts = [
            part for rank in range(world) if (part := self._part(step, rank, world)) is not None
        ]
        if len(parts) < world:
            return None
        groups = reshard_round([part.groups for part in parts], world=self.world)
        states = reshard_states([part.state for part in parts], world=self.world)
        return replace(parts[0], groups=groups[self.rank], state=states[self.rank])

    def _part(self, step: int, rank: int, world: int) -> Committed | None:
        """A rank's part; None where that file is of a round of another number of ranks."""
        path = round_file(self.folder, step, rank)
        head, content = read_round(path)
        label = {"step": step, "rank": rank, "world": content["world"]}
        written = {name: head.get(name) for name in label}
        if written != label:
            raise damaged_round(path, f"it is of {written}, not of {label}")
        if head["world"] != world:
            return None
        groups = [from_json(Group, group) for group in content["groups"]]
        summaries = [from_json(GroupSummary, summary) for summary in content["summaries"]]
        return Committed(
            groups, content["state"], content["metrics"], summaries, is_replayed=True
        )

    def prune(self, before: int) -> None:
        """Delete the rounds of steps before this one: a checkpoint holds what they taught."""
        drop_rounds(self.folder, before=before, of=self._is_ours)

    def forget_from(self, step: int) -> None:
        """Delete the rounds of this step and later ones: another round of this step comes."""
        drop_rounds(self.folder, after=step - 1, of=self._is_ours)

    def _is_ours(self, rank: int) -> bool:
        """Each rank deletes its own files, and those of ranks that there are no more."""
        return rank % self.world == self.rank


def record_metrics(committed: Committed, record: Callable[[str, float], None]) -> None:
    """Record a round's metrics; of one from the journal without its times, and mark the step as replayed."""
    for name, value in committed.metrics.items():
        if not (committed.is_replayed and name.startswith("ycore/time/")):
            record(name, value)
    if committed.is_replayed:
        record("ycore/replayed", 1.0)


@dataclass
class ReplayedRounds:
    """Rounds for TRL's trainer from the journal of another run, which is never changed: no engine, no reward runs."""

    journal: Journal
    _: KW_ONLY
    group_size: int
    record: Callable[[str, float], None]
    constraint_weights: list[float] | None = None
    effective_share: float = 1.0

    def check(self, *, steps: int, steps_per_round: int) -> None:
        """Raise RunFolderError where the journal lacks a round, of any rank, that this run will need."""
        for step in range(0, steps, steps_per_round):
            if self.journal.world_of(step) is None:
                raise RunFolderError(
                    f"{self.journal.folder} has no round of step {step}, and this run takes {steps} steps with a "
                    f"round every {steps_per_round}; say --steps {step}, or the batch of that run"
                )

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        """The round of this step, which `check` has found; ConfigError where it has another size."""
        committed = self.journal.read(step)
        assert committed is not None
        groups = committed.groups
        sizes = {len(group.completions) for group in groups}
        if len(groups) != num_groups or sizes != {self.group_size}:
            raise ConfigError(
                f"the rounds of {self.journal.folder} are {len(groups)} groups of {max(sizes)} a rank, and this run takes "
                f"{num_groups} of {self.group_size}; leave --prompts-per-step and --group-size as they were"
            )
        record_metrics(committed, self.record)
        self.constraint_weights = committed.state["constraints"]
        return groups
