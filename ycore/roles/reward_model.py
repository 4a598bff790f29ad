"""The reward-model role's process: one stock vLLM pooling server with a sequence classifier of one label.

Not here: asking it (`reward_model_engine`), what its number becomes (`judging.reward_model`), starting it (`launch`).
"""

from collections.abc import Mapping
from typing import Any

from ycore.errors import ModelError
from ycore.roles.reward_model_engine import SERVED_REWARD_MODEL
from ycore.roles.rollout import RolloutEngine, server_command


def reward_model_command(engine: RolloutEngine) -> list[str]:
    """The server's command line. `classify` keeps the classifier's head; the model's own pooling stays as it is."""
    return server_command(
        engine, served_as=SERVED_REWARD_MODEL, options={"--runner": "pooling", "--convert": "classify"}
    )


def check_classifier(name: str, config: Mapping[str, Any]) -> None:
    """ModelError unless a model's config.json is that of a sequence classifier with one label."""
    architectures = [str(one) for one in config.get("architectures") or []]
    if not any(one.endswith("ForSequenceClassification") for one in architectures):
        told = ", ".join(architectures) or "none"
        raise ModelError(
            f"rm:{name} must be a sequence classifier with one label (...ForSequenceClassification); its architectures "
            f"are {told}; train one with TRL's RewardTrainer, or ask the model as a judge: --reward judge:FILE.yaml"
        )
    labels = config.get("id2label") or {}
    num_labels = config.get("num_labels") or len(labels) or 2  # transformers' default, where nothing is said
    if num_labels != 1:
        raise ModelError(f"rm:{name} must give one number, and has {num_labels} labels; take a model with num_labels=1")
