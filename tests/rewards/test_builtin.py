import inspect
import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.config.schema import RewardConfig
from ycore.errors import RewardError
from ycore.rewards import builtin
from ycore.rewards.builtin import (
    BUILTIN,
    EVALUATED_FORMULAS,
    EVALUATED_LISTS,
    before_the_answer,
    reference_reward,
)
from ycore.rewards.loading import load_reward
from ycore.rewards.worker_client import check_reward

# Tasks whose scorer evaluates something, but never the text that the policy wrote.
EVALUATES_ONLY_ITS_OWN_TEXT = {"codeio", "number_sorting"}


def score(
    name: str, completion: Any, *, ids: list[int] | None = None, **row: Any
) -> float | None:
    settings = {key: row.pop(key) for key in list(row) if key in SETTINGS}
    columns = {column: [value] for column, value in row.items()}
    (reward,) = BUILTIN[name](
        prompts=["?"],
        completions=[completion],
        completion_ids=[ids or [1]],
        **columns,
        **settings,
    )
    return reward


SETTINGS = {"pattern", "target", "n", "max_penalty", "max_tokens", "cache_tokens", "score"}


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("The answer is 7.", "7", 1.0),
        ([{"role": "assistant", "content": "The answer is 7."}], "7", 1.0),
        ("7", 7, 1.0),
        ("it is 7.0", "7", 1.0),
        ("it is 1,234 apples", "1234", 1.0),
        ("10-7=3", "3", 1.0),
        ("10-15", "15", 0.0),
        ("It takes 10\u201315 minutes.", "15", 0.0),
        ("5 - 9 = \N{MINUS SIGN}4", "-4", 1.0),
        ("4 - 7", "-7", 0.0),
        ("costs $5.00", "5", 1.0),
        ("1,2,3", "3", 1.0),
        ("7 or 8", "7", 0.0),
        ("SmolLM2", "2", 0.0),
        ("", "7", 0.0),
        ("<think>7</think>8", "7", 0.0),
        ("<think>is it 7", "7", 0.0),
        ("<answer>7</answer> or 9", "7", 1.0),
        ("so 72", "48 / 2 = 24, 48 + 24 = 72\n#### 72", 1.0),
        ("The capital is Paris.", "paris", 1.0),
        ("**Paris**", "Paris", 1.0),
        ("Paris it is", "Paris", 0.0),
        ("Comparis", "Paris", 0.0),
        ("11/2", "1/2", 0.0),
        ("(B).", "B", 1.0),
        ("is it ?", "?", 1.0),
        ("is it !", "?", 0.0),
        ("no <answer>7</answer> <answer>8", "7", 1.0),
        ("7", None, None),
        ("7", "  ", None),
        ([], "7", 0.0),
    ],
)
def test_exact_answer(completion: Any, answer: Any, expected: float | None) -> None:
    assert score("exact_answer", completion, answer=answer) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("7 or 8", "7", 1.0),
        ("17", "7", 0.0),
        ("I say PARIS, of course", "Paris", 1.0),
        ("Parisian", "Paris", 0.0),
        ("<think>7</think>8", "7", 0.0),
        ("7", "", None),
    ],
)
def test_contains_answer(completion: Any, answer: Any, expected: float | None) -> None:
    assert score("contains_answer", completion, answer=answer) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("The answer is 7.", "7", 1.0),
        ("The answer is 8.", "7", 0.0),
        (r"so $\boxed{\frac{2}{6}}$", r"\frac{1}{3}", 1.0),
        ([{"role": "assistant", "content": r"\boxed{1+x^2}"}], "x^2+1", 1.0),
        ("so 72", "48 + 24 = 72\n#### 72", 1.0),
        ("<think>8</think> 7", "8", 0.0),
        ("no idea", "7", 0.0),
        ("7", "no solution exists", None),
        ("7", "", None),
    ],
)
def test_math(completion: Any, answer: Any, expected: float | None) -> None:
    assert score("math", completion, answer=answer) == expected


@pytest.mark.parametrize(
    ("completion", "settings", "expected"),
    [
        ("<think>2 + 2</think>4", {}, 1.0),
        (" <think>two\nlines</think>\n4\n", {}, 1.0),
        ("<think>2 + 2</think>  ", {}, 0.0),
        ("<think><think>a</think>4", {}, 0.0),
        ("<think>a</think>4</think>5", {}, 0.0),
        ("4", {}, 0.0),
        ("42", {"pattern": r"\d+"}, 1.0),
        ("is 42", {"pattern": r"\d+"}, 0.0),
    ],
)
def test_format(completion: str, settings: dict[str, Any], expected: float) -> None:
    assert score("format", completion, **settings) == expected


@pytest.mark.parametrize(
    ("num_words", "expected"), [(0, 0.0), (5, 0.5), (10, 1.0), (15, 0.5), (20, 0.0), (99, 0.0)]
)
def test_length_is_one_at_its_target_and_falls_off_on_both_sides(
    num_words: int, expected: float
) -> None:
    assert score("length", "word " * num_words, target=10) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("completion", "settings", "expected"),
    [
        ("a b c d e", {"n": 2}, 0.0),
        ("a a a a a", {"n": 2}, -0.75),
        ("a a a a a", {"n": 2, "max_penalty": 0.4}, -0.3),
        ("a", {"n": 2}, 0.0),
        ("", {}, 0.0),
    ],
)
def test_repetition(completion: str, settings: dict[str, Any], expected: float) -> None:
    assert score("repetition", completion, **settings) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 0), (80, 0), (90, -0.5), (100, -1), (150, -1)]
)
def test_overlong_is_dapos_equation(num_tokens: int, expected: float) -> None:
    reward = score("overlong", "text", ids=[0] * num_tokens, max_tokens=100, cache_tokens=20)
    assert reward == pytest.approx(expected)


HOSTILE = [
    "1" * 50_000 + "!",
    "1," * 20_000,
    "<answer>" * 20_000,
    "<think>" * 20_000,
    "((((" * 10_000,
    "1 " * 20_000,
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "name", ["exact_answer", "contains_answer", "format", "repetition", "gym"]
)
def test_long_hostile_text_is_scored_in_time(name: str) -> None:
    row = gym_row("countdown") if name == "gym" else {"answer": "7"}
    assert None not in [score(name, text, **row) for text in HOSTILE]


def gym_row(task: str) -> dict[str, Any]:
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset(task, size=1, seed=1)[0]
    return {"gym_task": task, "gym_entry": json.dumps(entry), "answer": entry["answer"]}


@pytest.mark.parametrize(
    "task", ["chain_sum", *sorted(EVALUATED_LISTS), "polynomial_multiplication"]
)
def test_gym_rewards_the_right_answer_of_a_task(task: str) -> None:
    row = gym_row(task)
    assert score("gym", f"<answer>{row['answer']}</answer>", **row) == 1.0
    assert (score("gym", "<answer>no idea</answer>", **row) or 0) < 0.1


def test_gym_reads_a_number_out_of_a_sentence() -> None:
    row = gym_row("chain_sum")
    assert score("gym", f"The answer is {row['answer']}.", **row) == 1.0
    assert (score("gym", f"The answer is {row['answer']}, or 123456.", **row) or 0) < 0.1


@pytest.mark.parametrize(
    ("task", "text"),
    [("prime_factorization", "no idea"), ("boxnet", "7"), ("game_of_life", '{"a": 1}')],
)
def test_gym_pays_nothing_for_what_a_scorer_cannot_read(task: str, text: str) -> None:
    """These scorers raise on such a text; a reward that raises is masked."""
    assert score("gym", text, **gym_row(task)) == 0.0


def test_gym_raises_where_the_row_is_at_fault_and_not_the_text() -> None:
    row = gym_row("prime_factorization") | {"gym_entry": json.dumps({"answer": None})}
    with pytest.raises(ValueError, match=r"invalid literal"):
        score("gym", "no idea", **row)


def test_gym_says_that_it_does_not_know_a_task() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match="no_such_task"):
        score("gym", "7", gym_task="no_such_task", gym_entry="{}")


def fraction_row(task: str, answer: str) -> dict[str, Any]:
    """A row whose right answer is 3/4, where 6/8 is what the question says."""
    numbers = {"numerator": 6, "denominator": 8}
    numbers |= {"simplified_numerator": 3, "simplified_denominator": 4}
    entry = {"question": "?", "answer": answer, "metadata": numbers}
    return {"gym_task": task, "gym_entry": json.dumps(entry), "answer": answer}


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("fraction_simplification", "3/4"),
        ("fraction_simplification", "$3/4$"),
        ("fraction_simplification", r"$\frac{3}{4}$"),
        ("fraction_simplification", r"$\dfrac{3}{4}$"),
        ("dice", "3/4"),
    ],
)
def test_gym_wants_a_fraction_reduced_where_the_task_does(task: str, answer: str) -> None:
    pytest.importorskip("reasoning_gym")
    row = fraction_row(task, answer)
    for right in (
        answer,
        "3/4",
        "3 / 4",
        "It is 3/4.",
        r"It is $\frac{3}{4}$.",
        r"\boxed{3/4}",
    ):
        assert score("gym", right, **row) == 1.0, right
    for wrong in ("6/8", "It is 6/8.", r"\boxed{\frac{6}{8}}", "0.75", "75%", "4/3"):
        assert (score("gym", wrong, **row) or 0) < 0.2, wrong


@pytest.mark.parametrize("task", sorted(EVALUATED_LISTS | EVALUATED_FORMULAS))
def test_gym_never_lets_a_completion_run_code(task: str, tmp_path: Any) -> None:
    mark = tmp_path / "ran"
    attack = f"[__import__('pathlib').Path({str(mark)!r}).touch()]"
    assert score("gym", f"<answer>{attack}</answer>", **gym_row(task)) == 0.0
    assert not mark.exists()


def test_every_gym_task_that_evaluates_text_is_known() -> None:
    factory = pytest.importorskip("reasoning_gym.factory")
    evaluates = re.compile(r"(?<![\w.])eval\(|parse_expr\(|sympify\(|\bexec\(")
    evaluating = {
        name
        for name, (task, _) in factory.DATASETS.items()
        if evaluates.search(inspect.getsource(task))
    }
    assert evaluating == EVALUATED_LISTS | EVALUATED_FORMULAS | EVALUATES_ONLY_ITS_OWN_TEXT


@pytest.mark.parametrize(
    ("completion", "answer", "settings", "expected"),
    [
        ("so it is 3.1416", "3.14159", {"tolerance": 0.001}, 1.0),
        ("so it is 3.1416", "3.14159", {}, 0.0),
        ("first 10, then 7", "7.0000001", {}, 1.0),
        ("1,010", "1000", {"tolerance": 0.01}, 1.0),  # of the answer's size: 10 off at most
        ("1,011", "1000", {"tolerance": 0.01}, 0.0),
        ("0.02", "0.01", {"tolerance": 0.01}, 1.0),  # below 1 the distance itself
        ("no number", "7", {}, 0.0),
        ("7", "seven", {}, None),
        ("<think>7</think> 8", "work #### 8", {}, 1.0),
    ],
)
def test_numeric_answer(
    completion: str, answer: str, settings: dict[str, Any], expected: float | None
) -> None:
    assert BUILTIN["numeric_answer"]([""], [completion], answer=[answer], **settings) == [
        expected
    ]


def similarity(prompts: list[str], texts: list[str], *, n: int = 1) -> list[float | None]:
    return builtin.similarity([*prompts], [*texts], n=n)


def test_similarity_by_hand() -> None:
    """Pairs: (a b, a b) = 1; (a b, b c) shares one of two words on either side, so 2 * 1 / 4 = 0.5."""
    assert similarity([""] * 3, ["a b", "A b", "b c"]) == [0.75, 0.75, 0.5]


def test_word_order_counts_for_similarity_from_two_words_on() -> None:
    assert similarity([""] * 2, ["a b c", "c b a"]) == [1.0, 1.0]
    assert similarity([""] * 2, ["a b c", "c b a"], n=2) == [0.0, 0.0]
    assert similarity([""] * 2, ["7", "7"], n=2) == [1.0, 1.0], (
        "an answer shorter than n words is one gram"
    )


def test_similarity_compares_only_the_answers() -> None:
    completions = ["<think>one way</think> 7", "<think>quite another</think> 7"]
    assert similarity([""] * 2, completions) == [1.0, 1.0]
    assert similarity([""] * 2, ["<think>never ends", "7"]) == [0.0, 0.0]


def test_a_group_of_one_has_nothing_to_agree_with() -> None:
    assert similarity([""], ["7"]) == [None]


@given(
    st.lists(st.text("ab ", max_size=8), min_size=2, max_size=6),
    st.randoms(use_true_random=False),
)
def test_similarity_follows_its_completion_through_any_order(
    texts: list[str], chance: random.Random
) -> None:
    order = list(range(len(texts)))
    chance.shuffle(order)
    straight = similarity([""] * len(texts), texts)
    shuffled = similarity([""] * len(texts), [texts[index] for index in order])
    assert shuffled == pytest.approx([straight[index] for index in order])
    assert all(value is not None and 0 <= value <= 1 for value in straight)


LOGPROBS = st.lists(st.floats(-50, 0), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("<think>3 + 4</think> <answer> 8 </answer>", "<think>3 + 4</think> <answer> "),
        ("so it is \\boxed{8}.", "so it is \\boxed{"),
        ("<think>hm</think>\n\nThe answer is 8.", "<think>hm</think>\n\n"),
        ("<answer>1</answer> no, <answer>2</answer>", "<answer>1</answer> no, <answer>"),
        ("It is 8", "It is 8\nAnswer: "),
        ("", "\nAnswer: "),
    ],
)
def test_where_the_answer_begins(text: str, before: str) -> None:
    assert before_the_answer(text, bridge="\nAnswer: ") == before


def test_reference_probability_by_hand() -> None:
    """Tokens of probability 0.5 and 0.25 after the reasoning, 0.125 and 0.125 without it."""
    reasoned, bare = [math.log(0.5), math.log(0.25)], [math.log(0.125)] * 2
    assert reference_reward(reasoned, None) == pytest.approx(0.375)
    assert reference_reward(reasoned, bare) == pytest.approx(0.25)
    assert reference_reward(bare, reasoned) == 0.0, (
        "reasoning that makes it less likely earns nothing"
    )


@given(LOGPROBS, LOGPROBS)
def test_reference_probability_lies_between_0_and_1_and_does_not_mind_the_order_of_tokens(
    reasoned: list[float], bare: list[float]
) -> None:
    value = reference_reward(reasoned, bare)
    assert 0 <= value <= 1
    assert reference_reward(reasoned[::-1], bare[::-1]) == pytest.approx(value)


def test_a_mistyped_reference_probability_is_corrected() -> None:
    with pytest.raises(RewardError, match="did you mean 'reference_probability'"):
        check_reward(RewardConfig(reward="reference_probabilty"), ["answer"])


INSTRUCTED = {
    "instruction_id_list": [
        "punctuation:no_comma",
        "keywords:frequency",
        "language:response_language",
    ],
    "kwargs": [
        {"keyword": None},
        {"keyword": "sun", "frequency": 2, "relation": "at least"},
        {"language": "en"},
    ],
}


@pytest.fixture
def without_sentences(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """NLTK, which finds no data at all."""
    pytest.importorskip("lm_eval")
    nltk = pytest.importorskip("nltk")
    monkeypatch.setattr(nltk.data, "path", [])
    builtin._ifeval_checker.cache_clear()
    yield nltk.data
    builtin._ifeval_checker.cache_clear()


@pytest.mark.parametrize(
    ("completion", "strict", "loose", "share"),
    [
        ("The sun is up and the sun is warm today.", 1.0, 1.0, 1.0),
        (
            "<think>First, a plan.</think>The sun is up and the sun is warm today.",
            1.0,
            1.0,
            1.0,
        ),
        ("Sure, here it is:\nThe sun is up and the sun is warm today.", 0.0, 1.0, 2 / 3),
        ("The sun, the moon, and the stars are all out tonight.", 0.0, 0.0, 1 / 3),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_ifeval_counts_the_instructions_that_are_followed(
    without_sentences: Any,
    tmp_path: Path,
    completion: str,
    strict: float,
    loose: float,
    share: float,
) -> None:
    (tmp_path / "tokenizers/punkt_tab/english").mkdir(
        parents=True
    )  # these instructions read no sentences
    without_sentences.path.append(str(tmp_path))
    for name, expected in (("strict", strict), ("loose", loose), ("share", share)):
        assert score("ifeval", completion, **INSTRUCTED, score=name) == pytest.approx(
            expected
        ), name
    assert score("ifeval", completion, instruction_id_list=[], kwargs=[]) is None


def test_ifeval_says_before_a_run_what_it_needs(without_sentences: Any) -> None:
    with pytest.raises(
        RewardError,
        match=r"sentences is not in .*nltk_data; fetch it once: .*nltk\.downloader -d",
    ):
        load_reward(RewardConfig(reward="ifeval"))
    with pytest.raises(RewardError, match="score must be strict, loose or share: 'all'"):
        load_reward(RewardConfig(reward="ifeval", args={"score": "all"}))
