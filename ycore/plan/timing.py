"""Seconds of every phase of a step, from operations and bytes. Pure; formulas and sources are in docs/plan.md.

A phase costs its multiplications at the speed that the device reaches in them, and the bytes that everything else
moves at the speed of its memory (the roofline's two terms, added: Williams et al. 2009), and a fixed part.

Not here: phases side by side on several slots (`rounds`).
"""

from dataclasses import dataclass

from ycore.plan.devices import Device
from ycore.plan.job import Job, Way
from ycore.plan.memory import micro_batch_tokens, saved_per_token
from ycore.plan.model_facts import ModelFacts

_LENGTH_CLASSES = 8


@dataclass(frozen=True, slots=True)
class Pace:
    """What software reaches of a device, and what it costs by itself."""

    training: float
    """Share of the device's operations a second in a trainer's multiplications."""

    serving: float
    """The same in an engine's."""

    memory: float
    """Share of the memory's bandwidth."""

    passes: float
    """How often a training step moves what a layer keeps: written, read, and its gradient as well."""

    decode_s: float
    """Of one decoding step, whatever is in it: scheduling, launching."""

    sequence_s: float
    """Of one sequence in one decoding step: sampling, answering."""

    sync_s: float
    sync_bandwidth: float
    """Bytes of weights a second from trainer to engine."""

    swap_s: float
    swap_bandwidth: float
    """Of an engine that sleeps and wakes: vllm-project/vllm#48337 has 1.9 s for 0.6B and 6.8 s for 8B at level 2."""

    request_s: float = 0.0
    """Of one request to an engine: it is read, scheduled, and answered."""

    micro_batch_s: float = 0.0
    """Of one micro-batch, whatever is in it."""


ON_GPU = Pace(
    training=0.65, serving=0.5, memory=0.7, passes=6.0, decode_s=0.004, sequence_s=2e-5,
    sync_s=0.3, sync_bandwidth=5e9, swap_s=1.5, swap_bandwidth=3.1e9, micro_batch_s=0.02,
)  # fmt: skip
ON_CPU = Pace(
    training=0.40, serving=0.30, memory=0.40, passes=6.0, decode_s=0.008, sequence_s=5e-4, request_s=0.010,
    sync_s=0.13, sync_bandwidth=0.48e9, swap_s=0.0, swap_bandwidth=1e12, micro_batch_s=0.05,
)  # fmt: skip
"""For GPUs set so that three published step times come out within twice; for CPUs on steps of docs/benchmarks.md."""


def pace_of(device: Device) -> Pace:
    return ON_CPU if device.on_cpu else ON_GPU


def train_s(job: Job, way: Way, device: Device, *, cores: int = 1) -> float:
    """One optimizer step of one rank over its share of the completions.

    Operations: 2 a parameter and token forward, 4 backward, of which LoRA spares the weights' own gradients, 2
    (arXiv 2001.08361, section 2.1; arXiv 2106.09685); 2 more where activations are computed again. Attention adds 4 a
    pair of tokens and hidden value forward. The head's logits are made twice (`algorithms.lm_head`).
    """
    pace, facts = pace_of(device), job.policy
    flops, moved = device.flops * pace.training * cores, device.bandwidth * pace.memory
    passes = max(1, round(job.completions / way.ranks / way.micro_batch))
    tokens = micro_batch_tokens(job, way) * _filled(job)
    completion_tokens = way.micro_batch * job.completion_tokens
    per_token = 4.0 if job.lora_rank is not None else 6.0
    per_token += 2.0 if way.checkpointing else 0.0
    linear = per_token * facts.linear_params * tokens
    row = job.prompt_tokens + way.micro_batch * job.completion_tokens / max(1.0, way.micro_batch / job.group_size)
    attention = (per_token / 2 + 1) * 4 * facts.num_hidden_layers * facts.query_size * tokens * row / 2
    head = (4.0 if job.lora_rank is not None else 8.0) * facts.head_params * completion_tokens
    adapters = 0.0 if job.lora_rank is None else 6.0 * facts.lora_params(job.lora_rank) * tokens
    layers = pace.passes * facts.num_hidden_layers * saved_per_token(job) * tokens
    logits = 20.0 * facts.vocab_size * completion_tokens
    casts = (10.0 if job.bytes_per_value == 2 else 4.0) * job.trainable
    a_pass = (linear + attention + head + adapters) / flops + (layers + logits + casts) / moved + pace.micro_batch_s
    return passes * a_pass + optimizer_s(job, way, device) + gathering_s(job, way, device)


def optimizer_s(job: Job, way: Way, device: Device) -> float:
    """Adam reads and writes weights, gradients and two moments, and the norm of the gradients reads them again."""
    mine = job.trainable / (way.ranks if way.sharding != "ddp" else 1)
    return 40.0 * mine / (device.bandwidth * pace_of(device).memory)


def gathering_s(job: Job, way: Way, device: Device) -> float:
    """Collectives: an all-reduce moves each gradient twice, and ZeRO-3 the weights once more in every pass."""
    if way.ranks == 1:
        return 0.0
    share = (way.ranks - 1) / way.ranks
    size = 4 if way.sharding == "ddp" else job.bytes_per_value
    moved = 2.0 * share * size * job.trainable
    if way.sharding in ("zero3", "fsdp2"):
        passes = max(1, round(job.completions / way.ranks / way.micro_batch))
        moved += 2.0 * passes * share * job.bytes_per_value * job.policy.num_params
    return moved / (device.link * pace_of(device).memory)


def generate_s(job: Job, device: Device, *, slots: int, tensor_parallel: int, at_once: int) -> float:
    """All completions of a round on `slots` engines, of which each writes `at_once` at a time."""
    sequences = -(-job.completions * job.draws // slots)
    groups = sequences / job.group_size
    requests = sequences * pace_of(device).request_s
    prompts = requests + prefill_s(
        job.policy, job, device, tokens=groups * job.prompt_tokens, tensor_parallel=tensor_parallel
    )
    lengths = [min(job.max_tokens, length) for length in spread_lengths(job.completion_tokens, job.max_tokens)]
    return prompts + decode_all_s(
        job.policy, job, device, sequences=sequences, lengths=lengths, context=job.prompt_tokens,
        tensor_parallel=tensor_parallel, at_once=at_once,
    )  # fmt: skip


def judge_s(job: Job, device: Device, *, slots: int, tensor_parallel: int, at_once: int) -> float:
    """A verdict on every completion; what the judge reads is the prompt, the completion and its own instructions."""
    if job.judge is None:
        return 0.0
    verdicts = -(-job.completions * job.draws // slots)
    reads = verdicts * (job.judge_prompt_tokens + job.completion_tokens)
    asked = verdicts * pace_of(device).request_s
    return asked + prefill_s(job.judge, job, device, tokens=reads, tensor_parallel=tensor_parallel) + decode_all_s(
        job.judge, job, device, sequences=verdicts, lengths=[job.judge_tokens], tensor_parallel=tensor_parallel,
        context=job.judge_prompt_tokens + job.completion_tokens, at_once=at_once,
    )  # fmt: skip


def prefill_s(facts: ModelFacts, job: Job, device: Device, *, tokens: float, tensor_parallel: int) -> float:
    """Reading prompts: two operations a parameter and token."""
    pace = pace_of(device)
    return 2.0 * facts.linear_params * tokens / (device.flops * pace.serving * tensor_parallel)


def decode_all_s(
    facts: ModelFacts,
    job: Job,
    device: Device,
    *,
    sequences: float,
    lengths: list[float],
    context: int,
    tensor_parallel: int,
    at_once: int,
) -> float:
    """Decoding sequences of these lengths, as many of each, in waves of `at_once`; short ones leave first."""
    together = max(1.0, min(sequences, at_once))
    seconds, done = 0.0, 0.0
    for index, length in enumerate(sorted(lengths)):
        awake = together * (1 - index / len(lengths))
        step = decode_step_s(
            facts, job, device, sequences=awake, context=context + (done + length) / 2, tensor_parallel=tensor_parallel
        )
        seconds += (length - done) * step
        done = length
    return seconds * sequences / together


def decode_step_s(
    facts: ModelFacts, job: Job, device: Device, *, sequences: float, context: float, tensor_parallel: int
) -> float:
    """One token for each sequence: the longer of the multiplications and the weights' way, and the cache's way."""
    pace, size = pace_of(device), job.bytes_per_value
    flops = device.flops * pace.serving * tensor_parallel
    moved = device.bandwidth * pace.memory * tensor_parallel
    weights = facts.linear_params + facts.head_params
    read = size * min(facts.num_params, weights * max(1.0, min(sequences, facts.num_experts)))
    product = max(2.0 * weights * sequences / flops, read / moved)
    cache = sequences * (size * facts.kv_values * context + 4.0 * 6 * facts.vocab_size) / moved
    return product + cache + pace.decode_s + pace.sequence_s * sequences


def sync_s(job: Job, device: Device) -> float:
    """The policy's weights from trainer to every engine."""
    pace = pace_of(device)
    return pace.sync_s + job.policy.num_params * job.bytes_per_value / pace.sync_bandwidth


def swap_s(facts: ModelFacts, job: Job, device: Device) -> float:
    """One engine to sleep and another awake."""
    pace = pace_of(device)
    return pace.swap_s + facts.num_params * job.bytes_per_value / pace.swap_bandwidth


def spread_lengths(mean: float, longest: int) -> list[float]:
    """Lengths of a round in classes of equal size: evenly from nothing to twice the mean, or all the longest."""
    if mean >= longest:
        return [float(longest)]
    return [2 * mean * (k + 0.5) / _LENGTH_CLASSES for k in range(_LENGTH_CLASSES)]


def _filled(job: Job) -> float:
    """Share of the widest micro-batch that a common one has: completions are packed, so short ones cost less."""
    return (job.prompt_tokens / job.group_size + job.completion_tokens) / (
        job.prompt_tokens / job.group_size + job.max_tokens
    )
