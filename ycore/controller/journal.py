"""The journal: every round on disk before the optimizer sees it, so that a step that was begun can be taken again.

A round's record holds the groups that a rank trains on (token ids, logprobs, rewards with their sources, rows,
positions, policy versions) and the controller's state after it. Generating the round again would not give the same
tokens in general: an engine's arithmetic depends on what else is in its batch. Reading it gives them to the bit.

Not here: the files' names (`run_folder.rounds`), the checkpoint that a resumed run begins from (`roles.checkpoints`),
training from another run's journal (`replay`), and what is done with a round.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ycore.controller.peers import Peers
from ycore.controller.source import Record, Rounds
from ycore.controller.state import controller_state, restore_controller
from ycore.controller.wire import group_from_json, group_to_json
from ycore.errors import RunFolderError
from ycore.run_folder.files import write_bytes_atomic
from ycore.run_folder.rounds import drop_rounds, round_file
from ycore.types import Group

SCHEMA = 1


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
        body = json.dumps(told).encode()
        head = {"schema": SCHEMA, **self._label(step), "seed": self._seed, "sha256": _sha256(body)}
        write_bytes_atomic(self.path(step), json.dumps(head).encode() + b"\n" + body + b"\n")

    def read(self, step: int) -> Committed | None:
        """The round of that step; None where it was never committed."""
        try:
            first, _, body = self.path(step).read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        problem = self._problem(step, first, body.removesuffix(b"\n"))
        if problem is not None:
            raise RunFolderError(
                f"{self.path(step)} is damaged ({problem}); remove it and resume: its round is generated again"
            )
        told = json.loads(body)
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

    def _problem(self, step: int, first: bytes, body: bytes) -> str | None:
        try:
            head = json.loads(first)
        except ValueError:
            return "its first line is not JSON"
        if not isinstance(head, dict) or head.get("schema") != SCHEMA:
            return f"its schema is not {SCHEMA}"
        if _sha256(body) != head.get("sha256"):
            return "its sha256 is not the one that was written"
        found = {name: head.get(name) for name in self._label(step)}
        return None if found == self._label(step) else f"it is of {found}, not of {self._label(step)}"


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


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
