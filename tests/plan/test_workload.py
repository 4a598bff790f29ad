"""A run's settings become the job that is planned."""

from dataclasses import replace

import pytest

from ycore.config.resolve import resolve
from ycore.config.schema import RunConfig
from ycore.config.trl_arguments import micro_batch_sizes
from ycore.models.model_facts import model_facts
from ycore.plan.memory import workload_of

SMALL = model_facts("smollm2-135m")


def run_of(**settings: object) -> RunConfig:
    base = {
        "model": "smollm2-135m",
        "dataset": "task:addition",
        "rewards": ["exact_answer"],
        **settings,
    }
    config = resolve(recipe=base, sets=(), options={"algorithm": "grpo"})
    assert isinstance(config, RunConfig)
    return config


def test_a_job_is_the_runs_sizes() -> None:
    config = run_of(
        prompts_per_step=4,
        group_size=2,
        max_tokens=32,
        lora=None,
        dtype="float32",
        trl={"beta": 0.1},
    )
    work = workload_of(config, SMALL, completion_tokens=100)
    assert (
        work.prompts_per_step,
        work.group_size,
        work.max_tokens,
        work.completion_tokens,
    ) == (
        4,
        2,
        32,
        32,
    )
    assert (work.lora_rank, work.bytes_per_value, work.has_reference, work.draws) == (
        None,
        4,
        True,
        1.5,
    )
    assert workload_of(run_of(sampling={"dynamic": False}), SMALL).draws == 1.0


def test_a_critic_is_trained_beside_the_policy_and_every_group_counts() -> None:
    """16 adapters of rank a layer have 4,884,480 weights in SmolLM2-135M, and its hidden state 576."""
    base = {"model": "smollm2-135m", "dataset": "task:addition", "rewards": ["exact_answer"]}
    config = resolve(recipe=base, sets=(), options={"algorithm": "ppo"})
    assert isinstance(config, RunConfig)
    work = workload_of(config, SMALL)
    assert (work.has_critic, work.draws) == (True, 1.0)
    assert work.trainable == 2 * 4_884_480 + 577
    assert replace(work, lora_rank=None).trainable == 2 * SMALL.num_params + 577, (
        "its embeddings are also its head"
    )
    untied = replace(work, lora_rank=None, policy=model_facts("Qwen3-8B"))
    assert (
        untied.trainable
        == 2 * untied.policy.num_params
        - untied.policy.head_params
        + untied.policy.hidden_size
        + 1
    )


@pytest.mark.parametrize(
    ("trl", "sizes"),
    [
        ({}, [8, 4, 2, 1]),
        ({"per_device_train_batch_size": 2}, [2]),
        ({"gradient_accumulation_steps": 4}, [16]),
    ],
)
def test_micro_batches_are_the_runs_own_or_the_usual_one_and_smaller_ones(
    trl: dict[str, int], sizes: list[int]
) -> None:
    config = run_of(trl=trl)
    assert micro_batch_sizes(config, world_size=1, on_cpu=True) == sizes
