"""Where a step's time went, and its row in metrics.jsonl: TRL's own numbers and ours.

Not here: the file (`telemetry.metrics`) and trackers (TRL's `report_to`, which receive the same numbers).
"""

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ycore.controller.source import Rounds
from ycore.telemetry.metrics import MetricsWriter

PROBLEMS = "ycore/reward_problems"


class StepMetrics(TrainerCallback):
    """Times are told to TRL at a step's end, before it logs, so that trackers and metrics.jsonl have them alike."""

    def __init__(self, writer: MetricsWriter) -> None:
        self._writer = writer
        self._rounds: Rounds | None = None
        self._began = 0.0

    def watch(self, rounds: Rounds) -> None:
        """The rounds of this run: they tell what of a step was not training, and what kept rewards from being given."""
        self._rounds = rounds

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        assert self._rounds is not None
        took = time.perf_counter() - self._began
        self._rounds.record("ycore/time/step", took)
        self._rounds.record("ycore/time/train", took - self._rounds.take_seconds())

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if "loss" not in logs or not state.is_world_process_zero:
            return  # the totals at the end of training, or another rank
        assert self._rounds is not None
        problems = dict(self._rounds.problems)
        self._writer.write({"step": state.global_step, **logs, **({PROBLEMS: problems} if problems else {})})
