"""A trainer over the seam: the tiny model on a CPU, with rounds that a test gives, before its first step."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from datasets import Dataset
from transformers import AutoTokenizer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from trl import GRPOConfig

from ycore.trl.build import placeholder_rewards
from ycore.trl.seam import RoundSource

T = TypeVar("T")


def small_trainer(
    kind: Callable[..., T],
    model: Path,
    output: Path,
    rounds: RoundSource,
    *,
    rewards: Sequence[str] = ("mine",),
    trainer_args: dict[str, Any] | None = None,
    alone: bool = False,
    **settings: Any,
) -> T:
    """`trainer_args` go to the trainer, `settings` to its GRPOConfig; a step has one group of four unless they say else.

    `alone`: each completion is a group of its own, which GRPOConfig itself refuses.
    """
    args = GRPOConfig(
        **{
            "output_dir": str(output),
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "save_strategy": "no",
            "num_generations": 4,
            "per_device_train_batch_size": 4,
            **settings,
        }
    )
    if alone:
        args.num_generations = 1
    num_rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    made = kind(
        model=str(model),
        reward_funcs=placeholder_rewards([*rewards]),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["tick"] * num_rows}),
        processing_class=AutoTokenizer.from_pretrained(model),
        **(trainer_args or {}),
    )
    made.rounds = rounds  # type: ignore[attr-defined]
    made.current_gradient_accumulation_steps = args.gradient_accumulation_steps  # type: ignore[attr-defined]
    return made
