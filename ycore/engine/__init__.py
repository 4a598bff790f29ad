"""The `Engine` that a round asks for completions, and the `SamplingParams` settings of its requests.

`kinds` has the kinds of engines: `vllm_engine` (a vLLM server, over a unix socket) and `transformers_engine` (the
trainer's own model).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ycore.placement.slots import Sleeper
from ycore.types import Completion, Prompt

NEVER = -100.0
"""The `logit_bias` of a token that must not be sampled; vLLM takes none below."""


@dataclass(frozen=True)
class SamplingParams:
    """SamplingParams parameters; the field names are those of vLLM's requests."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] | None = None


class WeightSource(NamedTuple):
    """The policy's weights in the trainer's memory.

    Attributes:
        weights: Yields each weight's checkpoint name and tensor, the same until the next step.
        device: The torch device that they are on.
    """

    weights: Callable[[], Iterator[tuple[str, Any]]]
    device: Any


class Engine:
    """A client of what writes completions. The defaults are those of an engine that lives in the trainer's process.

    Attributes:
        in_flight: Requests of this client without an answer.
        restarts: How often a new process has replaced the one before, each counted by one rank's client.
        is_home: Whether this client sends the engine its weights and reports its metrics; one rank's does.
        verified_share: The share of the tensors and bytes sent last that were read back and were right.
        sleeper: Puts the engine to sleep and wakes it; None where it cannot sleep.
        version: The policy version of its weights.
    """

    name: str
    in_flight = 0
    restarts = 0
    is_home = False
    verified_share = 0.0
    sleeper: Sleeper | None = None
    version = 0

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
            greedy: Take the likeliest token every time, whatever `SamplingParams` says.
            max_tokens: Limit of this completion, in place of `SamplingParams`'s.
            prompt: The prompt with its pictures, which are in no token ids; None without any.
        """
        raise NotImplementedError

    async def logprobs_of(
        self, context_ids: Sequence[int], target_ids: Sequence[int]
    ) -> tuple[float, ...]:
        """Return the log-probability of each target token under the policy, given the tokens before it."""
        raise NotImplementedError

    async def load_weights(self, folder: Path, version: int) -> None:
        """Load the policy's new weights.

        Args:
            folder: The output of `weights.write_weights`, with its manifest.
            version: The policy version of these weights; SyncError where the folder or then the engine holds another.
        """
        self.version = version  # the trainer's own

    async def abort(self) -> None:
        """Have `complete` return what was written so far, with the finish reason `abort`, for all in flight."""

    async def close(self) -> None:
        """Close connections; the process, if any, is the launcher's."""
