from typing import Any

import pytest

from ycore.config.algorithms import AnyConfig
from ycore.config.schema import TuneConfig
from ycore.errors import ConfigError
from ycore.tools.pipeline_run import config_of, stood_in
from ycore.tools.stages import parse_pipeline, steps_of

ROLLOUTS = {"dataset": "d", "rewards": ["exact_answer"]}


def configs(**told: Any) -> list[AnyConfig]:
    pipeline = parse_pipeline({"model": "m", "output": "out", **told}, name="mine")
    return [config_of(step, pipeline) for step in steps_of(pipeline)]


def test_a_stage_is_the_run_that_its_command_would_make_of_the_same_keys() -> None:
    sft, rloo, pairs = configs(
        defaults={"seed": 3, "group_size": 4},
        stages={"sft": {"dataset": "d", "trl": {"max_length": "64"}}, "rloo": ROLLOUTS, "pairs": ROLLOUTS},
    )
    assert isinstance(sft, TuneConfig) and sft.trl == {"max_length": 64}
    assert (sft.algorithm, rloo.algorithm, pairs.algorithm) == ("sft", "rloo", "eval")
    assert {sft.seed, rloo.seed, pairs.seed} == {3}, "a default is for every stage that knows its key"
    assert rloo.model_dump()["group_size"] == 4 and rloo.model_dump()["advantage"] == "rloo"
    assert [config.output for config in (sft, rloo, pairs)] == ["out/sft", "out/rloo", "out/pairs"]


def test_a_preset_works_in_a_stage_as_on_the_command_line() -> None:
    (grpo,) = configs(stages={"grpo": {**ROLLOUTS, "preset": "dapo", "max_tokens": 100}})
    assert grpo.trl["epsilon_high"] == 0.28
    assert [reward["reward"] for reward in grpo.model_dump()["rewards"]] == ["exact_answer", "overlong"]


def test_an_error_names_its_stage() -> None:
    with pytest.raises(ConfigError, match="stage sft: no key step; did you mean 'steps'"):
        configs(stages={"sft": {"dataset": "d", "step": 3}})


def test_what_is_not_there_yet_is_stood_in_for_where_that_can_be() -> None:
    pipeline = parse_pipeline(
        {
            "model": "m",
            "output": "out",
            "stages": {
                "sft": {"dataset": "d"},
                "pairs": ROLLOUTS,
                "dpo": {"dataset": "${pairs.dataset}"},
            },
        },
        name="mine",
    )
    sft, pairs, dpo = steps_of(pipeline)
    assert stood_in(sft) == sft
    ready = stood_in(pairs)
    assert ready is not None and ready.keys["model"] == "m" and pairs.keys["model"] == "out/sft/model"
    assert stood_in(dpo) is None
