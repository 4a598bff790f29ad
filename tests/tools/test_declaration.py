from typing import Any

import pytest

from ycore.errors import ConfigError
from ycore.tools.stages import COMMANDS, Loop, Stage, parse_pipeline, with_sets

SFT = {"dataset": "chats.jsonl"}


def parsed(**told: Any) -> Any:
    return parse_pipeline({"model": "m", **told}, name="mine")


def test_stages_keep_their_order_and_are_called_like_their_command_or_say_it() -> None:
    found = parsed(stages={"sft": SFT, "judge": {"command": "reward", "dataset": "pairs.jsonl"}})
    assert found.stages == (Stage("sft", "sft", SFT), Stage("judge", "reward", {"dataset": "pairs.jsonl"}))
    assert found.output == "runs/mine"


def test_a_loop_holds_stages() -> None:
    loop = {"repeat": 3, "stages": {"pairs": {"compare": "all", "num_samples": 4}, "dpo": None}}
    found = parsed(stages={"rounds": loop})
    assert found.stages == (
        Loop("rounds", 3, (Stage("pairs", "pairs", {"num_samples": 4}, "all"), Stage("dpo", "dpo", {}))),
    )


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"stages": {}}, "a pipeline needs stages"),
        ({"stages": [1]}, "stages must be a mapping of keys; it is [1]"),
        ({"stage": {}}, "a pipeline has no key stage; did you mean 'stages'?"),
        ({"stages": {"first": SFT}}, "stage first: its command is one of sft"),
        ({"stages": {"warm": {"command": "stf"}}}, "did you mean 'sft'?"),
        ({"stages": {"a/b": {"command": "sft"}}}, "a name is letters, digits, - and _"),
        ({"stages": {"sft": {"output": "x"}}}, "stage sft: output is the pipeline's own"),
        ({"stages": {"sft": 3}}, "stage sft must be a mapping of keys; it is 3"),
        ({"stages": {"again": {"repeat": 0, "stages": {"sft": SFT}}}}, "loop again: repeat must be a whole number"),
        ({"stages": {"again": {"repeat": 2, "stages": {}}}}, "loop again: it needs stages"),
        ({"stages": {"again": {"times": 2, "stages": {"sft": SFT}}}}, "loop again has no key times"),
        ({"stages": {"sft": SFT, "l": {"repeat": 2, "stages": {"sft": SFT}}}}, "stage sft: there are two of this name"),
        ({"stages": {"pairs": {"compare": "some"}}}, "compare is best-worst or all; it is 'some'"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(told: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pipeline(told, name="mine")
    assert said in str(caught.value)


def test_set_finds_its_stage_wherever_it_stands() -> None:
    told = {"stages": {"sft": {"trl": {"beta": 1}}, "loop": {"repeat": 2, "stages": {"dpo": {"steps": 5}}}}}
    sets = {"sft.trl.learning_rate": 0.1, "dpo.steps": 7, "loop.repeat": 4, "model": "m", "defaults.seed": 3}
    assert with_sets(told, sets) == {
        "model": "m",
        "defaults": {"seed": 3},
        "stages": {
            "sft": {"trl": {"beta": 1, "learning_rate": 0.1}},
            "loop": {"repeat": 4, "stages": {"dpo": {"steps": 7}}},
        },
    }
    assert told["stages"]["sft"] == {"trl": {"beta": 1}}, "the declaration itself is not changed"


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
