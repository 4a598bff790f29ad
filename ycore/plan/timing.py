"""Seconds of every phase of a step, from operations and bytes. The formulas and their sources are also in docs/plan.md.

A phase is its multiplications at the speed that software reaches in them, plus the bytes that everything else moves at
the memory's speed (the roofline's two terms, added: Williams et al. 2009), plus a fixed part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ycore.plan.devices import Device, Fleet
from ycore.plan.job import PHASES, Job, Way
from ycore.plan.memory import micro_batch_tokens, saved_per_token, trainer_memory
from ycore.plan.model_facts import ModelFacts

_LENGTH_CLASSES = 8


@dataclass(frozen=True, slots=True)
class Pace:
    training: float  # share of the device's operations a second in the trainer's multiplications
    serving: float  # the same in an engine's
    memory: float  # share of the memory's bandwidth
    passes: float  # how often a training step moves what a layer keeps: write, read, and the same for its gradient
    decode_s: float  # seconds of a decoding step whatever is in it: scheduling, launching kernels
    sequence_s: float  # seconds of a sequence in a decoding step: sampling, answering
    sync_s: float  # seconds of a weight sync whatever the model
    sync_bandwidth: float  # bytes of weights a second from trainer to engine
    swap_s: float  # seconds of an engine's sleep and wake whatever the model
    swap_bandwidth: float  # bytes of weights a second in it (vllm-project/vllm#48337: 1.9 s for 0.6B, 6.8 s for 8B)
    micro_batch_s: float  # seconds of a micro-batch whatever is in it
    offload_bandwidth: float = 1e12  # bytes a second between a device and pinned host memory
    request_s: float = 0.0  # seconds of a request to an engine: parsing, scheduling, answering


ON_GPU = Pace(
    training=0.65, serving=0.5, memory=0.7, passes=6.0, decode_s=0.004, sequence_s=2e-5,
    sync_s=0.3, sync_bandwidth=5e9, swap_s=1.5, swap_bandwidth=3.1e9, micro_batch_s=0.02,
    offload_bandwidth=1.2e10,
)  # fmt: skip
"""Not measured: set so that three published step times (tests/plan/test_published.py) come out within twice."""

ON_CPU = Pace(
    training=0.40, serving=0.30, memory=0.40, passes=6.0, decode_s=0.008, sequence_s=5e-4, request_s=0.010,
    sync_s=0.13, sync_bandwidth=0.48e9, swap_s=0.0, swap_bandwidth=1e12, micro_batch_s=0.05,
)  # fmt: skip
"""Fitted to the measured steps of docs/benchmarks.md."""


def pace_of(device: Device) -> Pace:
    return ON_CPU if device.on_cpu else ON_GPU


def step_seconds(
    job: Job, way: Way, fleet: Fleet, *, at_once: Mapping[str, int]
) -> Mapping[str, float]:
    """Seconds of `sync`, `generate`, `judge` (or `score`, or `teach`), `swaps`, `round`, `train` and the whole `step`.

    `at_once`: by role, the sequences that one engine holds.
    """
    device = fleet.device
    if way.kind == "dynamic":
        # It finds the best division by itself: within a few percent, see docs/placement.md.
        splits = (replace(way, kind="split", judge_slots=n) for n in range(1, way.slots))
        divisions = [replace(way, kind="colocated"), *splits]
        steps = (step_seconds(job, division, fleet, at_once=at_once) for division in divisions)
        return min(steps, key=lambda seconds: seconds["step"])
    in_split = way.kind == "split"
    writing = max(1, way.slots - (way.judge_slots if in_split else 0)) * way.engines("rollout")
    generate = generate_s(
        job, device, slots=writing, tensor_parallel=way.tensor_parallel, at_once=at_once["rollout"]
    )
    judge = 0.0
    swaps = (swap_s(job.policy, job, device) if way.sleeps else 0.0) + offload_s(job, way, device)
    if job.judge is not None:
        judging = max(1, way.judge_slots if in_split else way.slots) * way.engines(job.judge_role)
        judge = judge_s(
            job,
            device,
            slots=judging,
            tensor_parallel=way.judge_tensor_parallel,
            at_once=at_once[job.judge_role],
        )
        swaps += 0.0 if in_split else swap_s(job.judge, job, device)
    both = generate + judge
    if in_split:  # judging overlaps generating once the first group has ended
        both = max(generate, judge) + min(generate, judge) / max(1, job.prompts_per_step)
    train = train_s(job, way, device, cores=fleet.count // way.ranks if device.on_cpu else 1)
    sync, round_s = sync_s(job, device), both + swaps
    judged = {PHASES[job.judge_role]: judge} if judge else {}
    times = {
        "sync": sync,
        "generate": generate,
        **judged,
        "swaps": swaps,
        "round": round_s,
        "train": train,
    }
    return times | {"step": sync + round_s + train}


def train_s(job: Job, way: Way, device: Device, *, cores: int = 1) -> float:
    """One optimizer step of one rank over its share of the completions.

    Operations per parameter and token: 2 forward and 4 backward, of which LoRA saves the 2 for the frozen weights'
    gradients (arXiv 2001.08361, section 2.1; arXiv 2106.09685), and 2 more with checkpointing. Attention adds 4 forward
    per pair of tokens and query value. The head's logits are computed twice (ycore/trl/forward.py).
    """
    pace, facts, has_lora = pace_of(device), job.policy, job.lora_rank is not None
    flops, bandwidth = device.flops * pace.training * cores, device.bandwidth * pace.memory
    # Completions are packed, so short ones cost less: the mean over the longest tokens of a micro-batch.
    prompt = job.prompt_tokens / job.group_size
    filled = (prompt + job.completion_tokens) / (prompt + job.max_tokens)
    tokens = micro_batch_tokens(job, way) * filled
    completion_tokens = way.micro_batch * job.completion_tokens
    per_token = (4.0 if has_lora else 6.0) + (2.0 if way.checkpointing else 0.0)
    # The critic's forward and backward, and before them a forward pass for its values alone.
    passes = 1.0 if not job.has_critic else 2.0 + 2.0 / per_token
    linear = passes * per_token * facts.linear_params * tokens
    row = job.prompt_tokens + way.micro_batch * job.completion_tokens / max(
        1.0, way.micro_batch / job.group_size
    )
    attention = (
        passes
        * (per_token / 2 + 1)
        * 4
        * facts.num_hidden_layers
        * facts.query_size
        * tokens
        * row
        / 2
    )
    head = (4.0 if has_lora else 8.0) * facts.head_params * completion_tokens
    adapters = (
        0.0 if job.lora_rank is None else 6.0 * passes * facts.lora_params(job.lora_rank) * tokens
    )
    layers = (
        passes * pace.passes * facts.num_hidden_layers * saved_per_token(job) * tokens
    )  # bytes, as the next two
    logits = 20.0 * facts.vocab_size * completion_tokens
    casts = (10.0 if job.bytes_per_value == 2 else 4.0) * job.trainable
    products_s, moves_s = (
        (linear + attention + head + adapters) / flops,
        (layers + logits + casts) / bandwidth,
    )
    # Adam reads and writes weights, gradients and two moments, and clipping reads the gradients again: 40 bytes.
    optimizer_s = 40.0 * (job.trainable / (1 if way.sharding == "ddp" else way.ranks)) / bandwidth
    return (
        way.num_passes(job) * (products_s + moves_s + pace.micro_batch_s)
        + optimizer_s
        + gather_s(job, way, device)
    )


def gather_s(job: Job, way: Way, device: Device) -> float:
    """Collectives: an all-reduce moves each gradient twice; sharded weights move twice more in every pass.

    Source: arXiv 1910.02054, section 7.
    """
    if way.ranks == 1:
        return 0.0
    share = (way.ranks - 1) / way.ranks
    size = 4 if way.sharding == "ddp" else job.bytes_per_value
    moved = 2.0 * share * size * job.trainable
    if way.shards_weights:
        moved += 2.0 * way.num_passes(job) * share * job.bytes_per_value * job.policy.num_params
    return moved / (device.link * pace_of(device).memory)


@dataclass(frozen=True, slots=True)
class Serving:
    """One engine: a model on `tensor_parallel` devices."""

    facts: ModelFacts
    device: Device
    bytes_per_value: int
    tensor_parallel: int

    def prefill_s(self, tokens: float) -> float:
        """Reading prompts: two operations a parameter and token."""
        flops = self.device.flops * pace_of(self.device).serving * self.tensor_parallel
        return 2.0 * self.facts.linear_params * tokens / flops

    def decode_step_s(self, sequences: float, *, context: float) -> float:
        """One token for each sequence: the longer of multiplying by the weights and reading them, plus reading the
        cache of `context` tokens and the logits."""
        pace, facts, size = pace_of(self.device), self.facts, self.bytes_per_value
        flops = self.device.flops * pace.serving * self.tensor_parallel
        bandwidth = self.device.bandwidth * pace.memory * self.tensor_parallel
        weights = facts.linear_params + facts.head_params
        read = size * min(facts.num_params, weights * max(1.0, min(sequences, facts.num_experts)))
        product = max(2.0 * weights * sequences / flops, read / bandwidth)
        cache = (
            sequences * (size * facts.kv_values * context + 4.0 * 6 * facts.vocab_size) / bandwidth
        )
        return product + cache + pace.decode_s + pace.sequence_s * sequences

    def decode_s(
        self, sequences: float, *, lengths: list[float], context: int, at_once: int
    ) -> float:
        """Decoding sequences of these lengths in equal numbers, in waves of `at_once`; short ones leave first."""
        together = max(1.0, min(sequences, at_once))
        seconds, done = 0.0, 0.0
        for index, length in enumerate(sorted(lengths)):
            running = together * (1 - index / len(lengths))
            seconds += (length - done) * self.decode_step_s(
                running, context=context + (done + length) / 2
            )
            done = length
        return seconds * sequences / together


def generate_s(
    job: Job, device: Device, *, slots: int, tensor_parallel: int, at_once: int
) -> float:
    """All completions of a round on `slots` engines, each of which writes `at_once` at a time."""
    engine = Serving(job.policy, device, job.bytes_per_value, tensor_parallel)
    sequences = -(-job.completions * job.draws // slots)
    reads = sequences * pace_of(device).request_s + engine.prefill_s(
        sequences / job.group_size * job.prompt_tokens
    )
    lengths = [
        min(job.max_tokens, length)
        for length in spread_lengths(job.completion_tokens, job.max_tokens)
    ]
    return reads + engine.decode_s(
        sequences, lengths=lengths, context=job.prompt_tokens, at_once=at_once
    )


def judge_s(job: Job, device: Device, *, slots: int, tensor_parallel: int, at_once: int) -> float:
    """A verdict on every completion of a round. The judge reads its instructions, the prompt and the completion."""
    if job.judge is None:
        return 0.0
    engine = Serving(job.judge, device, job.bytes_per_value, tensor_parallel)
    verdicts = -(-job.completions * job.draws // slots)
    context = job.judge_prompt_tokens + job.completion_tokens
    reads = verdicts * pace_of(device).request_s + engine.prefill_s(verdicts * context)
    return reads + engine.decode_s(
        verdicts, lengths=[job.judge_tokens], context=context, at_once=at_once
    )


def spread_lengths(mean: float, longest: int) -> list[float]:
    """Lengths of a round in classes of equal number: even from zero to twice the mean, or all the longest."""
    if mean >= longest:
        return [float(longest)]
    return [2 * mean * (k + 0.5) / _LENGTH_CLASSES for k in range(_LENGTH_CLASSES)]


def sync_s(job: Job, device: Device) -> float:
    pace = pace_of(device)
    return pace.sync_s + job.policy.num_params * job.bytes_per_value / pace.sync_bandwidth


def swap_s(facts: ModelFacts, job: Job, device: Device) -> float:
    """A sleep of one engine and a wake of another."""
    pace = pace_of(device)
    return pace.swap_s + facts.num_params * job.bytes_per_value / pace.swap_bandwidth


def offload_s(job: Job, way: Way, device: Device) -> float:
    """What leaves the device for a round, and comes back."""
    resting = trainer_memory(job, way).resting
    return 2 * (resting["none"] - resting[way.offload]) / pace_of(device).offload_bandwidth
