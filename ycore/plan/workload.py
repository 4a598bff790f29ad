"""A workload (one step's work) and a strategy to run it: the two values that memory and time are functions of."""

from dataclasses import dataclass
from typing import Literal, get_args

from ycore.config.schema import Offload, RunConfig
from ycore.placement.placement import JUDGE, REWARD_MODEL, ROLLOUT, TEACHER
from ycore.plan.model_facts import ModelFacts
from ycore.scoring.scoring import ServedModel

Sharding = Literal["ddp", "zero1", "zero2", "zero3", "fsdp2"]
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)

PHASES = {JUDGE: "judge", REWARD_MODEL: "score", TEACHER: "teach"}
"""The phase of a step in which a model that scores is busy."""

PROMPT_TOKENS = 256
"""The length of a prompt where none is given."""

MAX_CONTEXT = 4096
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

    def width(self, role: str) -> int:
        return self.tensor_parallel if role == ROLLOUT else self.judge_tensor_parallel

    def engines_per_slot(self, role: str) -> int:
        return max(self.tensor_parallel, self.judge_tensor_parallel) // self.width(role)

    @property
    def spans_devices(self) -> bool:
        """Whether an engine spans several devices."""
        return max(self.tensor_parallel, self.judge_tensor_parallel) > 1

    @property
    def shards_weights(self) -> bool:
        return self.sharding in ("zero3", "fsdp2")

    def num_passes(self, work: Workload) -> int:
        """Micro-batches of one rank in a step."""
        return max(1, round(work.completions / self.ranks / self.micro_batch))

    @property
    def in_words(self) -> str:
        """A description for people, e.g. `colocated, zero2, micro-batch 4`."""
        words: list[str] = [self.kind]
        words.append(self.sharding if self.ranks > 1 else "one rank")
        words.append(f"micro-batch {self.micro_batch}")
        if self.checkpointing:
            words.append("gradient checkpointing")
        width, judge_width = self.tensor_parallel, self.judge_tensor_parallel
        if width != judge_width:
            devices = "devices" if width > 1 else "device"
            words.append(f"engines over {width} {devices}, the judge's over {judge_width}")
        elif width > 1:
            words.append(f"engines over {width} devices")
        if self.sleeps:
            words.append("engines asleep while training")
        if self.offload != "none":
            words.append(f"{OFFLOADED[self.offload]} in host memory during rounds")
        return ", ".join(words)


OFFLOADED = {
    "optimizer": "optimizer's state",
    "weights": "optimizer's state and frozen weights",
}


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
    context = policy.context_length or MAX_CONTEXT
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
        max_model_len=config.engine.max_model_len or min(context, MAX_CONTEXT),
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
