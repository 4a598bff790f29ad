"""The journal: every round on disk before the optimizer sees it, so that a step that was begun can be taken again.

A round's record holds the groups that a rank trains on (token ids, logprobs, rewards with their sources, rows,
positions, policy versions) and the controller's state after it. Generating the round again would not give the same
tokens in general: an engine's arithmetic depends on what else is in its batch. Reading it gives them to the bit.

Not here: the checkpoint that a resumed run begins from (`roles.checkpoints`), and what is done with a round.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ycore.controller.peers import Peers
from ycore.controller.source import Rounds
from ycore.controller.state import controller_state, restore_controller
from ycore.controller.wire import group_from_json, group_to_json
from ycore.errors import RunFolderError
from ycore.run_folder.files import write_json_atomic
from ycore.types import Group

Record = Callable[[str, float], None]


class Journal:
    """One file a round and rank, named by its step. A file of such a name is whole: it was renamed into place."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        self._folder = folder
        self._rank = rank

    def path(self, step: int) -> Path:
        return self._folder / f"round-{step:06d}-rank-{self._rank}.json"

    def commit(self, step: int, groups: list[Group], state: dict[str, Any]) -> None:
        """Returns once the round is on the disk under its name."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json_atomic(self.path(step), {"groups": [group_to_json(group) for group in groups], "state": state})

    def read(self, step: int) -> tuple[list[Group], dict[str, Any]] | None:
        """The round of that step and the state after it; None where it was never committed."""
        try:
            told = json.loads(self.path(step).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as damage:
            raise RunFolderError(
                f"{self.path(step)} is damaged ({damage}); remove it and resume: its round is generated again"
            ) from None
        return [group_from_json(group) for group in told["groups"]], told["state"]

    def prune(self, before: int) -> None:
        """Drop the rounds of steps before this one: a checkpoint holds what they taught."""
        for path in self._folder.glob(f"round-*-rank-{self._rank}.json"):
            if int(path.name.split("-")[1]) < before:
                path.unlink(missing_ok=True)


class JournaledRounds:
    """A `RoundSource` that commits every round, and gives a committed one again instead of generating it anew.

    A round counts as committed when every rank has its part: a kill between two ranks' commits leaves it unmade.
    """

    def __init__(self, rounds: Rounds, journal: Journal, peers: Peers, record: Record) -> None:
        self._rounds = rounds
        self._journal = journal
        self._peers = peers
        self._record = record

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        """The round of this step: from the journal where it stands there, else generated and committed."""
        committed = self._journal.read(step)
        if self._peers.add_up([float(committed is not None)]) == [float(self._peers.world)]:
            assert committed is not None
            groups, state = committed
            restore_controller(self._rounds, state)
            self._record("ycore/replayed", 1.0)
            return groups
        groups = self._rounds.next_round(step=step, num_groups=num_groups)
        self._journal.commit(step, groups, controller_state(self._rounds))
        return groups
