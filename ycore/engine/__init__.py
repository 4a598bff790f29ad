"""What generates completions: the `Engine` that a round asks, and the `Sampling` settings.

Two engines implement it: `vllm_engine` (a vLLM server, over a unix socket) and `transformers_engine` (the trainer's
own model).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from ycore.types import Completion, Prompt

NEVER = -100.0
"""A `logit_bias` with which a token is not written; vLLM takes none below."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are sampled; the field names are those of vLLM's requests."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] | None = None


class Engine(Protocol):
    name: str

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Return once the engine answers; EngineError where it does not in time."""

    async def complete(
        self,
        prompt_ids: Sequence[int],
        seed: int,
        *,
        greedy: bool = False,
        max_tokens: int | None = None,
        prompt: Prompt | None = None,
    ) -> Completion:
        """Sample one completion. One request each, so that each is scored as it ends and can be retried alone.

        Args:
            seed: The same seed gives the same completion from the same weights.
            greedy: Take the likeliest token every time, whatever `Sampling` says.
            max_tokens: At most so many, in place of `Sampling`'s.
            prompt: With pictures, which are in no token ids; None without any.
        """

    async def logprobs_of(
        self, context_ids: Sequence[int], target_ids: Sequence[int]
    ) -> tuple[float, ...]:
        """The log-probability of each target token under the policy, given the context and the targets before it."""

    async def load_weights(self, folder: Path, version: int) -> None:
        """Load the policy's new weights.

        Args:
            folder: What `weights.write_weights` wrote, with its manifest.
            version: The policy version of these weights; SyncError where the folder or then the engine holds another.
        """

    async def close(self) -> None:
        """Close connections; the process, if any, is the launcher's."""


@runtime_checkable
class Halting(Protocol):
    """An engine that can give back completions before they are whole. `in_flight`: its requests without an answer."""

    in_flight: int

    async def abort(self) -> None:
        """Have `complete` return what was written, with the finish reason `abort`, for all that this client asked."""
