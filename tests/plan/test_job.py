"""A run's settings become the job that is planned."""

import pytest

from ycore.config.resolve import resolve
from ycore.config.schema import RunConfig
from ycore.plan.job import job_of, micro_batch_of
from ycore.plan.model_facts import model_facts

SMALL = model_facts("smollm2-135m")


def run_of(**settings: object) -> RunConfig:
    base = {"model": "smollm2-135m", "dataset": "task:addition", "rewards": ["exact_answer"], **settings}
    config = resolve(recipe=base, sets=(), options={"algorithm": "grpo"})
    assert isinstance(config, RunConfig)
    return config


def test_a_job_is_the_runs_sizes() -> None:
    config = run_of(prompts_per_step=4, group_size=2, max_tokens=32, lora=None, dtype="float32", trl={"beta": 0.1})
    job = job_of(config, SMALL, completion_tokens=100)
    assert (job.prompts_per_step, job.group_size, job.max_tokens, job.completion_tokens) == (4, 2, 32, 32)
    assert (job.lora_rank, job.bytes_per_value, job.has_reference, job.draws) == (None, 4, True, 1.5)
    assert job_of(run_of(sampling={"dynamic": False}), SMALL).draws == 1.0


@pytest.mark.parametrize(("settings", "ranks", "size"), [({}, 1, 8), ({"prompts_per_step": 3}, 2, 1)])
def test_a_micro_batch_is_the_runs_or_one_where_its_sizes_do_not_work(
    settings: dict[str, object], ranks: int, size: int
) -> None:
    assert micro_batch_of(run_of(**settings), ranks=ranks, on_cpu=True) == size
