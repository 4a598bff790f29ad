"""Bytes of every role, and the roles that are in a device's memory together, phase by phase.

On GPUs the largest phase of one device must fit. On a CPU the roles are processes that never sleep and share one
memory, so the sum of their peaks must fit. The formulas and their sources are also in docs/plan.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ycore.plan.devices import GIB, Fleet
from ycore.plan.job import Job, Way
from ycore.plan.model_facts import ModelFacts

Parts = Mapping[str, float]  # bytes by what they are for

HEAD_TILE = 512  # positions whose logits exist at a time (`TILE` in ycore/trl/forward.py)
_LOGIT_BYTES = 14  # one logit of a tile: in bfloat16, in float32, its log-softmax and its softmax
_PREFILL_TOKENS = 8192  # prompt tokens that vLLM takes into one step at most, by default
_SYNC_BYTES = 0.5 * GIB  # what the writing rank holds of the policy (`QUEUED_BYTES` in ycore/engine/weights.py)
_MOST_SEQUENCES = 256
_CPU_CACHE_STEP = GIB  # on a CPU, vLLM's cache is whole GiB
_DEVICE_SHARE, _HOST_SHARE = 0.95, 0.9  # share of a GPU's and of the host's memory that a plan may use


@dataclass(frozen=True, slots=True)
class Footing:
    """Bytes of a process before it has a model: libraries, a device's context, communication buffers."""

    trainer: float
    engine: float
    asleep: float  # an engine that sleeps
    zero: float  # what DeepSpeed adds to a rank of the trainer
    slack: float  # what an allocator holds beyond what is in use, as a share of that


ON_GPU = Footing(trainer=1.2 * GIB, engine=1.5 * GIB, asleep=1.2 * GIB, zero=0.0, slack=0.10)
ON_CPU = Footing(trainer=0.85 * GIB, engine=1.5 * GIB, asleep=1.5 * GIB, zero=0.7 * GIB, slack=0.05)
"""For CPUs as measured; see docs/plan.md."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Bytes of one role's engine on one device."""

    weights: float
    kv_cache: float
    workspace: float
    footing: float
    at_once: int  # sequences whose keys and values fit together

    @property
    def awake(self) -> float:
        return self.weights + self.kv_cache + self.workspace + self.footing


def capacity_of(fleet: Fleet) -> float:
    """Bytes that a plan may use of a device, or of the machine for a CPU."""
    return fleet.device.memory_bytes * (_HOST_SHARE if fleet.device.on_cpu else _DEVICE_SHARE)


def step_memory(job: Job, way: Way, fleet: Fleet) -> tuple[Parts, Mapping[str, Engine], Mapping[str, Parts]]:
    """One rank's trainer at its peak; the engines by role; the bytes by phase and role, on the fullest device."""
    footing = ON_CPU if fleet.device.on_cpu else ON_GPU
    libraries = footing.trainer + (footing.zero if way.sharding.startswith("zero") else 0.0)
    parts, states = trainer_peak(job, way), trainer_states(job, way)
    trainer = {**parts, "allocator": footing.slack * sum(parts.values()), "libraries": libraries}
    peak = sum(trainer.values())
    resident = sum(states.values()) - states.get("gradients", 0.0) - states.get("copies", 0.0) + libraries
    syncing = resident + largest_weight(job.policy)
    others = footing.asleep * (0 if job.judge is None else 1)
    engines = _engines(job, way, fleet, beside=syncing + others if way.sleeps else peak)
    if not fleet.device.on_cpu:
        return trainer, engines, _gpu_phases(way, footing, engines, peak, resident, syncing)
    policy_bytes = float(job.policy.num_params * job.bytes_per_value)
    peak = max(peak, syncing + min(_SYNC_BYTES, policy_bytes))
    processes = {role: engine.awake * way.slots for role, engine in engines.items()}
    return trainer, engines, {"all at once": {"trainer": peak * way.ranks, **processes}}


def _gpu_phases(
    way: Way, footing: Footing, engines: Mapping[str, Engine], peak: float, resident: float, syncing: float
) -> Mapping[str, Parts]:
    """The phases of a device. In a split too it has an engine of every role, of which one is never used."""
    resting = {role: footing.asleep if way.sleeps else engine.awake for role, engine in engines.items()}

    def working(role: str, trainer: float) -> Parts:
        return {"trainer": trainer, **resting, role: engines[role].awake}

    phases: dict[str, Parts] = {
        "train": {"trainer": peak, **resting},
        "wake-up and sync": working("rollout", syncing),
        "generate": working("rollout", resident),
    }
    return phases | ({"judge": working("judge", resident)} if "judge" in engines else {})


def trainer_states(job: Job, way: Way) -> Parts:
    """Weights, gradients and optimizer state of one rank: 16 bytes a trained parameter before sharding.

    DDP keeps trained weights in float32 (4 bytes, 4 of gradient, 8 of Adam's moments), and autocast a bfloat16 copy
    beside them. ZeRO (arXiv 1910.02054, section 3.1) keeps them in bfloat16 (2 + 2) with float32 masters and moments
    (12): stage 1 shards masters and moments, stage 2 the gradients too, stage 3 the weights too.
    """
    trained, size, ranks = job.trainable, job.bytes_per_value, way.ranks
    frozen = 0 if job.lora_rank is None else job.policy.num_params
    weight_ranks = ranks if way.shards_weights else 1
    two_layers = 2.0 * size * job.policy.layer_params  # gathered: the one at work and the next
    parts: dict[str, float] = {"frozen weights": frozen * size / weight_ranks}
    if way.sharding == "ddp":
        copies = (2.0 * trained if size == 2 else 0.0) + (4.0 * trained if ranks > 1 else 0.0)
        parts |= {"weights": 4.0 * trained, "gradients": 4.0 * trained, "optimizer": 8.0 * trained, "copies": copies}
    elif way.sharding == "fsdp2":
        parts |= {"weights": 4.0 * trained / ranks, "gradients": 4.0 * trained / ranks}
        parts |= {"optimizer": 8.0 * trained / ranks, "copies": two_layers}
    else:
        parts["weights"] = float(size) * trained / weight_ranks
        parts["gradients"] = float(size) * trained / (1 if way.sharding == "zero1" else ranks)
        parts["optimizer"] = 12.0 * trained / ranks
        parts["copies"] = 4.0 * trained / ranks + (two_layers if way.shards_weights else 0.0)
    if job.has_reference and job.lora_rank is None:
        parts["reference"] = float(size) * job.policy.num_params / weight_ranks
    return {name: value for name, value in parts.items() if value}


def saved_per_token(job: Job) -> float:
    """Bytes that one token leaves in one layer for the backward pass, without gradient checkpointing.

    Counted per operation, as arXiv 2205.05198 (section 4.1) does for its layer; this layer has RMSNorm, rotary
    embeddings, keys repeated for grouped queries, attention that keeps no scores, and a gated MLP.
    """
    facts, size = job.policy, job.bytes_per_value
    norms = 2 * 4 * facts.hidden_size  # the float32 that each norm squares
    inputs = 2 * size * facts.hidden_size  # inputs of the linear layers after each norm
    attention = size * 4 * facts.query_size + 4 * facts.num_attention_heads  # queries, repeated keys and values, output
    mlp = 4 * size * facts.intermediate_size * facts.num_experts_per_token  # gate, its activation, up, their product
    residual = 2 * 4 * facts.hidden_size if job.lora_rank is None else 0  # norms with trained weights keep more
    adapters = 0.0 if job.lora_rank is None else 7 * 4 * job.lora_rank
    return norms + inputs + attention + size * facts.query_size + mlp + residual + adapters


def micro_batch_tokens(job: Job, way: Way) -> int:
    """Tokens of one forward pass: each group's prompt once, where groups are whole, and every completion."""
    groups = max(1.0, way.micro_batch / job.group_size)
    return round(groups * job.prompt_tokens + way.micro_batch * job.max_tokens)


def activations(job: Job, way: Way) -> Parts:
    """What the forward pass leaves for the backward pass, and the logits of one tile.

    Checkpointing keeps every layer's input and the activations of one layer (arXiv 2205.05198, section 5).
    """
    facts, tokens = job.policy, micro_batch_tokens(job, way)
    a_layer = tokens * saved_per_token(job)
    inputs = tokens * job.bytes_per_value * facts.hidden_size
    kept = a_layer + facts.num_hidden_layers * inputs if way.checkpointing else facts.num_hidden_layers * a_layer
    tile = min(HEAD_TILE, way.micro_batch * job.max_tokens)
    return {"activations": kept, "logits": float(tile * facts.vocab_size * _LOGIT_BYTES)}


def trainer_peak(job: Job, way: Way) -> Parts:
    """One rank's states and activations at their peak. In a single pass, gradients replace activations one by one."""
    states, kept = dict(trainer_states(job, way)), activations(job, way)
    if way.num_passes(job) == 1:
        states["gradients"] = max(0.0, states["gradients"] - sum(kept.values()))
    return {name: value for name, value in {**states, **kept}.items() if value}


def largest_weight(facts: ModelFacts) -> float:
    """Bytes of the largest weight in float32: a sync gathers one weight at a time."""
    return 4.0 * max(facts.head_params, facts.expert_params / 3, facts.hidden_size * facts.query_size)


def _engines(job: Job, way: Way, fleet: Fleet, *, beside: float) -> Mapping[str, Engine]:
    """The engines of one slot, each with as much cache as the round can use, or as fits beside the trainer."""
    in_split = way.kind == "split"
    writing = (way.slots - way.judge_slots) * way.engines("rollout")
    needs = {"rollout": (job.policy, writing, job.prompt_tokens + job.max_tokens)}
    if job.judge is not None:
        longest = job.judge_prompt_tokens + job.max_tokens + job.judge_tokens
        judging = (way.judge_slots if in_split else way.slots) * way.engines("judge")
        needs["judge"] = (job.judge, judging, longest)
    room = (capacity_of(fleet) - beside) / (1 if way.sleeps else len(needs))
    return {
        role: _engine(job, facts, way.width(role), fleet, engines=max(1, engines), longest=longest, room=room)
        for role, (facts, engines, longest) in needs.items()
    }


def _engine(job: Job, facts: ModelFacts, wide: int, fleet: Fleet, *, engines: int, longest: int, room: float) -> Engine:
    """One of so many engines, over `wide` devices. `longest`: tokens of its longest sequence. `room`: bytes left for it
    on a device."""
    on_cpu, size = fleet.device.on_cpu, job.bytes_per_value
    footing = (ON_CPU if on_cpu else ON_GPU).engine
    weights = engine_weights(facts, size, tensor_parallel=wide, on_cpu=on_cpu)
    wanted = max(1, min(_MOST_SEQUENCES, round(job.completions * job.draws / engines)))
    a_sequence = facts.kv_values * size / wide * longest
    if on_cpu:
        cache = max(1, -(-(a_sequence * wanted) // _CPU_CACHE_STEP)) * _CPU_CACHE_STEP
        return Engine(weights, cache, 0.0, footing, wanted)
    workspace = _workspace(facts, size, sequences=wanted, tensor_parallel=wide)
    left = max(0.0, room - weights - workspace - footing)
    at_once = int(min(wanted, left // a_sequence))
    return Engine(weights, max(at_once, 1) * a_sequence, workspace, footing, at_once)


def _workspace(facts: ModelFacts, size: int, *, sequences: int, tensor_parallel: int) -> float:
    """The widest tensors of a prefill step, and 12 bytes for every logit of a decoding step."""
    widest = _PREFILL_TOKENS * (2 * facts.intermediate_size * facts.num_experts_per_token + 4 * facts.hidden_size)
    return widest * size / tensor_parallel + 3.0 * 4 * sequences * facts.vocab_size


def least_engine(facts: ModelFacts, *, longest: int, bytes_per_value: int, tensor_parallel: int) -> float:
    """Bytes on each of its GPUs of an engine that has room for one sequence of `longest` tokens."""
    cache = facts.kv_values * bytes_per_value / min(tensor_parallel, facts.num_key_value_heads) * longest
    workspace = _workspace(facts, bytes_per_value, sequences=1, tensor_parallel=tensor_parallel)
    return engine_weights(facts, bytes_per_value, tensor_parallel=tensor_parallel) + cache + workspace + ON_GPU.engine


def engine_weights(facts: ModelFacts, bytes_per_value: int, *, tensor_parallel: int, on_cpu: bool = False) -> float:
    """On a CPU three times: the weights, vLLM's packed copies of them, and the mapped file of the last sync."""
    return facts.num_params * bytes_per_value / tensor_parallel * (3 if on_cpu else 1)
