"""A pipeline as it is declared, `--set` on it, and the steps that come of it."""

from pathlib import Path
from typing import Any

import pytest

from ycore.api.stages import COMMANDS, Stage, StageRun, parse_pipeline, steps_of, with_sets
from ycore.errors import ConfigError

SFT = {"dataset": "chats.jsonl"}


def parsed(**told: Any) -> Any:
    return parse_pipeline({"model": "m", **told}, name="mine")


def test_stages_keep_their_order_and_are_called_like_their_command_or_say_it() -> None:
    found = parsed(
        stages={"sft": SFT, "judge": {"command": "reward", "dataset": "pairs.jsonl"}}
    )
    assert found.stages == (
        Stage("sft", "sft", SFT),
        Stage("judge", "reward", {"dataset": "pairs.jsonl"}),
    )
    assert found.output == "runs/mine"


def test_a_loop_is_its_stages_in_every_round() -> None:
    loop = {"repeat": 3, "stages": {"pairs": {"compare": "all", "num_samples": 4}, "dpo": None}}
    found = parsed(stages={"rounds": loop})
    assert found.stages == tuple(
        stage
        for number in (1, 2, 3)
        for stage in (
            Stage("pairs", "pairs", {"num_samples": 4}, "all", number),
            Stage("dpo", "dpo", {}, round=number),
        )
    )


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"stages": {}}, "a pipeline needs stages"),
        ({"stages": [1]}, "stages must be a mapping of keys; it is [1]"),
        ({"stage": {}}, "a pipeline has no key stage; did you mean 'stages'?"),
        ({"stages": {"first": SFT}}, "stage first: its command is one of grpo"),
        ({"stages": {"warm": {"command": "stf"}}}, "did you mean 'sft'?"),
        ({"stages": {"a/b": {"command": "sft"}}}, "a name is letters, digits, - and _"),
        ({"stages": {"sft": {"output": "x"}}}, "stage sft: output is the pipeline's own"),
        ({"stages": {"sft": 3}}, "stage sft must be a mapping of keys; it is 3"),
        (
            {"stages": {"again": {"repeat": 0, "stages": {"sft": SFT}}}},
            "loop again: repeat must be a whole number",
        ),
        ({"stages": {"again": {"repeat": 2, "stages": {}}}}, "loop again: it needs stages"),
        (
            {"stages": {"again": {"times": 2, "stages": {"sft": SFT}}}},
            "loop again has no key times",
        ),
        (
            {"stages": {"sft": SFT, "l": {"repeat": 2, "stages": {"sft": SFT}}}},
            "stage sft: there are two of this name",
        ),
        (
            {"stages": {"pairs": {"compare": "some"}}},
            "compare is best-worst or all; it is 'some'",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(told: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pipeline(told, name="mine")
    assert said in str(caught.value)


def test_set_finds_its_stage_wherever_it_stands() -> None:
    told = {
        "stages": {
            "sft": {"trl": {"beta": 1}},
            "loop": {"repeat": 2, "stages": {"dpo": {"steps": 5}}},
        }
    }
    sets = {
        "sft.trl.learning_rate": 0.1,
        "dpo.steps": 7,
        "loop.repeat": 4,
        "model": "m",
        "defaults.seed": 3,
    }
    assert with_sets(told, sets) == {
        "model": "m",
        "defaults": {"seed": 3},
        "stages": {
            "sft": {"trl": {"beta": 1, "learning_rate": 0.1}},
            "loop": {"repeat": 4, "stages": {"dpo": {"steps": 7}}},
        },
    }
    assert told["stages"]["sft"] == {"trl": {"beta": 1}}, (
        "the declaration itself is not changed"
    )


def test_set_changes_an_element_of_a_list() -> None:
    told = {"stages": {"grpo": {"rewards": [{"reward": "a"}, {"reward": "b"}]}}}
    assert with_sets(told, {"grpo.rewards.1.weight": 0.5})["stages"]["grpo"]["rewards"] == [
        {"reward": "a"},
        {"reward": "b", "weight": 0.5},
    ]
    with pytest.raises(ConfigError, match="the list has 2, counted from 0"):
        with_sets(told, {"grpo.rewards.2.weight": 0.5})


def test_set_of_an_unknown_stage_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'dpo'"):
        with_sets({"stages": {"l": {"repeat": 1, "stages": {"dpo": {}}}}}, {"dpoo.steps": 7})


def test_every_command_that_trains_can_be_a_stage() -> None:
    assert {"sft", "reward", "dpo", "kto", "grpo", "eval", "pairs"} <= set(COMMANDS)


PAIRS = {"dataset": "prompts.jsonl", "rewards": ["exact_answer"]}


def steps(**told: Any) -> list[StageRun]:
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


def test_what_is_not_made_yet_stand_ins_what_it_begins_from() -> None:
    """A policy for the model it was trained from; a reward model, whose head is new, for nothing."""
    *_, grpo = steps(
        model="m",
        stages={
            "sft": {"dataset": "d"},
            "reward": {"dataset": "p"},
            "grpo": {"dataset": "d", "rewards": ["rm:${reward.model}"]},
        },
    )
    assert grpo.stand_ins == {"out/sft/model": "m", "out/reward/model": None}


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
    assert [
        (step.keys["seed"], step.keys["split"]) for step in found if step.command == "pairs"
    ] == [
        (1, "part-1"),
        (2, "part-2"),
    ]
    assert found[3].stand_ins == {"out/dpo-1/model": "m", "out/pairs-2/pairs.jsonl": None}


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        (
            "${later.model}",
            "stage first: ${later.model} names no stage that has run by then; by then there are no",
        ),
        ("${first.model}", "stage first: ${first.model} names no stage that has run by then"),
        (
            "${round}",
            "stage first: ${round} counts the rounds of a loop, and this stage is in none",
        ),
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
    with pytest.raises(
        ConfigError,
        match="stage sft: it has no model, and no stage before it makes one; say model:",
    ):
        steps(stages={"sft": {"dataset": "d"}})
