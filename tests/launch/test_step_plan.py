"""The planned seconds of a run's steps, before it starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from ycore.config.schema import RewardConfig, RunConfig
from ycore.launch.layout import ONE_RANK, Layout, Machine, Site
from ycore.launch.step_plan import plan_steps
from ycore.plan.devices import GIB, Device
from ycore.run.paths import RunFolder
from ycore.run.text import as_duration

CORE = Device("core", 24 * GIB, 4e11, 3e10, 1e10, "a test's", on_cpu=True)


def config(**settings: object) -> RunConfig:
    told = {
        "model": "m",
        "dataset": "task:addition",
        "rewards": [RewardConfig(reward="exact_answer")],
    }
    return RunConfig.model_validate(told | {"output": "runs/x"} | settings)


def new_run(folder: Path, **machine: Any) -> Site:
    """A run that has not begun, on two cores."""
    return Site(
        RunFolder(folder), ONE_RANK, Machine(**{"cores": (0, 1), "devices": ()} | machine)
    )


def planned(site: Site, **settings: object) -> dict[str, Any] | None:
    told = {"model": "smollm2-135m", "steps": 40, "max_tokens": 16, **settings}
    return plan_steps(config(**told), site, prompt_tokens=44, core=CORE)


def test_a_run_is_planned_before_it_starts(tmp_path: Path) -> None:
    """For the lengths that can be known by then, which the plan's words tell."""
    plan = planned(new_run(tmp_path))
    assert plan is not None
    step_s = plan["seconds"]["step"]
    assert step_s == pytest.approx(
        sum(plan["seconds"][part] for part in ("sync", "round", "train")), abs=0.01
    )
    assert plan["in_words"] == (
        f"about {step_s:.1f} s a step, {as_duration(40 * step_s)} for 40 steps, with prompts of 44 tokens, "
        "completions of 16 (the most), 12 groups drawn a step"
    )
    assert json.loads(json.dumps(plan)) == plan
    fixed = planned(new_run(tmp_path), sampling={"dynamic": False})
    assert (
        fixed is not None
        and fixed["seconds"]["step"] < step_s
        and "drawn" not in fixed["in_words"]
    )


def test_a_judge_counts_by_the_form_of_its_verdict(tmp_path: Path) -> None:
    def judged(**declared: Any) -> dict[str, Any] | None:
        verdict = {"kind": "labels", "labels": {"yes": 1.0, "no": 0.0}}
        args = {
            "model": "smollm2-135m",
            "rubric": "Is it right?",
            "verdict": verdict,
            **declared,
        }
        return planned(new_run(tmp_path), rewards=[{"reward": "judge:mine", "args": args}])

    by_labels, by_words, alone = (
        judged(),
        judged(verdict={"kind": "score"}),
        planned(new_run(tmp_path)),
    )
    assert by_labels is not None and by_words is not None and alone is not None
    assert (
        "verdicts of 16, " in by_labels["in_words"]
        and "verdicts of 256, " in by_words["in_words"]
    )
    rounds = [one["seconds"]["round"] for one in (alone, by_labels, by_words)]
    assert rounds == sorted(rounds)
    assert judged(mode="pairwise") is None
    assert judged(base_url="http://localhost:8000/v1") is None, (
        "nobody knows how fast an address is"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "an/unknown-model"},
        {"algorithm": "online-dpo"},
        {"tools": ["calculator.py:add"]},
        {"sampling": {"max_staleness": 1}},
        {"replay": "runs/other"},
        {"trl": {"num_iterations": 2}},
        {"rewards": [{"reward": "code"}]},
    ],
)
def test_nothing_is_planned_where_the_formulas_do_not_count_the_step(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    assert planned(new_run(tmp_path), **settings) is None


def test_nothing_is_planned_for_gpus_whose_speed_nobody_measured(tmp_path: Path) -> None:
    assert planned(new_run(tmp_path, devices=("0",), device_bytes=80 * GIB)) is None


@pytest.mark.parametrize(
    ("told", "sharding"),
    [
        (None, "ddp"),
        ({"distributed_type": "MULTI_GPU"}, "ddp"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}, "zero2"),
        ({"distributed_type": "FSDP"}, "fsdp2"),
    ],
)
def test_how_training_is_cut_up_is_read_from_accelerates_config(
    told: dict[str, object] | None, sharding: str
) -> None:
    assert Layout(world=2, accelerate=told).sharding == sharding
