"""Built-in rewards for a right answer: `exact_answer`, `contains_answer`, `numeric_answer`, `math`, `gym`.

Built-in rewards for how a completion is written: `format`, `length`, `repetition`, `overlong`.

A built-in reward for agreeing with the rest of the group: `similarity`. It needs no right answer.

The built-in rewards by name: plain functions in TRL's shape, `(prompts, completions, **columns) -> list`.

Not here: rewards for shape and length (`shape`), and the table of names (`builtin`).
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from functools import cache, lru_cache
from typing import Any, NamedTuple

from ycore.rewards.answers import answer_text, gives, gold_of, holds, number_of, numbers_in, text_of, words_of
from ycore.types import Content

# reasoning-gym's scorers of these tasks run Python's `eval`, or sympy's, on the text they are given. The policy
# writes that text, so only what cannot call or reach anything is passed on.
EVALUATED_LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
EVALUATED_FORMULAS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
_DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2}")
_PLAIN_LIST = re.compile(r"""[\w\s,\[\]'"#.-]*""")
_FUNCTIONS = "a?(?:sin|cos|tan)h?|exp|log|ln|sqrt|pi|Abs"
_PLAIN_FORMULA = re.compile(
    rf"(?:\s|\d++(?:\.\d*+)?|[-+*/^(),=]|(?<![A-Za-z])(?:{_FUNCTIONS}|[A-Za-z])(?![A-Za-z_]))*+"
)


def exact_answer(
    prompts: list[Content], completions: list[Content], answer: list[Any], **_columns: Any
) -> list[float | None]:
    """1 where the last thing given is the answer (see `answers.gives`), else 0; None where the row has no answer."""
    return _compared(completions, answer, gives)


def contains_answer(
    prompts: list[Content], completions: list[Content], answer: list[Any], **_columns: Any
) -> list[float | None]:
    """1 where the answer stands anywhere in what is given (see `answers.holds`), else 0; None without an answer."""
    return _compared(completions, answer, holds)


def numeric_answer(
    prompts: list[Content], completions: list[Content], answer: list[Any], *, tolerance: float = 1e-6, **_columns: Any
) -> list[float | None]:
    """1 where the last number given is within `tolerance` of the answer, else 0; None where the answer is no number.

    The tolerance is a share of the answer's size where that is above 1, and the distance itself below.
    """
    if tolerance < 0:
        raise ValueError(f"tolerance must be 0 or more: {tolerance}")
    golds = [number_of(gold_of(gold)) for gold in answer]
    return [
        None if gold is None else _is_near(numbers_in(answer_text(completion)), gold, Decimal(str(tolerance)))
        for completion, gold in zip(completions, golds, strict=True)
    ]


def math(prompts: list[Content], completions: list[Content], answer: list[Any], **_columns: Any) -> list[float | None]:
    """1 where math-verify finds the formula equal to the answer, else 0; None where the answer itself is no formula.

    It may take for ever on a hostile formula: the worker's deadline is its only limit.
    """
    return [_math_score(completion, gold_of(gold)) for completion, gold in zip(completions, answer, strict=True)]


def gym(
    prompts: list[Content], completions: list[Content], gym_task: list[str], gym_entry: list[str], **_columns: Any
) -> list[float | None]:
    """What reasoning-gym's own scorer of the task gives to the answer."""
    rows = zip(completions, gym_task, gym_entry, strict=True)
    return [_gym_score(answer_text(completion), task, json.loads(entry)) for completion, task, entry in rows]


def _compared(
    completions: list[Content], answers: list[Any], is_right: Callable[[str, str], bool]
) -> list[float | None]:
    golds = [gold_of(answer) for answer in answers]
    return [
        float(is_right(answer_text(completion), gold)) if gold else None
        for completion, gold in zip(completions, golds, strict=True)
    ]


def _is_near(given: list[Decimal], right: Decimal, tolerance: Decimal) -> float:
    return float(bool(given) and abs(given[-1] - right) <= tolerance * max(Decimal(1), abs(right)))


def _math_score(completion: Content, gold: str) -> float | None:
    import math_verify

    parsed_gold = _parsed_gold(gold)
    if not parsed_gold:
        return None
    # math-verify's own time limits answer "wrong" when they strike; the worker's deadline masks the item instead.
    given = math_verify.parse(answer_text(completion), parsing_timeout=None)
    return float(math_verify.verify(list(parsed_gold), given, timeout_seconds=None))


@lru_cache(maxsize=1024)
def _parsed_gold(gold: str) -> tuple[Any, ...]:
    import math_verify

    # Bare LaTeX (`x^2+1`) is only read between dollars; between dollars words would be read as products of letters.
    is_bare = _DELIMITED.search(gold) is None and _WORD.search(gold) is None
    parsed = math_verify.parse(f"${gold}$" if is_bare else gold, parsing_timeout=None)
    return tuple(parsed) if any(not isinstance(part, str) for part in parsed) else ()


def _gym_score(given: str, task: str, entry: dict[str, Any]) -> float:
    if not _may_evaluate(task, given):
        return 0.0
    right = entry.get("answer")
    if isinstance(right, str) and number_of(right) is not None and numbers_in(given):
        # The scorers want the bare answer; small models say "The answer is 7.".
        given = given if task in EVALUATED_FORMULAS else _last_number(given, right)
    return float(_gym_scorer(task)(given, entry))


def _last_number(given: str, right: str) -> str:
    return right if gives(given, right) else str(numbers_in(given)[-1])


def _may_evaluate(task: str, given: str) -> bool:
    if task in EVALUATED_LISTS:
        return _PLAIN_LIST.fullmatch(given) is not None
    if task in EVALUATED_FORMULAS:
        return _PLAIN_FORMULA.fullmatch(given) is not None
    return True


@cache
def _gym_scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym.factory import get_score_answer_fn

    scorer: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(task)
    return scorer


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


Reward = Callable[..., list[float | None]]

BUILTIN: dict[str, Reward] = {
    "exact_answer": exact_answer,
    "contains_answer": contains_answer,
    "numeric_answer": numeric_answer,
    "math": math,
    "gym": gym,
    "format": format,
    "length": length,
    "repetition": repetition,
    "overlong": overlong,
    "similarity": similarity,
}


class Library(NamedTuple):
    """A module that a built-in reward needs, and the command that brings it."""

    module: str
    install: str


LIBRARIES: dict[str, Library] = {
    "math": Library("math_verify", "pip install math-verify"),
    "gym": Library("reasoning_gym", "pip install 'ycore[gym]'"),
}
