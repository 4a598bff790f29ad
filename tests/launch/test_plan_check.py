"""At a run's end: the plan beside what was measured, from the files that a run leaves."""

import json
from pathlib import Path

import pytest

from ycore.config.schema import RewardConfig, RunConfig
from ycore.launch.diagnostics import compared, plan_and_measured
from ycore.launch.layout import ONE_RANK, Layout, Machine, Site
from ycore.plan.devices import GIB, Device
from ycore.plan.model_facts import known_config
from ycore.run.paths import RunFolder

CORE = Device("core", 24 * GIB, 4e11, 3e10, 1e10, "a test's", on_cpu=True)
METRICS = [{"step": step, "ycore/time/step": 3.0, "completions/mean_length": 40.0} for step in (1, 2)]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A finished run's folder."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(known_config("smollm2-135m")))
    folder = RunFolder(tmp_path)
    told = {"kind": "vllm", "engines": ["rollout-0", "rollout-1"], "model": str(tmp_path / "model"), "max_num_seqs": 8}
    (tmp_path / "engines.json").write_text(json.dumps(told))
    folder.memory.write_text(json.dumps({"trainer": 3 * GIB, "rollout-0": 3 * GIB, "rollout-1": 3 * GIB}))
    return Site(folder, ONE_RANK, Machine(cores=(0, 1), devices=()))


def config(**settings: object) -> RunConfig:
    rewards = [RewardConfig(reward="exact_answer")]
    return RunConfig.model_validate(
        {"model": "m", "dataset": "task:addition", "rewards": rewards, "output": "runs/x", **settings}
    )


def test_memory_and_time_are_compared(site: Site) -> None:
    rows = compared(config(), site, METRICS, core=CORE)
    assert [row.what for row in rows] == ["memory/trainer", "memory/rollout", "time/step"]
    assert rows[1].measured == 6.0


def test_a_run_has_its_rows_in_json(site: Site) -> None:
    rows = plan_and_measured(config(), site, METRICS)
    assert {"what", "unit", "planned", "measured", "error"} == set(rows[0])
    assert json.loads(json.dumps(rows)) == rows


def test_nothing_is_compared_where_nothing_was_measured(site: Site) -> None:
    assert plan_and_measured(config(), site, []) == []
    site.folder.memory.unlink()
    assert plan_and_measured(config(), site, METRICS) == []


def test_a_model_that_cannot_be_planned_costs_no_run_its_summary(site: Site) -> None:
    (site.folder.root / "model" / "config.json").write_text("{}")
    assert plan_and_measured(config(), site, METRICS) == []


@pytest.mark.parametrize(
    ("told", "sharding"),
    [
        (None, "ddp"),
        ({"distributed_type": "MULTI_GPU"}, "ddp"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}, "zero2"),
        ({"distributed_type": "FSDP"}, "fsdp2"),
    ],
)
def test_how_training_is_cut_up_is_read_from_accelerates_config(told: dict[str, object] | None, sharding: str) -> None:
    assert Layout(world=2, accelerate=told).sharding == sharding
