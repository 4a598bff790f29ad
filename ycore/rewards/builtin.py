"""The built-in rewards: plain functions in TRL's shape, `(prompts, completions, **columns)`, one number per completion.

Keyword-only parameters are the settings that a run may give; None means "does not apply". The numbers of
`reference_probability` come from the policy, so the controller scores it; its settings and its equation are here.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from math import exp
from statistics import fmean
from typing import Any, TypeVar

from pydantic import BaseModel, PositiveFloat

from ycore.config.resolve import validated
from ycore.config.schema import Positive, RewardConfig, Strict
from ycore.data.cells import golds_of, last_boxed
from ycore.rewards.answers import (
    answer_text,
    completion_text,
    for_math_verify,
    gives,
    holds,
    last_number,
    number_of,
    numbers_in,
    offers_two,
    without_thinking,
    words_of,
)
from ycore.types import THINKING, Content, JsonObject

Contents = list[Content]
Rewards = list[float | None]
Reward = Callable[..., Rewards]
_Settings = TypeVar("_Settings", bound=BaseModel)

THINK_THEN_ANSWER = r"<think>(?:(?!</?think>).)*</think>\s*(?=\S)(?:(?!</?think>).)+"
REFERENCE = "reference_probability"
ENVIRONMENT = "environment"  # what the run's own environment pays: its `get_reward`
CODE = "code"  # scored by `ycore.scoring.code_scorer`, its pure part is `ycore.rewards.code`

# reasoning-gym's scorers of these tasks run Python's `eval`, or sympy's, on the text they are given. The policy
# writes that text, so only what cannot call or reach anything is passed on.
EVALUATED_LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
EVALUATED_FORMULAS = frozenset(
    {
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
    }
)
_DELIMITED = r"\$|\\boxed|\\\(|\\\["
_TEXT = r"\\text\{[^{}]*\}"
# Signs by which a box holds no single value, though math-verify finds one: \neq 6, 6 \lor 7, > 6, 6_7.
_NO_VALUE = r"\\(?:neq?|lor)\b|^[<>]|\d_"
_WORD = r"(?<![\\A-Za-z{])(?![abcnpqrxyz]{2,3}(?![A-Za-z]))[A-Za-z]{2}"
_PLAIN_LIST = r"""[\w\s,\[\]'"#.-]*"""
_FUNCTIONS = "a?(?:sin|cos|tan)h?|exp|log|ln|sqrt|pi|Abs"
_PLAIN_FORMULA = (
    rf"(?:\s|\d++(?:\.\d*+)?|[-+*/^(),=]|(?<![A-Za-z])(?:{_FUNCTIONS}|[A-Za-z])(?![A-Za-z_]))*+"
)


def exact_answer(
    prompts: Contents, completions: Contents, answer: list[Any], **_columns: Any
) -> Rewards:
    """1 where the completion ends with an answer that the row accepts (`answers.gives`), else 0; None without any.

    `answer` may be a text, a number, a list of accepted answers, or a mapping with `value` and `aliases`. Numbers are
    compared as numbers, in all forms that people and LaTeX write them.
    """
    return _compared(completions, answer, gives)


def contains_answer(
    prompts: Contents, completions: Contents, answer: list[Any], **_columns: Any
) -> Rewards:
    """1 where an answer that the row accepts occurs anywhere (`answers.holds`), else 0; None without any.

    `answer` as in `exact_answer`.
    """
    return _compared(completions, answer, holds)


def numeric_answer(
    prompts: Contents,
    completions: Contents,
    answer: list[Any],
    *,
    tolerance: float = 1e-6,
    **_columns: Any,
) -> Rewards:
    """1 where the last number is within `tolerance` of an accepted answer, else 0; None where no answer is a number.

    The tolerance is a share of the answer where that is above 1, and a distance below. `answer` as in `exact_answer`.
    """
    if tolerance < 0:
        raise ValueError(f"tolerance must be 0 or more: {tolerance}")
    numbers = [
        [gold for gold in golds_of(row_answer) if number_of(gold)] for row_answer in answer
    ]

    def is_near(text: str, gold: str) -> bool:
        right = number_of(gold)
        return right is not None and any(
            number.equals(right, tolerance) for number in last_number(text)
        )

    return _compared(completions, numbers, is_near)


def math(
    prompts: Contents, completions: Contents, answer: list[Any], **_columns: Any
) -> Rewards:
    """1 where math-verify finds the formula equal to an accepted answer, else 0; None where no answer is a formula.

    `answer` as in `exact_answer`; a formula may stand bare or between delimiters. It may take forever on a hostile
    formula: the worker's deadline is its only limit.
    """
    return [
        _math_score(completion, golds_of(row_answer))
        for completion, row_answer in zip(completions, answer, strict=True)
    ]


def gym(
    prompts: Contents,
    completions: Contents,
    gym_task: list[str],
    gym_entry: list[str],
    **_columns: Any,
) -> Rewards:
    """Return the score of reasoning-gym's own scorer of the task."""
    rows = zip(completions, gym_task, gym_entry, strict=True)
    return [
        _gym_score(answer_text(completion), task, json.loads(entry))
        for completion, task, entry in rows
    ]


def ifeval(
    prompts: Contents,
    completions: Contents,
    instruction_id_list: list[list[str]],
    kwargs: list[list[JsonObject]],
    *,
    score: str = "strict",
    **_columns: Any,
) -> Rewards:
    """IFEval's instructions (arXiv 2311.07911), checked by lm-eval. Each is a name with its own arguments in `kwargs`.

    `strict`: 1 where the completion, without its thinking, follows all of them, else 0. `loose`: the same, where each
    may also be followed without the first line, the last line or asterisks. `share`: the share of them that it follows.
    """
    if score not in ("strict", "loose", "share"):
        raise ValueError(f"score must be strict, loose or share: {score!r}")
    checker = _ifeval_checker()
    check = (
        checker.test_instruction_following_loose
        if score == "loose"
        else checker.test_instruction_following_strict
    )
    scores: Rewards = []
    for prompt, completion, names, arguments in zip(
        prompts, completions, instruction_id_list, kwargs, strict=True
    ):
        row = checker.InputExample(
            key=0, instruction_id_list=names, prompt=completion_text(prompt), kwargs=arguments
        )
        followed = check(
            row, completion_text(without_thinking(completion))
        ).follow_instruction_list
        if not followed:
            scores.append(None)
        else:
            scores.append(fmean(followed) if score == "share" else float(all(followed)))
    return scores


@cache
def _ifeval_checker() -> Any:
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab/english/")
    except LookupError:  # lm-eval would fetch it in the worker, which has no network
        fetch = f"{sys.executable} -m nltk.downloader -d {sys.prefix}/nltk_data punkt_tab"
        raise ValueError(
            f"NLTK's data of sentences is not in {sys.prefix}/nltk_data; fetch it once: {fetch}"
        ) from None
    import langdetect
    from lm_eval.tasks.ifeval import utils

    langdetect.DetectorFactory.seed = 0  # its guesses are random otherwise
    return utils


def _compared(
    completions: Contents, answers: list[Any], is_right: Callable[[str, str], bool]
) -> Rewards:
    rewards: Rewards = []
    for completion, answer in zip(completions, answers, strict=True):
        text = answer_text(completion)
        golds = golds_of(answer)
        rewards.append(float(any(is_right(text, gold) for gold in golds)) if golds else None)
    return rewards


def _math_score(completion: Content, golds: list[str]) -> float | None:
    import math_verify

    formulas = {gold: parsed for gold in golds if (parsed := _parsed_gold(gold))}
    words = [gold for gold in golds if "\\" in gold and gold not in formulas]
    if not formulas and not words:
        return None
    text = for_math_verify(answer_text(completion))
    box = last_boxed(text)
    # math-verify's own time limits answer "wrong" when they strike; the worker's deadline masks the item instead.
    parsed = math_verify.parse(text, parsing_timeout=None)
    bare = "" if box is None and re.search(_DELIMITED, text) else text
    # math-verify finds a number in `5 or 6`, and in `\neq 6`.
    is_misread = bare and (box is None or re.search(_NO_VALUE, box) or offers_two(text))

    def is_right(gold: str) -> bool:
        is_number = number_of(gold) is not None
        if is_number and is_misread:
            return gives(bare, gold)
        return (
            (box or text).replace(" ", "") == for_math_verify(gold).replace(" ", "")
            # bare LaTeX, and more forms
            or ((len(gold) > 1 or is_number) and gives(bare, gold))
            or math_verify.verify(
                list(formulas[gold]), parsed, timeout_seconds=None, allow_set_relation_comp=True
            )
        )

    return float(any(map(is_right, formulas)) or any(gives(text, gold) for gold in words))


@lru_cache(maxsize=1024)
def _parsed_gold(gold: str) -> tuple[Any, ...]:
    import math_verify

    gold = for_math_verify(gold)
    # Bare LaTeX (`x^2+1`) is only read between dollars; between dollars words would be read as products of letters.
    is_bare = (
        re.search(_DELIMITED, gold) is None
        and re.search(_WORD, re.sub(_TEXT, "", gold)) is None
    )
    parsed = math_verify.parse(f"${gold}$" if is_bare else gold, parsing_timeout=None)
    return tuple(parsed) if any(not isinstance(part, str) for part in parsed) else ()


def _gym_score(text: str, task: str, entry: JsonObject) -> float:
    if task in EVALUATED_LISTS and re.fullmatch(_PLAIN_LIST, text) is None:
        return 0.0
    if task in EVALUATED_FORMULAS and re.fullmatch(_PLAIN_FORMULA, text) is None:
        return 0.0
    right = str(entry.get("answer"))
    number = None if task in EVALUATED_FORMULAS else number_of(right)
    numbers = [*numbers_in(text), *last_number(text)]
    if number and numbers:
        # The scorers want the bare answer; small models say "The answer is 7.". A fraction is also to be reduced.
        is_right = "/" not in number.text and gives(text, right)
        text = right if is_right else numbers[-1].digits
    scorer = _gym_scorer(task)
    try:
        return float(scorer(text, entry))
    except Exception:  # noqa: BLE001 (of some scorers, for a text that is no answer to their task)
        scorer(right, entry)  # raises too where the row or the scorer is at fault
        return 0.0


@cache
def _gym_scorer(task: str) -> Any:
    from reasoning_gym.factory import get_score_answer_fn

    return get_score_answer_fn(task)


def format(
    prompts: Contents,
    completions: Contents,
    *,
    pattern: str = THINK_THEN_ANSWER,
    **_columns: Any,
) -> Rewards:
    """1 where the whole completion, without the white space around it, matches `pattern`, else 0.

    `.` matches line ends too. The default wants `<think>...</think>` and then an answer. Where the prompt opened the
    thinking, a completion may match with that `<think>` or without.
    """
    try:
        whole = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(
            f"pattern must be a regular expression: {pattern!r}: {error}"
        ) from error
    texts = [completion_text(completion).strip() for completion in completions]
    return [
        float(any(map(whole.fullmatch, (text, text.removeprefix(THINKING))))) for text in texts
    ]


def length(
    prompts: Contents, completions: Contents, *, target: Positive = 100, **_columns: Any
) -> Rewards:
    """1 at `target` words, falling linearly to 0 at no words and at twice as many."""
    counts = [len(words_of(completion_text(completion))) for completion in completions]
    return [max(0.0, 1 - abs(count - target) / target) for count in counts]


def repetition(
    prompts: Contents,
    completions: Contents,
    *,
    n: Positive = 3,
    max_penalty: PositiveFloat = 1.0,
    **_columns: Any,
) -> Rewards:
    """Minus the share of a completion's word n-grams that repeat an earlier one, times `max_penalty`."""
    grams = [_ngrams(words_of(completion_text(completion)), n) for completion in completions]
    return [-max_penalty * (1 - len(set(mine)) / len(mine)) if mine else 0.0 for mine in grams]


def overlong(
    prompts: Contents,
    completions: Contents,
    completion_ids: list[list[int]],
    *,
    max_tokens: int,
    cache_tokens: Positive,
    **_columns: Any,
) -> Rewards:
    """DAPO's soft punishment of long completions (arXiv 2503.14476, equation 13).

    0 up to `max_tokens - cache_tokens`, then falling linearly to -1 at `max_tokens` and beyond.
    """
    if cache_tokens >= max_tokens:
        raise ValueError(
            f"cache_tokens must be below max_tokens: {cache_tokens} and {max_tokens}"
        )
    free = max_tokens - cache_tokens
    return [min(0.0, max(-1.0, (free - len(ids)) / cache_tokens)) for ids in completion_ids]


def similarity(
    prompts: Contents, completions: Contents, *, n: Positive = 1, **_columns: Any
) -> Rewards:
    """A completion's mean similarity to the others of its group, from 0 to 1; None for a group of one.

    The similarity of two is the F1 of the word `n`-grams of their answers, counted with repetition, without regard to
    case. It rewards agreement within a group, as Con-RAG's PS-GRPO does (with BLEU over paraphrases).
    """
    if len(completions) < 2:
        return [None] * len(completions)
    words = [words_of(answer_text(completion).casefold()) for completion in completions]
    grams = [
        Counter(_ngrams(mine, min(n, len(mine)) or 1)) for mine in words
    ]  # a shorter answer is one gram
    return [
        sum(_f1(mine, theirs) for other, theirs in enumerate(grams) if other != index)
        / (len(grams) - 1)
        for index, mine in enumerate(grams)
    ]


def _ngrams(words: list[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]


def _f1(left: Counter[tuple[str, ...]], right: Counter[tuple[str, ...]]) -> float:
    total = left.total() + right.total()
    return 2 * (left & right).total() / total if total else 0.0


_REWARDS = (
    exact_answer,
    contains_answer,
    numeric_answer,
    math,
    gym,
    ifeval,
    format,
    length,
    repetition,
    overlong,
    similarity,
)
BUILTIN: dict[str, Reward] = {reward.__name__: reward for reward in _REWARDS}

# They look at completions behind the `<think>` that a prompt opened.
READ_ANSWERS = frozenset(BUILTIN) - {"length", "repetition", "overlong"}

# The module that a built-in reward imports, and the command that installs it.
LIBRARIES = {
    "math": ("math_verify", "pip install math-verify"),
    "gym": ("reasoning_gym", "pip install 'ycore[gym]'"),
    "ifeval": ("lm_eval", "pip install 'ycore[ifeval]'"),
}


class Reference(Strict):
    """Settings of `reference_probability`: how likely the policy finds the right answer after its own reasoning.

    It needs reference answers but no rule that compares them: RLPR (arXiv 2506.18254). `debias` subtracts the
    probability of the answer without any reasoning, and cuts at 0 (equation 4). `bridge` leads from reasoning to answer
    where the completion itself marks no place for the answer.
    """

    debias: bool = True
    bridge: str = "\nAnswer: "


def settings_of(spec: RewardConfig, model: type[_Settings]) -> _Settings:
    """Return the settings in a reward's `args`; RewardError where one is unknown or of the wrong type."""
    return validated(model, spec.args, what=f"reward {spec.reward!r}")


def before_the_answer(text: str, *, bridge: str) -> str:
    """Return the part of a completion before its answer: up to the last `<answer>`, else `\\boxed{`, else `</think>`.

    Where there is none of them, the whole text is reasoning, and `bridge` leads to the answer.
    """
    for mark in ("<answer>", "\\boxed{", "</think>"):
        before, end, after = text.rpartition(mark)
        if end:
            return before + end + after[: len(after) - len(after.lstrip())]
    return text + bridge


def reference_reward(logprobs: Sequence[float], bare: Sequence[float] | None) -> float:
    """Return the mean probability of the answer's tokens, less that without reasoning (`bare`), cut to 0 and 1.

    The mean of probabilities and not their product: one unlikely token would make an answer worthless (section 3.2).
    """
    reward = fmean(map(exp, logprobs))
    return reward if bare is None else min(1.0, max(0.0, reward - fmean(map(exp, bare))))
