"""`ycore rloo`: REINFORCE with a leave-one-out baseline (arXiv 2402.14740), by GRPO's trainer, engines and controller.

Its options are GRPO's, but for those that its name decides.

Not here: what it sets (the preset `rloo`), what the options mean (`options`), the checks and the run (`training`).
"""

from typing import Any

import typer
from ycore_cli.grpo import grpo, train_on_rewards
from ycore_cli.options import takes_options_of


@takes_options_of(grpo, without=("preset", "advantage"))
def rloo(context: typer.Context, **options: Any) -> None:
    """Train a model on a reward with RLOO.

    \b
    It is `ycore grpo --preset rloo`, and takes every field of TRL's GRPOConfig; what differs from
    `trl rloo` is in docs/algorithms.md.

    \b
    ycore rloo --recipe quickstart
    ycore rloo --model Qwen/Qwen2.5-0.5B-Instruct --dataset train.jsonl \\
               --reward rewards.py:score --output runs/first --steps 200
    """
    context.params["preset"] = "rloo"
    train_on_rewards(context, algorithm="rloo")
