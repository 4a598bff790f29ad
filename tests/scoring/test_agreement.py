"""`agrees:`: which question the policy gets of a pair, and what its verdict is worth."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ycore.config.schema import RewardConfig, RunConfig
from ycore.data.prompts import PromptSet, load_prompts
from ycore.errors import UserError
from ycore.judge.declaration import with_declarations
from ycore.judge.question import Questioner, verdict_code
from ycore.judge.verdict import Unreadable
from ycore.scoring.judge_scorer import (
    KEY,
    agreement,
    agreement_of,
    judge_questions,
    shows_chosen_first,
)
from ycore.types import Prompt

PAIRWISE = {"mode": "pairwise", "verdict": {"kind": "score"}, "rubric": "Which is right?"}
AGREES = RewardConfig(reward="agrees:mine", args=PAIRWISE)
ROWS = [
    {"prompt": f"{n} + 1?", "chosen": f"good{n}", "rejected": f"bad{n}"} for n in range(400)
]


def config_of(tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> RunConfig:
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "model": "m",
        "dataset": str(tmp_path / "pairs.jsonl"),
        "output": "o",
        "rewards": [AGREES],
        **settings,
    }
    return RunConfig.model_validate(options)


def questions(tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> PromptSet:
    config = config_of(tmp_path, rows, **settings)
    end = SimpleNamespace(content="<|end|>", special=True)
    tokenizer: Any = SimpleNamespace(added_tokens_decoder={0: end}, all_special_tokens=[])
    return judge_questions(config, load_prompts(config, as_chat=True), tokenizer=tokenizer)


def test_each_pair_is_the_judges_own_question(tmp_path: Path) -> None:
    prompt_set = questions(tmp_path, [{**ROWS[0], "chosen": "good<|end|>"}])
    (question,) = prompt_set.prompts
    key = question.columns[KEY]
    answers = ["good<|end|>", "bad0"] if shows_chosen_first(key) else ["bad0", "good<|end|>"]
    prompt = Prompt(0, [{"role": "user", "content": "0 + 1?"}])
    assert question.content == Questioner(agreement_of(AGREES), ("<|end|>",)).question(
        prompt, *answers, key=key
    )
    text = question.content[1]["content"]
    assert (
        f"<score-{verdict_code(key)}>" in text and "good< |end|>" in text and prompt_set.is_chat
    )
    assert prompt_set.columns == ("chosen", "rejected"), (
        "the key is no column that a reward may ask for"
    )


def test_half_of_the_pairs_are_in_each_order_always_the_same(tmp_path: Path) -> None:
    prompts = [*questions(tmp_path, ROWS).prompts]
    first = [shows_chosen_first(prompt.columns[KEY]) for prompt in prompts]
    assert 160 < sum(first) < 240
    for question, chosen_first in zip(prompts, first, strict=True):
        text = question.content[1]["content"]
        assert (text.index("\ngood") < text.index("\nbad")) == chosen_first
    assert len({prompt.columns[KEY] for prompt in prompts}) == len(ROWS)
    backwards = [*questions(tmp_path, ROWS[::-1]).prompts]
    assert [prompt.content for prompt in backwards[::-1]] == [
        prompt.content for prompt in prompts
    ], "whatever its row is"
    other = [
        shows_chosen_first(prompt.columns[KEY])
        for prompt in questions(tmp_path, ROWS, seed=1).prompts
    ]
    assert (
        120
        < sum(
            is_first != other_first for is_first, other_first in zip(first, other, strict=True)
        )
        < 280
    )


def keys() -> tuple[str, str]:
    """Return the key of a question with the chosen answer first, and of one with it second."""
    names = [f"key{number}" for number in range(20)]
    return next(filter(shows_chosen_first, names)), next(
        name for name in names if not shows_chosen_first(name)
    )


@pytest.mark.parametrize(
    ("number", "when_first"), [("10", 1.0), ("5.1", 1.0), ("5", 0.5), ("4.9", 0.0), ("0", 0.0)]
)
def test_a_verdict_for_the_chosen_answer_is_rewarded(number: str, when_first: float) -> None:
    judge = agreement_of(AGREES)
    for key, reward in zip(keys(), (when_first, 1 - when_first), strict=True):
        tag = f"score-{verdict_code(key)}"
        assert agreement(judge, key, f"It is longer. <{tag}>{number}</{tag}>") == reward
    by_json = agreement_of(
        RewardConfig(reward="agrees:j", args={**PAIRWISE, "verdict": {"kind": "json"}})
    )
    text = json.dumps({"score": float(number), "code": verdict_code(keys()[0])})
    assert agreement(by_json, keys()[0], text) == when_first


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The first.",
        "<score>10</score>",
        "<score-000000>10</score-000000>",
        "<{tag}>11</{tag}>",
        "<{tag}>10",
    ],
)
def test_an_unreadable_verdict_is_none(text: str) -> None:
    key = keys()[0]
    with pytest.raises(Unreadable):
        agreement(
            agreement_of(AGREES), key, text.replace("{tag}", f"score-{verdict_code(key)}")
        )


@pytest.mark.parametrize(
    "args",
    [
        {"verdict": {"kind": "score"}},
        {"mode": "pairwise", "verdict": {"kind": "labels", "labels": {"A": 1, "B": 0}}},
        {"mode": "groupwise", "verdict": {"kind": "ranking"}},
    ],
)
def test_a_judge_that_writes_no_verdict_on_two_answers_is_refused(
    args: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(
        UserError, match=r"say mode: pairwise, and verdict: \{kind: score\}"
    ) as caught:
        questions(tmp_path, ROWS[:1], rewards=[RewardConfig(reward="agrees:mine", args=args)])
    assert "\n" not in str(caught.value)


def test_other_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lacks the columns chosen and rejected"):
        questions(tmp_path, [{"prompt": "1 + 1?", "answer": "2"}])
    with pytest.raises(
        UserError,
        match=r"agrees:mine reads the columns chosen and rejected; .* leave --answer-column",
    ):
        questions(tmp_path, ROWS[:1], answer_column="chosen")


def test_a_run_carries_its_judge_and_others_keep_their_prompts(tmp_path: Path) -> None:
    (tmp_path / "j.yaml").write_text("mode: pairwise\nverdict: {kind: json}\n")
    config = config_of(
        tmp_path, ROWS[:2], rewards=[RewardConfig(reward=f"agrees:{tmp_path}/j.yaml")]
    )
    (spec,) = with_declarations(config).rewards
    assert (spec.reward, spec.args) == (
        "agrees:j",
        {"mode": "pairwise", "verdict": {"kind": "json"}},
    )
    plain = config_of(tmp_path, ROWS[:2], rewards=[RewardConfig(reward="length")])
    assert config.trains_a_judge and not plain.trains_a_judge
