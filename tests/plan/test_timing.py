"""Each formula of time moves the way its causes do."""

from dataclasses import replace

import pytest

from ycore.models.model_facts import model_facts
from ycore.plan import timing
from ycore.plan.devices import DEVICES
from ycore.plan.memory import (
    Strategy,
    Workload,
    activations,
    micro_batch_tokens,
    trainer_states,
)

H100 = DEVICES["h100"]
JOB = Workload(
    model_facts("Qwen/Qwen2.5-7B-Instruct"),
    prompts_per_step=32,
    prompt_tokens=256,
    max_tokens=512,
)
WAY = Strategy(8, 8, "zero2", 8)


def train(work: Workload = JOB, strategy: Strategy = WAY) -> float:
    return timing.train_s(work, strategy, H100)


def test_training_costs_more_for_every_weight_for_recomputing_and_for_more_tokens() -> None:
    full = replace(JOB, lora_rank=None)
    assert train(full) > train()
    assert train(strategy=replace(WAY, checkpointing=True)) > train()
    assert train(replace(JOB, prompts_per_step=64)) == pytest.approx(2 * train(), rel=0.05)
    assert train(replace(JOB, completion_tokens=64)) < train()


def test_a_critic_costs_up_to_two_passes_and_a_half_with_adapters() -> None:
    """4P for the policy, 4P for the critic, and 2P for the values before it; the vocabulary is the policy's alone."""
    assert 2.0 < train(replace(JOB, has_critic=True)) / train() < 2.5


def test_sharded_weights_are_gathered_in_every_pass() -> None:
    full = replace(JOB, lora_rank=None)
    assert (
        timing.gather_s(full, replace(WAY, sharding="zero3"), H100)
        > timing.gather_s(full, WAY, H100)
        > 0
    )
    assert timing.gather_s(full, replace(WAY, ranks=1), H100) == 0


def test_with_replicas_only_gradients_pass_between_machines() -> None:
    """32 ranks on 4 machines: weights are gathered within each, by the fast link; each gradient passes twice, less 1/4."""
    full = replace(JOB, lora_rank=None)
    far = replace(H100, network=12.5e9)
    sharded = replace(WAY, ranks=32, sharding="fsdp2")
    replicated = replace(sharded, sharding="hsdp", replicas=4)
    between = 2 * 0.75 * 2 * full.trainable / 12.5e9 / timing.ON_GPU.memory
    assert timing.gather_s(full, replicated, far) - timing.gather_s(
        full, replicated, H100
    ) == pytest.approx(between, rel=1e-3)
    assert timing.gather_s(full, replicated, far) < timing.gather_s(full, sharded, far)
    assert timing.gather_s(full, sharded, far) > 10 * timing.gather_s(full, sharded, H100)


def test_replicas_hold_as_much_as_one_machine() -> None:
    full = replace(JOB, lora_rank=None)
    sharded = replace(WAY, sharding="fsdp2")
    replicated = replace(sharded, ranks=32, sharding="hsdp", replicas=4)
    assert trainer_states(full, replicated) == trainer_states(full, sharded)


def test_a_full_batch_decodes_more_tokens_a_second_than_one_sequence() -> None:
    def step(sequences: float) -> float:
        return timing.decode_step_s(JOB.policy, H100, sequences, context=512, size=2, width=1)

    assert 64 / step(64) > 20 / step(1)
    # One sequence reads every weight once: 15 GB at 3.35 TB/s are 4.5 ms, and no device is faster than its memory.
    assert step(1) > 2 * JOB.policy.num_params / H100.bandwidth


def test_more_engines_generate_faster_and_waves_take_longer() -> None:
    def generate(slots: int, at_once: int) -> float:
        return timing.serving_s(JOB, WAY, H100, "rollout", slots=slots, at_once=at_once)

    assert generate(8, 256) < generate(4, 256) < generate(4, 16)


def test_lengths_are_spread_about_their_mean() -> None:
    lengths = timing.spread_lengths(100, 1000)
    assert sum(lengths) / len(lengths) == 100 and min(lengths) > 0
    assert timing.spread_lengths(512, 512) == [512.0]


def test_a_judge_that_is_not_there_takes_no_time() -> None:
    alone = timing.round_seconds(JOB, WAY, H100, at_once={"rollout": 64})
    assert alone["round"] == alone["generate"] + alone["swaps"] and "judge" not in alone
    judged = replace(JOB, judge=model_facts("Qwen3-8B"))
    assert timing.serving_s(judged, WAY, H100, "judge", slots=8, at_once=64) > 0


def test_a_published_swap_is_met() -> None:
    """vllm-project/vllm#48337, level 2: 1.92 s for Qwen3-0.6B and 6.84 s for Qwen3-8B."""
    for name, published_s in (("Qwen3-0.6B", 1.92), ("Qwen3-8B", 6.84)):
        assert timing.swap_s(model_facts(name), JOB, H100) == pytest.approx(
            published_s, rel=0.05
        )


def test_states_are_cut_up_as_zero_says() -> None:
    full = replace(JOB, lora_rank=None)
    states = {
        name: trainer_states(full, replace(WAY, sharding=name))
        for name in ("zero1", "zero2", "zero3")
    }
    assert states["zero1"]["gradients"] == 8 * states["zero2"]["gradients"]
    assert states["zero2"]["weights"] == 8 * states["zero3"]["weights"]
    assert states["zero1"]["optimizer"] == states["zero3"]["optimizer"]


def test_the_weights_of_a_frozen_base_have_neither_gradient_nor_optimizer() -> None:
    parts = trainer_states(JOB, replace(WAY, sharding="ddp"))
    assert parts["frozen weights"] == 2 * JOB.policy.num_params
    assert parts["gradients"] == 4 * JOB.trainable < 0.02 * parts["frozen weights"]


def test_a_groups_prompt_is_counted_once_in_a_micro_batch() -> None:
    assert micro_batch_tokens(JOB, WAY) == 256 + 8 * 512
    assert micro_batch_tokens(JOB, replace(WAY, micro_batch=16)) == 2 * 256 + 16 * 512


def test_checkpointing_keeps_one_layer() -> None:
    kept = activations(JOB, WAY)["activations"]
    assert activations(JOB, replace(WAY, checkpointing=True))["activations"] < 0.15 * kept
