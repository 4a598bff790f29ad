"""Ways to run a job: which fit, how they rank, and what mends a job that fits nowhere."""

import itertools
from dataclasses import replace

from ycore.config.schema import RunConfig
from ycore.plan.devices import DEVICES, GIB, Device, Fleet
from ycore.plan.job import Job, Way
from ycore.plan.model_facts import model_facts
from ycore.plan.search import Plan, make_plan, nearest, ranked, ways, why_not
from ycore.plan.step_forecast import forecast

CORE = Device("core", 24 * GIB, 4e11, 3e10, 1e10, "a test's", on_cpu=True)
SEVEN = model_facts("Qwen/Qwen2.5-7B-Instruct")
JOB = Job(
    SEVEN,
    prompts_per_step=64,
    group_size=8,
    prompt_tokens=256,
    completion_tokens=700,
    max_tokens=1024,
)
EIGHT = Fleet(DEVICES["a100"], 8)


def test_what_fits_is_ranked_by_time_and_each_way_once() -> None:
    candidates = ways(JOB, EIGHT, micro_batch=4)
    fitting, others = ranked(JOB, EIGHT, candidates)
    assert len(set(candidates)) == len(candidates) == len(fitting) + len(others)
    times = [one.step_s for one in fitting]
    assert all(later >= earlier * 0.98 for earlier, later in itertools.pairwise(times))
    assert all(one.peak[1] <= one.capacity for one in fitting)
    assert all("GiB" in why_not(one) or "no room" in why_not(one) for one in others)


def test_a_judge_can_be_apart_or_on_the_same_devices() -> None:
    job = replace(JOB, judge=model_facts("Qwen3-8B"))
    fitting, _ = ranked(job, EIGHT, ways(job, EIGHT, micro_batch=4))
    kinds = {one.way.kind for one in fitting}
    assert kinds == {"colocated", "split", "dynamic"}
    asleep_ways = [one for one in fitting if one.way.sleeps]
    best = {kind: min(one.step_s for one in asleep_ways if one.way.kind == kind) for kind in kinds}
    assert best["dynamic"] <= best["colocated"], (
        "slots that move in the middle of a round wait less"
    )
    apart = next(one for one in asleep_ways if one.way.kind == "split")
    assert set(apart.phases) == {"train", "sync", "generate", "judge"}
    asleep = apart.phases["generate"]["judge"]
    assert asleep < 2 * GIB, "a launch starts an engine of every role on every slot"


def test_sleeping_engines_leave_their_memory_to_the_trainer() -> None:
    way = Way(8, 8, "zero2", 4, checkpointing=True)
    awake, asleep = (forecast(JOB, replace(way, sleeps=sleeps), EIGHT) for sleeps in (False, True))
    assert asleep.phases["train"]["rollout"] < 0.2 * awake.phases["train"]["rollout"]
    assert asleep.engines["rollout"].kv_cache >= awake.engines["rollout"].kv_cache
    assert asleep.seconds["swaps"] > 0 == awake.seconds["swaps"]


def test_what_fits_nowhere_comes_with_the_nearest_that_does() -> None:
    full = replace(JOB, lora_rank=None)
    one = Fleet(DEVICES["a100"], 1)
    fitting, others = ranked(full, one, ways(full, one, micro_batch=4))
    assert not fitting and "most of it the trainer" in why_not(others[0])
    near = nearest(full, one, micro_batch=4)
    assert [change.change for change in near] == ["--lora", "--devices 2x of the same"]
    assert all(change.forecast.fits for change in near)


def test_two_changes_are_tried_where_one_is_not_enough() -> None:
    job = Job(model_facts("Qwen/Qwen2.5-72B-Instruct"), prompts_per_step=8, lora_rank=None)
    one = Fleet(DEVICES["a100"], 1)
    assert [change.change for change in nearest(job, one, micro_batch=8)] == [
        "--devices 8x of the same and --lora"
    ]


def test_on_cores_every_process_counts_at_once() -> None:
    job = Job(model_facts("smollm2-135m"))
    fitting, _ = ranked(job, Fleet(CORE, 2), ways(job, Fleet(CORE, 2), micro_batch=8))
    assert {one.way.ranks for one in fitting} == {1, 2}
    assert all(set(one.phases) == {"all at once"} for one in fitting)
    assert all(set(one.phases["all at once"]) == {"trainer", "rollout"} for one in fitting)


def planned_on_24gb(**keys: object) -> Plan:
    told = {"model": "Qwen/Qwen2.5-7B-Instruct", "dataset": "task:addition", "output": "o"}
    config = RunConfig.model_validate({**told, "rewards": [{"reward": "exact_answer"}], **keys})
    return make_plan(config, devices="1x24GB")


def test_a_7b_model_learns_with_adapters_on_one_device_of_24_gb() -> None:
    """Its weights alone are 14.2 GiB, in the trainer and again in the engine."""
    in_4_bits, whole = planned_on_24gb(quantize="4bit"), planned_on_24gb()
    for made in (in_4_bits, whole):
        best = made.fitting[0]
        assert set(best.phases) == {"train", "sync", "generate"}
        assert all(sum(roles.values()) <= best.capacity for roles in best.phases.values())
        assert best.way.sleeps and best.engines["rollout"].at_once >= 16
    assert in_4_bits.fitting[0].way.micro_batch > whole.fitting[0].way.micro_batch
    assert whole.fitting[0].way.offload == "weights"
    assert whole.first is not None and whole.first.trl["per_device_train_batch_size"] < 64
    assert in_4_bits.first is not None and in_4_bits.first.quantize == "4bit"


def test_4_bits_are_among_the_nearest_changes() -> None:
    told = planned_on_24gb(trl={"per_device_train_batch_size": 32})
    assert not told.fitting and "--quantize 4bit" in [change.change for change in told.nearest]
