"""Declaring a judge: what is refused, in one line that says the way out."""

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from ycore.config.schema import RewardConfig
from ycore.errors import RewardError
from ycore.judge.declaration import Judge, judge_of, require_columns, reward_model_of
from ycore.judge.verdict import Reply, read_value

SCORE = {"kind": "score"}


def declare(**args: Any) -> Judge:
    return judge_of(RewardConfig(reward="judge:mine", args={"verdict": SCORE, **args}))


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


@pytest.mark.parametrize(
    ("declared", "problem"),
    [
        ({"rubrik": "x"}, "judge mine: no key rubrik; did you mean 'rubric'?"),
        ({"verdict": {"kind": "score", "mx": 3}}, "no key verdict.mx"),
        (
            {"verdict": {"kind": "scores"}},
            "verdict must say its kind: 'score', 'json', 'labels', 'ranking'",
        ),
        ({"verdict": {}}, "verdict must say its kind"),
        (
            {"verdict": {"kind": "score", "min": 5, "max": 5}},
            "min must be below its max; they are 5 and 5",
        ),
        (
            {"verdict": {"kind": "score", "max": float("inf")}},
            "verdict.max must be a finite number",
        ),
        (
            {"verdict": {"kind": "score", "tag": "b>"}},
            "verdict.tag must be text of the form ^[a-z]",
        ),
        (
            {"verdict": {"kind": "labels", "labels": {True: 1, False: 0}}},
            'quote the labels: {"yes": 1, "no": 0}',
        ),
        ({"verdict": {"kind": "labels", "labels": {"yes": 1}}}, "list of 2 or more"),
        (
            {"verdict": {"kind": "labels", "labels": {"yes": 1, "no": 1}}},
            "two different values",
        ),
        (
            {"verdict": {"kind": "labels", "labels": {"good": 1, "goodish": 0}}},
            "no label may begin with another",
        ),
        (
            {"verdict": {"kind": "labels", "labels": {"A": 1, "a": 0}}},
            "no label may begin with another",
        ),
        (
            {"verdict": {"kind": "labels", "labels": {"\u043do": 1, "yes": 0}}},
            "a label is a plain word",
        ),
        ({"messages": messages("{prompt}")}, "must have the field {completion}"),
        ({"messages": messages("{completoin}")}, "{completion}; did you mean 'completoin'?"),
        (
            {"messages": messages("{completion} {first}")},
            "{first} is no field of a pointwise judge",
        ),
        ({"messages": messages("{completion} {a.b}")}, "plain name in braces, not {a.b}"),
        ({"messages": messages("{completion} {0}")}, "plain name in braces, not {0}"),
        ({"messages": messages("{completion!r}")}, "plain name in braces"),
        ({"messages": messages("{completion")}, "braces do not match"),
        (
            {"messages": messages("{completion}")},
            "must have the field {how_to_answer}: it tells the judge the code",
        ),
        (
            {
                "verdict": {"kind": "labels", "labels": {"yes": 1, "no": 0}},
                "messages": messages("{completion}"),
            },
            "the code without which no labels verdict is read",
        ),
        (
            {"verdict": {"kind": "labels", "labels": {'"yes"': 1, "no": 0}}},
            "a label is a plain word",
        ),
        (
            {"messages": messages("{completion} {how_to_answer}"), "rubric": "x"},
            "no message has the field {rubric}",
        ),
        ({"messages": messages("{completion} {rubric} {how_to_answer}")}, "there is no rubric"),
        ({"verdict": {"kind": "json", "field": "code"}}, "field must not be 'code'"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "judge", "content": "{completion}"}]},
            "messages.0.role must be 'system', 'user'",
        ),
        ({"mode": "groupwise"}, "say verdict: {kind: ranking}"),
        ({"verdict": {"kind": "ranking"}}, "say mode: groupwise"),
        (
            {"mode": "listwise"},
            "mode must be 'pointwise', 'pairwise' or 'groupwise'; it is 'listwise'",
        ),
        ({"scale": [1, 1]}, "scale gives the rewards of min and max, which must differ"),
        ({"temperature": -1}, "temperature must be at least 0; it is -1"),
        ({"retries": 11}, "retries must be at most 10; it is 11"),
        ({"max_tokens": 0}, "max_tokens must be greater than 0"),
        ({"base_url": "http://x"}, "base_url needs the model's name there"),
        ({"base_url": "x:80", "model": "m"}, "base_url begins with http:// or https://"),
        ({"base_url": "http://me:pw@x/v1", "model": "m"}, "base_url has a password in it"),
        ({"api_key_env": "KEY"}, "api_key_env is for a base_url"),
    ],
)
def test_what_cannot_work_is_one_line(declared: dict[str, Any], problem: str) -> None:
    with pytest.raises(RewardError) as caught:
        declare(**declared)
    message = str(caught.value)
    assert message.startswith("judge mine: ") and problem in message and "\n" not in message


def test_the_least_that_is_a_judge() -> None:
    judge = declare()
    assert (judge.model, judge.mode, judge.columns) == ("policy-base", "pointwise", set())
    assert "{completion}" in judge.template[-1][1]


def test_a_verdict_becomes_a_reward() -> None:
    judge = declare(verdict={"kind": "score", "min": 1, "max": 5}, scale=[1, -1])
    assert [judge.reward(judge.fraction(value)) for value in (1, 3, 5)] == [1, 0, -1]


def test_columns_are_those_of_the_dataset() -> None:
    judge = declare(
        messages=messages("{prompt} {completion} {reference} {level} {how_to_answer}"),
        reference_column="gold",
    )
    assert judge.columns == {"gold", "level"}
    require_columns("mine", judge, ["gold", "level", "other"])
    with pytest.raises(
        RewardError, match=r"reference_column is 'gold', which is no column .*columns are level"
    ):
        require_columns("mine", judge, ["level"])


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("mine.yaml", None, "no such judge file: mine.yaml; did you mean 'main.yaml'?"),
        ("main.yaml", "verdict: {kind: score", "the judge main.yaml, line 1: not YAML"),
        ("main.yaml", "- verdict", "must be a mapping of keys"),
        ("main.yaml", "rubric: x", "verdict is missing"),
        ("cheerfull", None, "no judge 'cheerfull'.*did you mean 'cheerful'?"),
    ],
)
def test_a_file_that_is_no_judge_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("main.yaml").write_text(text or "verdict: {kind: score}")
    with pytest.raises(RewardError, match=problem):
        judge_of(RewardConfig(reward=f"judge:{name}"))


@pytest.mark.parametrize(
    "name",
    [
        entry.name.removesuffix(".yaml")
        for entry in (files("ycore_recipes") / "judges").iterdir()
    ],
)
def test_every_judge_that_comes_with_ycore_is_one(name: str) -> None:
    judge = judge_of(RewardConfig(reward=f"judge:{name}"))
    assert judge.model == "policy-base" and judge.columns <= {"answer"}


def test_every_key_is_documented_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "judges.md").read_text(encoding="utf-8")
    table = page.partition("These are the keys:")[2].partition("A judge can also")[0]
    documented = [
        key
        for line in table.splitlines()
        for key in re.findall(r"`(\w+)`", line.split("|")[1] if "|" in line else "")
    ]
    assert sorted(documented) == sorted(Judge.model_fields)


def test_reward_models_are_declared_by_their_name() -> None:
    declared = reward_model_of(
        RewardConfig(
            reward="rm:some/model", args={"center": 1, "multiplier": 2, "clip": [-1, 3]}
        )
    )
    assert (declared.model, declared.reward(2.0), declared.reward(9.0)) == (
        "some/model",
        2.0,
        3.0,
    )
    for args, problem in (
        ({"centre": 1}, "no key centre; did you mean 'center'"),
        ({"clip": [1, 0]}, "the least and the most"),
        ({"multiplier": 0}, "multiplier must be greater than 0"),
        ({"combine": "min"}, "combine min needs several models, rm:A.B; it is some/model"),
        ({"model": "a+a"}, "names each of its models once, A.B; it is a.a"),
        ({"model": "a+"}, "names each of its models once"),
    ):
        with pytest.raises(RewardError, match=problem):
            reward_model_of(RewardConfig(reward="rm:some/model", args=args))
    with pytest.raises(RewardError, match="needs a model's name"):
        reward_model_of(RewardConfig(reward="rm:"))


@pytest.mark.parametrize(
    ("args", "reward"),
    [
        ({}, 2.5),
        ({"combine": "min"}, 0.5),
        ({"combine": "lower"}, 0.867007),
        ({"combine": "lower", "k": 0}, 2.5),
    ],
)
def test_an_ensemble_is_combined(args: dict[str, Any], reward: float) -> None:
    """Logits less 1 and halved are 0.5, 2.5 and 4.5: their mean is 2.5, their deviation 1.632993."""
    args = {"center": 1, "multiplier": 0.5, **args}
    declared = reward_model_of(RewardConfig(reward="rm:a+b/c+d", args=args))
    assert declared.models == ("a", "b/c", "d")
    assert declared.reward(2.0, 6.0, 10.0) == pytest.approx(reward, abs=1e-6)


def test_a_folder_may_have_a_plus_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "a+b").mkdir()
    assert reward_model_of(RewardConfig(reward=f"rm:{tmp_path}/a+b")).models == (
        f"{tmp_path}/a+b",
    )


def test_the_judge_of_reasoning_accepts_by_1_alone() -> None:
    """A constraint that marks nothing else takes a doubt of 0.9 as a refusal."""
    spec = RewardConfig(reward="judge:reasoning", constraint=True)
    judge = judge_of(spec)
    replies = [
        Reply(f"Step 2 follows.\n<score-c0de>{text}</score-c0de>") for text in ("1", "0.9", "0")
    ]
    rewards = [
        judge.reward(judge.fraction(read_value(judge, reply, code="c0de"))) for reply in replies
    ]
    assert [reward >= spec.least for reward in rewards] == [True, False, False]
    assert judge.columns == set()  # any dataset of questions will do
