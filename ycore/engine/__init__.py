"""Engine: what a controller asks of whatever generates, and the settings both kinds sample with.

Not here: the two that exist, `vllm_engine` (a server of its own, over a unix socket) and `transformers_engine` (the
trainer's own model), and how a server's process starts (`rollout`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ycore.types import Completion


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn; field names are the OpenAI and vLLM request's."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()


class Engine(Protocol):
    """One engine, as a controller sees it."""

    name: str

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Return once the engine answers; EngineError when it does not in time."""

    async def complete(self, prompt_ids: Sequence[int], seed: int, *, greedy: bool = False) -> Completion:
        """One completion. One request each, so that every completion can be scored as it ends and asked again alone.

        `greedy` takes the likeliest token each time, whatever the run's sampling says.
        """

    async def logprobs_of(self, context_ids: Sequence[int], target_ids: Sequence[int]) -> tuple[float, ...]:
        """The policy's log-probability of each target token, given the context and the targets before it."""

    async def load_weights(self, folder: Path, version: int) -> None:
        """Take the weights in `folder` as policy version `version`; SyncError unless the engine then says so."""

    async def close(self) -> None:
        """Let go of connections; the process, if any, is the launcher's."""
