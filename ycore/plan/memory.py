"""A workload (one step's work), a strategy to run it, and the memory that the two take.

That is the bytes of every role, and the roles that are in a device's memory together, phase by phase.

On GPUs the largest phase of one device must fit. On a CPU the roles are processes that never sleep and share one
memory, so the sum of their peaks must fit. The formulas and their sources are also in docs/plan.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple, get_args

from ycore.config.schema import SHARDS_WEIGHTS, Offload, RunConfig
from ycore.models.model_facts import ModelFacts
from ycore.placement.placement import JUDGE, REWARD_MODEL, ROLLOUT, TEACHER
from ycore.plan.devices import GIB, Fleet
from ycore.scoring.scoring import ServedModel

Sharding = Literal["ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp"]  # the last two are FSDP's
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)

PHASES = {JUDGE: "judge", REWARD_MODEL: "score", TEACHER: "teach"}
"""The phase of a step in which a model that scores is busy."""

PROMPT_TOKENS = 256
"""The length of a prompt where none is given."""

_VERDICT_TOKENS = 128
_DYNAMIC_DRAWS = 1.5
"""Groups drawn for each one kept, before anything is measured (DAPO, arXiv 2503.14476, 3.2)."""


@dataclass(frozen=True)
class Workload:
    """One step's work. Tokens are per sequence.

    Attributes:
        completion_tokens: mean length of a completion.
        lora_rank: None trains every weight.
        quantized: the frozen base of a LoRA run is in 4 bits.
        bytes_per_value: 2 computes in bfloat16, 4 in float32.
        draws: groups generated for each one trained on (dynamic sampling).
        has_reference: for the KL term; with LoRA it is the policy without adapters, and costs nothing.
        has_critic: PPO's; the policy's frozen weights with adapters of its own, or every weight again.
        teachers: those that every rank holds itself.
        judge: or a reward model or a teacher, which an engine serves.
    """

    policy: ModelFacts
    prompts_per_step: int = 8
    group_size: int = 8
    prompt_tokens: int = 256
    completion_tokens: int = 256
    max_tokens: int = 256
    max_model_len: int = 4096
    lora_rank: int | None = 16
    quantized: bool = False
    bytes_per_value: int = 2
    draws: float = 1.0
    has_reference: bool = False
    has_critic: bool = False
    teachers: tuple[ModelFacts, ...] = ()
    judge: ModelFacts | None = None
    judge_role: str = JUDGE
    judge_prompt_tokens: int = 256
    judge_tokens: int = 128

    @property
    def completions(self) -> int:
        """Completions of a step that are trained on."""
        return self.prompts_per_step * self.group_size

    @property
    def trainable(self) -> int:
        """Trained parameters of the policy and of its critic."""
        facts = self.policy
        if self.lora_rank is None:
            trained = facts.num_params
            critic = trained - (0 if facts.tied else facts.head_params)
        else:
            trained = critic = facts.lora_params(self.lora_rank)
        return trained + (critic + facts.hidden_size + 1 if self.has_critic else 0)


@dataclass(frozen=True)
class Strategy:
    """One way to run a workload. On GPUs every device is a rank of the trainer and also serves engines.

    Attributes:
        apart: devices that serve engines alone, in place of those of the ranks; 0: none.
        away: slots on other machines, taken for as fast as those here.
        replicas: copies of what is sharded: one a machine with `hsdp`.
        slots: blocks of devices that can work at the same time, each for one role.
        micro_batch: completions in one forward pass of a rank.
        tensor_parallel: devices that an engine of the policy spans; a slot is as wide as the widest engine.
        kind: `dynamic` divides the slots between the policy and the judge by itself; see docs/placement.md.
        sleeps: engines free their memory while the trainer trains.
    """

    ranks: int
    slots: int
    sharding: Sharding = "ddp"
    micro_batch: int = 8
    checkpointing: bool = False
    tensor_parallel: int = 1
    judge_tensor_parallel: int = 1
    kind: Literal["colocated", "dynamic"] = "colocated"
    sleeps: bool = False
    offload: Offload = "none"
    apart: int = 0
    away: int = 0
    replicas: int = 1

    @property
    def shard_ranks(self) -> int:
        """Ranks that share what is sharded."""
        return self.ranks // self.replicas

    @property
    def all_slots(self) -> int:
        return self.slots + self.away

    @property
    def engines_are_apart(self) -> bool:
        """Whether engines have none of the devices that train."""
        return self.apart > 0 or self.slots == 0

    def width(self, role: str) -> int:
        return self.tensor_parallel if role == ROLLOUT else self.judge_tensor_parallel

    @property
    def slot_width(self) -> int:
        return max(self.tensor_parallel, self.judge_tensor_parallel)

    def engines_per_slot(self, role: str) -> int:
        return self.slot_width // self.width(role)

    @property
    def shards_weights(self) -> bool:
        return self.sharding in SHARDS_WEIGHTS

    def num_passes(self, work: Workload) -> int:
        """Micro-batches of one rank in a step."""
        return max(1, round(work.completions / self.ranks / self.micro_batch))

    @property
    def in_words(self) -> str:
        """A description for people, e.g. `colocated, zero2, micro-batch 4`."""
        words = [
            str(self.kind),
            self.sharding if self.ranks > 1 else "one rank",
            f"micro-batch {self.micro_batch}",
        ]
        if self.checkpointing:
            words.append("gradient checkpointing")
        width = self.tensor_parallel
        judge_width = self.judge_tensor_parallel
        if width != judge_width:
            devices = "devices" if width > 1 else "device"
            words.append(f"engines over {width} {devices}, the judge's over {judge_width}")
        elif width > 1:
            words.append(f"engines over {width} devices")
        if self.apart:
            words.append(f"engines on {self.apart} devices of their own")
        if self.away:
            words.append(f"{self.away} slots on other machines")
        if self.sleeps:
            words.append("engines asleep while training")
        if self.offload != "none":
            words.append(f"{OFFLOADED[self.offload]} in host memory during rounds")
        return ", ".join(words)


OFFLOADED = {
    "optimizer": "optimizer's state",
    "weights": "optimizer's state and frozen weights",
}


def usual_length(context: int | None, *, new_tokens: int) -> int:
    """Return the longest prompt plus completion in tokens, where the user names none.

    It is 4096, or the longest completion and 2048 for its prompt, and no more than the model's context.
    """
    usual = max(4096, new_tokens + 2048)
    return min(context or usual, usual)


def workload_of(
    config: RunConfig,
    policy: ModelFacts,
    *,
    scorer: ServedModel | None = None,
    judge: ModelFacts | None = None,
    prompt_tokens: int | None = None,
    completion_tokens: int | None = None,
) -> Workload:
    """Return the workload of a run; `judge` are the facts of `scorer`, a model that scores in engines.

    By default a mean prompt has 256 tokens, a verdict at most 128, and
    a completion the most. A reward model or a teacher reads what the policy has read and written, and writes nothing.
    """
    prompt_tokens = prompt_tokens or PROMPT_TOKENS
    judge_role = JUDGE if scorer is None else scorer.role
    verdict_tokens = 0 if scorer is None else scorer.max_new_tokens
    is_dynamic = config.sampling.dynamic and not config.teaches_alone
    return Workload(
        policy=policy,
        prompts_per_step=config.prompts_per_step,
        group_size=config.group_size,
        prompt_tokens=prompt_tokens,
        completion_tokens=min(completion_tokens or config.max_tokens, config.max_tokens),
        max_tokens=config.max_tokens,
        max_model_len=config.engine.max_model_len
        or usual_length(policy.context_length, new_tokens=config.max_tokens),
        lora_rank=None if config.lora is None else config.lora.r,
        quantized=config.quantize is not None,
        bytes_per_value=config.value_bytes,
        draws=_DYNAMIC_DRAWS if is_dynamic else 1.0,
        has_reference=bool(config.trl.get("beta")),
        has_critic=config.has_critic,
        judge=judge,
        judge_role=judge_role,
        judge_prompt_tokens=PROMPT_TOKENS if judge_role == JUDGE else prompt_tokens,
        judge_tokens=verdict_tokens or (_VERDICT_TOKENS if judge_role == JUDGE else 1),
    )


# -- memory ------------------------------------------------------------------------------------------------------------

Parts = Mapping[str, float]
"""Bytes by what they are for."""

HEAD_TILE = 512
"""Positions whose logits exist at a time (`TILE` in ycore/trl/forward.py)."""

DEVICE_SHARE, HOST_SHARE = 0.95, 0.9
"""Shares of a GPU's and of the host's memory that a plan may use."""

# One logit of a tile: in bfloat16, in float32, its log-softmax and its softmax.
_LOGIT_BYTES = 14
_PREFILL_TOKENS = 8192  # prompt tokens that vLLM takes into one step at most, by default
# Queued by the writing rank (`QUEUED_BYTES` in ycore/engine/weights.py)
_SYNC_BYTES = 0.5 * GIB
_MAX_SEQUENCES = 256
MAX_ENGINES_ON_CPU = 2
"""Engines that a run starts on a CPU by default, where it has fewer ranks."""

_NF4_BITS = 4.127  # with doubly quantised scales of blocks of 64 (arXiv 2305.14314, section 3)
_CPU_CACHE_STEP = GIB  # on a CPU, vLLM's cache is whole GiB
_ONE_STEP_ONLY = ("gradients", "copies")  # parts that exist only while a step is computed


class ProcessOverhead(NamedTuple):
    """Bytes of a process before it has a model: libraries, a device's context, communication buffers.

    Attributes:
        zero: what DeepSpeed adds to a rank of the trainer.
        slack: what an allocator holds beyond what is in use, as a share of that.
    """

    trainer: float
    zero: float
    slack: float


ON_GPU = ProcessOverhead(trainer=1.2 * GIB, zero=0.0, slack=0.10)
ON_CPU = ProcessOverhead(trainer=0.85 * GIB, zero=0.7 * GIB, slack=0.05)
"""For CPUs as measured; see docs/plan.md."""
_ENGINE_BYTES = 1.5 * GIB  # of an engine that is awake, on either
ASLEEP_BYTES = 1.2 * GIB
"""Bytes of an engine that sleeps."""


# -- the trainer -------------------------------------------------------------------------------------------------------


class TrainerMemory(NamedTuple):
    """Bytes of one rank.

    Attributes:
        parts: at its peak.
        resting: between its steps, by what is then in host memory.
        gather: what a sync adds.
        held: what it cannot do without in a step, whatever the micro-batch.
    """

    parts: Parts
    resting: Mapping[Offload, float]
    gather: float
    held: float = 0.0

    @property
    def peak(self) -> float:
        return sum(self.parts.values())


NO_TRAINER = TrainerMemory({}, {"none": 0.0}, 0.0)


def trainer_memory(
    work: Workload, strategy: Strategy, overhead: ProcessOverhead = ON_GPU
) -> TrainerMemory:
    libraries = overhead.trainer
    if strategy.sharding.startswith("zero"):
        libraries += overhead.zero
    states = trainer_states(work, strategy)
    resting: dict[Offload, float] = {
        "none": libraries
        + sum(size for name, size in states.items() if name not in _ONE_STEP_ONLY)
    }
    # Under ZeRO-3 the float32 masters stay, 4 of 12 bytes: DeepSpeed itself moves only its own FusedAdam's state.
    leaves = 8 / 12 if strategy.sharding == "zero3" else 1.0
    resting["optimizer"] = resting["none"] - leaves * states.get("optimizer", 0.0)
    if not strategy.shards_weights:
        frozen = ("frozen weights", "reference", "teachers")
        resting["weights"] = resting["optimizer"] - sum(
            states.get(name, 0.0) for name in frozen
        )
    parts = trainer_peak(work, strategy)
    allocator = overhead.slack * sum(parts.values())
    peak = {**parts, "allocator": allocator, "libraries": libraries}
    held = libraries + sum(states.values())
    return TrainerMemory(peak, resting, largest_weight(work.policy), held)


def trainer_states(work: Workload, strategy: Strategy) -> Parts:
    """Return weights, gradients and optimizer state of one rank: 16 bytes a trained parameter before sharding.

    DDP keeps trained weights in float32 (4 bytes, 4 of gradient, 8 of Adam's moments), and autocast a bfloat16 copy
    beside them. ZeRO (arXiv 1910.02054, section 3.1) keeps them in bfloat16 (2 + 2) with float32 masters and moments
    (12): stage 1 shards masters and moments, stage 2 the gradients too, stage 3 the weights too.
    """
    trained = work.trainable
    size = work.bytes_per_value
    ranks = strategy.shard_ranks
    weight_ranks = ranks if strategy.shards_weights else 1
    two_layers = 2.0 * size * work.policy.layer_params  # gathered: the one at work and the next
    parts = {}
    if work.lora_rank is not None:
        parts["frozen weights"] = frozen_bytes(work) / weight_ranks
    if not strategy.sharding.startswith("zero"):
        parts["weights"] = 4.0 * trained / weight_ranks
        parts["gradients"] = 4.0 * trained / weight_ranks
        parts["optimizer"] = 8.0 * trained / weight_ranks
        autocast = 2.0 * trained if size == 2 else 0.0
        parts["copies"] = autocast if strategy.sharding == "ddp" else two_layers
        if strategy.sharding == "ddp" and ranks > 1:
            parts["gradient buckets"] = 4.0 * trained  # DDP's reducer keeps them between steps
    else:
        parts["weights"] = size * trained / weight_ranks
        parts["gradients"] = size * trained / (1 if strategy.sharding == "zero1" else ranks)
        parts["optimizer"] = 12.0 * trained / ranks
        gathered = two_layers if strategy.shards_weights else 0.0
        parts["copies"] = 4.0 * trained / ranks + gathered
    if work.quantized:  # the weight at work, in the dtype of the computation
        facts = work.policy
        widest = max(facts.intermediate_size, facts.query_size)
        parts["copies"] += size * facts.hidden_size * widest
    if work.has_reference and work.lora_rank is None:
        parts["reference"] = size * work.policy.num_params / weight_ranks
    parts["teachers"] = size * sum(facts.num_params for facts in work.teachers)
    return {name: value for name, value in parts.items() if value}


def frozen_bytes(work: Workload) -> float:
    """Return the bytes of the base of a LoRA run.

    In 4 bits (arXiv 2305.14314, section 3) the linear layers of the blocks have `_NF4_BITS` a weight; embeddings, head,
    norms and the experts of a mixture stay as they are.
    """
    facts = work.policy
    size = work.bytes_per_value
    if not work.quantized:
        return facts.num_params * size
    per_layer = facts.attention_params + (facts.expert_params if facts.num_experts == 1 else 0)
    linear = facts.num_hidden_layers * per_layer
    return linear * _NF4_BITS / 8 + (facts.num_params - linear) * size


def saved_per_token(work: Workload) -> float:
    """Return the bytes that one token leaves in one layer for the backward pass, without gradient checkpointing.

    Counted per operation, as arXiv 2205.05198 (section 4.1) does for its layer; this layer has RMSNorm, rotary
    embeddings, keys repeated for grouped queries, attention that keeps no scores, and a gated MLP.
    """
    facts = work.policy
    size = work.bytes_per_value
    norms = 2 * 4 * facts.hidden_size  # the float32 that each norm squares
    inputs = 2 * size * facts.hidden_size  # inputs of the linear layers after each norm
    # Queries, repeated keys and values, output, and the projection's input.
    attention = 5 * size * facts.query_size + 4 * facts.num_attention_heads
    # Gate, its activation, up, their product.
    mlp = 4 * size * facts.intermediate_size * facts.num_experts_per_token
    if work.lora_rank is None:  # norms with trained weights keep more
        return norms + inputs + attention + mlp + 2 * 4 * facts.hidden_size
    return norms + inputs + attention + mlp + 7.0 * 4 * work.lora_rank


def micro_batch_tokens(work: Workload, strategy: Strategy) -> int:
    """Return the tokens of one forward pass: a prompt once for a whole group, and every completion."""
    groups = max(1.0, strategy.micro_batch / work.group_size)
    return round(groups * work.prompt_tokens + strategy.micro_batch * work.max_tokens)


def activations(work: Workload, strategy: Strategy) -> Parts:
    """Return what the forward pass leaves for the backward pass, and the logits of one tile.

    Checkpointing keeps every layer's input and the activations of one layer (arXiv 2205.05198, section 5).
    """
    facts = work.policy
    tokens = micro_batch_tokens(work, strategy)
    if work.has_critic:  # one backward for both
        tokens *= 2
    layer = tokens * saved_per_token(work)
    kept = facts.num_hidden_layers * layer
    if strategy.checkpointing:
        kept = (
            layer + facts.num_hidden_layers * tokens * work.bytes_per_value * facts.hidden_size
        )
    tile = min(HEAD_TILE, strategy.micro_batch * work.max_tokens)
    logits = tile * facts.vocab_size * _LOGIT_BYTES * (1 + len(work.teachers))
    return {"activations": kept, "logits": float(logits)}


def trainer_peak(work: Workload, strategy: Strategy) -> Parts:
    """Return one rank's peak. In a single pass, gradients replace activations one by one."""
    states = dict(trainer_states(work, strategy))
    kept = activations(work, strategy)
    if strategy.num_passes(work) == 1:
        states["gradients"] = max(0.0, states["gradients"] - sum(kept.values()))
    return {name: value for name, value in {**states, **kept}.items() if value}


def largest_weight(facts: ModelFacts) -> float:
    """Return the bytes of the largest weight in float32: a sync gathers one weight at a time."""
    return 4.0 * max(
        facts.head_params, facts.expert_params / 3, facts.hidden_size * facts.query_size
    )


# -- engines -----------------------------------------------------------------------------------------------------------


class EngineMemory(NamedTuple):
    """Bytes of one role's engine on one device; `at_once` sequences fit into its cache together."""

    weights: float
    kv_cache: float
    workspace: float
    overhead: float
    at_once: int

    @property
    def awake(self) -> float:
        return self.weights + self.kv_cache + self.workspace + self.overhead


class EngineNeed(NamedTuple):
    """Requirements of an engine. Tokens are of one sequence; `longest` is what vLLM must be able to hold."""

    facts: ModelFacts
    bytes_per_value: int
    tensor_parallel: int
    sequences: int
    tokens: int
    longest: int

    @property
    def token_bytes(self) -> float:
        """Cache of a token on each device; with fewer KV heads than devices, several have the same head."""
        kv_heads = self.facts.num_key_value_heads
        return self.facts.kv_values * self.bytes_per_value / min(self.tensor_parallel, kv_heads)

    @property
    def weights(self) -> float:
        return engine_weight_bytes(
            self.facts, self.bytes_per_value, tensor_parallel=self.tensor_parallel
        )

    @property
    def workspace(self) -> float:
        """The widest tensors of a prefill step, and 12 bytes for every logit of a decoding step."""
        facts = self.facts
        widths = (
            2 * facts.intermediate_size * facts.num_experts_per_token + 4 * facts.hidden_size
        )
        widest = _PREFILL_TOKENS * widths * self.bytes_per_value / self.tensor_parallel
        return widest + 3.0 * 4 * self.sequences * facts.vocab_size

    @property
    def without_cache(self) -> float:
        return self.weights + self.workspace + _ENGINE_BYTES

    @property
    def least_cache(self) -> float:
        return self.token_bytes * self.longest

    @property
    def least(self) -> float:
        """Bytes on each of its GPUs of an engine that has room for one of its longest sequences."""
        return self.without_cache + self.least_cache

    def engine(self, cache: float) -> EngineMemory:
        """Return the engine with so many bytes of cache."""
        at_once = 0
        if cache >= self.least_cache:
            at_once = int(min(self.sequences, cache // (self.token_bytes * self.tokens)))
        return EngineMemory(
            self.weights, max(0.0, cache), self.workspace, _ENGINE_BYTES, at_once
        )


def engine_weight_bytes(
    facts: ModelFacts, bytes_per_value: int, *, tensor_parallel: int, on_cpu: bool = False
) -> float:
    """Count weights three times on a CPU: with vLLM's packed copies, and the mapped file of the last sync."""
    return facts.num_params * bytes_per_value / tensor_parallel * (3 if on_cpu else 1)


def engine_needs(work: Workload, strategy: Strategy) -> Mapping[str, EngineNeed]:
    """Return what the engines of one slot hold, by role."""
    tokens = work.prompt_tokens + work.max_tokens
    needs = {
        ROLLOUT: EngineNeed(
            work.policy,
            work.bytes_per_value,
            strategy.tensor_parallel,
            _sequences(work, strategy.all_slots * strategy.engines_per_slot(ROLLOUT)),
            tokens,
            max(tokens, work.max_model_len),
        )
    }
    if work.judge is not None:
        tokens = work.judge_prompt_tokens + work.max_tokens + work.judge_tokens
        needs[work.judge_role] = EngineNeed(
            work.judge,
            work.bytes_per_value,
            strategy.judge_tensor_parallel,
            _sequences(work, strategy.all_slots * strategy.engines_per_slot(work.judge_role)),
            tokens,
            usual_length(
                work.judge.context_length, new_tokens=work.max_tokens + work.judge_tokens
            ),
        )
    return needs


def _sequences(work: Workload, num_engines: int) -> int:
    """Return the sequences that each engine has at once."""
    share = round(work.completions * work.draws / max(1, num_engines))
    return max(1, min(_MAX_SEQUENCES, share))


def _engine_on_cpu(need: EngineNeed) -> EngineMemory:
    steps = ceil(need.token_bytes * need.tokens * need.sequences / _CPU_CACHE_STEP)
    weights = engine_weight_bytes(
        need.facts, need.bytes_per_value, tensor_parallel=need.tensor_parallel, on_cpu=True
    )
    cache = max(1, steps) * _CPU_CACHE_STEP
    return EngineMemory(weights, cache, 0.0, _ENGINE_BYTES, need.sequences)


def engines_on_gpu(
    needs: Mapping[str, Sequence[EngineNeed]],
    trainer: TrainerMemory,
    capacity: float,
    *,
    sleeps: bool,
    offload: Offload,
) -> Mapping[str, list[EngineMemory]]:
    """Return engines by role, as many on a device as the role has models, with the cache that they need or that fits.

    Those of a role are awake together; of several roles one is at a time where engines sleep, and all are where not.
    """
    if not sleeps:
        together = [need for role_needs in needs.values() for need in role_needs]
        awake = iter(_fill(together, capacity - trainer.peak))
        return {role: [next(awake) for _ in role_needs] for role, role_needs in needs.items()}
    num_models = sum(map(len, needs.values()))
    engines = {}
    for role, role_needs in needs.items():
        asleep = ASLEEP_BYTES * (num_models - len(role_needs))
        engines[role] = _fill(role_needs, capacity - trainer.resting[offload] - asleep)
    return engines


def _fill(needs: Sequence[EngineNeed], room: float) -> list[EngineMemory]:
    """Return engines that are awake together in `room` bytes.

    Each has room for its longest sequence; where there is too little for all, each gets the same share of what it could
    use beyond that.
    """
    wanted = [
        max(0.0, need.token_bytes * need.tokens * need.sequences - need.least_cache)
        for need in needs
    ]
    left = room - sum(need.least for need in needs)
    share = min(1.0, max(0.0, left) / max(1.0, sum(wanted)))
    engines = []
    for need, more in zip(needs, wanted, strict=True):
        engine = need.engine(need.least_cache + share * more)
        engines.append(engine if left >= 0 else engine._replace(at_once=0))
    return engines


# -- phases ------------------------------------------------------------------------------------------------------------


def capacity_of(fleet: Fleet) -> float:
    """Return the bytes that a plan may use of a device, or of the machine for a CPU."""
    return fleet.device.memory_bytes * (HOST_SHARE if fleet.device.on_cpu else DEVICE_SHARE)


def step_memory(
    work: Workload, strategy: Strategy, fleet: Fleet
) -> tuple[Parts, Mapping[str, EngineMemory], Mapping[str, Parts]]:
    """Return one rank's trainer at its peak, the engines by role, and bytes by phase and role on the fullest device."""
    needs = engine_needs(work, strategy)
    if fleet.device.on_cpu:
        trainer = trainer_memory(work, strategy, ON_CPU)
        on_cpu = {role: _engine_on_cpu(need) for role, need in needs.items()}
        policy_bytes = float(work.policy.num_params * work.bytes_per_value)
        syncing = trainer.resting["none"] + trainer.gather + min(_SYNC_BYTES, policy_bytes)
        processes = {role: engine.awake * strategy.slots for role, engine in on_cpu.items()}
        processes = {"trainer": max(trainer.peak, syncing) * strategy.ranks, **processes}
        return trainer.parts, on_cpu, {"all at once": processes}
    trainer = trainer_memory(work, strategy)
    beside = NO_TRAINER if strategy.engines_are_apart else trainer
    sleeps = strategy.sleeps
    offload = strategy.offload
    engines = engines_on_gpu(
        {role: [need] for role, need in needs.items()},
        beside,
        capacity_of(fleet),
        sleeps=sleeps,
        offload=offload,
    )
    phases = dict(gpu_phases(engines, beside, sleeps=sleeps, offload=offload))
    if strategy.engines_are_apart:
        phases["train"] = {"trainer": trainer.peak}
    return trainer.parts, {role: engines[role][0] for role in engines}, phases


def gpu_phases(
    engines: Mapping[str, Sequence[EngineMemory]],
    trainer: TrainerMemory,
    *,
    sleeps: bool,
    offload: Offload,
) -> Mapping[str, Parts]:
    """Return the phases of a device. It has an engine of every role."""
    awake = {role: sum(engine.awake for engine in models) for role, models in engines.items()}
    idle = awake
    if sleeps:
        idle = {role: ASLEEP_BYTES * len(models) for role, models in engines.items()}
    resting = trainer.resting[offload]
    phases = {
        "train": {"trainer": trainer.peak, **idle},
        "sync": {"trainer": resting + trainer.gather, **idle},  # before an engine wakes
    }
    for role, phase in {ROLLOUT: "generate", **PHASES}.items():
        if role == ROLLOUT or role in engines:
            phases[phase] = {"trainer": resting, **idle, role: awake[role]}
    return phases
