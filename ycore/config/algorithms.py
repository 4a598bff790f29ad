"""The two kinds of run, as resolving sees them: which model validates, which of TRL's classes has the other fields.

Not here: resolving itself (`overrides`), and the two configurations (`run`, `tune`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from ycore.config import schema as owned
from ycore.config.schema import METHODS, TRL_CLASS, TUNE_ALIASES, RunConfig, TuneConfig, tune_own_value, tune_refusal

AnyConfig = RunConfig | TuneConfig
C = TypeVar("C", bound=BaseModel)

_MODEL = "--model smollm2-135m"
_DATASETS = {"sft": "chats.jsonl", "reward": "pairs.jsonl", "dpo": "pairs.jsonl", "kto": "labelled.jsonl"}


@dataclass(frozen=True, slots=True)
class Kind(Generic[C]):
    """`give` names, for each key without a default, an example of how to say it."""

    config: type[C]
    trl_class: str
    aliases: Mapping[str, str]
    refusal: Callable[[str], str | None]
    own_value: Callable[[str, Any], Any]
    give: Mapping[str, str]


RUN: Kind[RunConfig] = Kind(
    RunConfig,
    "GRPOConfig",
    owned.ALIASES,
    owned.refusal,
    owned.own_value,
    {"model": _MODEL, "dataset": "--dataset 'task:addition?digits=1'", "rewards": "--reward exact_answer"},
)


def tune_kind(method: str) -> Kind[TuneConfig]:
    """The kind of a trainer without rollouts."""
    give = {"model": _MODEL, "dataset": f"--dataset {_DATASETS[method]}"}
    return Kind(TuneConfig, TRL_CLASS[method], TUNE_ALIASES, tune_refusal, tune_own_value, give)


def is_tuning(algorithm: object) -> bool:
    return algorithm in METHODS


def kind_of(algorithm: str) -> Kind[RunConfig] | Kind[TuneConfig]:
    """By the name of a command or of a recipe's `algorithm`."""
    return tune_kind(algorithm) if is_tuning(algorithm) else RUN
