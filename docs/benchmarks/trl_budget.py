"""Inside an unmodified `trl grpo` run: the task's reward, and the end of training after so many seconds of steps.

It is named as the run's reward, so TRL imports it before training. `METHOD_REWARD` is the name of one of ycore's
rewards, `METHOD_BUDGET_S` the seconds. `seconds.json` in the working folder tells what was done until then.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    trainer,
)

from ycore.rewards import builtin

DONE = "seconds.json"


def score(prompts: list[Any], completions: list[Any], **columns: Any) -> list[Any]:
    list_columns = {
        name: values for name, values in columns.items() if isinstance(values, list)
    }
    rewards: list[Any] = getattr(builtin, os.environ["METHOD_REWARD"])(
        prompts, completions, **list_columns
    )
    return rewards


class Budget(TrainerCallback):  # type: ignore[misc]
    """Stops before the step that would go past the budget, as long as steps take what they took so far."""

    def __init__(self, seconds: float) -> None:
        self._budget, self._seconds, self._began, self._taught = seconds, 0.0, 0.0, 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._began = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._seconds += time.perf_counter() - self._began
        mean = self._seconds / state.global_step
        control.should_training_stop |= self._seconds + mean > self._budget

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        **_: Any,
    ) -> None:
        if "frac_reward_zero_std" in logs:
            groups = (
                args.per_device_train_batch_size
                * args.gradient_accumulation_steps
                // args.num_generations
            )
            self._taught += groups * (1 - logs["frac_reward_zero_std"])
        progress = {
            "steps": state.global_step,
            "seconds": self._seconds,
            "taught": self._taught,
        }
        Path(DONE).write_text(json.dumps(progress))


if "METHOD_BUDGET_S" in os.environ:
    trainer.DEFAULT_CALLBACKS.append(Budget(float(os.environ["METHOD_BUDGET_S"])))
