"""The reward that both sides of the benchmark learn from, and a record of the lengths of their completions.

It costs almost no time and varies between completions, so that every group has a gradient; what it rewards has no
meaning. Each call adds a line to `completions.jsonl` in the working folder: the step, and for each completion its
prompt and its number of tokens.
"""

import json
from pathlib import Path
from typing import Any

LENGTHS = "completions.jsonl"


def distinct_characters(
    completions: list[Any],
    completion_ids: list[list[int]],
    prompt_index: list[int],
    trainer_state: Any,
    **columns: Any,
) -> list[float]:
    """Count the distinct characters of each completion, in hundreds."""
    lengths = [len(token_ids) for token_ids in completion_ids]
    line = {"step": trainer_state.global_step, "prompt_index": prompt_index, "tokens": lengths}
    with Path(LENGTHS).open(
        "a"
    ) as file:  # small appends do not interleave, also from several workers
        file.write(json.dumps(line) + "\n")
    return [len(set(_text(completion))) / 100 for completion in completions]


def _text(completion: Any) -> str:
    return (
        completion
        if isinstance(completion, str)
        else "".join(str(turn["content"]) for turn in completion)
    )
