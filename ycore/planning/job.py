"""What is to be run, and one way to run it: the two values that memory and time are functions of.

Not here: which ways there are (`search`), and where the values come from (`jobs`).
"""

from dataclasses import dataclass
from typing import Literal

from ycore.planning.facts import ModelFacts

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
