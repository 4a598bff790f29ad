"""A built-in reward for agreeing with the rest of the group: `similarity`. It needs no right answer.

Not here: rewards that look at one completion alone (`correctness`, `shape`), and the table of names (`builtin`).
"""

from collections import Counter
from typing import Any

from ycore.rewards.text import answer_text
from ycore.types import Content


def similarity(
    prompts: list[Content], completions: list[Content], *, n: int = 1, **_columns: Any
) -> list[float | None]:
    """A completion's mean likeness to the others of its group, from 0 to 1; None for one alone.

    Likeness of two is the F1 of their word `n`-grams, each counted as often as it comes, without regard to case, in
    what is given as the answer. Rewarding agreement within a group: Con-RAG's PS-GRPO (with BLEU over paraphrases).
    """
    if n < 1:
        raise ValueError(f"n must be 1 or more: {n}")
    if len(completions) < 2:
        return [None] * len(completions)
    grams = [_grams(answer_text(completion).casefold().split(), n) for completion in completions]
    others = len(completions) - 1
    return [
        sum(_f1(mine, theirs) for other, theirs in enumerate(grams) if other != index) / others
        for index, mine in enumerate(grams)
    ]


def _grams(words: list[str], n: int) -> Counter[tuple[str, ...]]:
    size = min(n, len(words))  # an answer shorter than n words is one gram
    return Counter(tuple(words[start : start + size]) for start in range(len(words) - size + 1)) if words else Counter()


def _f1(one: Counter[tuple[str, ...]], other: Counter[tuple[str, ...]]) -> float:
    total = one.total() + other.total()
    return 2 * (one & other).total() / total if total else 0.0
