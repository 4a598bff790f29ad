"""Evaluations of a run with rollouts: when they are due, the model that was best, and the end before the last step.

What they decide follows from the run's metrics alone, so a resumed run decides the same. They draw nothing that
training draws: held-out prompts have their own order, and every completion its own seed.

The policy of a step is measured when the step ends. With `eval_while_training` the engines measure it in a thread while
the trainer computes the next step, from the end of its round to before its optimizer changes the weights. So figures,
the best model and what a resumed run measures are the same; only `stop_when` decides a step later.
"""

import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ycore.config.schema import RunConfig
from ycore.errors import Interrupted
from ycore.round.held_out import PREFIX, as_metrics, best_of, is_due, measure, report, watched, why_stop
from ycore.round.step import Controller
from ycore.run.files import read_json, sync, write_json_atomic
from ycore.run.metrics import STEP_SECONDS, number, read_metrics
from ycore.run.trace import TRAIN
from ycore.trainer.training_run import TrainingRun

_RECORD = "evaluation.json"  # in the folder of the best model: its step and figures


class Evaluation(TrainerCallback):
    """Add it after the checkpoints' callback.

    Args:
        controller: of the run; it syncs the weights.
        held_out: beside it, that of the held-out prompts; None measures nothing.
    """

    def __init__(
        self, run: TrainingRun, config: RunConfig, controller: Controller, held_out: Controller | None
    ) -> None:
        self._run, self._controller, self._held_out = run, controller, held_out
        self._config, self._folder = config, run.home
        self._settings = self._config.for_evaluation()
        self._rows: list[dict[str, Any]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._waits = False  # for the next step's round to be there
        self._under_way: Future[dict[str, float]] | None = None

    def start(self, *, timeout_s: float) -> None:
        """Wait for what scores the held-out completions, where that is not what scores the run's own."""
        if self._held_out is not None and self._held_out.scoring is not self._controller.scoring:
            self._controller.run(self._held_out.scoring.start(timeout_s=timeout_s))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Take the rows up to the checkpoint. What is due there and was not measured, as step 0, is measured now."""
        step = state.global_step
        self._rows = [row for row in read_metrics(self._folder.metrics) if row.get("step", 0) <= step]
        if self._best_step() > step and self._run.leads:
            shutil.rmtree(self._folder.best)  # of a step that is taken again
        if is_due(step, self._config) and not self._has(step):
            self._log(self._measure(step))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        step, record = state.global_step, self._run.trainer.record
        figures: dict[str, float] = {}
        self._waits = is_due(step, self._config) and self._config.eval_while_training and step < self._config.steps
        if is_due(step, self._config) and not self._waits:
            try:
                figures = self._measure(step)
            except Interrupted:  # the step itself is whole: it is logged and saved, and measured when the run goes on
                control.should_training_stop = True
                return
        for name, value in figures.items():
            record(name, value)
        seconds, leads = self._run.step_metrics.seconds, float(self._run.leads)
        (seconds,) = self._controller.peers.add_up([leads * seconds])  # the leader's, which metrics.jsonl has
        row = {"step": step, "ycore/skipped": float(not self._run.trainer.teaches), STEP_SECONDS[0]: seconds}
        self._rows.append(row | figures)
        if step < self._config.steps and (reason := why_stop(self._rows, self._config)):
            self._run.ended_early, control.should_training_stop = reason, True

    def begin(self) -> None:
        """The engines are free: let them measure what was due at the end of the last step, beside this thread."""
        if not self._waits:
            return
        self._waits, step = False, self._run.trainer.state.global_step
        self._controller.sync(step)
        self._run.mark_progress()
        self._under_way = self._thread.submit(self._figures, step, then=TRAIN)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Wait for what `begin` began. Interrupted: this step is not taken, and the run goes on with measuring."""
        if self._under_way is None:
            return
        work, self._under_way = self._under_way, None
        began = time.perf_counter()
        figures = work.result()
        self._keep(state.global_step, figures)
        self._controller.note_waited(time.perf_counter() - began)
        self._log(figures)

    def close(self) -> None:
        """End an evaluation that nobody waits for any more."""
        if self._under_way is not None:
            self._controller.stop.set()
        self._thread.shutdown()

    def finish(self) -> None:
        """Measure a run that ended early, and write down what was found."""
        step = self._run.trainer.state.global_step
        if self._held_out is not None and not self._has(step):
            self._log(self._measure(step))
        if not self._run.leads:
            return
        found = report(self._rows, self._config)
        ended = {} if self._run.ended_early is None else {"ended_early": self._run.ended_early}
        if found or ended:
            write_json_atomic(self._folder.held_out, found | ended)

    def _has(self, step: int) -> bool:
        return any(row.get("step") == step and f"{PREFIX}reward" in row for row in self._rows)

    def _log(self, figures: dict[str, float]) -> None:
        """A row of its own, for the trackers too."""
        if figures:
            self._rows.append({"step": self._run.trainer.state.global_step, **figures})
            Trainer.log(self._run.trainer, dict(figures))  # TRL's own adds the metrics of a step

    def _measure(self, step: int) -> dict[str, float]:
        """The metrics of the policy of this step; its model is kept where it is the best so far."""
        self._run.mark_progress()
        with self._run.trainer.room_for_engines():
            self._controller.sync(step)
            figures = self._figures(step)
        self._keep(step, figures)
        return figures

    def _figures(self, step: int, *, then: str | None = None) -> dict[str, float]:
        """The metrics of the policy that the engines hold. `then`: the phase of the step that goes on afterwards."""
        assert self._held_out is not None and self._settings is not None, "it is due only where there are rows"
        began = time.perf_counter()
        prompts = self._held_out.draws.prompts
        figures = as_metrics(measure(self._held_out, len(prompts), step=step, config=self._settings))
        if then is not None:
            self._controller.slots.begin_phase(then)
        return figures | {"ycore/time/eval": time.perf_counter() - began}

    def _keep(self, step: int, figures: dict[str, float]) -> None:
        """Keep the trainer's model, of this step, where it is the best so far and the best is to be kept."""
        if self._config.keep_best is None:
            return
        metric = watched(self._config)
        value, best = number(figures, metric), best_of(self._rows, metric) or {}
        if value is None or value <= (number(best, metric) or float("-inf")):
            return
        fresh, old = (self._folder.root / f".best.{name}" for name in ("new", "old"))
        self._run.save_model_in(fresh)
        if self._run.leads:
            write_json_atomic(fresh / _RECORD, {"step": step, **figures})
            shutil.rmtree(old, ignore_errors=True)
            if self._folder.best.exists():
                os.replace(self._folder.best, old)
            os.replace(fresh, self._folder.best)
            sync(self._folder.root)
            shutil.rmtree(old, ignore_errors=True)
        self._run.trainer.accelerator.wait_for_everyone()

    def _best_step(self) -> int:
        record: Path = self._folder.best / _RECORD
        return int(read_json(record)["step"]) if record.is_file() else -1
