"""Ways to run a job: which fit, how they rank, and what mends a job that fits nowhere."""

import itertools
from dataclasses import replace

import pytest

from ycore.errors import ConfigError
from ycore.plan.devices import DEVICES, GB, GIB, Device, Fleet, parse_devices
from ycore.plan.job import Job, Way
from ycore.plan.model_facts import model_facts
from ycore.plan.phases import forecast
from ycore.plan.search import mends, ranked, ways, why_not

CORE = Device("core", 24 * GIB, 4e11, 3e10, 1e10, "a test's", on_cpu=True)
SEVEN = model_facts("Qwen/Qwen2.5-7B-Instruct")
JOB = Job(SEVEN, prompts_per_step=64, group_size=8, prompt_tokens=256, completion_tokens=700, max_tokens=1024)
EIGHT = Fleet(DEVICES["a100"], 8)


@pytest.mark.parametrize(
    ("text", "count", "name", "gigabytes"),
    [
        ("8x80GB", 8, "80 GB device", 80),
        ("4xH100", 4, "H100", 80),
        ("h200", 1, "H200", 141),
        ("2 x 24gb", 2, "24 GB device", 24),
    ],
)
def test_devices_are_a_number_and_a_size_or_name(text: str, count: int, name: str, gigabytes: float) -> None:
    fleet = parse_devices(text, processor=CORE, num_cores=2)
    assert (fleet.count, fleet.device.name, fleet.device.memory_bytes) == (count, name, gigabytes * GB)
    assert fleet.device.source


def test_the_machine_here_is_a_fleet_of_cores() -> None:
    assert parse_devices("cpu", processor=CORE, num_cores=2) == Fleet(CORE, 2)
    assert parse_devices("1xcpu", processor=CORE, num_cores=2) == Fleet(CORE, 1)


@pytest.mark.parametrize("text", ["3xcpu", "0x80GB", "8xh1000", "many", "", "8x"])
def test_other_devices_are_refused_with_a_way_out(text: str) -> None:
    with pytest.raises(ConfigError, match=r"e\.g\.|did you mean"):
        parse_devices(text, processor=CORE, num_cores=2)


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
    best = {kind: min(one.step_s for one in fitting if one.way.kind == kind) for kind in kinds}
    assert best["dynamic"] <= best["colocated"], "slots that move in the middle of a round wait less"
    apart = next(one for one in fitting if one.way.kind == "split")
    assert set(apart.phases) == {"train", "wake-up and sync", "generate", "judge"}
    assert "judge" not in apart.phases["generate"] and "rollout" not in apart.phases["judge"]


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
    nearest = mends(full, one, micro_batch=4)
    assert [mend.change for mend in nearest] == ["--lora", "--devices 2x of the same"]
    assert all(mend.forecast.fits for mend in nearest)


def test_two_changes_are_tried_where_one_is_not_enough() -> None:
    job = Job(model_facts("Qwen/Qwen2.5-72B-Instruct"), prompts_per_step=8, lora_rank=None)
    one = Fleet(DEVICES["a100"], 1)
    assert [mend.change for mend in mends(job, one, micro_batch=8)] == ["--devices 8x of the same and --lora"]


def test_on_cores_every_process_counts_at_once() -> None:
    job = Job(model_facts("smollm2-135m"))
    fitting, _ = ranked(job, Fleet(CORE, 2), ways(job, Fleet(CORE, 2), micro_batch=8))
    assert {one.way.ranks for one in fitting} == {1, 2}
    assert all(set(one.phases) == {"all at once"} for one in fitting)
    assert all(set(one.phases["all at once"]) == {"trainer", "rollout"} for one in fitting)
