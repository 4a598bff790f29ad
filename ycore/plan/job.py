"""A job (one step's work) and a way to run it: the two values that memory and time are functions of."""

from dataclasses import dataclass
from typing import Literal, get_args

from ycore.config.batch import derive_batch
from ycore.config.learner_rules import teaches_alone
from ycore.config.schema import Offload, RunConfig
from ycore.errors import ConfigError
from ycore.placement.placement import JUDGE, REWARD_MODEL, ROLLOUT, TEACHER, Kind
from ycore.plan.model_facts import ModelFacts

Sharding = Literal["ddp", "zero1", "zero2", "zero3", "fsdp2"]
PHASES = {JUDGE: "judge", REWARD_MODEL: "score", TEACHER: "teach"}
"""What a model that scores is doing."""

SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)


@dataclass(frozen=True, slots=True)
class Job:
    """One step's work. Tokens are per sequence."""

    policy: ModelFacts
    prompts_per_step: int = 8
    group_size: int = 8
    prompt_tokens: int = 256
    completion_tokens: int = 256  # mean length of a completion
    max_tokens: int = 256
    max_model_len: int = 4096
    lora_rank: int | None = 16  # None trains every weight
    quantized: bool = False  # the frozen base of a LoRA run in 4 bits
    bytes_per_value: int = 2  # 2 computes in bfloat16, 4 in float32
    draws: float = 1.0  # groups generated for each one trained on (dynamic sampling)
    has_reference: bool = (
        False  # for the KL term; with LoRA, the policy without adapters, so it costs nothing
    )
    has_critic: bool = (
        False  # PPO's: the policy's frozen weights with adapters of its own, or every weight again
    )
    teachers: tuple[ModelFacts, ...] = ()  # that every rank holds itself
    judge: ModelFacts | None = None  # or a reward model or a teacher, which an engine serves
    judge_role: str = JUDGE
    judge_prompt_tokens: int = 256
    judge_tokens: int = 128

    @property
    def completions(self) -> int:
        """Completions of a step that are trained on."""
        return self.prompts_per_step * self.group_size

    @property
    def trainable(self) -> int:
        """Of the policy, and of its critic."""
        facts = self.policy
        if self.lora_rank is None:
            own, critic = (
                facts.num_params,
                facts.num_params - (0 if facts.tied else facts.head_params),
            )
        else:
            own = critic = facts.lora_params(self.lora_rank)
        return own + (critic + facts.hidden_size + 1 if self.has_critic else 0)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a job. On GPUs every device is a rank of the trainer and also serves engines."""

    ranks: int
    slots: int  # blocks of devices that can work at the same time, each for one role
    sharding: Sharding = "ddp"
    micro_batch: int = 8  # completions in one forward pass of a rank
    checkpointing: bool = False
    tensor_parallel: int = 1  # devices that an engine of the policy spans
    judge_tensor_parallel: int = (
        1  # and one of the judge; a slot is as wide as the wider of the two
    )
    kind: Kind = "colocated"
    judge_slots: int = 0  # slots of the judge in a split
    sleeps: bool = False  # engines free their memory while the trainer trains
    offload: Offload = "none"

    def width(self, role: str) -> int:
        return self.tensor_parallel if role == ROLLOUT else self.judge_tensor_parallel

    def engines(self, role: str) -> int:
        """Engines of a role on one slot."""
        return max(self.tensor_parallel, self.judge_tensor_parallel) // self.width(role)

    @property
    def shards_weights(self) -> bool:
        return self.sharding in ("zero3", "fsdp2")

    def num_passes(self, job: Job) -> int:
        """Micro-batches of one rank in a step."""
        return max(1, round(job.completions / self.ranks / self.micro_batch))

    @property
    def in_words(self) -> str:
        """For people, e.g. `colocated, zero2, micro-batch 4`."""
        placed: str = self.kind
        if self.kind == "split":
            placed = f"split {self.slots - self.judge_slots}:{self.judge_slots}"
        words = [
            placed,
            self.sharding if self.ranks > 1 else "one rank",
            f"micro-batch {self.micro_batch}",
        ]
        words += ["gradient checkpointing"] if self.checkpointing else []
        policy, judge = self.tensor_parallel, self.judge_tensor_parallel
        if policy != judge:
            words += [f"engines over {policy} device{'s' * (policy > 1)}, the judge's over {judge}"]
        elif policy > 1:
            words += [f"engines over {policy} devices"]
        words += ["engines asleep while training"] if self.sleeps else []
        away = {"optimizer": "optimizer's state", "weights": "optimizer's state and frozen weights"}
        words += (
            [f"{away[self.offload]} in host memory during rounds"] if self.offload != "none" else []
        )
        return ", ".join(words)


PROMPT_TOKENS = 256  # the length of a prompt where none is given
LONGEST = 4096
_VERDICT_TOKENS = 128
_DYNAMIC_DRAWS = (
    1.5  # groups drawn for each one kept, before anything is measured (DAPO, arXiv 2503.14476, 3.2)
)


def job_of(
    config: RunConfig,
    policy: ModelFacts,
    *,
    judge: ModelFacts | None = None,
    judge_role: str = JUDGE,
    judge_tokens: int | None = None,
    prompt_tokens: int | None = None,
    completion_tokens: int | None = None,
) -> Job:
    """The job of a run; by default a mean prompt has 256 tokens, a verdict at most 128, and completions the most.

    For a policy that sees, a mean prompt has one picture too. A reward model or a teacher reads what the policy has
    read and written, and writes nothing.
    """
    context = policy.context_length or LONGEST
    prompt_tokens = prompt_tokens or PROMPT_TOKENS + policy.image_tokens
    return Job(
        policy=policy,
        prompts_per_step=config.prompts_per_step,
        group_size=config.group_size,
        prompt_tokens=prompt_tokens,
        completion_tokens=min(completion_tokens or config.max_tokens, config.max_tokens),
        max_tokens=config.max_tokens,
        max_model_len=config.engine.max_model_len or min(context, LONGEST),
        lora_rank=None if config.lora is None else config.lora.r,
        quantized=config.quantize is not None,
        bytes_per_value=4 if config.dtype == "float32" else 2,
        draws=_DYNAMIC_DRAWS if config.sampling.dynamic and not teaches_alone(config) else 1.0,
        has_reference=bool(config.trl.get("beta")),
        has_critic=config.critic is not None,
        judge=judge,
        judge_role=judge_role,
        judge_prompt_tokens=PROMPT_TOKENS if judge_role == JUDGE else prompt_tokens,
        judge_tokens=judge_tokens or (_VERDICT_TOKENS if judge_role == JUDGE else 1),
    )


def micro_batch_of(config: RunConfig, *, ranks: int, on_cpu: bool) -> int:
    """Completions in one forward pass of a rank, as the run would derive them; 1 where its sizes do not work."""
    try:
        return derive_batch(config, world_size=ranks, on_cpu=on_cpu).per_device_train_batch_size
    except ConfigError:
        return 1
