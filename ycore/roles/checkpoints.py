"""The controller's part of a checkpoint, and the checkpoint to go on from.

Not here: the trainer's own part (transformers writes it), and what the controller remembers (`controller.state`).
"""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ycore.controller.source import Rounds
from ycore.controller.state import controller_state, restore_controller
from ycore.run_folder.files import read_json, write_json_atomic

_PREFIX = "checkpoint-"


def controller_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"controller-{rank}.json"


def newest_checkpoint(folder: Path) -> Path | None:
    """The latest checkpoint that holds a controller's state: that is written last."""
    if not folder.is_dir():
        return None
    whole = [path for path in folder.glob(f"{_PREFIX}*") if controller_file(path, 0).is_file()]
    return max(whole, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


class ControllerState(TrainerCallback):
    """Remembers the controller as it was at the last step's end, and writes that into every checkpoint, on every rank.

    A round that was cut short has moved the controller on; its step does not exist, so neither does its state.
    """

    def __init__(self, rounds: Rounds, *, rank: int) -> None:
        self._rounds = rounds
        self._rank = rank
        self._at_step_end = controller_state(rounds)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._at_step_end = controller_state(self._rounds)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.write(Path(str(args.output_dir)) / f"{_PREFIX}{state.global_step}")

    def write(self, checkpoint: Path) -> None:
        write_json_atomic(controller_file(checkpoint, self._rank), self._at_step_end)

    def restore(self, checkpoint: Path) -> None:
        self._at_step_end = read_json(controller_file(checkpoint, self._rank))
        restore_controller(self._rounds, self._at_step_end)
