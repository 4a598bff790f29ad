"""TRL's experimental trainers on given examples, each as it is: `trl.experimental.NAME`."""

import importlib
from collections.abc import Callable
from typing import Any

from datasets import Dataset

from ycore.config.schema import TEACHER_MODEL, ExperimentalConfig
from ycore.data.rows import last_text
from ycore.models.fetch import fetch_model
from ycore.models.names import resolve_model
from ycore.rewards.loading import inputs_of, reward_named
from ycore.trl.base import BaseTrainer

_COLUMN_OF_ANSWERS = {"sdft": "privileged_context", "sdpo": "answer"}
"""SDFT shows the answer to the teacher alone, and SDPO's reward compares with it: both learn from what they write."""


def choose_experimental_trainer(config: ExperimentalConfig) -> type[BaseTrainer]:
    """Return the class of the algorithm's trainer, with ycore's checkpoints, measure and model."""
    name = config.algorithm
    module = importlib.import_module(f"trl.experimental.{name}")
    more: dict[str, Any] = {}
    if name == "gold":
        more["teacher_model"] = str(fetch_model(resolve_model(config.trl[TEACHER_MODEL])))
    if config.reward is not None:
        more["reward_funcs"] = [_reward(config.reward)]

    trainer: Any = getattr(module, f"{name.upper()}Trainer")

    class ExperimentalTrainer(BaseTrainer, trainer):
        config_class = getattr(module, f"{name.upper()}Config")
        keeps_peft = True

        def __init__(
            self, *, train_dataset: Dataset, eval_dataset: Dataset | None, **kwargs: Any
        ) -> None:
            if column := _COLUMN_OF_ANSWERS.get(name):
                train_dataset = _with_answers(train_dataset, column)
                eval_dataset = eval_dataset and _with_answers(eval_dataset, column)
            super().__init__(
                train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs, **more
            )

    return ExperimentalTrainer


def _with_answers(rows: Dataset, column: str) -> Dataset:
    """Move the text of each completion to a column."""
    answers = [last_text(completion) for completion in rows["completion"]]
    return rows.remove_columns("completion").add_column(column, answers)


def _reward(name: str) -> Callable[..., Any]:
    """Return a reward as TRL calls it: with every column, of which it gets those that it names."""
    function = reward_named(name)
    inputs = inputs_of(function)

    def reward(**columns: Any) -> Any:
        return function(**inputs.accepted(columns))

    reward.__name__ = name.rpartition(":")[2]
    return reward
