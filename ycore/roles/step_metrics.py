"""What a step logs, as a row of metrics.jsonl: TRL's own numbers, and where the step's time went.

Not here: the file (`telemetry.metrics`) and trackers (TRL's `report_to`, which receive the same numbers).
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ycore.telemetry.metrics import MetricsWriter

PROBLEMS = "ycore/reward_problems"
STEP, TRAIN = "ycore/time/step", "ycore/time/train"
_NOT_TRAINING = ("ycore/time/sync", "ycore/time/round")


class StepMetrics(TrainerCallback):
    """First among the callbacks: it completes the logs that trackers then see."""

    def __init__(self, writer: MetricsWriter, problems: Callable[[], Mapping[str, int]]) -> None:
        """`problems` tells, after a round, what kept rewards from being given, and how often."""
        self._writer = writer
        self._problems = problems
        self._began = 0.0
        self._took = 0.0

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._took = time.perf_counter() - self._began

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if "reward" not in logs:
            return  # the totals at the end of training
        logs[STEP] = self._took
        logs[TRAIN] = self._took - sum(logs.get(name) or 0.0 for name in _NOT_TRAINING)
        if state.is_world_process_zero:
            problems = dict(self._problems())
            self._writer.write({"step": state.global_step, **logs, **({PROBLEMS: problems} if problems else {})})
