"""One training run inside the trainer's process, whatever it learns from: train, stop in order, go on, save.

`rollout_run` adds rounds, and `example_run` adds given rows. A checkpoint has transformers' files and, for every rank of a
run with rounds, ours: the controller at the end of the last step (`controller-RANK.json`), and the micro-batches of a round
that later steps still learn from (`round-RANK.safetensors`).
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from peft.helpers import disable_input_dtype_casting
from safetensors.torch import load_file, save_file
from torch.serialization import register_package
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ycore.config.schema import AnyConfig
from ycore.data.examples import ExampleSet
from ycore.errors import Interrupted, RunError
from ycore.evaluation.during_training import EndedEarly
from ycore.round.journal import reshard_states
from ycore.round.step import Controller
from ycore.run.claim import check_contents, contents_of
from ycore.run.files import RunFolder, read_json, sync, sync_tree, write_json_atomic
from ycore.run.metrics import MetricsWriter, is_evaluation
from ycore.run.reports import this_rank
from ycore.run.resuming import (
    CheckpointWriter,
    checkpoint_of,
    controller_file,
    newest_for,
    read_checkpoint_manifest,
    step_of,
)
from ycore.trl.base import BaseTrainer
from ycore.trl.batches import MicroBatches, RoundPosition
from ycore.trl.build import build_trainer, compute_dtype
from ycore.trl.seam import SeamGRPOTrainer
from ycore.view.trackers import TrackerPage

# -- checkpoints ---------------------------------------------------------------------------------------------------------


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
            trainer = state["trainer"]
            batches = _batches_file(checkpoint, rank)
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


class Checkpoints(CheckpointWriter):
    """Writes and restores the checkpoints of a run with a trainer of TRL's; `rounds`: of a run with rollouts."""

    def __init__(
        self,
        home: RunFolder,
        trainer: BaseTrainer,
        rounds: RoundState | None = None,
        prune: Callable[[int], None] | None = None,
    ) -> None:
        self._rounds = rounds
        ranks = trainer.accelerator
        keep = trainer.args.save_total_limit
        size = _expected_bytes(trainer.model)
        super().__init__(home, expected_bytes=size, keep=keep, ranks=ranks, prune=prune)
        trainer.saving = self.saving

    def remember(self) -> None:
        """Take the state of the rounds at the end of a step."""
        if self._rounds is not None:
            self._rounds.remember()

    @contextmanager
    def saving(self, step: int) -> Iterator[Path]:
        """Give the folder for `checkpoint-STEP`, published on leaving; all ranks come here together."""
        with super().saving(step) as staged:
            yield staged
            if self._rounds is not None:
                self._rounds.write(checkpoint_of(staged, step), self.ranks.process_index, step)

    def restore(self, checkpoint: Path) -> None:
        """Set this rank to what it wrote, before transformers loads its own part."""
        if self._rounds is not None:
            ranks = self.ranks
            self._rounds.restore(checkpoint, ranks.process_index, ranks.num_processes)
        self.saved_step = step_of(checkpoint)


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
    tensors = dict[str, torch.Tensor]()
    lists = dict[str, list[Any]]()
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


# -- the run -------------------------------------------------------------------------------------------------------------


class TrainingRun(ABC, TrainerCallback):
    """Example: `run = open_run(root); run.train(); run.save(); run.close()`.

    It is a callback of its trainer: it marks the beginning of each step, stops between steps, and writes a row of
    metrics.jsonl for each.

    Args:
        folder: of this machine, where the launcher looks.
        home: the run's own folder, which is another one on a machine that is not the first.
        model: the folder of the weights that the run begins with.
        identity: the fingerprint of the rows that it learns from.
        examples: the rows of a run without rollouts.
    """

    checkpoints: Checkpoints
    controller: Controller | None = None
    """The rounds of a run with rollouts."""
    ended_early: str | None = None
    """Why the run is over before its last step."""
    stop: threading.Event
    """Set it, in a signal's handler too, to stop after the step that is being computed."""

    def __init__(
        self,
        config: AnyConfig,
        folder: RunFolder,
        home: RunFolder,
        *,
        model: Path,
        tokenizer: PreTrainedTokenizerBase,
        identity: str,
        examples: ExampleSet | None = None,
    ) -> None:
        rank = this_rank()
        contents = contents_of(identity, model, config.code_files)
        if rank.number == 0:
            check_contents(home, contents)
        self.config = config
        self.home = home
        self._step_began = folder.step_began
        self.metrics = MetricsWriter(home.metrics)
        self._began = self.last_step_s = 0.0
        self.trainer = build_trainer(
            config,
            home,
            model=model,
            tokenizer=tokenizer,
            callbacks=[self],
            world_size=rank.world,
            examples=examples,
        )
        if rank.number > 0:
            check_contents(home, contents)  # rank 0 has written them before the ranks met
        self.trainer.remove_callback(PrinterCallback)  # metrics.jsonl has what it would print
        self._page = TrackerPage(home, self.trainer.callback_handler, config)
        self.trainer.add_callback(self._page)
        self.leads = bool(self.trainer.accelerator.is_main_process)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()
        self.mark_progress()

    def mark_progress(self) -> None:
        """The launcher limits the time to the first step, and of each step and evaluation, by this file."""
        self._step_began.touch()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        controller = self.controller
        if controller is not None:
            controller.settle()
        self.last_step_s = time.perf_counter() - self._began
        if controller is not None:  # before TRL logs, so that trackers get them too
            controller.record("ycore/time/step", self.last_step_s)
            controller.record("ycore/time/train", self.last_step_s - controller.take_seconds())
        control.should_training_stop |= self.should_stop()
        self.trainer.refuse_broken_weights()
        self.checkpoints.remember()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        **_: Any,
    ) -> None:
        """Write the row of a step, TRL's numbers and what its round recorded, or of an evaluation."""
        state.log_history.clear()  # metrics.jsonl has it, and every checkpoint would be larger than the last
        if not state.is_world_process_zero:
            return
        row: dict[str, Any] = {"step": state.global_step}
        if "loss" in logs:
            row |= {"ycore/time/step": self.last_step_s, **logs}
        elif is_evaluation(logs):  # with a row of its own
            row |= {name: value for name, value in logs.items() if name.startswith("ycore/")}
        else:
            return  # the totals at the end of training
        if self.controller is not None and (problems := self.controller.problems):
            row["ycore/reward_problems"] = problems
        self.metrics.write(row)

    @abstractmethod
    def should_stop(self) -> bool:
        """Whether any rank was asked to stop; all ranks call it together and get the same answer."""

    @abstractmethod
    def begin(self, *, resumes: bool) -> None:
        """Before the first step."""

    @abstractmethod
    def finish(self) -> None:
        """After the last step, which an interrupted run does not reach."""

    def train(self) -> None:
        """Take all steps, from the newest checkpoint if there is one.

        Raises:
            Interrupted: the run was asked to stop before the last step.
        """
        ranks = self.trainer.accelerator.num_processes
        step = 0
        if self.leads:
            say = partial(print, flush=True)
            step = newest_for(self.home.checkpoints, world=ranks, say=say)
        step = int(self.sum_over_ranks(step))  # all ranks take the first one's
        checkpoint = checkpoint_of(self.home.checkpoints, step) if step else None
        accept_numbered_cpus()
        if checkpoint is not None:
            self.checkpoints.restore(checkpoint)
        if self.leads:
            self.metrics.forget_after(step)
        self.begin(resumes=checkpoint is not None)
        casts_inputs: Any = nullcontext()
        if (
            not self.trainer.keeps_peft
        ):  # autocast, in which it runs alone, makes the adapters' cast anyway
            casts_inputs = disable_input_dtype_casting(self.trainer.bare_model)
        with casts_inputs:
            try:
                self.trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
            except EndedEarly:
                handler = self.trainer.callback_handler  # whose trackers end with the training
                handler.on_train_end(
                    self.trainer.args, self.trainer.state, self.trainer.control
                )
        if (
            self.trainer.state.global_step < self.trainer.args.max_steps
            and self.ended_early is None
        ):
            raise Interrupted(f"stopped after step {self.trainer.state.global_step}")
        self.finish()

    def save(self) -> None:
        """Save the model under `model/`: whole, or the adapter and, with `merge`, the merged model too.

        It and every row of metrics are on the disk on return: a summary may then say that the run has finished.
        Trackers have them too.
        """
        self.save_model_in(self.home.model)
        if self.leads:
            sync(self.home.metrics)
            self._page.close()
        self.trainer.accelerator.wait_for_everyone()

    def save_model_in(self, folder: Path) -> None:
        """Save the model there, on the disk on return on the first rank."""
        self.trainer.refuse_broken_weights()
        merge = self.config.merge and self.config.lora is not None
        self.trainer.write_model(folder, dtype=compute_dtype(self.config), merge=merge)
        if self.leads:
            sync_tree(folder)

    def save_checkpoint(self) -> None:
        """Save a checkpoint of the last finished step, unless it has one."""
        if self.trainer.state.global_step > self.checkpoints.saved_step:
            self.trainer.save_checkpoint()
        self.trainer.accelerator.wait_for_everyone()  # a rank that ends early would take the others with it

    def sum_over_ranks(self, number: float) -> float:
        """Add up a number of every rank."""
        tensor = torch.tensor(
            number, dtype=torch.float64, device=self.trainer.accelerator.device
        )
        total: Any = self.trainer.accelerator.reduce(tensor, reduction="sum")
        return float(total.item())

    def close(self) -> None:
        """End what the run has started."""
        self.metrics.close()
