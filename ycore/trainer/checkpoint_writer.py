"""Write a run's checkpoints: published together by all ranks or not at all, and none without room on the disk."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from ycore.errors import RunError, YcoreError
from ycore.round.journal import Journal
from ycore.run.checkpoints import (
    MIN_KEPT,
    checkpoints_in,
    drop_oldest,
    publish,
    size_of,
    staging,
    step_of,
)
from ycore.run.files import is_disk_full, make_folder, sync
from ycore.run.paths import RunFolder

_SPARE = 1.1  # of the last checkpoint's size must be free for the next one


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks that write a checkpoint together, as one of them sees it."""

    rank: int = 0
    world: int = 1
    is_first_of_machine: bool = True
    meet: Callable[[], None] = lambda: None  # returns when every rank has called it


class CheckpointWriter:
    """Example: `with writer.saving(step) as staged: write_into(staged / f"checkpoint-{step}")`.

    Args:
        expected_bytes: rough size of a checkpoint.
        keep: how many checkpoints stay; None keeps all.
        journal: pruned with the checkpoints; None keeps its rounds.
    """

    def __init__(
        self,
        home: RunFolder,
        *,
        expected_bytes: int,
        keep: int | None,
        ranks: RankGroup,
        journal: Journal | None = None,
    ) -> None:
        make_folder(home.checkpoints)
        self._folder = home.checkpoints
        self._metrics = home.metrics
        self._expected_bytes = expected_bytes
        self._keep = keep
        self._ranks = ranks
        self._journal = journal
        self.saved_step = 0

    @contextmanager
    def saving(self, step: int) -> Iterator[Path]:
        """Give the folder for `checkpoint-STEP`, published on leaving; all ranks come here together."""
        staged, ranks = staging(self._folder, step), self._ranks
        leads = ranks.rank == 0
        try:
            if leads:
                self._stage(staged, step)
            ranks.meet()
            if not staged.is_dir() and ranks.is_first_of_machine:
                leads = True  # a machine that does not share the run folder publishes what its ranks wrote
                self._stage(staged, step)
            ranks.meet()
            yield staged
            ranks.meet()
            if leads:
                sync(self._metrics)  # its steps are not taken again from here on
                publish(self._folder, step, world=ranks.world)
                drop_oldest(self._folder, keep=self._keep)
            ranks.meet()
        except YcoreError:
            raise
        except (OSError, RuntimeError, SafetensorError) as error:
            if leads:
                # This makes room for the last lines of logs and summary.
                shutil.rmtree(staged, ignore_errors=True)
            if is_disk_full(error) or self._is_nearly_full():
                raise RunError(self._no_room(step)) from error
            raise
        self.saved_step = step
        if self._journal is not None:
            self._journal.prune(before=step_of(checkpoints_in(self._folder)[0]))

    def check_room(self) -> None:
        """RunError if the disk has no room for the checkpoints that a run keeps."""
        needed, free = MIN_KEPT * self._expected_bytes, self._free_bytes()
        if self._ranks.rank == 0 and not checkpoints_in(self._folder) and free < needed:
            raise RunError(
                f"{MIN_KEPT} checkpoints take about {needed / 1e6:.0f} MB, and {self._folder} has {free / 1e6:.0f} MB "
                "free; make room, or choose another --output"
            )

    def _stage(self, staged: Path, step: int) -> None:
        self._check_spare_room(step)
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(mode=0o700)

    def _check_spare_room(self, step: int) -> None:
        """RunError before anything is written: as much as the last checkpoint took must be free."""
        last_bytes = self._last_bytes()
        if last_bytes is not None and self._free_bytes() < int(_SPARE * last_bytes):
            raise RunError(self._no_room(step))

    def _is_nearly_full(self) -> bool:
        """torch reports that a write failed, but not why."""
        return self._free_bytes() < (self._last_bytes() or self._expected_bytes)

    def _no_room(self, step: int) -> str:
        whole = checkpoints_in(self._folder)
        last = "there is none yet, and the journal holds the rounds"
        if whole:
            last = f"{whole[-1].name} is whole"
        return (
            f"no room for the checkpoint of step {step} in {self._folder} ({self._free_bytes() / 1e6:.1f} MB free); "
            f"{last}: make room, and go on with --resume"
        )

    def _last_bytes(self) -> int | None:
        whole = checkpoints_in(self._folder)
        return size_of(whole[-1]) if whole else None

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self._folder).free
