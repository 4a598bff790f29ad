"""The verdict on what a preflight measured: everything that keeps a run from learning is named, with the way out."""

from dataclasses import replace

import pytest

from ycore.evaluation.preflight import (
    JudgeCalls,
    PreflightMeasurements,
    PromptLengths,
    preflight_verdict,
)

GOOD = PreflightMeasurements(
    num_prompts=16,
    group_size=4,
    max_tokens=128,
    context=2048,
    truncated=0.05,
    equal=0.25,
    rewards=(0.0, 1.0, 0.5, 0.0) * 16,
    masked=0.0,
    generate_s=3.0,
    reward_s=0.1,
    prompts=PromptLengths(rows=100, longest=200, longest_row=7, too_long=0, room=1920),
)


def test_a_good_run_has_nothing_to_mend() -> None:
    judged = preflight_verdict(GOOD)
    assert judged.learns and not judged.findings
    assert judged.in_words == "this run can learn: 75% of the groups have something to compare"


STOPS = [
    (
        "everything truncated",
        {"truncated": 1.0},
        "100% of the completions are cut off",
        "--max-tokens 512",
    ),
    (
        "all rewards zero",
        {"equal": 1.0, "rewards": (0.0,) * 64},
        "every reward is 0",
        "easier prompts",
    ),
    (
        "all rewards one",
        {"equal": 1.0, "rewards": (1.0,) * 64},
        "every reward is 1",
        "harder prompts",
    ),
    (
        "equal in every group",
        {"equal": 1.0},
        "differ between prompts but in no group",
        "--temperature",
    ),
    (
        "a judge that never parses",
        {"judges": JudgeCalls(calls=64, unreadable=64), "rewards": (), "masked": 1.0},
        "100% of the judge's 64 answers hold no verdict",
        "`json` verdict",
    ),
    (
        "a prompt longer than the context",
        {
            "prompts": PromptLengths(
                rows=100, longest=5000, longest_row=7, too_long=1, room=1920
            )
        },
        "1 of 100 prompts are longer than the 1920 tokens that fit beside a completion; the longest, row 7, has 5000",
        "--set engine.max_model_len=5128",
    ),
    (
        "no reward at all",
        {"rewards": (), "masked": 1.0, "problems": {"mine: TypeError": 64}},
        "mine: TypeError",
        "log",
    ),
]


@pytest.mark.parametrize(
    ("change", "problem", "mend"), [row[1:] for row in STOPS], ids=[row[0] for row in STOPS]
)
def test_what_stops_a_run_is_named_with_its_mend(
    change: dict[str, object], problem: str, mend: str
) -> None:
    judged = preflight_verdict(replace(GOOD, **change))  # type: ignore[arg-type]
    assert not judged.learns
    assert judged.in_words.startswith("this run will not learn: ")
    assert problem in judged.in_words and mend in judged.in_words
    assert judged.findings[0].level == "stops"


WARNS = [
    ({"truncated": 0.4}, "40% of the completions"),
    ({"equal": 0.9}, "90% of the groups"),
    ({"judges": JudgeCalls(calls=64, unreadable=16)}, "25% of the judge's"),
    ({"masked": 0.5, "problems": {"mine: ValueError": 3}}, "mine: ValueError"),
    ({"reward_s": 30.0}, "scoring takes 30.0 s"),
]


@pytest.mark.parametrize(("change", "problem"), WARNS, ids=[problem for _, problem in WARNS])
def test_what_slows_a_run_is_reported_and_does_not_stop_it(
    change: dict[str, object], problem: str
) -> None:
    judged = preflight_verdict(replace(GOOD, **change))  # type: ignore[arg-type]
    assert judged.learns and [finding.level for finding in judged.findings] == ["warns"]
    assert problem in judged.in_words


def test_what_stops_comes_before_what_slows() -> None:
    judged = preflight_verdict(replace(GOOD, truncated=0.4, equal=1.0, rewards=(0.0,) * 64))
    assert [finding.level for finding in judged.findings] == ["stops", "warns"]


def test_no_longer_completion_is_advised_than_the_context_has_room_for() -> None:
    lengths = PromptLengths(rows=1, longest=1900, longest_row=0, too_long=0, room=1920)
    judged = preflight_verdict(replace(GOOD, truncated=1.0, prompts=lengths))
    assert "--max-tokens 148" in judged.in_words
