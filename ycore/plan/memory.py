"""Bytes on one device, for every role in every phase. Pure; the formulas and their sources are in docs/plan.md.

Not here: which phases fall together on a device (`phases`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ycore.plan.devices import GIB, Device
from ycore.plan.job import Job, Way
from ycore.plan.model_facts import ModelFacts

Parts = Mapping[str, float]
"""What the bytes are for, and how many."""

HEAD_TILE = 512
"""Positions whose logits exist at a time (`algorithms.lm_head.TILE`)."""

_LOGIT_BYTES = 14
"""Of one logit in a tile: in bfloat16, as float32, its log-softmax and its softmax."""

_PREFILL_TOKENS = 8192
"""Prompt tokens that vLLM takes into one step at most, by default."""

SYNC_FILE_BYTES = 2 * GIB
"""What the writing rank holds of the policy at a time (`algorithms.weights.FILE_BYTES`)."""


@dataclass(frozen=True, slots=True)
class Footing:
    """What a process holds before it has a model: libraries, a device's context and its communication buffers."""

    trainer: float
    engine: float
    asleep: float
    """Of an engine that sleeps."""

    zero: float
    """What DeepSpeed adds to a trainer's rank."""

    slack: float
    """What an allocator holds beyond what was asked of it, as a share."""


ON_GPU = Footing(trainer=1.2 * GIB, engine=1.5 * GIB, asleep=1.2 * GIB, zero=0.0, slack=0.10)
ON_CPU = Footing(trainer=0.85 * GIB, engine=1.5 * GIB, asleep=1.5 * GIB, zero=0.7 * GIB, slack=0.05)


def footing_of(device: Device) -> Footing:
    return ON_CPU if device.on_cpu else ON_GPU


def trainer_states(job: Job, way: Way) -> Parts:
    """Weights, gradients and optimizer state of one rank: 16 bytes a trained parameter before anything is cut up.

    DDP keeps weights in training in float32 (4 bytes, 4 of gradient, 8 of Adam's moments), and autocast a bfloat16
    copy beside them. ZeRO (arXiv 1910.02054, section 3.1) keeps them in bfloat16 (2 + 2) with float32 masters and
    moments (12), of which stage 1 cuts up the masters and moments, 2 the gradients too, 3 the weights too.
    """
    trained, size, ranks = job.trainable, job.bytes_per_value, way.ranks
    frozen = 0 if job.lora_rank is None else job.policy.num_params
    whole = way.sharding in ("zero3", "fsdp2")
    parts: dict[str, float] = {"frozen weights": frozen * size / (ranks if whole else 1)}
    if way.sharding == "ddp":
        parts |= {"weights": 4.0 * trained, "gradients": 4.0 * trained, "optimizer": 8.0 * trained}
        parts["copies"] = (2.0 * trained if size == 2 else 0.0) + (4.0 * trained if ranks > 1 else 0.0)
    elif way.sharding == "fsdp2":
        parts |= {"weights": 4.0 * trained / ranks, "gradients": 4.0 * trained / ranks}
        parts |= {"optimizer": 8.0 * trained / ranks, "copies": 2.0 * size * job.policy.layer_params}
    else:
        stage = int(way.sharding[-1])
        parts["weights"] = float(size) * trained / (ranks if stage == 3 else 1)
        parts["gradients"] = float(size) * trained / (ranks if stage >= 2 else 1)
        parts["optimizer"] = 12.0 * trained / ranks
        parts["copies"] = 4.0 * trained / ranks + (2.0 * size * job.policy.layer_params if stage == 3 else 0.0)
    if job.has_reference and job.lora_rank is None:
        parts["reference"] = float(size) * job.policy.num_params / (ranks if whole else 1)
    return MappingProxyType({name: value for name, value in parts.items() if value})


def saved_per_token(job: Job) -> float:
    """Bytes that one token leaves in one layer for the backward pass, without gradient checkpointing.

    Counted from the layer's operations as arXiv 2205.05198 (section 4.1) counts those of its own, for RMSNorm, rotary
    embeddings, keys repeated for grouped queries, attention that keeps no scores, and a gated MLP.
    """
    facts, size = job.policy, job.bytes_per_value
    norms = 2 * 4 * facts.hidden_size  # the float32 that each norm squares
    inputs = 2 * size * facts.hidden_size  # what the linear layers after each norm multiply
    attention = size * 4 * facts.query_size + 4 * facts.num_attention_heads  # queries, repeated keys and values, output
    mlp = 4 * size * facts.intermediate_size * facts.num_experts_per_token  # gate, its activation, up, their product
    residual = 2 * 4 * facts.hidden_size if job.lora_rank is None else 0  # norms with weights in training keep more
    adapters = 0.0 if job.lora_rank is None else 7 * 4 * job.lora_rank
    return norms + inputs + attention + size * facts.query_size + mlp + residual + adapters


def micro_batch_tokens(job: Job, way: Way) -> int:
    """Tokens of one forward pass: each group's prompt once, where groups are whole, and every completion."""
    groups = max(1.0, way.micro_batch / job.group_size)
    return round(groups * job.prompt_tokens + way.micro_batch * job.max_tokens)


def activations(job: Job, way: Way) -> Parts:
    """What the forward pass leaves for the backward, and the logits of one tile."""
    facts, tokens = job.policy, micro_batch_tokens(job, way)
    a_layer = tokens * saved_per_token(job)
    inputs = tokens * job.bytes_per_value * facts.hidden_size
    kept = a_layer + facts.num_hidden_layers * inputs if way.checkpointing else facts.num_hidden_layers * a_layer
    tile = min(HEAD_TILE, way.micro_batch * job.max_tokens)
    return {"activations": kept, "logits": float(tile * facts.vocab_size * _LOGIT_BYTES)}


def trainer_peak(job: Job, way: Way) -> Parts:
    """One rank's states and activations when there are most: gradients of an only pass come as its activations go."""
    states, kept = dict(trainer_states(job, way)), activations(job, way)
    passes = max(1, round(job.completions / way.ranks / way.micro_batch))
    if passes == 1:
        states["gradients"] = max(0.0, states["gradients"] - sum(kept.values()))
    return MappingProxyType({name: value for name, value in {**states, **kept}.items() if value})


def kv_bytes_per_token(facts: ModelFacts, bytes_per_value: int) -> float:
    """Keys and values of one token in all layers (arXiv 2309.06180, section 3)."""
    return float(facts.kv_values * bytes_per_value)


def engine_weights(facts: ModelFacts, bytes_per_value: int, *, tensor_parallel: int, on_cpu: bool = False) -> float:
    """On a CPU three times: the weights, vLLM's packed copies of them, and the pages of the file of the last sync."""
    return facts.num_params * bytes_per_value / tensor_parallel * (3 if on_cpu else 1)


def engine_workspace(facts: ModelFacts, bytes_per_value: int, *, sequences: int, tensor_parallel: int) -> float:
    """What one step of an engine needs beside weights and cache: a prefill's widest tensors, and the logits."""
    widest = _PREFILL_TOKENS * (2 * facts.intermediate_size * facts.num_experts_per_token + 4 * facts.hidden_size)
    return widest * bytes_per_value / tensor_parallel + 3.0 * 4 * sequences * facts.vocab_size


def largest_weight(facts: ModelFacts) -> float:
    """Bytes of the largest weight made whole in float32, as a sync does with one weight at a time."""
    return 4.0 * max(facts.head_params, facts.expert_params / 3, facts.hidden_size * facts.query_size)
