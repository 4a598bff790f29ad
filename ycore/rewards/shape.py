"""Built-in rewards for how a completion is written: `format`, `length`, `repetition`, `overlong`.

Not here: rewards for a right answer (`correctness`), and the table of names (`builtin`).
Keyword-only parameters are settings, bound from the reward's `args`; dataset columns never reach them.
"""

import re
from typing import Any

from ycore.rewards.text import text_of, words_of
from ycore.types import Content

THINK_THEN_ANSWER = r"<think>(?:(?!</?think>).)*</think>\s*(?=\S)(?:(?!</?think>).)+"


def format(
    prompts: list[Content], completions: list[Content], *, pattern: str = THINK_THEN_ANSWER, **_columns: Any
) -> list[float | None]:
    """1 where the whole completion, without the space around it, matches `pattern` (`.` matches line ends), else 0."""
    try:
        whole = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern must be a regular expression: {pattern!r}: {error}") from error
    return [float(whole.fullmatch(text_of(completion).strip()) is not None) for completion in completions]


def length(
    prompts: list[Content], completions: list[Content], *, target: int = 100, **_columns: Any
) -> list[float | None]:
    """1 at `target` words, falling off in a straight line to 0 at no words and at twice as many."""
    _require_positive("target", target)
    return [max(0.0, 1 - abs(len(words_of(completion)) - target) / target) for completion in completions]


def repetition(
    prompts: list[Content], completions: list[Content], *, n: int = 3, max_penalty: float = 1.0, **_columns: Any
) -> list[float | None]:
    """Minus the share of a completion's word n-grams that repeat an earlier one, times `max_penalty`."""
    _require_positive("n", n)
    _require_positive("max_penalty", max_penalty)
    return [-max_penalty * _repeated_share(words_of(completion), n) for completion in completions]


def overlong(
    prompts: list[Content],
    completions: list[Content],
    completion_ids: list[list[int]],
    *,
    max_tokens: int,
    cache_tokens: int,
    **_columns: Any,
) -> list[float | None]:
    """DAPO's soft punishment of long completions (arXiv 2503.14476, eq. 13).

    0 up to `max_tokens - cache_tokens`, then falling in a straight line to -1 at `max_tokens` and beyond.
    """
    _require_positive("cache_tokens", cache_tokens)
    if cache_tokens >= max_tokens:
        raise ValueError(f"cache_tokens must be below max_tokens: {cache_tokens} and {max_tokens}")
    free = max_tokens - cache_tokens
    return [min(0.0, max(-1.0, (free - len(ids)) / cache_tokens)) for ids in completion_ids]


def _repeated_share(words: list[str], n: int) -> float:
    grams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _require_positive(name: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"{name} must be above 0: {value}")
