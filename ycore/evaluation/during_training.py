"""Evaluate during a run: when it is due, the model that was best, and the end before the last step.

All decisions follow from the run's metrics alone, so a resumed run decides the same. Evaluations draw nothing that
training draws: held-out prompts have their own order, and every completion its own seed.

The model of a step is measured when the step ends, before the next one begins.
"""

import os
import shutil
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol

from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ycore.config.schema import AnyConfig, RunConfig
from ycore.errors import Interrupted
from ycore.evaluation.held_out import (
    as_metrics,
    evaluate_policy,
    first_and_last,
    is_due,
    metric_score,
    row_figures,
    watched_metric,
    why_stop,
)
from ycore.round.step import Controller
from ycore.run.files import RunFolder, read_json, sync, write_json_atomic
from ycore.run.metrics import STEP_SECONDS, is_evaluation, read_metrics
from ycore.run.work import working
from ycore.types import JsonObject, Metrics

_RECORD = "evaluation.json"  # in the folder of the best model: its step and figures


class EndedEarly(Exception):
    """Raised before a step: the run is over, as `ended_early` says. transformers looks for that after steps only."""


class EvaluatedRun(Protocol):
    """The training run that an evaluation belongs to."""

    home: RunFolder
    trainer: Any
    leads: bool
    ended_early: str | None
    last_step_s: float

    def mark_progress(self) -> None: ...

    def sum_over_ranks(self, number: float) -> float: ...

    def save_model_in(self, folder: Path) -> None: ...


class Evaluation(TrainerCallback, ABC):
    """Evaluate on schedule. Add it after the run's own callback, which remembers the step's end.

    Args:
        measures: whether there are rows to measure on.
    """

    def __init__(self, run: EvaluatedRun, config: AnyConfig, *, measures: bool) -> None:
        self._run = run
        self._config = config
        self._folder = run.home
        self._measures = measures
        self._rows: list[JsonObject] = []

    @abstractmethod
    def _figures(self, step: int) -> Metrics:
        """Return the metrics of the model of this step; all ranks call it together."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Take the rows up to the checkpoint. What is due there and was not measured, as step 0, is measured now."""
        step = state.global_step
        rows = read_metrics(self._folder.metrics)
        self._rows = [row for row in rows if row.get("step", 0) <= step]
        if self._run.leads and self._kept().get("step", 0) > step:
            shutil.rmtree(self._folder.best)  # of a step that is taken again
        if self._is_due(step) and not self._is_measured(step):
            self._log(self._measure(step))
        if self._ends(step):
            raise EndedEarly

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        step = state.global_step
        if control.should_training_stop and step < args.max_steps:
            return  # stopped: the step itself is whole, it is logged and saved, and measured when the run goes on
        figures: Metrics = {}
        if self._is_due(step):
            try:
                figures = self._measure(step)
            except Interrupted:
                control.should_training_stop = True
                return
            self._log_with_step(figures)
        self._rows.append(self._row(step) | figures)
        control.should_training_stop |= self._ends(step)

    def finish(self, **facts: Any) -> None:
        """Measure a run that ended early; write held_out.json, after these facts."""
        step = self._run.trainer.state.global_step
        if self._measures and not self._is_measured(step):
            self._log(self._measure(step))
        if not self._run.leads:
            return
        evaluations = [row for row in self._rows if is_evaluation(row)]
        summary = facts | (first_and_last(evaluations) if evaluations else {})
        if self._config.keep_best and (best := self._kept()):
            summary["best"] = row_figures(best)
        if self._run.ended_early is not None:
            summary["ended_early"] = self._run.ended_early
        if summary:
            write_json_atomic(self._folder.held_out, summary)

    @property
    def _max_steps(self) -> int:
        return int(self._run.trainer.args.max_steps)

    def _is_due(self, step: int) -> bool:
        return self._measures and is_due(step, self._config.eval_every, self._max_steps)

    def _is_measured(self, step: int) -> bool:
        return any(row.get("step") == step and is_evaluation(row) for row in self._rows)

    def _ends(self, step: int) -> bool:
        """Tell whether the run ends after this step, before its last."""
        if step < self._max_steps:
            self._run.ended_early = why_stop(self._rows, self._config)
        return self._run.ended_early is not None

    def _row(self, step: int) -> JsonObject:
        """Return what decisions read of a step: the leader's seconds, which metrics.jsonl has, on every rank."""
        seconds = self._run.sum_over_ranks(self._run.leads * self._run.last_step_s)
        return {"step": step, STEP_SECONDS[0]: seconds}

    def _log(self, figures: Metrics) -> None:
        """Log a row of its own, for the trackers too."""
        if figures:
            self._rows.append({"step": self._run.trainer.state.global_step, **figures})
            Trainer.log(
                self._run.trainer, dict(figures)
            )  # TRL's own adds the metrics of a step

    def _log_with_step(self, figures: Metrics) -> None:
        """Log the figures when the step is."""
        Trainer.log(self._run.trainer, dict(figures))

    def _measure(self, step: int) -> Metrics:
        """Return the metrics of the model of this step, which is kept where it is the best so far."""
        self._run.mark_progress()
        with working("evaluating on held-out rows"):
            figures = self._figures(step)
        self._keep(step, figures)
        return figures

    def _keep(self, step: int, figures: Metrics) -> None:
        """Save the trainer's model, of this step, where it is the best so far and the best is to be kept."""
        if self._config.keep_best is None:
            return
        metric = watched_metric(self._config)
        is_better = metric_score(figures, metric) > metric_score(self._kept(), metric)
        if not self._run.sum_over_ranks(self._run.leads and is_better):
            return
        fresh, old = (self._folder.root / f".best.{name}" for name in ("new", "old"))
        with working("saving the best model"):
            self._save(fresh)
        if self._run.leads:
            write_json_atomic(fresh / _RECORD, {"step": step, **figures})
            shutil.rmtree(old, ignore_errors=True)
            if self._folder.best.exists():
                os.replace(self._folder.best, old)
            os.replace(fresh, self._folder.best)
            sync(self._folder.root)
            shutil.rmtree(old, ignore_errors=True)
        self._run.trainer.accelerator.wait_for_everyone()

    def _kept(self) -> JsonObject:
        """Return the step and the figures of the model in `best/`; {} where it is not there."""
        record = self._folder.best / _RECORD
        return read_json(record) if record.is_file() else {}

    def _save(self, folder: Path) -> None:
        self._run.save_model_in(folder)


class RolloutEvaluation(Evaluation):
    """Evaluate by rollouts.

    Args:
        controller: the run's, which syncs the weights.
        held_out: that of the held-out prompts; None measures nothing.
    """

    def __init__(
        self,
        run: EvaluatedRun,
        config: RunConfig,
        controller: Controller,
        held_out: Controller | None,
    ) -> None:
        super().__init__(run, config, measures=held_out is not None)
        self._controller = controller
        self._held_out = held_out
        self._settings = config.for_evaluation()

    def _row(self, step: int) -> JsonObject:
        return super()._row(step) | {"ycore/skipped": float(not self._run.trainer.has_gradient)}

    def _log_with_step(self, figures: Metrics) -> None:
        for name, value in figures.items():
            self._run.trainer.record(name, value)

    def _figures(self, step: int) -> Metrics:
        assert self._held_out is not None and self._settings is not None, "due only with rows"
        began = time.perf_counter()
        num_prompts = len(self._held_out.draws.prompts)
        with self._run.trainer.room_for_engines():
            self._controller.rest()
            self._controller.sync(step)
            figures = evaluate_policy(
                self._held_out, num_prompts, step=step, config=self._settings
            )
        return as_metrics(figures) | {"ycore/time/eval": time.perf_counter() - began}
