"""ycore: reinforcement learning for language models, from one command or three lines of Python. Imports nothing heavy.

from ycore import grpo
run = grpo(model="smollm2-135m", dataset="task:addition?digits=1", reward="exact_answer")
run.metrics, run.model(), run.report()
"""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = [
    "Planned",
    "Round",
    "Run",
    "distill",
    "dpo",
    "dry_run",
    "evaluate",
    "grpo",
    "kto",
    "online_dpo",
    "plan_run",
    "ppo",
    "reward_model",
    "sft",
]
_MODULES = {
    "Planned": "tables",
    "Round": "own_loop",
    "plan_run": "planning",
}
"""The files of `ycore.api` in which names are that are not in its `functions`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ycore' has no attribute {name!r}")
    module = _MODULES.get(name, "functions")
    return getattr(importlib.import_module(f"ycore.api.{module}"), name)
