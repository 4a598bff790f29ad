"""The checkpoints of a run without rollouts: transformers' own files, published whole or not at all.

Not here: files, manifests and names (`run_folder.checkpoints`), and runs with rounds (`checkpoints`).
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ycore.run_folder.checkpoints import drop_oldest, newest_for, publish, staging


class TuningCheckpoints:
    """Writes and finds the checkpoints; all ranks come together, the first one publishes."""

    def __init__(self, folder: Path, trainer: Any) -> None:
        self._folder = folder
        self._accelerator = trainer.accelerator
        self._keep = trainer.args.save_total_limit
        self.saved_step = 0

    @contextmanager
    def saving(self, step: int) -> Iterator[Path]:
        """What is written under the folder given becomes `checkpoint-STEP` on leaving."""
        staged, leads = staging(self._folder, step), self._accelerator.is_main_process
        if leads:
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(mode=0o700)
        self._accelerator.wait_for_everyone()
        yield staged
        self._accelerator.wait_for_everyone()
        if leads:
            publish(self._folder, step, {"world": self._accelerator.num_processes})
            drop_oldest(self._folder, keep=self._keep)
        self._accelerator.wait_for_everyone()
        self.saved_step = step

    def find(self) -> Path | None:
        """Clear what a killed save left, and choose the newest checkpoint that verifies; for the first rank to do."""
        world = self._accelerator.num_processes
        return newest_for(self._folder, world=world, say=lambda line: print(line, flush=True))
