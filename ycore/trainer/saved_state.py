"""The checkpoints of TRL's trainers: transformers' files and ours.

Ours, for every rank of a run with rounds: the controller at the end of the last step (`controller-RANK.json`), and the
micro-batches of a round that later steps still learn from (`round-RANK.safetensors`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.serialization import register_package
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ycore.errors import RunError
from ycore.round.checkpoint_parts import reshard_states
from ycore.round.journal import Journal
from ycore.round.step import Controller
from ycore.run.checkpoints import (
    checkpoint_of,
    controller_file,
    read_checkpoint_manifest,
    step_of,
)
from ycore.run.files import read_json, write_json_atomic
from ycore.run.paths import RunFolder
from ycore.trainer.checkpoint_writer import CheckpointWriter, RankGroup
from ycore.trl.base import BaseTrainer
from ycore.trl.batches import MicroBatches, RoundPosition
from ycore.trl.seam import SeamGRPOTrainer


class RoundState:
    """The state of a rank with rounds at the end of the last step.

    A round that was cut short has moved the controller on, but its step does not exist.

    Args:
        controller: None if the rounds are read from another run's journal.
    """

    def __init__(self, trainer: SeamGRPOTrainer, controller: Controller | None) -> None:
        self._trainer = trainer
        self._controller = controller
        self.remember()

    def remember(self) -> None:
        """Take the state as it is, at the end of a step."""
        self._position = self._trainer.position
        self._state = {} if self._controller is None else self._controller.state()

    def write(self, checkpoint: Path, rank: int, step: int) -> None:
        position = self._position
        checkpoint.mkdir(parents=True, exist_ok=True)  # the first rank makes it, perhaps later
        tensors, lists = _flat(position.micro_batches or [])
        trainer = {
            "micro_step": position.micro_step,
            "has_engine_logps": position.has_engine_logps,
            "lists": lists,
        }
        state = {"policy_version": step, "trainer": trainer, "controller": self._state}
        write_json_atomic(checkpoint / controller_file(rank), state)
        if tensors:
            save_file(tensors, _batches_file(checkpoint, rank))

    def restore(self, checkpoint: Path, rank: int, world: int) -> None:
        """Take what this rank of `world` saved; where another number of ranks did, its part of what they saved."""
        saved_world = read_checkpoint_manifest(checkpoint).world
        if saved_world == world:
            state = _read_state(checkpoint, rank)
            trainer, batches = state["trainer"], _batches_file(checkpoint, rank)
            unfinished = None
            if batches.is_file():
                unfinished = _nested({**load_file(batches), **trainer["lists"]})
            self._position = RoundPosition(
                trainer["micro_step"], trainer["has_engine_logps"], unfinished
            )
            self._state = state["controller"]
        else:
            states = [_read_state(checkpoint, number) for number in range(saved_world)]
            # Micro-batches have another size now, and are counted anew: the next one begins a round.
            self._position = RoundPosition(0, states[0]["trainer"]["has_engine_logps"])
            self._state = {}
            if self._controller is not None:
                controllers = [state["controller"] for state in states]
                self._state = reshard_states(controllers, world=world)[rank]
        self._trainer.resume_at(self._position)
        if self._controller is not None:
            self._controller.restore(self._state)


class Checkpoints(TrainerCallback):
    """Writes and restores the checkpoints of a run with a trainer of TRL's.

    Args:
        rounds: of a run with rollouts.
        journal: pruned with the checkpoints; None keeps its rounds.
    """

    def __init__(
        self,
        home: RunFolder,
        trainer: BaseTrainer,
        rounds: RoundState | None = None,
        journal: Journal | None = None,
    ) -> None:
        accelerator = trainer.accelerator
        self._trainer = trainer
        self._rounds = rounds
        self._rank = int(accelerator.process_index)
        self._world = int(accelerator.num_processes)
        ranks = RankGroup(
            self._rank,
            self._world,
            is_first_of_machine=bool(accelerator.is_local_main_process),
            meet=accelerator.wait_for_everyone,
        )
        keep = trainer.args.save_total_limit
        size = _expected_bytes(trainer.model)
        self.writer = CheckpointWriter(
            home, expected_bytes=size, keep=keep, ranks=ranks, journal=journal
        )

    @property
    def saved_step(self) -> int:
        return self.writer.saved_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._trainer.refuse_broken_weights()
        if self._rounds is not None:
            self._rounds.remember()

    @contextmanager
    def saving(self, step: int) -> Iterator[Path]:
        """Give the folder for `checkpoint-STEP`, published on leaving; all ranks come here together."""
        with self.writer.saving(step) as staged:
            yield staged
            if self._rounds is not None:
                self._rounds.write(checkpoint_of(staged, step), self._rank, step)

    def restore(self, checkpoint: Path) -> None:
        """Set this rank to what it wrote, before transformers loads its own part."""
        if self._rounds is not None:
            self._rounds.restore(checkpoint, self._rank, self._world)
        self.writer.saved_step = step_of(checkpoint)


@cache  # torch keeps a sorted list, and two of the same priority cannot be sorted
def accept_numbered_cpus() -> None:
    """Let `torch.load` take `cpu:1` for the CPU: accelerate names it by rank, and transformers loads optimizers so."""

    def keep_on_cpu(storage: Any, location: str) -> Any:
        return storage if location.startswith("cpu:") else None

    register_package(50, lambda storage: None, keep_on_cpu)


def _expected_bytes(model: torch.nn.Module) -> int:
    """Roughly: the trained weights and, for each, two averages of the optimizer's, in float32."""
    trained = (weight for weight in model.parameters() if weight.requires_grad)
    return sum(12 * int(weight.numel()) for weight in trained)


def _batches_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"round-{rank}.safetensors"


def _read_state(checkpoint: Path, rank: int) -> Any:
    file = checkpoint / controller_file(rank)
    if not file.is_file():
        raise RunError(
            f"rank {rank} has no state in {checkpoint}; a run over several machines goes on only where "
            "all of them see the same run folder"
        )
    return read_json(file)


def _flat(batches: MicroBatches) -> tuple[dict[str, torch.Tensor], dict[str, list[Any]]]:
    """`3/advantages` -> tensor, each with its own memory, as safetensors wants it; and the same for plain lists."""
    tensors, lists = dict[str, torch.Tensor](), dict[str, list[Any]]()
    for number, batch in enumerate(batches):
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{number}/{name}"] = value.detach().cpu().clone()
            elif isinstance(value, list):
                lists[f"{number}/{name}"] = value
    return tensors, lists


def _nested(flat: Mapping[str, torch.Tensor | list[Any]]) -> MicroBatches:
    """The inverse of `_flat`, without the values that were None: TRL reads those with `.get`."""
    count = 1 + max(int(key.partition("/")[0]) for key in flat)
    batches: MicroBatches = [{} for _ in range(count)]
    for key, value in flat.items():
        number, _, name = key.partition("/")
        batches[int(number)][name] = value
    return batches
