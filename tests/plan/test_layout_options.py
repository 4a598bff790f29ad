"""The plan's layouts can be run: their options, beside the run's own, are read back and checked as at a launch."""

import random
import shlex
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from ycore_cli.main import app
from ycore_cli.options import resolve_config

from ycore.config.recipe_files import load_recipe
from ycore.config.resolve import resolve, resolve_any
from ycore.config.schema import RunConfig
from ycore.config.trl_arguments import derive_batch
from ycore.errors import ConfigError
from ycore.judge import declaration
from ycore.judge.declaration import with_declarations
from ycore.launch import layout
from ycore.launch.device_memory import arrange, facts_here
from ycore.launch.layout import site_of
from ycore.launch.machine_checks import check_described, check_run, described
from ycore.models.model_facts import KNOWN_CONFIGS
from ycore.plan import planner
from ycore.plan.devices import DEVICES, GIB, Device
from ycore.plan.memory import Strategy
from ycore.plan.planner import (
    Plan,
    StepForecast,
    layout_options,
    make_plan,
    with_layout,
)
from ycore.scoring.scorers import first_scorer, served_models

CORE = Device("core", 24 * GIB, 4e11, 3e10, 1e10, "a test's", on_cpu=True)
JOBS = 300
GRPO = typer.main.get_command(app).commands["grpo"]  # type: ignore[attr-defined]


@cache
def parsed(text: str) -> dict[str, Any]:
    return dict(yaml.safe_load(text))


EXAMPLE = {
    "dataset": "task:addition",
    "rewards": [{"reward": "exact_answer"}],
    "output": "runs/planned",
}


def read_back(keys: dict[str, Any], options: str, folder: Path) -> RunConfig:
    """Return the config of a recipe with these keys and of a plan's options, as `ycore grpo` reads it."""
    recipe = folder / "planned.yaml"
    recipe.write_text(yaml.safe_dump({"algorithm": "grpo", **EXAMPLE, **keys}))
    words = ["--recipe", str(recipe), *shlex.split(options)]
    config = resolve_config(GRPO.make_context("grpo", words), algorithm="grpo")
    assert isinstance(config, RunConfig)
    return config


def drawn(chance: random.Random) -> tuple[dict[str, Any], str]:
    """Draw the keys of a run and the devices to plan it for."""
    models = [name for name in KNOWN_CONFIGS if chance.random() < 0.5 or "72B" not in name]
    config: dict[str, Any] = {
        "model": chance.choice(models),
        "prompts_per_step": chance.choice([1, 2, 4, 6, 8, 12, 16, 32, 64, 100]),
        "group_size": chance.choice([2, 4, 7, 8, 16]),
        "max_tokens": chance.choice([16, 64, 256, 1000, 4096]),
        "trl": {"learning_rate": 3e-6} | ({"beta": 0.1} if chance.random() < 0.2 else {}),
    }
    config |= {"lora": None} if chance.random() < 0.3 else {}
    config |= {"dtype": "float32"} if chance.random() < 0.2 else {}
    config |= (
        {"accelerate": chance.choice(["ddp", "zero2", "zero3"])}
        if chance.random() < 0.2
        else {}
    )
    if chance.random() < 0.4:
        config["rewards"] = [
            {"reward": "judge:cheerful", "args": {"model": chance.choice(models)}}
        ]
    kind = chance.choice(
        [*(f"{row.name}" for row in DEVICES.values()), "24GB", "80GB", "cpu", "cpu"]
    )
    return config, f"{chance.choice([1, 2, 3, 4, 5, 6, 8, 8, 16])}x{kind}"


def config_with(keys: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(EXAMPLE | keys)


@pytest.fixture(autouse=True)
def fixed_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "measured_core", lambda dtype: CORE)


def planned(keys: dict[str, Any], devices: str) -> Plan:
    config = config_with(keys)
    return make_plan(
        config,
        devices=devices,
        scorer=first_scorer(served_models(with_declarations(config))),
        check=lambda candidate, fleet: check_described(with_declarations(candidate), fleet),
    )


def forecast_of(made: Plan, strategy: Strategy) -> StepForecast:
    return next(forecast for forecast in made.fitting if forecast.strategy == strategy)


def check_as_launched(
    keys: dict[str, Any],
    strategy: Strategy,
    made: Plan,
    folder: Path,
    patch: pytest.MonkeyPatch,
) -> None:
    """Check that the run has this strategy on the described machine, and that nothing refuses it."""
    machine, work, fleet = described(made.fleet), made.work, made.fleet
    patch.setattr(layout, "this_machine", lambda: machine)
    line = layout_options(
        made.config, with_layout(made.config, forecast_of(made, strategy), fleet)
    )
    assert "\n" not in line
    config = read_back(keys, line, folder)
    site = site_of(config)
    check_run(config, site, vllm=True)
    _, models, slots, _ = arrange(config, site, facts_here)
    if not fleet.device.on_cpu and len(models) <= 2:
        assert [model.width for model in models] == [
            strategy.tensor_parallel,
            strategy.judge_tensor_parallel,
        ][: len(models)], line
    assert (site.layout.world, len(slots)) == (strategy.ranks, strategy.slots), line
    assert strategy.ranks == 1 or site.layout.sharding == strategy.sharding, line
    batch = derive_batch(config, world_size=site.layout.world, on_cpu=fleet.device.on_cpu)
    assert batch.per_device_train_batch_size == strategy.micro_batch, line
    assert (
        config.trl.get("gradient_checkpointing", not fleet.device.on_cpu)
        == strategy.checkpointing
    ), line
    assert (config.lora is None) == (
        work.lora_rank is None
    ) and config.max_tokens == work.max_tokens
    assert config.trl["learning_rate"] == 3e-6
    if work.judge is not None:
        assert config.placement == strategy.kind, line
    if not fleet.device.on_cpu:
        assert config.engine.sleep == strategy.sleeps, line


@pytest.mark.verify
def test_every_way_of_hundreds_of_plans_can_be_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(planner, "usable_cores", lambda: range(16))
    monkeypatch.setattr(
        declaration, "parse_yaml", lambda text, **more: dict(parsed(text))
    )  # one file, hundreds of times
    chance, counts = random.Random(0), Counter[str]()
    for _ in range(JOBS):
        keys, devices = drawn(chance)
        try:
            made = planned(keys, devices)
        except ConfigError as refused:
            assert "T4 has none" in str(refused) or "micro-batch" in str(refused), (
                keys,
                devices,
            )
            counts["refused as a whole"] += 1
            continue
        unexpected = {why for _, why in made.refused if "engine." not in why}
        assert not unexpected, (unexpected, keys, devices)
        counts["nothing fits"] += not made.fitting
        firsts = {
            candidate.strategy.kind: candidate for candidate in reversed(made.fitting)
        }  # of each placement
        for kind, forecast in firsts.items():
            counts[kind] += 1
            counts["wide"] += (
                max(forecast.strategy.tensor_parallel, forecast.strategy.judge_tensor_parallel)
                > 1
            )
            counts["unequal"] += (
                forecast.strategy.tensor_parallel != forecast.strategy.judge_tensor_parallel
            )
            check_as_launched(keys, forecast.strategy, made, tmp_path, monkeypatch)
    assert min(counts[kind] for kind in ("colocated", "dynamic")) > JOBS / 20, counts
    assert counts["refused as a whole"] < JOBS / 5 and counts["nothing fits"] < JOBS / 2, counts


def test_the_options_of_a_plan_are_those_that_the_recipe_lacks() -> None:
    config = resolve_any(recipe=load_recipe("gsm8k-dapo"), run_name="gsm8k-dapo")
    assert isinstance(config, RunConfig)
    made = make_plan(config, devices="4xH100", check=check_described)
    assert made.options is not None and "--processes 4" in made.options
    planned_config = with_layout(config, made.fitting[0], made.fleet)
    assert layout_options(planned_config, planned_config) == ""


@pytest.mark.parametrize(
    ("recipe", "devices"),
    [
        ("gsm8k-grpo", "1x80GB"),
        ("gsm8k-dapo", "1x80GB"),
        ("countdown-grpo", "2x80GB"),
        ("deepscaler-8k", "8x80GB"),
        ("open-r1-math", "8x80GB"),
    ],
)
def test_a_recipe_that_needs_gpus_fits_on_what_its_page_says(recipe: str, devices: str) -> None:
    config = resolve_any(recipe=load_recipe(recipe), run_name=recipe)
    assert isinstance(config, RunConfig)
    assert make_plan(config, devices=devices, check=check_described).fitting


def test_ways_over_several_devices_are_listed_with_their_widths() -> None:
    made = planned({"model": "Qwen/Qwen2.5-72B-Instruct", "prompts_per_step": 64}, "8xB200")
    assert not made.refused
    assert {forecast.strategy.tensor_parallel for forecast in made.fitting} >= {2, 4, 8}
    judged = {
        "rewards": [
            {"reward": "judge:cheerful", "args": {"model": "Qwen/Qwen2.5-72B-Instruct"}}
        ]
    }
    keys = {"model": "Qwen/Qwen2.5-7B-Instruct", "prompts_per_step": 64} | judged
    made = planned(keys, "8xH100")
    wide = next(
        forecast
        for forecast in made.fitting
        if (forecast.strategy.tensor_parallel, forecast.strategy.judge_tensor_parallel)
        == (1, 4)
    )
    config = config_with(keys)
    line = layout_options(config, with_layout(config, wide, made.fleet))
    assert "engine.tensor_parallel=1" in line and "rewards.0.args.tensor_parallel=4" in line


def test_a_declared_width_is_kept() -> None:
    made = planned(
        {"model": "Qwen/Qwen2.5-7B-Instruct", "engine": {"tensor_parallel": 2}}, "4xH100"
    )
    assert {forecast.strategy.tensor_parallel for forecast in made.fitting} == {2}
    assert {why for _, why in made.refused} == {
        "engine.tensor_parallel is 2, and these engines would span another number of devices; leave it out"
    }


def test_ways_that_a_learner_refuses_are_not_among_those_that_fit() -> None:
    """PPO clips and warms up its critic apart, which ZeRO cannot."""
    base = {"model": "smollm2-135m", "dataset": "task:addition", "rewards": ["exact_answer"]}
    config = resolve(recipe=base, sets=(), options={"algorithm": "ppo"})
    assert isinstance(config, RunConfig)
    made = make_plan(config, devices="2xa100", check=check_described)
    assert {forecast.strategy.sharding for forecast in made.fitting} == {"ddp"}
    assert any("take --accelerate ddp" in why for _, why in made.refused)
