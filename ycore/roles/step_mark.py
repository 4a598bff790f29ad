"""Tells the launcher that a step begins: it counts the trainer's start by one limit, and its steps by another.

Not here: the limits (`launch.supervise`), and a step's figures (`step_metrics`).
"""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class StepMark(TrainerCallback):
    """Touches `RunFolder.step_began` of this machine; any rank may."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._file.touch()
