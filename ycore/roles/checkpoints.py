"""The controller's part of a checkpoint, and the checkpoint to go on from.

Not here: the trainer's own part (transformers writes it), and what the controller remembers (`controller.state`).
"""

from pathlib import Path
from typing import Any

from torch.serialization import register_package
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ycore.controller.journal import Journal
from ycore.controller.source import Rounds
from ycore.controller.state import controller_state, restore_controller
from ycore.errors import RunError
from ycore.run_folder.files import read_json, write_json_atomic

_PREFIX = "checkpoint-"


def controller_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"controller-{rank}.json"


def newest_checkpoint(folder: Path, *, num_ranks: int = 1) -> Path | None:
    """The latest checkpoint that holds the state of that many controllers: those are written last."""
    if not folder.is_dir():
        return None
    whole = [
        path
        for path in folder.glob(f"{_PREFIX}*")
        if all(controller_file(path, rank).is_file() for rank in range(num_ranks))
    ]
    return max(whole, key=step_of, default=None)


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / f"{_PREFIX}{step}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def accept_numbered_cpus() -> None:
    """Let `torch.load` take `cpu:1` for the CPU: so accelerate names it by rank, and transformers loads optimizers."""
    register_package(50, lambda storage: None, lambda storage, where: storage if where.startswith("cpu:") else None)


class ControllerState(TrainerCallback):
    """Remembers the controller as it was at the last step's end, and writes that into every checkpoint, on every rank.

    A round that was cut short has moved the controller on; its step does not exist, so neither does its state.
    """

    def __init__(self, rounds: Rounds, journal: Journal, *, rank: int) -> None:
        self._rounds = rounds
        self._journal = journal
        self._rank = rank
        self.saved_step = 0
        self._at_step_end = controller_state(rounds)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._at_step_end = controller_state(self._rounds)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.write(checkpoint_of(Path(str(args.output_dir)), state.global_step))

    def write(self, checkpoint: Path) -> None:
        checkpoint.mkdir(parents=True, exist_ok=True)  # the first rank's folder, which may not have made it yet
        write_json_atomic(controller_file(checkpoint, self._rank), self._at_step_end)
        self.saved_step = step_of(checkpoint)
        self._journal.prune(before=min(step_of(path) for path in checkpoint.parent.glob(f"{_PREFIX}*")))

    def restore(self, checkpoint: Path) -> None:
        file = controller_file(checkpoint, self._rank)
        if not file.is_file():
            raise RunError(
                f"rank {self._rank} has no state in {checkpoint}; a run over several machines goes on only where "
                "all of them see the same run folder"
            )
        self._at_step_end = read_json(file)
        self.saved_step = step_of(checkpoint)
        restore_controller(self._rounds, self._at_step_end)
