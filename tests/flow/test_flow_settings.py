"""The settings of `ycore flow`: layers, and contradictions in one line."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ycore.config.recipe_files import load_recipe
from ycore.config.resolve import resolve_any
from ycore.errors import ConfigError
from ycore.flow.flow_settings import FlowConfig, FlowSettings
from ycore.launch.layout import on_machine

GIVEN: dict[str, Any] = {
    "model": "flow-digits",
    "dataset": "classes",
    "rewards": ["r.py:f"],
    "output": "runs/x",
}


def resolve_flow(**layers: Any) -> FlowConfig:
    layers["options"] = layers.get("options", {}) | {"algorithm": "flow"}
    config = resolve_any(**layers)
    assert isinstance(config, FlowConfig)
    return config


def test_options_win_over_set_which_wins_over_the_recipe() -> None:
    config = resolve_flow(recipe=GIVEN | {"steps": 3, "flow": {"kl": 0.5}}, sets=["steps=4", "flow.b=0.5"],
                          options={"steps": 5})  # fmt: skip
    assert (config.steps, config.flow.kl, config.flow.b, config.rewards[0].reward) == (
        5,
        0.5,
        0.5,
        "r.py:f",
    )
    weighed = resolve_flow(recipe=GIVEN, sets=["rewards.0.weight=2"])
    assert (
        weighed.rewards[0].weight == 2 and weighed.learning_rate == 1e-5 and weighed.every == 4
    )
    assert resolve_flow(
        recipe={key: GIVEN[key] for key in GIVEN if key != "output"}
    ).output.startswith("runs/")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"flow": {"method": "grpo", "noise": 0}},
            "which only steps with noise have, and flow.noise is 0",
        ),
        ({"flow": {"method": "grpo", "sampler": "ode"}}, "and flow.sampler is ode"),
        ({"flow": {"window": 2}}, "flow.window is of --method grpo"),
        ({"flow": {"method": "grpo", "window": 10}}, "must be below flow.steps, 10"),
        ({"flow": {"method": "ppo"}}, "flow.method must be 'nft' or 'grpo'; it is 'ppo'"),
        ({"flow": {"kll": 1}}, "no key flow.kll"),
        ({"group_size": 1}, "group_size must be at least 2"),
        ({"rewards": ["exact_answer"]}, "a reward of ycore flow is a function of images"),
        ({"rewards": ["rm:model"]}, "a reward of ycore flow is a function of images"),
        ({"rewards": [{"reward": "r.py:f", "constraint": True}]}, "has no constraints"),
        ({"processes": 2}, "processes must be 1; it is 2"),
        ({"dtype": "bfloat16"}, "dtype must be 'float32'; it is 'bfloat16'"),
        ({"quantize": "4bit"}, "has no quantize"),
        ({"merge": True}, "has no merge"),
        ({"sampling": {"drop_after": 1}}, "has no sampling.drop_after"),
        ({"sampling": {"least": 0.5}}, "has no sampling.least"),
        ({"trl": {"beta": 0.1}}, "has no trl, and it is"),
        (
            {"sampling": {"curriculum": True}},
            "ycore flow has no sampling.curriculum; leave it out",
        ),
        (
            {"sampling": {"oversample": 1.5}},
            "ycore flow has no sampling.oversample; leave it out",
        ),
        (
            {"sampling": {"max_staleness": 1}},
            "ycore flow has no sampling.max_staleness; leave it out",
        ),
        (
            {"rewards": None},
            "rewards must be a list; it is None; name one, e.g. --reward",
        ),
    ],
)
def test_what_contradicts_itself_is_one_line(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_flow(recipe=GIVEN | change)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_the_page_of_pictures_has_every_key_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pictures.md").read_text(encoding="utf-8")
    documented: dict[str, str] = {}
    for names, defaults in re.findall(r"^\| (`flow\..*?) \| (.*?) \|", page, re.MULTILINE):
        cells = re.findall(r"`([^`]+)`", defaults) or ["null"]
        documented |= dict(zip(re.findall(r"`flow\.(\w+)`", names), cells, strict=True))
    assert {
        name: yaml.safe_load(text) for name, text in documented.items()
    } == FlowSettings().model_dump()


@pytest.mark.parametrize("name", ["digits", "digits-grpo", "digits-overoptimised"])
def test_the_shipped_recipes_are_of_this_command_and_no_other(name: str) -> None:
    config = resolve_flow(recipe=load_recipe(name, command="flow"))
    assert (
        isinstance(config, FlowConfig)
        and config.eval_rewards
        and config.output == f"runs/{name}"
    )
    with pytest.raises(
        ConfigError, match=f"is for `ycore flow`, not grpo; say ycore flow --recipe {name}"
    ):
        load_recipe(name, command="grpo")


def test_it_computes_in_float32_in_one_process_on_every_machine() -> None:
    config = resolve_flow(recipe=GIVEN)
    assert on_machine(config) == config and config.dtype == "float32" and config.processes == 1
