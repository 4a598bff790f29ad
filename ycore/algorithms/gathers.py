"""TRL's gathers of text, bounded: its trainer collects every prompt and completion of all ranks on every rank.

They only feed TRL's table of completions, so unless `log_completions` asks for that table, each rank keeps its own.

Not here: the gathers of numbers (lengths, rewards, metrics), which stay TRL's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trl.trainer import grpo_trainer


@contextmanager
def texts_stay_local(num_sequences: int, *, logs_completions: bool) -> Iterator[None]:
    """While it lasts, TRL gathers no list that has one item for each of this rank's `num_sequences`."""
    gather_object = grpo_trainer.gather_object

    def gather_names(items: list[Any]) -> list[Any]:
        if len(items) == num_sequences:
            return items
        gathered: list[Any] = gather_object(items)
        return gathered

    if logs_completions:
        yield
        return
    grpo_trainer.gather_object = gather_names
    try:
        yield
    finally:
        grpo_trainer.gather_object = gather_object
