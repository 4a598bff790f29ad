"""A run's checkpoints: transformers' files and ours, published together or not at all.

Ours, for every rank of a run with rounds: the controller at the end of the last step (`controller-RANK.json`), and the
micro-batches of a round that later steps still learn from (`round-RANK.safetensors`).
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.serialization import register_package
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ycore.errors import RunError, RunFolderError, YcoreError
from ycore.round.journal import Journal
from ycore.round.regroup import regroup_states
from ycore.round.step import Controller
from ycore.run.checkpoints import (
    MIN_KEPT,
    checkpoint_of,
    checkpoints_in,
    controller_file,
    drop_oldest,
    publish,
    read_checkpoint_manifest,
    size_of,
    staging,
    step_of,
)
from ycore.run.claim import contents_that_differ, in_words
from ycore.run.files import is_disk_full, make_folder, read_json, sync, write_json_atomic
from ycore.run.paths import RunFolder
from ycore.trl.base import BaseTrainer
from ycore.trl.batches import MicroBatches, RoundPosition
from ycore.trl.seam import SeamGRPOTrainer

_SPARE = 1.1  # of the last checkpoint's size must be free for the next one


class RoundState:
    """What a rank with rounds remembers from step to step.

    A round that was cut short has moved the controller on, but its step does not exist. A checkpoint therefore holds
    the state at the end of the last step.

    Args:
        controller: None if the rounds are read from another run's journal.
    """

    def __init__(self, trainer: SeamGRPOTrainer, controller: Controller | None) -> None:
        self._trainer = trainer
        self._controller = controller
        self.remember()

    def remember(self) -> None:
        """A step has ended."""
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
        file, batches = _files_of(checkpoint, rank)
        write_json_atomic(file, state)
        if tensors:
            save_file(tensors, batches)

    def restore(self, checkpoint: Path, rank: int, world: int) -> None:
        """Take what this rank of `world` saved; where another number of ranks did, its part of what they saved."""
        saved = read_checkpoint_manifest(checkpoint).world
        if saved == world:
            state, batches = _read_state(checkpoint, rank), _files_of(checkpoint, rank)[1]
            trainer = state["trainer"]
            unfinished = (
                _nested({**load_file(batches), **trainer["lists"]}) if batches.is_file() else None
            )
            self._position = RoundPosition(
                trainer["micro_step"], trainer["has_engine_logps"], unfinished
            )
            self._state = state["controller"]
        else:
            states = [_read_state(checkpoint, number) for number in range(saved)]
            # Micro-batches have another size now, and are counted anew: the next one begins a round.
            self._position = RoundPosition(0, states[0]["trainer"]["has_engine_logps"])
            controllers = [state["controller"] for state in states]
            self._state = (
                regroup_states(controllers, world=world)[rank]
                if self._controller is not None
                else {}
            )
        self._trainer.resume_at(self._position)
        if self._controller is not None:
            self._controller.restore(self._state)


class Checkpoints(TrainerCallback):
    """Writes and restores the checkpoints of a run; the first rank publishes them.

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
        make_folder(home.checkpoints)
        self._folder, self._metrics = home.checkpoints, home.metrics
        self._trainer = trainer
        self._rounds = rounds
        self._journal = journal
        self._rank = int(trainer.accelerator.process_index)
        self._meet = trainer.accelerator.wait_for_everyone
        self.saved_step = 0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._trainer.refuse_broken_weights()
        if self._rounds is not None:
            self._rounds.remember()

    @contextmanager
    def saving(self, step: int) -> Iterator[Path]:
        """Give the folder for `checkpoint-STEP`, published on leaving; all ranks come here together."""
        staged, leads = staging(self._folder, step), self._rank == 0
        try:
            if leads:
                self._stage(staged)
            self._meet()
            if not staged.is_dir() and self._trainer.accelerator.is_local_main_process:
                leads = True  # a machine that does not share the run folder publishes what its ranks wrote
                self._stage(staged)
            self._meet()
            yield staged
            if self._rounds is not None:
                self._rounds.write(
                    staged / checkpoint_of(self._folder, step).name, self._rank, step
                )
            self._meet()
            if leads:
                sync(self._metrics)  # its steps are not taken again from here on
                publish(self._folder, step, world=self._trainer.accelerator.num_processes)
                drop_oldest(self._folder, keep=self._trainer.args.save_total_limit)
            self._meet()
        except YcoreError:
            raise
        except (OSError, RuntimeError, SafetensorError) as error:
            if leads:
                shutil.rmtree(
                    staged, ignore_errors=True
                )  # room for the last lines of logs and summary
            if is_disk_full(error) or self._is_nearly_full():
                raise RunError(self._no_room(step)) from error
            raise
        self.saved_step = step
        if self._journal is not None:
            self._journal.prune(before=step_of(checkpoints_in(self._folder)[0]))

    def restore(self, checkpoint: Path) -> None:
        """Set this rank to what it wrote, before transformers loads its own part."""
        if self._rounds is not None:
            self._rounds.restore(checkpoint, self._rank, self._trainer.accelerator.num_processes)
        self.saved_step = step_of(checkpoint)

    def check_room(self) -> None:
        """RunError if the disk has no room for the checkpoints that a run keeps."""
        need, free = MIN_KEPT * self._expected_bytes(), self._free_bytes()
        if self._rank == 0 and not checkpoints_in(self._folder) and free < need:
            raise RunError(
                f"{MIN_KEPT} checkpoints take about {need / 1e6:.0f} MB, and {self._folder} has {free / 1e6:.0f} MB "
                "free; make room, or choose another --output"
            )

    def _stage(self, staged: Path) -> None:
        self._look_for_room()
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(mode=0o700)

    def _look_for_room(self) -> None:
        """Before anything is written: as much as the last checkpoint took must be free."""
        before = checkpoints_in(self._folder)
        if before and self._free_bytes() < int(_SPARE * size_of(before[-1])):
            raise RunError(self._no_room(self._trainer.state.global_step))

    def _is_nearly_full(self) -> bool:
        """torch reports that a write failed, but not why."""
        before = checkpoints_in(self._folder)
        return self._free_bytes() < (size_of(before[-1]) if before else self._expected_bytes())

    def _no_room(self, step: int) -> str:
        whole = checkpoints_in(self._folder)
        last = (
            f"{whole[-1].name} is whole"
            if whole
            else "there is none yet, and the journal holds the rounds"
        )
        return (
            f"no room for the checkpoint of step {step} in {self._folder} ({self._free_bytes() / 1e6:.1f} MB free); "
            f"{last}: make room, and go on with --resume"
        )

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self._folder).free

    def _expected_bytes(self) -> int:
        """Roughly: the trained weights and, for each, two averages of the optimizer's, in float32."""
        return sum(
            12 * int(weight.numel())
            for weight in self._trainer.model.parameters()
            if weight.requires_grad
        )


def check_contents(home: RunFolder, contents: dict[str, str]) -> None:
    """Write down what a run learns from at its first start: fingerprints of its rows, model and rewards by name.

    Raises:
        RunFolderError: a later start finds another content.
    """
    if not home.identity.is_file():
        write_json_atomic(home.identity, contents)
        return
    differences = contents_that_differ(read_json(home.identity), contents)
    if differences:
        raise RunFolderError(
            f"{home.root} did not begin with this ({in_words(differences)}); bring back what it was, "
            "or go on all the same with --resume --accept-changes"
        )


@cache  # torch keeps a sorted list, and two of the same priority cannot be sorted
def accept_numbered_cpus() -> None:
    """Let `torch.load` take `cpu:1` for the CPU: accelerate names it by rank, and transformers loads optimizers so."""
    register_package(
        50,
        lambda storage: None,
        lambda storage, where: storage if where.startswith("cpu:") else None,
    )


def _files_of(checkpoint: Path, rank: int) -> tuple[Path, Path]:
    """A rank's own: its controller, and its micro-batches."""
    return checkpoint / controller_file(rank), checkpoint / f"round-{rank}.safetensors"


def _read_state(checkpoint: Path, rank: int) -> Any:
    file, _ = _files_of(checkpoint, rank)
    if not file.is_file():
        raise RunError(
            f"rank {rank} has no state in {checkpoint}; a run over several machines goes on only where "
            "all of them see the same run folder"
        )
    return read_json(file)


def _flat(batches: MicroBatches) -> tuple[dict[str, torch.Tensor], dict[str, list[Any]]]:
    """`3/advantages` -> tensor, each with its own memory, as safetensors wants it; and the same for plain lists."""
    named = [
        (f"{number}/{name}", value)
        for number, batch in enumerate(batches)
        for name, value in batch.items()
    ]
    tensors = {
        key: value.detach().cpu().clone() for key, value in named if isinstance(value, torch.Tensor)
    }
    return tensors, {key: value for key, value in named if isinstance(value, list)}


def _nested(flat: Mapping[str, torch.Tensor | list[Any]]) -> MicroBatches:
    """The inverse of `_flat`, without the values that were None: TRL reads those with `.get`."""
    count = 1 + max(int(key.partition("/")[0]) for key in flat)
    batches: MicroBatches = [{} for _ in range(count)]
    for key, value in flat.items():
        number, _, name = key.partition("/")
        batches[int(number)][name] = value
    return batches
