"""Ways to run a job: which fit, how they rank, and what mends a job that fits nowhere."""

import itertools
from dataclasses import replace

from ycore.config.schema import RunConfig
from ycore.plan.devices import DEVICES, GIB, Device, Fleet
from ycore.plan.model_facts import model_facts
from ycore.plan.planner import Plan, make_plan, rank_by_time, strategies, why_too_large
from ycore.plan.step_forecast import forecast_step
from ycore.plan.workload import Strategy, Workload

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


def test_what_fits_is_ranked_by_time_and_each_way_once() -> None:
    candidates = strategies(JOB, EIGHT, micro_batch=4)
    fitting, others = rank_by_time(JOB, EIGHT, candidates)
    assert len(set(candidates)) == len(candidates) == len(fitting) + len(others)
    times = [one.step_s for one in fitting]
    assert all(later >= earlier * 0.98 for earlier, later in itertools.pairwise(times))
    assert all(one.peak[1] <= one.capacity for one in fitting)
    assert all("GiB" in why_too_large(one) or "no room" in why_too_large(one) for one in others)


def test_a_judge_can_be_apart_or_on_the_same_devices() -> None:
    work = replace(JOB, judge=model_facts("Qwen3-8B"))
    fitting, _ = rank_by_time(work, EIGHT, strategies(work, EIGHT, micro_batch=4))
    kinds = {one.strategy.kind for one in fitting}
    assert kinds == {"colocated", "split", "dynamic"}
    asleep_ways = [one for one in fitting if one.strategy.sleeps]
    best = {
        kind: min(one.step_s for one in asleep_ways if one.strategy.kind == kind)
        for kind in kinds
    }
    assert best["dynamic"] <= best["colocated"], (
        "slots that move in the middle of a round wait less"
    )
    apart = next(one for one in asleep_ways if one.strategy.kind == "split")
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


def test_what_fits_nowhere_comes_with_the_nearest_that_does() -> None:
    full = replace(JOB, lora_rank=None)
    one = Fleet(DEVICES["a100"], 1)
    fitting, others = rank_by_time(full, one, strategies(full, one, micro_batch=4))
    assert not fitting and "most of it the trainer" in why_too_large(others[0])


def test_what_fits_nowhere_comes_with_the_nearest_changes() -> None:
    settings = {"model": "Qwen/Qwen2.5-7B-Instruct", "lora": None, "prompts_per_step": 64}
    plan = planned_on("1xa100", **settings, trl={"per_device_train_batch_size": 4})
    options = [change.option for change in plan.nearest]
    assert options[:2] == ["--lora", "--devices 2x of the same"] and plan.first is None
    assert all(change.forecast.fits for change in plan.nearest)


def test_a_smaller_model_is_among_the_changes() -> None:
    plan = planned_on("1x24GB", model="Qwen/Qwen2.5-72B-Instruct")
    assert plan.nearest[-1].option.startswith("--model ")


def test_on_cores_every_process_counts_at_once() -> None:
    work = Workload(model_facts("smollm2-135m"))
    fitting, _ = rank_by_time(
        work, Fleet(CORE, 2), strategies(work, Fleet(CORE, 2), micro_batch=8)
    )
    assert {one.strategy.ranks for one in fitting} == {1, 2}
    assert all(set(one.phases) == {"all at once"} for one in fitting)
    assert all(set(one.phases["all at once"]) == {"trainer", "rollout"} for one in fitting)


def planned_on(devices: str, **settings: object) -> Plan:
    required = {"model": "Qwen/Qwen2.5-7B-Instruct", "dataset": "task:addition", "output": "o"}
    config = {**required, "rewards": [{"reward": "exact_answer"}], **settings}
    return make_plan(RunConfig.model_validate(config), devices=devices)


def test_a_7b_model_learns_with_adapters_on_one_device_of_24_gb() -> None:
    """Its weights alone are 14.2 GiB, in the trainer and again in the engine."""
    in_4_bits, whole = planned_on("1x24GB", quantize="4bit"), planned_on("1x24GB")
    for made in (in_4_bits, whole):
        best = made.ranking.fitting[0]
        assert set(best.phases) == {"train", "sync", "generate"}
        assert all(sum(roles.values()) <= best.capacity for roles in best.phases.values())
        assert best.strategy.sleeps and best.engines["rollout"].at_once >= 16
    assert (
        in_4_bits.ranking.fitting[0].strategy.micro_batch
        > whole.ranking.fitting[0].strategy.micro_batch
    )
    assert whole.ranking.fitting[0].strategy.offload == "weights"
    assert whole.first is not None and whole.first.trl["per_device_train_batch_size"] < 64
    assert in_4_bits.first is not None and in_4_bits.first.quantize == "4bit"


def test_4_bits_are_among_the_nearest_changes() -> None:
    told = planned_on("1x24GB", trl={"per_device_train_batch_size": 32})
    assert not told.ranking.fitting and "--quantize 4bit" in [
        change.option for change in told.nearest
    ]
