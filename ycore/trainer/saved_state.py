"""A run's checkpoints: the trainer's part, which transformers writes, and ours, published as one or not at all.

Ours, for every rank: the controller as it was at the last step's end (`controller-RANK.json`), and the micro-batches of
a round that later steps still learn from (`round-RANK.safetensors`).

Whether the run that goes on learns from what it began with: the same rows, model and reward files.

The checkpoints of a run without rollouts: transformers' own files, published whole or not at all.

Not here: files, manifests and names (`run_folder.checkpoints`), what the controller remembers (`controller.state`), and
whether the run that goes on is the one that began (`roles.identity`).
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.serialization import register_package
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ycore.errors import RunError, RunFolderError, YcoreError
from ycore.round.assemble import Assembly
from ycore.round.journal import Journal
from ycore.run.checkpoints import (
    MIN_KEPT,
    checkpoint_of,
    checkpoints_in,
    drop_oldest,
    newest_for,
    publish,
    size_of,
    staging,
    step_of,
)
from ycore.run.claim import contents_that_differ, files_fingerprint, in_words, model_fingerprint
from ycore.run.files import is_disk_full, read_json, write_json_atomic
from ycore.run.paths import RunFolder
from ycore.trl.checkpointing import DurableTrainer, MicroBatches, Place


def check_identity(parts: Assembly) -> None:
    """Write down what the run learns from at its first start; RunFolderError where a later start finds another."""
    check_contents(parts.home, contents(parts))


def check_contents(home: RunFolder, here: dict[str, str]) -> None:
    """The same for contents by name."""
    file = home.identity
    if not file.is_file():
        write_json_atomic(file, here)
        return
    differences = contents_that_differ(read_json(file), here)
    if differences:
        raise RunFolderError(
            f"{home.root} did not begin with this ({in_words(differences)}); bring back what it was, "
            "or go on all the same with --resume --accept-changes"
        )


def contents(parts: Assembly) -> dict[str, str]:
    """What the run learns from, by name; the policy itself is in the checkpoint."""
    told = {
        "dataset": f"{len(parts.prompts.prompts)} rows, sha256 {parts.prompts.fingerprint[:16]}",
        "model": model_fingerprint(parts.started.model),
    }
    for reward in parts.config.rewards:
        file = Path(reward.reward.rpartition(":")[0]).expanduser()
        if file.suffix == ".py" and file.is_file():
            told[f"reward {reward.reward}"] = files_fingerprint([file])
    return told


_SPARE = 1.1


def controller_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"controller-{rank}.json"


def round_in_use(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"round-{rank}.safetensors"


@cache  # torch keeps a sorted list, and two of the same priority cannot be sorted
def accept_numbered_cpus() -> None:
    """Let `torch.load` take `cpu:1` for the CPU: so accelerate names it by rank, and transformers loads optimizers."""
    register_package(50, lambda storage: None, lambda storage, where: storage if where.startswith("cpu:") else None)


@dataclass(frozen=True, slots=True)
class Memory:
    """What the controller of this rank remembers, as JSON values: how to ask for it, and how to set it."""

    tell: Callable[[], dict[str, Any]]
    restore: Callable[[dict[str, Any]], None]


NOTHING = Memory(tell=dict, restore=lambda state: None)
"""Where rounds are read from another run's journal, there is nothing to remember."""


class Checkpoints(TrainerCallback):
    """Writes, finds and restores the checkpoints of one rank; the first rank publishes.

    A round that was cut short has moved the controller on; its step does not exist, so neither does its state: what is
    saved is always the state at the last step's end.
    """

    def __init__(self, folder: Path, trainer: DurableTrainer, memory: Memory, journal: Journal | None) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._trainer = trainer
        self._memory = memory
        self._journal = journal
        self._rank = int(trainer.accelerator.process_index)
        self._world = int(trainer.accelerator.num_processes)
        self._at_step_end = (memory.tell(), trainer.place)
        self.saved_step = 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.refuse_broken_weights()
        self._at_step_end = (self._memory.tell(), self._trainer.place)

    # -- writing ---------------------------------------------------------------------------------------------------

    @contextmanager
    def saving(self, step: int) -> Iterator[Path]:
        """What is written under the folder given becomes `checkpoint-STEP` on leaving; all ranks come here together."""
        staged, leads = staging(self._folder, step), self._rank == 0
        try:
            if leads:
                self._stage(staged)
            self._meet()
            if not staged.is_dir() and self._trainer.accelerator.is_local_main_process:
                leads = True  # a machine with a run folder of its own publishes there what its ranks wrote
                self._stage(staged)
            self._meet()
            yield staged
            self._write_own(staged / checkpoint_of(self._folder, step).name, step)
            self._meet()
            if leads:
                publish(self._folder, step, {"world": self._world})
                drop_oldest(self._folder, keep=self._trainer.args.save_total_limit)
            self._meet()
        except YcoreError:
            raise
        except (OSError, RuntimeError, SafetensorError) as error:
            if leads:
                shutil.rmtree(staged, ignore_errors=True)  # room for the last lines of logs and summary
            if is_disk_full(error) or self._is_nearly_full():
                raise RunError(self._full(step)) from error
            raise
        self.saved_step = step
        if self._journal is not None:
            self._journal.prune(before=step_of(checkpoints_in(self._folder)[0]))

    def _stage(self, staged: Path) -> None:
        self._look_for_room()
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(mode=0o700)

    def _write_own(self, checkpoint: Path, step: int) -> None:
        told, place = self._at_step_end
        checkpoint.mkdir(parents=True, exist_ok=True)  # the first rank's folder, which may not have made it yet
        tensors, lists = _flat(place.micro_batches or [])
        trainer = {"micro_step": place.micro_step, "corrects": place.corrects, "lists": lists}
        write_json_atomic(
            controller_file(checkpoint, self._rank), {"policy_version": step, "trainer": trainer, "controller": told}
        )
        if tensors:
            save_file(tensors, round_in_use(checkpoint, self._rank))

    def _look_for_room(self) -> None:
        """Before anything is written: as much as the last checkpoint took must be free."""
        before = checkpoints_in(self._folder)
        need = int(_SPARE * size_of(before[-1])) if before else 0
        if shutil.disk_usage(self._folder).free < need:
            raise RunError(self._full(self._trainer.state.global_step))

    def _is_nearly_full(self) -> bool:
        """torch says only that a write failed, not why."""
        before = checkpoints_in(self._folder)
        expected = size_of(before[-1]) if before else self._expected_bytes()
        return shutil.disk_usage(self._folder).free < expected

    def _full(self, step: int) -> str:
        free = shutil.disk_usage(self._folder).free / 1e6
        whole = checkpoints_in(self._folder)
        stands = f"{whole[-1].name} is whole" if whole else "there is none yet, and the journal holds the rounds"
        return (
            f"no room for the checkpoint of step {step} in {self._folder} ({free:.1f} MB free); {stands}: "
            "make room, and go on with --resume"
        )

    def _expected_bytes(self) -> int:
        """Roughly: the weights in training and, for each, two averages of the optimizer's, in float32."""
        weights = self._trainer.model.parameters()
        return sum(12 * int(weight.numel()) for weight in weights if weight.requires_grad)

    def check_room(self) -> None:
        """RunError where the disk has no room for the checkpoints that a run keeps."""
        need = MIN_KEPT * self._expected_bytes()
        free = shutil.disk_usage(self._folder).free
        if self._rank == 0 and not checkpoints_in(self._folder) and free < need:
            raise RunError(
                f"{MIN_KEPT} checkpoints take about {need / 1e6:.0f} MB, and {self._folder} has {free / 1e6:.0f} MB "
                "free; make room, or choose another --output"
            )

    def _meet(self) -> None:
        self._trainer.accelerator.wait_for_everyone()

    # -- going on --------------------------------------------------------------------------------------------------

    def find(self) -> Path | None:
        """Clear what a killed save left, and choose the newest checkpoint that verifies; for the first rank to do."""
        return newest_for(self._folder, world=self._world, say=lambda line: print(line, flush=True))

    def restore(self, checkpoint: Path) -> None:
        """Set this rank to what it wrote; before the trainer loads its own part."""
        file = controller_file(checkpoint, self._rank)
        if not file.is_file():
            raise RunError(
                f"rank {self._rank} has no state in {checkpoint}; a run over several machines goes on only where "
                "all of them see the same run folder"
            )
        told, batches = read_json(file), round_in_use(checkpoint, self._rank)
        trainer = told["trainer"]
        unfinished = _nested({**load_file(batches), **trainer["lists"]}) if batches.is_file() else None
        place = Place(trainer["micro_step"], trainer["corrects"], unfinished)
        self._trainer.go_to(place)
        self._memory.restore(told["controller"])
        self._at_step_end = (told["controller"], place)
        self.saved_step = step_of(checkpoint)


def _flat(batches: MicroBatches) -> tuple[dict[str, torch.Tensor], dict[str, list[Any]]]:
    """`3/advantages` -> tensor, each with memory of its own, as safetensors wants it; and the same for plain lists."""
    named = [(f"{number}/{name}", value) for number, batch in enumerate(batches) for name, value in batch.items()]
    tensors = {key: value.detach().cpu().clone() for key, value in named if isinstance(value, torch.Tensor)}
    return tensors, {key: value for key, value in named if isinstance(value, list)}


def _nested(flat: Mapping[str, torch.Tensor | list[Any]]) -> MicroBatches:
    """The inverse of `_flat`; what was None is not there, and TRL asks with `.get` for what may be None."""
    count = 1 + max(int(key.partition("/")[0]) for key in flat)
    batches: MicroBatches = [{} for _ in range(count)]
    for key, value in flat.items():
        number, _, name = key.partition("/")
        batches[int(number)][name] = value
    return batches


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
