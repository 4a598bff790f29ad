"""Bytes of roles: each part is there when its cause is, and the phases hold what is in memory together."""

from dataclasses import replace

import pytest

from ycore.models.model_facts import model_facts
from ycore.plan.devices import DEVICES, GIB, Device, Fleet
from ycore.plan.memory import (
    Strategy,
    Workload,
    activations,
    engine_weight_bytes,
    largest_weight,
    trainer_memory,
    trainer_peak,
    trainer_states,
)
from ycore.plan.planner import forecast_step

CORE = Device("core", 24 * GIB, 4e11, 3e10, 1e10, "a test's", on_cpu=True)
SMALL = model_facts("smollm2-135m")
JOB = Workload(
    SMALL,
    prompts_per_step=4,
    group_size=4,
    prompt_tokens=50,
    completion_tokens=64,
    max_tokens=64,
)
WAY = Strategy(1, 2, "ddp", 16)


def test_gradients_of_an_only_pass_come_as_its_activations_go() -> None:
    full = replace(JOB, lora_rank=None)
    states, peak = trainer_states(full, WAY), trainer_peak(full, WAY)
    assert states["gradients"] == 4 * SMALL.num_params
    assert peak.get("gradients", 0.0) < states["gradients"]
    several = trainer_peak(full, replace(WAY, micro_batch=4))
    assert several["gradients"] == states["gradients"]


def test_a_reference_costs_memory_without_adapters_only() -> None:
    full = replace(JOB, lora_rank=None, has_reference=True)
    assert trainer_states(full, WAY)["reference"] == 2 * SMALL.num_params
    assert "reference" not in trainer_states(replace(JOB, has_reference=True), WAY)


def test_a_critic_shares_the_frozen_weights_and_keeps_activations_of_its_own() -> None:
    """A 7.6B base has 40.4 M adapter weights of rank 16: 16 bytes each are 0.65 GB."""
    alone = replace(JOB, policy=model_facts("Qwen2.5-7B-Instruct"))
    both = replace(alone, has_critic=True)
    before, after = trainer_states(alone, WAY), trainer_states(both, WAY)
    assert after["frozen weights"] == before["frozen weights"]
    more = sum(after[name] - before[name] for name in ("weights", "gradients", "optimizer"))
    assert more == pytest.approx(0.65e9, rel=0.01)
    assert activations(both, WAY)["activations"] == 2 * activations(alone, WAY)["activations"]


def test_a_teacher_in_the_trainer_is_held_whole_and_leaves_with_the_frozen_weights() -> None:
    taught = replace(JOB, teachers=(JOB.policy,))
    assert (
        trainer_states(taught, WAY)["teachers"] == JOB.policy.num_params * JOB.bytes_per_value
    )
    assert activations(taught, WAY)["logits"] == 2 * activations(JOB, WAY)["logits"]
    memory, alone = trainer_memory(taught, WAY), trainer_memory(JOB, WAY)
    assert memory.resting["optimizer"] > alone.resting["optimizer"] and memory.resting[
        "weights"
    ] == pytest.approx(alone.resting["weights"])


def test_a_mixtures_tokens_pass_through_few_experts() -> None:
    mixture = replace(JOB, policy=model_facts("Qwen3-30B-A3B"))
    dense = replace(JOB, policy=model_facts("Qwen3-32B"))
    assert activations(mixture, WAY)["activations"] < activations(dense, WAY)["activations"]


def test_an_engine_on_a_processor_holds_its_weights_thrice() -> None:
    alone = engine_weight_bytes(SMALL, 2, tensor_parallel=1)
    assert engine_weight_bytes(SMALL, 2, tensor_parallel=1, on_cpu=True) == 3 * alone
    assert engine_weight_bytes(SMALL, 2, tensor_parallel=2) == alone / 2


def test_the_sync_holds_one_whole_weight() -> None:
    assert largest_weight(SMALL) == 4 * SMALL.head_params
    forecast = forecast_step(JOB, replace(WAY, slots=1), Fleet(DEVICES["a100"], 1))
    trainer = {phase: roles["trainer"] for phase, roles in forecast.phases.items()}
    assert trainer["generate"] < trainer["sync"] < trainer["train"]
    assert trainer["sync"] - trainer["generate"] == largest_weight(SMALL)


def test_processes_add_up_over_ranks_and_engines() -> None:
    one_rank, two_ranks = (
        forecast_step(JOB, Strategy(ranks, 2, "ddp", 16 // ranks), Fleet(CORE, 2))
        for ranks in (1, 2)
    )
    assert (
        one_rank.phases["all at once"]["rollout"] == two_ranks.phases["all at once"]["rollout"]
    )
    assert (
        1.5
        < two_ranks.phases["all at once"]["trainer"] / one_rank.phases["all at once"]["trainer"]
        < 2.2
    )
