"""Bytes of every role, and the roles that are in a device's memory together, phase by phase.

On GPUs the largest phase of one device must fit. On a CPU the roles are processes that never sleep and share one
memory, so the sum of their peaks must fit. The formulas and their sources are also in docs/plan.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ycore.config.schema import Offload
from ycore.plan.devices import GIB, Fleet
from ycore.plan.job import LONGEST, PHASES, Job, Way
from ycore.plan.model_facts import ModelFacts

Parts = Mapping[str, float]  # bytes by what they are for

HEAD_TILE = 512  # positions whose logits exist at a time (`TILE` in ycore/trl/forward.py)
_LOGIT_BYTES = 14  # one logit of a tile: in bfloat16, in float32, its log-softmax and its softmax
_PREFILL_TOKENS = 8192  # prompt tokens that vLLM takes into one step at most, by default
_SYNC_BYTES = (
    0.5 * GIB
)  # what the writing rank holds of the policy (`QUEUED_BYTES` in ycore/engine/weights.py)
_MOST_SEQUENCES = 256
_NF4_BITS = 4.127  # with doubly quantised scales of blocks of 64 (arXiv 2305.14314, section 3)
_CPU_CACHE_STEP = GIB  # on a CPU, vLLM's cache is whole GiB
DEVICE_SHARE, _HOST_SHARE = (
    0.95,
    0.9,
)  # share of a GPU's and of the host's memory that a plan may use


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
    return fleet.device.memory_bytes * (_HOST_SHARE if fleet.device.on_cpu else DEVICE_SHARE)


def step_memory(
    job: Job, way: Way, fleet: Fleet
) -> tuple[Parts, Mapping[str, Engine], Mapping[str, Parts]]:
    """One rank's trainer at its peak; the engines by role; the bytes by phase and role, on the fullest device."""
    trainer = trainer_memory(job, way, on_cpu=fleet.device.on_cpu)
    needs = _needs(job, way)
    if fleet.device.on_cpu:
        on_cpu = {role: _engine_on_cpu(need) for role, need in needs.items()}
        policy_bytes = float(job.policy.num_params * job.bytes_per_value)
        peak = max(
            trainer.peak, trainer.resting["none"] + trainer.gather + min(_SYNC_BYTES, policy_bytes)
        )
        processes = {role: engine.awake * way.slots for role, engine in on_cpu.items()}
        return trainer.parts, on_cpu, {"all at once": {"trainer": peak * way.ranks, **processes}}
    alone = {role: [need] for role, need in needs.items()}
    engines = engines_on_gpu(
        alone, trainer, capacity_of(fleet), sleeps=way.sleeps, offload=way.offload
    )
    by_role = {role: of_role[0] for role, of_role in engines.items()}
    return (
        trainer.parts,
        by_role,
        gpu_phases(engines, trainer, sleeps=way.sleeps, offload=way.offload),
    )


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes of one rank. `resting`: between its steps, by what is then in host memory. `gather`: more during a sync."""

    parts: Parts  # at its peak
    resting: Mapping[Offload, float]
    gather: float

    @property
    def peak(self) -> float:
        return sum(self.parts.values())


NO_TRAINER = TrainerMemory({}, {"none": 0.0}, 0.0)


def trainer_memory(job: Job, way: Way, *, on_cpu: bool = False) -> TrainerMemory:
    footing = ON_CPU if on_cpu else ON_GPU
    libraries = footing.trainer + (footing.zero if way.sharding.startswith("zero") else 0.0)
    parts, states = trainer_peak(job, way), trainer_states(job, way)
    passing = ("gradients", "copies")  # only while a step is computed
    resting: dict[Offload, float] = {
        "none": sum(size for name, size in states.items() if name not in passing) + libraries
    }
    resting["optimizer"] = resting["none"] - states.get("optimizer", 0.0)
    if not way.shards_weights:
        resting["weights"] = (
            resting["optimizer"] - states.get("frozen weights", 0.0) - states.get("reference", 0.0)
        )
        resting["weights"] -= states.get("teachers", 0.0)
    peak = {**parts, "allocator": footing.slack * sum(parts.values()), "libraries": libraries}
    return TrainerMemory(peak, resting, largest_weight(job.policy))


@dataclass(frozen=True, slots=True)
class Need:
    """What an engine has to hold. Tokens are of one sequence; `longest` is what vLLM must be able to hold."""

    facts: ModelFacts
    bytes_per_value: int
    tensor_parallel: int
    sequences: int
    tokens: int
    longest: int

    @property
    def token_bytes(self) -> float:
        """Of the cache, on each device; with fewer KV heads than devices, several have the same one."""
        kv_heads = self.facts.num_key_value_heads
        return self.facts.kv_values * self.bytes_per_value / min(self.tensor_parallel, kv_heads)

    @property
    def fixed(self) -> tuple[float, float]:
        """Weights and workspace on each device."""
        wide, size = self.tensor_parallel, self.bytes_per_value
        workspace = _workspace(self.facts, size, sequences=self.sequences, tensor_parallel=wide)
        return engine_weights(self.facts, size, tensor_parallel=wide), workspace


def engines_on_gpu(
    needs: Mapping[str, Sequence[Need]],
    trainer: TrainerMemory,
    capacity: float,
    *,
    sleeps: bool,
    offload: Offload,
) -> Mapping[str, list[Engine]]:
    """Engines by role, as many on a device as the role has models, with the cache that they need or that fits.

    Those of a role are awake together; of several roles one is at a time where engines sleep, and all are where not.
    """
    if not sleeps:
        awake = iter(
            _filled(
                [need for of_role in needs.values() for need in of_role], capacity - trainer.peak
            )
        )
        return {role: [next(awake) for _ in of_role] for role, of_role in needs.items()}
    num_models = sum(map(len, needs.values()))
    return {
        role: _filled(
            of_role,
            capacity - trainer.resting[offload] - ON_GPU.asleep * (num_models - len(of_role)),
        )
        for role, of_role in needs.items()
    }


def _filled(needs: Sequence[Need], room: float) -> list[Engine]:
    """Engines that are awake together in `room` bytes; each has room for its longest sequence, and
    where there is too little for all, the same share of what it could use beyond that."""
    fixed = [need.fixed for need in needs]
    least = [need.token_bytes * need.longest for need in needs]
    more = [
        max(0.0, need.token_bytes * need.tokens * need.sequences - one)
        for need, one in zip(needs, least, strict=True)
    ]
    left = (
        room - sum(weights + workspace + ON_GPU.engine for weights, workspace in fixed) - sum(least)
    )
    share = min(1.0, max(0.0, left) / max(1.0, sum(more)))
    found = []
    for need, (weights, workspace), one, rest in zip(needs, fixed, least, more, strict=True):
        cache = one + share * rest
        at_once = (
            int(min(need.sequences, cache // (need.token_bytes * need.tokens))) if left >= 0 else 0
        )
        found.append(Engine(weights, cache, workspace, ON_GPU.engine, at_once))
    return found


def gpu_phases(
    engines: Mapping[str, Sequence[Engine]],
    trainer: TrainerMemory,
    *,
    sleeps: bool,
    offload: Offload,
) -> Mapping[str, Parts]:
    """The phases of a device. In a split too it has an engine of every role, of which one is never used."""
    awake = {role: sum(engine.awake for engine in of_role) for role, of_role in engines.items()}
    idle = (
        {role: ON_GPU.asleep * len(of_role) for role, of_role in engines.items()}
        if sleeps
        else awake
    )
    resting = trainer.resting[offload]

    def working(role: str) -> Parts:
        return {"trainer": resting, **idle, role: awake[role]}

    phases: dict[str, Parts] = {
        "train": {"trainer": trainer.peak, **idle},
        "sync": {
            "trainer": resting + trainer.gather,
            **idle,
        },  # weights are written before an engine wakes
        "generate": working("rollout"),
    }
    return phases | {name: working(role) for role, name in PHASES.items() if role in engines}


def trainer_states(job: Job, way: Way) -> Parts:
    """Weights, gradients and optimizer state of one rank: 16 bytes a trained parameter before sharding.

    DDP keeps trained weights in float32 (4 bytes, 4 of gradient, 8 of Adam's moments), and autocast a bfloat16 copy
    beside them. ZeRO (arXiv 1910.02054, section 3.1) keeps them in bfloat16 (2 + 2) with float32 masters and moments
    (12): stage 1 shards masters and moments, stage 2 the gradients too, stage 3 the weights too.
    """
    trained, size, ranks = job.trainable, job.bytes_per_value, way.ranks
    weight_ranks = ranks if way.shards_weights else 1
    two_layers = 2.0 * size * job.policy.layer_params  # gathered: the one at work and the next
    parts: dict[str, float] = {
        "frozen weights": (0.0 if job.lora_rank is None else frozen_bytes(job)) / weight_ranks
    }
    if way.sharding == "ddp":
        copies = (2.0 * trained if size == 2 else 0.0) + (4.0 * trained if ranks > 1 else 0.0)
        parts |= {
            "weights": 4.0 * trained,
            "gradients": 4.0 * trained,
            "optimizer": 8.0 * trained,
            "copies": copies,
        }
    elif way.sharding == "fsdp2":
        parts |= {"weights": 4.0 * trained / ranks, "gradients": 4.0 * trained / ranks}
        parts |= {"optimizer": 8.0 * trained / ranks, "copies": two_layers}
    else:
        parts["weights"] = float(size) * trained / weight_ranks
        parts["gradients"] = float(size) * trained / (1 if way.sharding == "zero1" else ranks)
        parts["optimizer"] = 12.0 * trained / ranks
        parts["copies"] = 4.0 * trained / ranks + (two_layers if way.shards_weights else 0.0)
    if job.quantized:  # the weight at work, in the dtype of the computation
        facts = job.policy
        parts["copies"] += float(
            size * facts.hidden_size * max(facts.intermediate_size, facts.query_size)
        )
    if job.has_reference and job.lora_rank is None:
        parts["reference"] = float(size) * job.policy.num_params / weight_ranks
    parts["teachers"] = float(size) * sum(facts.num_params for facts in job.teachers)
    return {name: value for name, value in parts.items() if value}


def frozen_bytes(job: Job) -> float:
    """The base of a LoRA run. In 4 bits (arXiv 2305.14314, section 3) the linear layers of the blocks have
    `_NF4_BITS` a weight; embeddings, head, norms and the experts of a mixture stay as they are.
    """
    facts, size = job.policy, job.bytes_per_value
    if not job.quantized:
        return float(facts.num_params * size)
    per_layer = facts.attention_params + (facts.expert_params if facts.num_experts == 1 else 0)
    linear = facts.num_hidden_layers * per_layer
    return linear * _NF4_BITS / 8 + (facts.num_params - linear) * size


def saved_per_token(job: Job) -> float:
    """Bytes that one token leaves in one layer for the backward pass, without gradient checkpointing.

    Counted per operation, as arXiv 2205.05198 (section 4.1) does for its layer; this layer has RMSNorm, rotary
    embeddings, keys repeated for grouped queries, attention that keeps no scores, and a gated MLP.
    """
    facts, size = job.policy, job.bytes_per_value
    norms = 2 * 4 * facts.hidden_size  # the float32 that each norm squares
    inputs = 2 * size * facts.hidden_size  # inputs of the linear layers after each norm
    attention = (
        size * 4 * facts.query_size + 4 * facts.num_attention_heads
    )  # queries, repeated keys and values, output
    mlp = (
        4 * size * facts.intermediate_size * facts.num_experts_per_token
    )  # gate, its activation, up, their product
    residual = (
        2 * 4 * facts.hidden_size if job.lora_rank is None else 0
    )  # norms with trained weights keep more
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
    facts, tokens = (
        job.policy,
        micro_batch_tokens(job, way) * (2 if job.has_critic else 1),
    )  # one backward for both
    a_layer = tokens * saved_per_token(job)
    inputs = tokens * job.bytes_per_value * facts.hidden_size
    kept = (
        a_layer + facts.num_hidden_layers * inputs
        if way.checkpointing
        else facts.num_hidden_layers * a_layer
    )
    tile = min(HEAD_TILE, way.micro_batch * job.max_tokens)
    return {
        "activations": kept,
        "logits": float(tile * facts.vocab_size * _LOGIT_BYTES * (1 + len(job.teachers))),
    }


def trainer_peak(job: Job, way: Way) -> Parts:
    """One rank's states and activations at their peak. In a single pass, gradients replace activations one by one."""
    states, kept = dict(trainer_states(job, way)), activations(job, way)
    if way.num_passes(job) == 1:
        states["gradients"] = max(0.0, states["gradients"] - sum(kept.values()))
    return {name: value for name, value in {**states, **kept}.items() if value}


def largest_weight(facts: ModelFacts) -> float:
    """Bytes of the largest weight in float32: a sync gathers one weight at a time."""
    return 4.0 * max(
        facts.head_params, facts.expert_params / 3, facts.hidden_size * facts.query_size
    )


def _needs(job: Job, way: Way) -> Mapping[str, Need]:
    """What the engines of one slot hold, by role."""

    def need(role: str, facts: ModelFacts, slots: int, tokens: int, longest: int) -> Need:
        num_engines = max(1, slots * way.engines(role))
        wanted = max(1, min(_MOST_SEQUENCES, round(job.completions * job.draws / num_engines)))
        return Need(
            facts, job.bytes_per_value, way.width(role), wanted, tokens, max(tokens, longest)
        )

    tokens = job.prompt_tokens + job.max_tokens
    needs = {
        "rollout": need(
            "rollout", job.policy, way.slots - way.judge_slots, tokens, job.max_model_len
        )
    }
    if job.judge is not None:
        tokens = job.judge_prompt_tokens + job.max_tokens + job.judge_tokens
        judging = way.judge_slots if way.kind == "split" else way.slots
        longest = min(job.judge.context_length or LONGEST, LONGEST)
        needs[job.judge_role] = need(job.judge_role, job.judge, judging, tokens, longest)
    return needs


def _engine_on_cpu(need: Need) -> Engine:
    a_sequence = need.facts.kv_values * need.bytes_per_value / need.tensor_parallel * need.tokens
    cache = max(1, -(-(a_sequence * need.sequences) // _CPU_CACHE_STEP)) * _CPU_CACHE_STEP
    weights = engine_weights(
        need.facts, need.bytes_per_value, tensor_parallel=need.tensor_parallel, on_cpu=True
    )
    return Engine(weights, cache, 0.0, ON_CPU.engine, need.sequences)


def _workspace(facts: ModelFacts, size: int, *, sequences: int, tensor_parallel: int) -> float:
    """The widest tensors of a prefill step, and 12 bytes for every logit of a decoding step."""
    widest = _PREFILL_TOKENS * (
        2 * facts.intermediate_size * facts.num_experts_per_token + 4 * facts.hidden_size
    )
    return widest * size / tensor_parallel + 3.0 * 4 * sequences * facts.vocab_size


def least_engine(need: Need) -> float:
    """Bytes on each of its GPUs of an engine that has room for one of its longest sequences."""
    return sum(need.fixed) + need.token_bytes * need.longest + ON_GPU.engine


def engine_weights(
    facts: ModelFacts, bytes_per_value: int, *, tensor_parallel: int, on_cpu: bool = False
) -> float:
    """On a CPU three times: the weights, vLLM's packed copies of them, and the mapped file of the last sync."""
    return facts.num_params * bytes_per_value / tensor_parallel * (3 if on_cpu else 1)
