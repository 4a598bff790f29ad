"""Seconds of every phase of a step, from operations and bytes. The formulas and their sources are also in docs/plan.md.

A phase is its multiplications at the speed that software reaches in them, plus the bytes that everything else moves at
the memory's speed (the roofline's two terms, added: Williams et al. 2009), plus a fixed part.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ycore.models.model_facts import ModelFacts
from ycore.placement.placement import ROLLOUT
from ycore.plan.devices import Device, Fleet
from ycore.plan.memory import (
    PHASES,
    Strategy,
    Workload,
    micro_batch_tokens,
    saved_per_token,
    trainer_memory,
)

_LENGTH_CLASSES = 8
# Of what a layer keeps, in a training step: written, read, and its gradient as often.
_MOVES = 6.0
_LOGIT_BYTES = 24.0  # of a decoding step: written and read in float32, three times
_LOSS_BYTES = 20.0  # of a logit in the trainer's head


class Efficiency(NamedTuple):
    """The share of a device that software reaches, and fixed costs.

    Attributes:
        training, serving: shares of the device's operations a second in the trainer's and an engine's multiplications.
        narrow: what is left of `training` where products are narrow: beside adapters, or divided among experts.
        memory: share of the memory's bandwidth.
        decode_s: seconds of a decoding step whatever is in it: scheduling, launching kernels.
        sequence_s: seconds of a sequence in a decoding step: sampling, answering.
        sync_s, sync_bandwidth: a weight sync, whatever the model, and bytes of weights a second.
        swap_s, swap_bandwidth: an engine's sleep and wake (vllm-project/vllm#48337: 1.9 s for 0.6B, 6.8 s for 8B).
        micro_batch_s: seconds of a micro-batch whatever is in it.
        offload_bandwidth: bytes a second between a device and pinned host memory.
        request_s: seconds of a request to an engine: parsing, scheduling, answering.
        start_s: seconds until engines and trainer are up, beside reading the weights.
    """

    training: float
    serving: float
    memory: float
    decode_s: float
    sequence_s: float
    sync_s: float
    sync_bandwidth: float
    swap_s: float
    swap_bandwidth: float
    micro_batch_s: float
    start_s: float
    narrow: float = 1.0
    offload_bandwidth: float = 1e12
    request_s: float = 0.0


ON_GPU = Efficiency(
    training=0.65, serving=0.5, memory=0.7, decode_s=0.004, sequence_s=2e-5,
    sync_s=0.3, sync_bandwidth=5e9, swap_s=1.5, swap_bandwidth=3.1e9, micro_batch_s=0.02,
    start_s=60.0, narrow=0.5, offload_bandwidth=1.2e10,
)  # fmt: skip
"""Not measured here. `narrow` was fitted to prime-rl's published steps; docs/plan.md has others, some off by over 25 %."""

ON_CPU = Efficiency(
    training=0.40, serving=0.30, memory=0.40, decode_s=0.008, sequence_s=5e-4, request_s=0.010,
    sync_s=0.13, sync_bandwidth=0.48e9, swap_s=0.0, swap_bandwidth=1e12, micro_batch_s=0.05,
    start_s=12.0,
)  # fmt: skip
"""Fitted to the measured steps of docs/benchmarks.md."""


def efficiency_of(device: Device) -> Efficiency:
    return ON_CPU if device.on_cpu else ON_GPU


# -- a step ------------------------------------------------------------------------------------------------------------


def step_seconds(
    work: Workload, strategy: Strategy, fleet: Fleet, *, at_once: Mapping[str, int]
) -> Mapping[str, float]:
    """Return seconds of `sync`, `generate`, `judge` (or `score`, or `teach`), `swaps`, `round`, `train` and `step`.

    Engines that have devices alone write later rounds while a step trains: the longer of the two is what counts.

    Args:
        at_once: by role, the sequences that one engine holds.
    """
    device = fleet.device
    cores = fleet.count // strategy.ranks if device.on_cpu else 1
    times = {
        "sync": sync_s(work, device),
        **round_seconds(work, strategy, device, at_once=at_once),
    }
    times["train"] = train_s(work, strategy, device, cores=cores)
    busy_s = [times["round"], times["train"]]
    return times | {
        "step": times["sync"] + (max(busy_s) if strategy.engines_are_apart else sum(busy_s))
    }


def round_seconds(
    work: Workload, strategy: Strategy, device: Device, *, at_once: Mapping[str, int]
) -> dict[str, float]:
    """Return seconds of `generate`, `judge`, `swaps` and the whole `round`.

    Colocated roles take turns on every slot. Dynamic placement also finds the best division of the slots, in which
    judging overlaps generating once the first group has ended: within a few percent, see docs/placement.md.
    """

    def busy_s(role: str, num_slots: int) -> float:
        return serving_s(work, strategy, device, role, slots=num_slots, at_once=at_once[role])

    swaps_s = offload_s(work, strategy, device)
    if strategy.sleeps:
        swaps_s += swap_s(work.policy, work, device)
    slots = strategy.all_slots
    generate = busy_s(ROLLOUT, slots)
    if work.judge is None:
        return {"generate": generate, "swaps": swaps_s, "round": generate + swaps_s}
    phase = PHASES[work.judge_role]
    judge = busy_s(work.judge_role, slots)
    judge_swap_s = swap_s(work.judge, work, device)
    best = {
        "generate": generate,
        phase: judge,
        "swaps": swaps_s + judge_swap_s,
        "round": generate + judge + swaps_s + judge_swap_s,
    }
    for judge_slots in range(1, slots if strategy.kind == "dynamic" else 1):
        generate = busy_s(ROLLOUT, slots - judge_slots)
        judge = busy_s(work.judge_role, judge_slots)
        shorter, longer = sorted([generate, judge])
        round_s = longer + shorter / max(1, work.prompts_per_step) + swaps_s
        if round_s < best["round"]:
            best = {"generate": generate, phase: judge, "swaps": swaps_s, "round": round_s}
    return best


def train_s(work: Workload, strategy: Strategy, device: Device, *, cores: int = 1) -> float:
    """Return the seconds of one optimizer step of one rank over its share of the completions.

    Operations per parameter and token: 2 forward and 4 backward, of which LoRA saves the 2 for the frozen weights'
    gradients (arXiv 2001.08361, section 2.1; arXiv 2106.09685), and 2 more with checkpointing. Attention adds 4 forward
    per pair of tokens and query value. The head's logits are computed twice (ycore/trl/forward.py).
    """
    efficiency = efficiency_of(device)
    bandwidth = device.bandwidth * efficiency.memory
    flops = device.flops * efficiency.training * cores
    if work.lora_rank is not None or work.policy.num_experts > 1:
        flops *= efficiency.narrow
    pass_s = _pass_flops(work, strategy) / flops
    pass_s += _pass_bytes(work, strategy) / bandwidth + efficiency.micro_batch_s
    # Adam reads and writes weights, gradients and two moments, and clipping reads the gradients again: 40 bytes.
    shards = 1 if strategy.sharding == "ddp" else strategy.shard_ranks
    optimizer_s = 40.0 * work.trainable / shards / bandwidth
    return strategy.num_passes(work) * pass_s + optimizer_s + gather_s(work, strategy, device)


def _mean_tokens(work: Workload, strategy: Strategy) -> float:
    """Return the tokens of a micro-batch: completions are packed, so short ones cost less."""
    prompt = work.prompt_tokens / work.group_size
    filled = (prompt + work.completion_tokens) / (prompt + work.max_tokens)
    return micro_batch_tokens(work, strategy) * filled


def _num_passes(work: Workload, strategy: Strategy) -> tuple[float, float]:
    """Return operations per parameter and token, and forward-and-backward passes with the critic's.

    The critic has a forward and backward, and before them a forward pass for its values alone.
    """
    per_token = 6.0 if work.lora_rank is None else 4.0
    if strategy.checkpointing:
        per_token += 2.0
    return per_token, 2.0 + 2.0 / per_token if work.has_critic else 1.0


def _pass_flops(work: Workload, strategy: Strategy) -> float:
    """Return the operations of one micro-batch."""
    facts = work.policy
    tokens = _mean_tokens(work, strategy)
    per_token, passes = _num_passes(work, strategy)
    completion_tokens = strategy.micro_batch * work.completion_tokens
    groups = max(1.0, strategy.micro_batch / work.group_size)
    row = work.prompt_tokens + completion_tokens / groups
    attention_values = 4 * facts.num_hidden_layers * facts.query_size
    linear = per_token * facts.linear_params * tokens
    attention = (per_token / 2 + 1) * attention_values * tokens * row / 2
    head = 8.0 * facts.head_params * completion_tokens
    adapters = 0.0
    if work.lora_rank is not None:
        head /= 2
        adapters = 6.0 * facts.lora_params(work.lora_rank) * tokens
    return passes * (linear + attention + adapters) + head


def _pass_bytes(work: Workload, strategy: Strategy) -> float:
    """Return the bytes that one micro-batch moves beside its multiplications."""
    _, passes = _num_passes(work, strategy)
    kept = work.policy.num_hidden_layers * saved_per_token(work) * _mean_tokens(work, strategy)
    completion_tokens = strategy.micro_batch * work.completion_tokens
    logits = _LOSS_BYTES * work.policy.vocab_size * completion_tokens
    casts = (10.0 if work.bytes_per_value == 2 else 4.0) * work.trainable
    return passes * _MOVES * kept + logits + casts


def gather_s(work: Workload, strategy: Strategy, device: Device) -> float:
    """Return the seconds of collectives.

    An all-reduce moves each gradient twice; sharded weights move twice more in every pass (arXiv 1910.02054, section
    7). All ranks together are no faster than the network between machines; with replicas only gradients pass it.
    """
    size = 4 if strategy.sharding == "ddp" else work.bytes_per_value
    gradients = 2.0 * size * work.trainable
    moved = gradients
    if strategy.shards_weights:
        weights = work.bytes_per_value * work.policy.num_params
        moved += 2.0 * strategy.num_passes(work) * weights
    link = device.link if strategy.replicas > 1 else min(device.link, device.network)
    inside_s = (1 - 1 / strategy.shard_ranks) * moved / link
    between_s = (1 - 1 / strategy.replicas) * gradients / device.network
    return (inside_s + between_s) / efficiency_of(device).memory


def sync_s(work: Workload, device: Device) -> float:
    efficiency = efficiency_of(device)
    weights = work.policy.num_params * work.bytes_per_value
    return efficiency.sync_s + weights / efficiency.sync_bandwidth


def swap_s(facts: ModelFacts, work: Workload, device: Device) -> float:
    """Return the seconds of a sleep of one engine and a wake of another."""
    efficiency = efficiency_of(device)
    return (
        efficiency.swap_s + facts.num_params * work.bytes_per_value / efficiency.swap_bandwidth
    )


def offload_s(work: Workload, strategy: Strategy, device: Device) -> float:
    """Return the seconds in which trainer state leaves the device for a round, and comes back."""
    resting = trainer_memory(work, strategy).resting
    moved = resting["none"] - resting[strategy.offload]
    return 2 * moved / efficiency_of(device).offload_bandwidth


# -- engines -----------------------------------------------------------------------------------------------------------


def serving_s(
    work: Workload, strategy: Strategy, device: Device, role: str, *, slots: int, at_once: int
) -> float:
    """Return the seconds in which the engines of a role write all completions of a round, or a verdict on each.

    A judge reads its instructions, the prompt and the completion. Sequences are decoded in waves, which short ones leave
    first.

    Args:
        at_once: sequences that fit into an engine's cache together.
    """
    facts = work.policy if role == ROLLOUT else work.judge
    assert facts is not None
    context = work.prompt_tokens
    prompt_tokens = work.prompt_tokens / work.group_size
    lengths = spread_lengths(work.completion_tokens, work.max_tokens)
    if role != ROLLOUT:
        prompt_tokens = context = work.judge_prompt_tokens + work.completion_tokens
        lengths = [work.judge_tokens]
    efficiency = efficiency_of(device)
    width = strategy.width(role)
    num_engines = slots * strategy.engines_per_slot(role)
    share = -(-round(work.completions * work.draws) // num_engines)
    flops = device.flops * efficiency.serving * width
    prefill_s = 2.0 * facts.linear_params * share * prompt_tokens / flops
    wave = max(1.0, min(share, at_once))
    decode_s = 0.0
    written = 0.0
    for index, length in enumerate(lengths):
        step_s = decode_step_s(
            facts,
            device,
            wave * (1 - index / len(lengths)),
            context=context + (written + length) / 2,
            size=work.bytes_per_value,
            width=width,
        )
        decode_s += (length - written) * step_s
        written = length
    return share * efficiency.request_s + prefill_s + decode_s * share / wave


def decode_step_s(
    facts: ModelFacts,
    device: Device,
    sequences: float,
    *,
    context: float,
    size: int,
    width: int,
) -> float:
    """Return the seconds of one token for each sequence, in an engine on `width` devices with values of `size` bytes.

    That is the longer of multiplying by the weights and reading them, plus reading the cache of `context` tokens and the
    logits.
    """
    efficiency = efficiency_of(device)
    flops = device.flops * efficiency.serving * width
    bandwidth = device.bandwidth * efficiency.memory * width
    weights = facts.linear_params + facts.head_params
    experts = max(1.0, min(sequences, facts.num_experts))
    weight_bytes = size * min(facts.num_params, weights * experts)
    product_s = max(2.0 * weights * sequences / flops, weight_bytes / bandwidth)
    sequence_bytes = size * facts.kv_values * context + _LOGIT_BYTES * facts.vocab_size
    cache_s = sequences * sequence_bytes / bandwidth
    return product_s + cache_s + efficiency.decode_s + efficiency.sequence_s * sequences


def spread_lengths(mean: float, longest: int) -> list[float]:
    """Return lengths in classes of equal number, the shortest first: even up to twice the mean, or all the longest."""
    if mean >= longest:
        return [float(longest)]
    spread = [2 * mean * (k + 0.5) / _LENGTH_CLASSES for k in range(_LENGTH_CLASSES)]
    return [min(longest, length) for length in spread]
