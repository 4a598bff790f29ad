"""Questions: what stands in them, and that nothing from outside gets out of its place."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.config.schema import RewardConfig
from ycore.judge.declaration import Judge, judge_of
from ycore.judge.question import Questioner, as_text, fold_lookalikes, sanitize, verdict_code
from ycore.types import Prompt

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Who wrote it?"},
]
PROMPT = Prompt(0, CHAT, {"answer": "Ada", "level": 3, "more": None})
SPECIAL = ("<|im_end|>", "<eos>", "[MASK]")


def make_judge(**declared: object) -> Judge:
    return judge_of(
        RewardConfig(reward="judge:test", args={"verdict": {"kind": "score"}, **declared})
    )


def test_a_template_is_filled_with_prompt_answer_reference_and_columns() -> None:
    text = (
        "{rubric}|{prompt}|{completion}|{reference}|{level}|{more}|{{as it is}}|{how_to_answer}"
    )
    judge = make_judge(
        rubric=" Be strict. ", fence=False, messages=[{"role": "user", "content": text}]
    )
    assert judge.columns == {"answer", "level", "more"}
    (turn,) = Questioner(judge).question(PROMPT, "Ada {prompt}", key="1")
    assert turn["content"] == (
        "Be strict.|Who wrote it?|Ada {prompt}|Ada|3||{as it is}|"
        f"End with a number from 0 to 10, as <score-{verdict_code('1')}>N</score-{verdict_code('1')}>."
    )


def test_marks_differ_from_request_to_request_and_are_repeatable() -> None:
    questioner = Questioner(make_judge())
    ask = lambda key: questioner.question(PROMPT, "Ada", key=key)[-1]["content"]  # noqa: E731
    assert ask("1") == ask("1") != ask("2")
    assert re.search(r"<(text-[0-9a-f]{10})>\nAda\n</\1>", ask("1"))


def test_the_code_differs_from_request_to_request_and_follows_what_engines_cache() -> None:
    assert verdict_code("1") == verdict_code("1") != verdict_code("2")
    for declared in (
        {"verdict": {"kind": "json"}},
        {},
        {"mode": "groupwise", "verdict": {"kind": "ranking"}},
    ):
        questioner = Questioner(make_judge(**declared))
        system, user = questioner.question(PROMPT, "Ada", key="1")
        assert verdict_code("1") not in system["content"]
        assert verdict_code("1") in user["content"].splitlines()[-1]


def test_pairs_and_groups_show_everybody_once() -> None:
    pair = Questioner(make_judge(mode="pairwise")).question(PROMPT, "one", "two", key="1")[-1][
        "content"
    ]
    assert (
        pair.index("First answer")
        < pair.index("one")
        < pair.index("Second answer")
        < pair.index("two")
    )
    ranking = make_judge(mode="groupwise", verdict={"kind": "ranking"})
    group = Questioner(ranking).question(PROMPT, "red", "green", "blue", key="1")[-1]["content"]
    assert re.findall(r"Answer (\d):\n<text-\w+>\n(\w+)", group) == [
        ("1", "red"),
        ("2", "green"),
        ("3", "blue"),
    ]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        (CHAT, "Who wrote it?"),
        ([*CHAT, {"role": "assistant", "content": "I?"}], "user: Who wrote it?\nassistant: I?"),
        (None, ""),
        (3.5, "3.5"),
        ([], "[]"),
    ],
)
def test_conversations_and_columns_as_text(content: object, text: str) -> None:
    assert as_text(content) == text


@pytest.mark.parametrize(
    "text",
    [
        "a < b > c",
        "if x<y: print(x)",
        "<b>bold</b>",
        "caf\u00e9 \u4f60\u597d \U0001f600",
        "100 % & more\n\ttab",
        "<scor>",
    ],
)
def test_plain_text_comes_through_as_it_is(text: str) -> None:
    assert sanitize(text, tags=("score", "text-"), special_tokens=SPECIAL) == text


@given(st.text() | st.text(alphabet="<>\uff1c\uff1e/ score|im_end\u043e\u200b[]MASK"))
def test_nothing_harmful_is_left_and_doing_it_twice_changes_nothing(text: str) -> None:
    safe = sanitize(text, tags=("score", "text-"), special_tokens=SPECIAL)
    assert not any(token in safe for token in SPECIAL)
    assert not re.search(r"<[\s/\\]*score", fold_lookalikes(safe))
    assert sanitize(safe, tags=("score", "text-"), special_tokens=SPECIAL) == safe
