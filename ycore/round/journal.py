"""The journal: every round on disk before the optimizer sees it, so that a step that was begun can be taken again.

A round's record holds the groups that a rank trains on (token ids, logprobs, rewards with their sources, rows,
positions, policy versions) and the controller's state after it. Generating the round again would not give the same
tokens in general: an engine's arithmetic depends on what else is in its batch. Reading it gives them to the bit.

Groups as JSON, for another rank or for a checkpoint: nothing that passes between processes is pickled.

What a controller must remember to go on exactly where it was: cursor, yield, surplus, and what placement learned.

Training from another run's journal: the same rollouts, without engines and without rewards being asked again.

Not here: the files' names (`run_folder.rounds`), the checkpoint that a resumed run begins from (`roles.checkpoints`),
training from another run's journal (`replay`), and what is done with a round.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ycore.errors import ConfigError, RunFolderError
from ycore.round.peers import Peers
from ycore.round.sampling import Yield
from ycore.round.step import Record, Rounds
from ycore.run.paths import RunFolder
from ycore.run.resuming import check_replay, damaged_round, drop_rounds, read_round, round_file, rounds_in, write_round
from ycore.types import Completion, Draw, Finished, Group, Prompt, Score


def to_bytes(group: Group) -> bytes:
    """UTF-8 JSON. A column's value that JSON has no word for, a date say, becomes its text: rewards have seen it."""
    return json.dumps(asdict(group), ensure_ascii=False, default=str).encode()


def from_bytes(data: bytes) -> Group:
    """The group that `to_bytes` was given."""
    return group_from_json(json.loads(data))


def group_to_json(group: Group) -> dict[str, Any]:
    """As `to_bytes`, for a file that holds more than the group."""
    told: dict[str, Any] = json.loads(to_bytes(group))
    return told


def finished_to_json(item: Finished) -> dict[str, Any]:
    return {"group": group_to_json(item.group), "teaches": item.teaches}


def finished_from_json(told: dict[str, Any]) -> Finished:
    return Finished(group_from_json(told["group"]), told["teaches"])


def group_from_json(told: dict[str, Any]) -> Group:
    """The group that `group_to_json` was given."""
    draw, greedy = told["draw"], told.get("greedy_scores_R")
    return Group(
        draw=Draw(draw["position"], Prompt(**draw["prompt"]), tuple(draw["token_ids"])),
        completions=tuple(_completion(one) for one in told["completions"]),
        scores_GR=tuple(tuple(Score(**score) for score in row) for row in told["scores_GR"]),
        greedy_scores_R=None if greedy is None else tuple(Score(**score) for score in greedy),
    )


def _completion(told: dict[str, Any]) -> Completion:
    logprobs = told["logprobs"]
    lists = {"token_ids": tuple(told["token_ids"]), "logprobs": None if logprobs is None else tuple(logprobs)}
    return Completion(**{**told, **lists})


def controller_state(rounds: Rounds) -> dict[str, Any]:
    """Plain JSON values."""
    yields = rounds.round.yields
    return {
        "cursor": rounds.draws.cursor,
        "yield": {"kept": yields.kept, "finished": yields.finished},
        "surplus": [finished_to_json(item) for item in rounds.surplus.waiting],
        "placement": rounds.round.slots.allocator.state(),
    }


def restore_controller(rounds: Rounds, state: dict[str, Any]) -> None:
    """Set a controller to what `controller_state` told."""
    rounds.draws.cursor = state["cursor"]
    rounds.round.yields = Yield(**state["yield"])
    rounds.surplus.waiting = [finished_from_json(item) for item in state["surplus"]]
    if "placement" in state:  # not yet in what earlier versions wrote
        rounds.round.slots.allocator.restore(state["placement"])


@dataclass(frozen=True, slots=True)
class Committed:
    """A round of one rank, the controller's state after it, and what the round told of itself."""

    groups: list[Group]
    state: dict[str, Any]
    metrics: Mapping[str, float]


class Journal:
    """One file a round and rank, named by its step. A file of such a name is whole: it was renamed into place.

    Its first line tells what it is and the sha256 of the second, which is the round; both are JSON. `seed` is the
    run's: every completion's own follows from it and from the position of its prompt.
    """

    def __init__(self, folder: Path, *, rank: int, world: int = 1, seed: int = 0) -> None:
        self._folder = folder
        self._rank = rank
        self._world = world
        self._seed = seed

    def path(self, step: int) -> Path:
        return round_file(self._folder, step, self._rank)

    def commit(
        self, step: int, groups: list[Group], state: dict[str, Any], metrics: Mapping[str, float] | None = None
    ) -> None:
        """Returns once the round is on the disk under its name; `metrics` is what it told of itself."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        told = {"groups": [group_to_json(group) for group in groups], "state": state, "metrics": dict(metrics or {})}
        write_round(self.path(step), {**self._label(step), "seed": self._seed}, told)

    def read(self, step: int) -> Committed | None:
        """The round of that step; None where it was never committed."""
        path, label = self.path(step), self._label(step)
        if not path.is_file():
            return None
        head, told = read_round(path)
        found = {name: head.get(name) for name in label}
        if found != label:
            raise damaged_round(path, f"it is of {found}, not of {label}")
        groups = [group_from_json(group) for group in told["groups"]]
        return Committed(groups, told["state"], told.get("metrics", {}))

    def prune(self, before: int) -> None:
        """Drop the rounds of steps before this one: a checkpoint holds what they taught."""
        drop_rounds(self._folder, before=before, rank=self._rank)

    def forget_after(self, step: int) -> None:
        """Drop the rounds of later steps: the one of this step is another than they followed."""
        drop_rounds(self._folder, after=step, rank=self._rank)

    def _label(self, step: int) -> dict[str, int]:
        return {"step": step, "rank": self._rank, "world": self._world}


class JournaledRounds:
    """A `RoundSource` that commits every round, and gives a committed one again instead of generating it anew.

    A round counts as committed when every rank has its part: a kill between two ranks' commits leaves it unmade.
    """

    def __init__(self, rounds: Rounds, journal: Journal, peers: Peers, record: Record) -> None:
        self._rounds = rounds
        self._journal = journal
        self._peers = peers
        self._record = record
        self._generates = False

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        """The round of this step: from the journal where it stands there, else generated and committed."""
        committed = self._journal.read(step)
        if self._peers.add_up([float(committed is not None)]) == [float(self._peers.world)]:
            assert committed is not None
            restore_controller(self._rounds, committed.state)
            record_again(committed, self._record)
            return committed.groups
        told: dict[str, float] = {}

        def record(name: str, value: float) -> None:
            told[name] = value
            self._record(name, value)

        self._rounds.record = record
        groups = self._rounds.next_round(step=step, num_groups=num_groups)
        if not self._generates:
            self._journal.forget_after(step)
            self._generates = True
        self._journal.commit(step, groups, controller_state(self._rounds), told)
        return groups


def record_again(committed: Committed, record: Record) -> None:
    """What the round told when it was generated, but for the time that took; and that it was not generated now."""
    for name, value in committed.metrics.items():
        if not name.startswith("ycore/time/"):
            record(name, value)
    record("ycore/replayed", 1.0)


class ReplayedRounds:
    """A `RoundSource` that reads every round from the journal of `run`, which is never changed."""

    def __init__(self, run: Path, *, rank: int, world: int, group_size: int, record: Record) -> None:
        self._run = run
        self._folder = RunFolder(run).journal
        self._world = world
        self._group_size = group_size
        self._record = record
        self._journal = Journal(self._folder, rank=rank, world=world)

    def check(self, *, steps: int, steps_per_round: int) -> None:
        """RunFolderError where a round that this run will ask for is not there, of every rank."""
        check_replay(self._run, self._folder)
        there, ranks = rounds_in(self._folder), set(range(self._world))
        if there[0] != ranks:
            raise RunFolderError(
                f"{self._run} was trained by {len(there[0])} ranks and this run has {self._world}; "
                f"say --processes {len(there[0])}"
            )
        for step in range(0, steps, steps_per_round):
            if there.get(step) != ranks:
                raise RunFolderError(
                    f"the journal of {self._run} has no round of step {step}, and this run takes {steps} steps with a "
                    f"round every {steps_per_round}; say --steps {step}, or the batch of that run"
                )

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        """The round of this step; ConfigError where it is of another size than this run's."""
        found = self._journal.read(step)
        if found is None:
            raise RunFolderError(f"the journal of {self._run} has no round of step {step}; say --steps {step}")
        groups = found.groups
        sizes = {len(group.completions) for group in groups}
        if len(groups) != num_groups or sizes != {self._group_size}:
            raise ConfigError(
                f"the rounds of {self._run} are {len(groups)} groups of {max(sizes)} a rank, and this run takes "
                f"{num_groups} of {self._group_size}; leave --prompts-per-step and --group-size as they were"
            )
        record_again(found, self._record)
        return groups
