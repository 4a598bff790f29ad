"""Clocks inside an unmodified `trl grpo` run: it is named as the run's reward, so TRL imports it before training.

Its import adds a callback that times whole steps, from `on_step_begin` to `on_step_end`, as ycore times its own. It
also listens to TRL's own profiling, which TRL otherwise sends only to trackers. Each step adds a line to `clock.jsonl`
in the working folder. Nothing else of TRL is changed. The reward itself is `benchmark_reward`.
"""

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmark_reward import distinct_characters
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    trainer,
)
from trl.extras.profiling import ProfilingContext

__all__ = ["CLOCK", "distinct_characters"]

CLOCK = "clock.jsonl"


class StepClock(TrainerCallback):  # type: ignore[misc]
    """Writes `{"step", "seconds", "spans": {name: seconds}, "logs": TRL's own}` for every step."""

    def __init__(self) -> None:
        self.spans: defaultdict[str, float] = defaultdict(float)
        self._began = 0.0
        self._took = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.spans.clear()
        self._began = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._took = time.perf_counter() - self._began

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        **_: Any,
    ) -> None:
        if "step_time" not in logs:
            return  # the totals at the end of training
        line = {
            "step": state.global_step,
            "seconds": self._took,
            "spans": dict(self.spans),
            "logs": logs,
        }
        with Path(CLOCK).open("a") as file:
            file.write(json.dumps(line) + "\n")


def attach(clock: StepClock) -> None:
    """Let `clock` hear every step and every profiled span of this process."""
    log_metrics = ProfilingContext._log_metrics

    def log_and_count(self: Any, duration: float) -> None:
        clock.spans[self.name.partition(".")[2]] += (
            duration  # the name is `GRPOTrainer.compute_loss`
        )
        log_metrics(self, duration)

    ProfilingContext._log_metrics = log_and_count
    trainer.DEFAULT_CALLBACKS.append(clock)


attach(StepClock())
