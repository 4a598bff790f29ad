"""Training from another run's journal: the same rollouts, without engines and without rewards being asked again.

Not here: writing a journal (`journal`).
"""

from pathlib import Path

from ycore.controller.journal import Journal, record_again
from ycore.controller.source import Record
from ycore.errors import ConfigError, RunFolderError
from ycore.run_folder.paths import RunFolder
from ycore.run_folder.rounds import check_replay, rounds_in
from ycore.types import Group


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
