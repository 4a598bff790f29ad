"""One training run inside the trainer's process, whatever it learns from: train, stop in order, go on, save.

`rollout_run` adds rounds, and `example_run` adds given rows.
"""

import threading
import time
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.helpers import disable_input_dtype_casting
from transformers import (
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ycore.config.schema import AnyConfig
from ycore.data.examples import ExampleSet
from ycore.errors import Interrupted
from ycore.evaluation.during_training import EndedEarly
from ycore.round.step import Controller
from ycore.run.checkpoints import checkpoint_of, newest_for, step_of
from ycore.run.files import sync, sync_tree
from ycore.run.metrics import MetricsWriter, is_evaluation
from ycore.run.paths import RunFolder
from ycore.run.reports import this_rank
from ycore.trainer.checkpoint_writer import check_contents
from ycore.trainer.saved_state import Checkpoints, accept_numbered_cpus
from ycore.trl.build import build_trainer, compute_dtype
from ycore.view.trackers import TrackerPage


class StepMetrics(TrainerCallback):
    """A row of metrics.jsonl for each step: TRL's numbers and, with a `controller`, what its rounds recorded.

    A round's times are recorded at the step's end, before TRL logs, so that trackers get them too.
    `seconds` are those of the last step.
    """

    def __init__(self, writer: MetricsWriter) -> None:
        self.controller: Controller | None = None
        self._writer = writer
        self._began = self.seconds = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._began = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.controller is not None:
            self.controller.settle()
        self.seconds = time.perf_counter() - self._began
        if self.controller is not None:
            self.controller.record("ycore/time/step", self.seconds)
            self.controller.record(
                "ycore/time/train", self.seconds - self.controller.take_seconds()
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        **_: Any,
    ) -> None:
        if not state.is_world_process_zero:
            return
        row: dict[str, Any] = {"step": state.global_step}
        if "loss" in logs:
            row |= {"ycore/time/step": self.seconds, **logs}
        elif is_evaluation(logs):  # with a row of its own
            row |= {name: value for name, value in logs.items() if name.startswith("ycore/")}
        else:
            return  # the totals at the end of training
        if self.controller is not None and (problems := self.controller.problems):
            row["ycore/reward_problems"] = problems
        self._writer.write(row)


class TrainingRun(ABC, TrainerCallback):
    """Example: `run = open_run(root); run.train(); run.save(); run.close()`.

    It is a callback of its trainer: it marks the beginning of each step, and stops between steps.

    Args:
        folder: of this machine, where the launcher looks.
        home: the run's own folder, which is another one on a machine that is not the first.
        model: the folder of the weights that the run begins with.
        contents: what the run learns from, as fingerprints by name.
        examples: the rows of a run without rollouts.
    """

    checkpoints: Checkpoints
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
        contents: dict[str, str],
        examples: ExampleSet | None = None,
    ) -> None:
        rank = this_rank()
        if rank.number == 0:
            check_contents(home, contents)
        self.config = config
        self.home = home
        self._step_began = folder.step_began
        self.metrics = MetricsWriter(home.metrics)
        self.step_metrics = StepMetrics(self.metrics)
        self.trainer = build_trainer(
            config,
            home,
            model=model,
            tokenizer=tokenizer,
            callbacks=[self.step_metrics, self],
            world_size=rank.world,
            examples=examples,
        )
        if rank.number > 0:
            check_contents(home, contents)  # rank 0 has written them before the ranks met
        self._page = TrackerPage(home, self.trainer.callback_handler, config)
        self.trainer.add_callback(self._page)
        self.leads = bool(self.trainer.accelerator.is_main_process)

    def save_with(self, checkpoints: Checkpoints) -> None:
        self.checkpoints, self.trainer.saving = checkpoints, checkpoints.saving
        self.trainer.add_callback(checkpoints)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.mark_progress()

    @property
    def last_step_s(self) -> float:
        return self.step_metrics.seconds

    def mark_progress(self) -> None:
        """The launcher limits the time to the first step, and of each step and evaluation, by this file."""
        self._step_began.touch()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        control.should_training_stop |= self.should_stop()

    @abstractmethod
    def should_stop(self) -> bool:
        """Whether any rank was asked to stop; all ranks call it together and get the same answer."""

    @abstractmethod
    def fail_others(self, error: BaseException) -> None:
        """Let the other ranks know that this one cannot go on."""

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
        newest = (
            newest_for(self.home.checkpoints, world=ranks, say=partial(print, flush=True))
            if self.leads
            else None
        )
        step = int(
            self.sum_over_ranks(0 if newest is None else step_of(newest))
        )  # all ranks take the first one's
        checkpoint = checkpoint_of(self.home.checkpoints, step) if step else None
        accept_numbered_cpus()
        if checkpoint is not None:
            self.checkpoints.restore(checkpoint)
        if self.leads:
            self.metrics.forget_after(step)
        self.begin(resumes=checkpoint is not None)
        with disable_input_dtype_casting(self.trainer.bare_model):
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
            self._page.close(self.trainer.args, step=self.trainer.state.global_step)
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
