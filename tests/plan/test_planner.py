"""Strategies of a run: which fit, how they rank, and why one does not fit."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from ycore.config.schema import RunConfig
from ycore.errors import ConfigError
from ycore.models.model_facts import model_facts
from ycore.plan.devices import DEVICES, GIB, Device, Fleet
from ycore.plan.memory import Strategy, Workload
from ycore.plan.planner import (
    Plan,
    StepForecast,
    forecast_step,
    make_plan,
    strategies,
    why_too_large,
)

CORE = Device("core", 24 * GIB, 4e11, 3e10, 1e10, "a test's", on_cpu=True)
SEVEN = model_facts("Qwen/Qwen2.5-7B-Instruct")
JOB = Workload(
    SEVEN,
    prompts_per_step=64,
    group_size=8,
    prompt_tokens=256,
    completion_tokens=700,
    max_tokens=1024,
)
EIGHT = Fleet(DEVICES["a100"], 8)


def forecasts(
    work: Workload, fleet: Fleet, *, micro_batch: int
) -> tuple[list[StepForecast], list[StepForecast]]:
    """The strategies that fit, and those that do not."""
    candidates = strategies(work, fleet, micro_batch=micro_batch)
    assert len(set(candidates)) == len(candidates)
    made = [forecast_step(work, strategy, fleet) for strategy in candidates]
    return [forecast for forecast in made if forecast.fits], [
        forecast for forecast in made if not forecast.fits
    ]


def test_what_fits_is_ranked_by_time() -> None:
    made = planned_on("8xa100", prompts_per_step=64, max_tokens=1024)
    times = [forecast.step_s for forecast in made.fitting]
    assert len(times) > 10
    assert all(later >= earlier * 0.98 for earlier, later in itertools.pairwise(times))
    assert all(forecast.peak[1] <= forecast.capacity for forecast in made.fitting)
    over = [forecast.peak[1] - forecast.capacity for forecast in made.too_large]
    assert over == sorted(over)
    for misfit in made.too_large:
        assert "GiB" in why_too_large(misfit) or "no room" in why_too_large(misfit)


def test_a_judge_can_be_apart_or_on_the_same_devices() -> None:
    work = replace(JOB, judge=model_facts("Qwen3-8B"))
    fitting, _ = forecasts(work, EIGHT, micro_batch=4)
    kinds = {forecast.strategy.kind for forecast in fitting}
    assert kinds == {"colocated", "dynamic"}
    sleeping = [forecast for forecast in fitting if forecast.strategy.sleeps]
    best = {
        kind: min(forecast.step_s for forecast in sleeping if forecast.strategy.kind == kind)
        for kind in kinds
    }
    assert best["dynamic"] <= best["colocated"], (
        "slots that move in the middle of a round wait less"
    )
    apart = next(forecast for forecast in sleeping if forecast.strategy.kind == "dynamic")
    assert set(apart.phases) == {"train", "sync", "generate", "judge"}
    asleep = apart.phases["generate"]["judge"]
    assert asleep < 2 * GIB, "a launch starts an engine of every role on every slot"


def test_sleeping_engines_leave_their_memory_to_the_trainer() -> None:
    strategy = Strategy(8, 8, "zero2", 4, checkpointing=True)
    awake, asleep = (
        forecast_step(JOB, replace(strategy, sleeps=sleeps), EIGHT) for sleeps in (False, True)
    )
    assert asleep.phases["train"]["rollout"] < 0.2 * awake.phases["train"]["rollout"]
    assert asleep.engines["rollout"].kv_cache >= awake.engines["rollout"].kv_cache
    assert asleep.seconds["swaps"] > 0 == awake.seconds["swaps"]


def test_what_fits_nowhere_says_why() -> None:
    full = replace(JOB, lora_rank=None)
    fitting, too_large = forecasts(full, Fleet(DEVICES["a100"], 1), micro_batch=4)
    assert not fitting and all(
        "most of it the trainer" in why_too_large(forecast) for forecast in too_large
    )


def test_on_cores_every_process_counts_at_once() -> None:
    work = Workload(model_facts("smollm2-135m"))
    fitting, _ = forecasts(work, Fleet(CORE, 2), micro_batch=8)
    assert {forecast.strategy.ranks for forecast in fitting} == {1, 2}
    assert all(set(forecast.phases) == {"all at once"} for forecast in fitting)
    assert all(
        set(forecast.phases["all at once"]) == {"trainer", "rollout"} for forecast in fitting
    )


def planned_on(devices: str, **settings: object) -> Plan:
    required = {"model": "Qwen/Qwen2.5-7B-Instruct", "dataset": "task:addition", "output": "o"}
    config = {**required, "rewards": [{"reward": "exact_answer"}], **settings}
    return make_plan(
        RunConfig.model_validate(config), devices=devices, check=lambda config, fleet: None
    )


def test_a_7b_model_learns_with_adapters_on_one_device_of_24_gb() -> None:
    """Its weights alone are 14.2 GiB, in the trainer and again in the engine."""
    in_4_bits, whole = planned_on("1x24GB", quantize="4bit"), planned_on("1x24GB")
    for made in (in_4_bits, whole):
        best = made.fitting[0]
        assert set(best.phases) == {"train", "sync", "generate"}
        assert all(sum(roles.values()) <= best.capacity for roles in best.phases.values())
        assert best.strategy.sleeps and best.engines["rollout"].at_once >= 16
    assert in_4_bits.fitting[0].strategy.micro_batch > whole.fitting[0].strategy.micro_batch
    assert whole.fitting[0].strategy.offload == "weights"
    assert whole.options is not None and "--per-device-train-batch-size" in whole.options
    assert in_4_bits.options is not None and "--quantize" not in in_4_bits.options


def test_a_micro_batch_that_is_given_stays() -> None:
    made = planned_on("1x24GB", trl={"per_device_train_batch_size": 32})
    assert not made.fitting and made.options is None
    assert {forecast.strategy.micro_batch for forecast in made.too_large} == {32}


def test_engines_with_devices_of_their_own_write_while_a_step_trains() -> None:
    """Training has the other devices to itself, and a step takes the longer of the two and the sync."""
    made = planned_on("8xa100", max_tokens=1024, sampling={"max_staleness": 4})
    apart = [forecast for forecast in made.fitting if forecast.strategy.apart]
    assert made.fitting[0] is apart[0] and len(apart) < len(made.fitting)
    for overlapped in apart:
        seconds, strategy = overlapped.seconds, overlapped.strategy
        assert seconds["step"] == seconds["sync"] + max(seconds["round"], seconds["train"])
        assert strategy.ranks + strategy.apart <= 8 and strategy.slots <= strategy.apart
        assert "rollout" not in overlapped.phases["train"]
        assert overlapped.phases["generate"].get("trainer", 0.0) == 0.0
    assert f"--set engine.devices={apart[0].strategy.apart}" in str(made.options)


@pytest.mark.parametrize(
    ("devices", "kinds"), [("8xh100", set()), ("2x1xh100", set()), ("2x8xh100", {"hsdp"})]
)
def test_replicas_are_planned_where_there_are_machines_and_ranks_for_them(
    devices: str, kinds: set[str]
) -> None:
    made = planned_on(devices, prompts_per_step=64)
    candidates = [*made.fitting, *made.too_large]
    assert {candidate.strategy.sharding for candidate in candidates} & {"hsdp"} == kinds
    assert all(
        candidate.strategy.replicas == 2
        for candidate in candidates
        if candidate.strategy.sharding == "hsdp"
    )
    if not kinds:
        with pytest.raises(ConfigError, match=r"two machines of two ranks or more; .*fsdp2"):
            planned_on(devices, prompts_per_step=64, accelerate="hsdp")


@pytest.mark.parametrize(
    ("devices", "settings", "numbers"),
    [
        ("8xa100", {}, {0}),
        ("2x8xa100", {"sampling": {"max_staleness": 4}}, {0}),
        ("8xa100", {"engine": {"devices": 6}}, {6}),
        ("8xa100", {"engine": {"devices": 6}, "sampling": {"max_staleness": 4}}, {6}),
    ],
)
def test_devices_apart_are_those_asked_for_or_any_where_engines_write_ahead(
    devices: str, settings: dict[str, Any], numbers: set[int]
) -> None:
    made = planned_on(devices, prompts_per_step=64, **settings)
    candidates = [*made.fitting, *made.too_large, *(candidate for candidate, _ in made.refused)]
    assert {candidate.strategy.apart for candidate in candidates} == numbers
