"""What is to be run, and one way to run it: the two values that memory and time are functions of.

From a run's settings to the job that is planned: its sizes, and what TRL's fields say of memory and time.

Not here: which ways there are (`search`), and where the values come from (`jobs`).
"""

from dataclasses import dataclass
from typing import Any, Literal

from ycore.config.batch import Sizes, plan_batch, problem_of
from ycore.config.schema import RunConfig
from ycore.plan.model_facts import ModelFacts

Sharding = Literal["ddp", "zero1", "zero2", "zero3", "fsdp2"]
SHARDINGS: tuple[Sharding, ...] = ("ddp", "zero1", "zero2", "zero3", "fsdp2")

Kind = Literal["colocated", "split", "dynamic"]


@dataclass(frozen=True, slots=True)
class Job:
    """One step's work. Tokens are per sequence."""

    policy: ModelFacts
    prompts_per_step: int = 8
    group_size: int = 8
    prompt_tokens: int = 256
    completion_tokens: int = 256
    """Mean length of a completion."""

    max_tokens: int = 256
    max_model_len: int = 4096
    lora_rank: int | None = 16
    """None trains every weight."""

    bytes_per_value: int = 2
    """2 computes in bfloat16, 4 in float32."""

    draws: float = 1.0
    """Groups generated for each one trained on (dynamic sampling)."""

    has_reference: bool = False
    """A frozen copy for the KL term; adapters switched off serve as one, so it costs memory without LoRA only."""

    judge: ModelFacts | None = None
    judge_prompt_tokens: int = 256
    judge_tokens: int = 128

    @property
    def completions(self) -> int:
        """That are trained on."""
        return self.prompts_per_step * self.group_size

    @property
    def sequence_tokens(self) -> int:
        """The longest sequence that the trainer may meet."""
        return self.prompt_tokens + self.max_tokens

    @property
    def trainable(self) -> int:
        """Parameters with a gradient."""
        return self.policy.num_params if self.lora_rank is None else self.policy.lora_params(self.lora_rank)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a job. On GPUs training has every device, one rank each, and so has a slot of engines."""

    ranks: int
    slots: int
    """Engines that can work at the same time, whichever role they are of."""

    sharding: Sharding = "ddp"
    micro_batch: int = 8
    """Completions in one forward pass of a rank."""

    checkpointing: bool = False
    tensor_parallel: int = 1
    """Devices that one engine spans."""

    kind: Kind = "colocated"
    judge_slots: int = 0
    """Slots of the judge, where they are apart."""

    sleeps: bool = False
    """Engines give their memory back while the trainer trains; else all is there at once."""

    @property
    def in_words(self) -> str:
        """As a person would say it, shortest first."""
        placed: str = self.kind
        if self.kind == "split":
            placed = f"split {self.slots - self.judge_slots}:{self.judge_slots}"
        words = [placed, self.sharding if self.ranks > 1 else "one rank", f"micro-batch {self.micro_batch}"]
        words += ["gradient checkpointing"] if self.checkpointing else []
        words += [f"engines over {self.tensor_parallel} devices"] if self.tensor_parallel > 1 else []
        words += ["engines asleep while training"] if self.sleeps else []
        return ", ".join(words)


PROMPT_TOKENS = 256
"""Taken for a prompt's length where it is not told."""

_LONGEST = 4096
_VERDICT_TOKENS = 128
_YIELD = 1.5
"""Groups drawn for each one kept with dynamic sampling, where nothing was measured (DAPO, arXiv 2503.14476, 3.2)."""


def job_of(
    config: RunConfig,
    policy: ModelFacts,
    *,
    judge: ModelFacts | None = None,
    judge_tokens: int | None = None,
    prompt_tokens: int | None = None,
    completion_tokens: int | None = None,
) -> Job:
    """The job of a run; a completion is taken to be as long as it may be unless a mean is told."""
    context = policy.context_length or _LONGEST
    return Job(
        policy=policy,
        prompts_per_step=config.prompts_per_step,
        group_size=config.group_size,
        prompt_tokens=prompt_tokens or PROMPT_TOKENS,
        completion_tokens=min(completion_tokens or config.max_tokens, config.max_tokens),
        max_tokens=config.max_tokens,
        max_model_len=config.engine.max_model_len or min(context, _LONGEST),
        lora_rank=None if config.lora is None else config.lora.r,
        bytes_per_value=4 if config.dtype == "float32" else 2,
        draws=_YIELD if config.sampling.dynamic else 1.0,
        has_reference=bool(config.trl.get("beta")),
        judge=judge,
        judge_tokens=judge_tokens or _VERDICT_TOKENS,
    )


def micro_batch_of(config: RunConfig, *, ranks: int, on_cpu: bool) -> int:
    """Completions in one forward pass of a rank, as the run would derive them; 1 where its sizes do not work."""
    sizes = Sizes(
        world_size=ranks,
        prompts_per_step=config.prompts_per_step,
        group_size=config.group_size,
        max_tokens=config.max_tokens,
        per_device_train_batch_size=config.trl.get("per_device_train_batch_size"),
        gradient_accumulation_steps=config.trl.get("gradient_accumulation_steps"),
    )
    if problem_of(sizes, on_cpu=on_cpu) is not None:
        return 1
    return plan_batch(sizes, on_cpu=on_cpu).per_device_train_batch_size


def asks_checkpointing(trl: dict[str, Any]) -> bool | None:
    """What the run says of gradient checkpointing; None where it leaves that to the defaults."""
    told = trl.get("gradient_checkpointing")
    return None if told is None else bool(told)
