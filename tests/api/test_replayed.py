"""A replay learns from what the other run's rounds have: scores, greedy completions, rewards of turns, weights."""

from typing import Any

import pytest

from ycore.api.running import check_replayed
from ycore.config.resolve import resolve
from ycore.errors import ConfigError

FORMAT = {"reward": "format", "constraint": True}
LAGRANGIAN = {"rewards": ["exact_answer", FORMAT], "constraints": {"by": "lagrangian"}}
TEACHER = {"algorithm": "distill", "rewards": ["teacher:m"]}


def config(**options: Any) -> Any:
    base = {"algorithm": "grpo", "model": "m", "dataset": "d", "output": "o"}
    rewards = ["exact_answer"]
    return resolve(options={**base, "rewards": rewards, "replay": "runs/kept", **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"advantage": "rloo", "trl": {"loss_type": "dr_grpo"}},
        {"rewards": [{"reward": "exact_answer", "weight": 0.5}]},
        {"algorithm": "ppo"},
    ],
)
def test_the_same_scores_teach_another_way(options: dict[str, Any]) -> None:
    check_replayed(config(**options), config())
    check_replayed(config(**LAGRANGIAN), config(**LAGRANGIAN))


@pytest.mark.parametrize(
    ("options", "before", "rule"),
    [
        ({"rewards": ["contains_answer"]}, {}, "has the scores of exact_answer with its own"),
        (
            {"preset": "dapo"},
            {},
            "leave --reward, --constraint, --teacher and --preset dapo out",
        ),
        ({"advantage": "remax"}, {}, "--advantage remax learns from what is written with the"),
        (
            {"advantage": "turn", "env": ["a.py:A"]},
            {"env": ["a.py:A"]},
            "--advantage turn learns",
        ),
        (
            LAGRANGIAN,
            {"rewards": LAGRANGIAN["rewards"]},
            "constraints.by=lagrangian learns from",
        ),
        (
            TEACHER,
            {**TEACHER, "distill": {"divergence": "js"}},
            "distill.divergence=sampled learns",
        ),
        (
            {"trl": {"temperature": 0.5}},
            {},
            "temperature 1, and here it is 0.5; say --temp.* 1",
        ),
        ({}, {"trl": {"temperature": 0.9}}, "here it is 1; say --temperature 0.9"),
    ],
)
def test_what_the_rounds_lack_is_refused(
    options: dict[str, Any], before: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ConfigError, match=rule):
        check_replayed(config(**options), config(**before))


def test_a_function_of_python_is_known_by_its_source() -> None:
    """It stands in a file beside each run's folder, with a hash of the source in its name."""
    kept, again, other = (
        config(rewards=[f"/runs/{run}.rewards-{source}.py:score"])
        for run, source in (("kept", "e3959522"), ("again", "e3959522"), ("again", "11111111"))
    )
    check_replayed(again, kept)
    with pytest.raises(ConfigError, match="has the scores of"):
        check_replayed(other, kept)
