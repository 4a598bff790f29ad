from pathlib import Path
from typing import Any

import pytest

from ycore.errors import ConfigError
from ycore.tools.stages import Step, parse_pipeline, steps_of

PAIRS = {"dataset": "prompts.jsonl", "rewards": ["exact_answer"]}


def steps(**told: Any) -> list[Step]:
    return steps_of(parse_pipeline({"output": "out", **told}, name="mine"))


def test_each_stage_begins_from_the_policy_that_the_last_one_made() -> None:
    sft, reward, grpo, after = steps(
        model="m",
        stages={
            "sft": {"dataset": "d"},
            "reward": {"dataset": "pairs.jsonl"},
            "grpo": {"dataset": "d", "rewards": ["rm:${reward.model}"]},
            "after": {"command": "eval", "dataset": "d"},
        },
    )
    assert [step.keys["model"] for step in (sft, reward, grpo, after)] == [
        "m", "out/sft/model", "out/sft/model", "out/grpo/model",
    ]  # fmt: skip
    assert grpo.keys["rewards"] == ["rm:out/reward/model"]
    assert [step.folder for step in (sft, after)] == [Path("out/sft"), Path("out/after")]


def test_what_is_not_made_yet_stands_for_what_it_begins_from() -> None:
    """A policy for the model it was trained from; a reward model, whose head is new, for nothing."""
    *_, grpo = steps(
        model="m",
        stages={
            "sft": {"dataset": "d"},
            "reward": {"dataset": "p"},
            "grpo": {"dataset": "d", "rewards": ["rm:${reward.model}"]},
        },
    )
    assert grpo.stands_for == {"out/sft/model": "m", "out/reward/model": None}


def test_a_loop_is_unrolled_and_its_references_are_to_the_latest_run() -> None:
    loop = {
        "pairs": {**PAIRS, "model": "${model}", "seed": "${round}", "split": "part-${round}"},
        "dpo": {"dataset": "${pairs.dataset}"},
    }
    found = steps(model="m", stages={"rounds": {"repeat": 2, "stages": loop}})
    assert [(step.name, step.keys["model"]) for step in found] == [
        ("pairs-1", "m"),
        ("dpo-1", "m"),
        ("pairs-2", "out/dpo-1/model"),
        ("dpo-2", "out/dpo-1/model"),
    ]
    assert [step.keys["dataset"] for step in found if step.command == "dpo"] == [
        "out/pairs-1/pairs.jsonl",
        "out/pairs-2/pairs.jsonl",
    ]
    assert [(step.keys["seed"], step.keys["split"]) for step in found if step.command == "pairs"] == [
        (1, "part-1"),
        (2, "part-2"),
    ]
    assert found[3].stands_for == {"out/dpo-1/model": "m", "out/pairs-2/pairs.jsonl": None}


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("${later.model}", "stage first: ${later.model} names no stage that has run by then; by then there are no"),
        ("${first.model}", "stage first: ${first.model} names no stage that has run by then"),
        ("${round}", "stage first: ${round} counts the rounds of a loop, and this stage is in none"),
        ("${model}", "stage first: ${model}: there is no model by then"),
    ],
)
def test_a_reference_to_nothing_is_refused(reference: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        steps(stages={"first": {"command": "sft", "model": "x", "dataset": reference}})
    assert str(caught.value).startswith(said)


def test_a_reference_says_what_its_stage_makes() -> None:
    told = {"sft": {"model": "m", "dataset": "d"}, "dpo": {"dataset": "${sft.dataset}"}}
    with pytest.raises(ConfigError, match=r"a sft stage makes output, model; say one of them"):
        steps(stages=told)
    with pytest.raises(ConfigError, match="did you mean 'sft'"):
        steps(stages={**told, "dpo": {"dataset": "${sfd.model}"}})


def test_a_pipeline_begins_from_a_model() -> None:
    with pytest.raises(ConfigError, match="stage sft: it has no model, and no stage before it makes one; say model:"):
        steps(stages={"sft": {"dataset": "d"}})
