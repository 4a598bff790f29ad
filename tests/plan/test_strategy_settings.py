"""What the plan says can be run: its first way as a command line, read back and checked as a launch would."""

import random
import shlex
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import typer
import yaml
from ycore_cli.main import app
from ycore_cli.options import resolve_config

from ycore.api import planning as command
from ycore.config.batch import derive_batch
from ycore.config.recipe_files import load_recipe
from ycore.config.resolve import resolve
from ycore.config.schema import RunConfig
from ycore.errors import ConfigError
from ycore.judge import sources
from ycore.judge.sources import with_declarations
from ycore.launch import layout
from ycore.launch.device_memory import facts_here
from ycore.launch.engines import arrange
from ycore.launch.layout import site_of
from ycore.launch.machine_checks import check_described, check_run, described
from ycore.plan import planner
from ycore.plan.devices import DEVICES, GIB, Device
from ycore.plan.model_facts import KNOWN_CONFIGS
from ycore.plan.planner import Plan, make_plan
from ycore.plan.strategy_settings import config_of, placement_of
from ycore.plan.workload import Strategy

CORE = Device("core", 24 * GIB, 4e11, 3e10, 1e10, "a test's", on_cpu=True)
JOBS = 300
GRPO = typer.main.get_command(app).commands["grpo"]  # type: ignore[attr-defined]


@cache
def parsed(text: str) -> dict[str, Any]:
    return dict(yaml.safe_load(text))


def read_back(line: str) -> RunConfig:
    """The config of a command line, as `ycore grpo` reads it."""
    program, name, *words = shlex.split(line)
    assert (program, name) == ("ycore", "grpo")
    found = resolve_config(GRPO.make_context("grpo", words), algorithm="grpo")
    assert isinstance(found, RunConfig)
    return found


def drawn(chance: random.Random) -> tuple[dict[str, Any], str]:
    """The keys of a run and the devices to plan it for."""
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
    return RunConfig.model_validate(
        {
            "dataset": "task:addition",
            "rewards": [{"reward": "exact_answer"}],
            "output": "runs/planned",
        }
        | keys
    )


def planned(keys: dict[str, Any], devices: str) -> Plan:
    config = config_with(keys)
    declared = with_declarations(config)
    return make_plan(
        config,
        devices=devices,
        **command._first_scorer(declared),
        core=CORE,
        check=lambda one, fleet: check_described(command.with_args(declared, one), fleet),
    )


def check_as_launched(
    line: str, strategy: Strategy, made: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the described machine the command goes the way, and nothing refuses it."""
    machine, work, fleet = described(made.fleet), made.work, made.fleet
    monkeypatch.setattr(layout, "this_machine", lambda: machine)
    config = read_back(line)
    site = site_of(config)
    check_run(config, site, vllm=True)
    models, slots, _ = arrange(config, site, facts_here)
    if not fleet.device.on_cpu and len(models) <= 2:
        assert [one.width for one in models] == [
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
        assert config.placement == placement_of(strategy), line
    if not fleet.device.on_cpu:
        assert config.engine.sleep == strategy.sleeps, line


def test_every_way_of_hundreds_of_plans_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """No nearest changes are sought, which would take minutes and refuse nothing."""
    monkeypatch.setattr(planner, "nearest_changes", lambda *settings: [])
    monkeypatch.setattr(planner, "usable_cores", lambda: range(16))
    monkeypatch.setattr(
        sources, "parse_yaml", lambda text, **more: dict(parsed(text))
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
        unexpected = {why for _, why in made.ranking.refused if "engine." not in why}
        assert not unexpected, (unexpected, keys, devices)
        counts["nothing fits"] += not made.ranking.fitting
        firsts = {
            one.strategy.kind: one for one in reversed(made.ranking.fitting)
        }  # of each placement
        for kind, one in firsts.items():
            counts[kind] += 1
            counts["wide"] += (
                max(one.strategy.tensor_parallel, one.strategy.judge_tensor_parallel) > 1
            )
            counts["unequal"] += (
                one.strategy.tensor_parallel != one.strategy.judge_tensor_parallel
            )
            first = config_of(config_with(keys), made.work, one, made.fleet)
            line = command._command(replace(made, first=first), None)
            assert line is not None and "\n" not in line
            check_as_launched(line, one.strategy, made, monkeypatch)
    assert min(counts[kind] for kind in ("colocated", "dynamic", "split")) > JOBS / 20, counts
    assert counts["refused as a whole"] < JOBS / 5 and counts["nothing fits"] < JOBS / 2, counts


def test_a_command_has_what_differs_from_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(
        recipe=load_recipe("gsm8k-dapo"),
        sets=["lora.r=4", "system_prompt=one 'two'"],
        run_name="gsm8k-dapo",
    )
    assert isinstance(config, RunConfig)
    made = make_plan(config, devices="4xH100", check=check_described)
    line = command._command(made, "gsm8k-dapo")
    assert line is not None and line.startswith(
        "ycore grpo --recipe gsm8k-dapo --system-prompt"
    )
    assert "--processes 4" in line and "--set lora.r=4" in line and "--preset" not in line
    monkeypatch.setattr(layout, "this_machine", lambda: described(made.fleet))
    assert made.first is not None
    settled = {"output": config.output, "dtype": "bfloat16"}  # what `auto` is on these devices
    assert read_back(line) == made.first.model_copy(update=settled)


def test_ways_over_several_devices_are_listed_with_their_widths() -> None:
    made = planned({"model": "Qwen/Qwen2.5-72B-Instruct", "prompts_per_step": 64}, "8xB200")
    assert not made.ranking.refused
    assert {one.strategy.tensor_parallel for one in made.ranking.fitting} >= {2, 4, 8}
    judged = {
        "rewards": [
            {"reward": "judge:cheerful", "args": {"model": "Qwen/Qwen2.5-72B-Instruct"}}
        ]
    }
    keys = {"model": "Qwen/Qwen2.5-7B-Instruct", "prompts_per_step": 64} | judged
    made = planned(keys, "8xH100")
    one = next(
        one
        for one in made.ranking.fitting
        if (one.strategy.tensor_parallel, one.strategy.judge_tensor_parallel) == (1, 4)
    )
    line = command._command(
        replace(made, first=config_of(config_with(keys), made.work, one, made.fleet)), None
    )
    assert line is not None
    assert "engine.tensor_parallel=1" in line and "rewards.0.args.tensor_parallel=4" in line


def test_a_declared_width_is_kept() -> None:
    made = planned(
        {"model": "Qwen/Qwen2.5-7B-Instruct", "engine": {"tensor_parallel": 2}}, "4xH100"
    )
    assert {one.strategy.tensor_parallel for one in made.ranking.fitting} == {2}
    assert {why for _, why in made.ranking.refused} == {"engine.tensor_parallel is 2"}


def test_ways_that_a_learner_refuses_are_not_among_those_that_fit() -> None:
    """PPO clips and warms up its critic apart, which ZeRO cannot."""
    base = {"model": "smollm2-135m", "dataset": "task:addition", "rewards": ["exact_answer"]}
    config = resolve(recipe=base, sets=(), options={"algorithm": "ppo"})
    assert isinstance(config, RunConfig)
    made = make_plan(config, devices="2xa100", check=check_described)
    assert {one.strategy.sharding for one in made.ranking.fitting} == {
        "ddp"
    } and made.first is not None
    assert any("take --accelerate ddp" in why for _, why in made.ranking.refused)
