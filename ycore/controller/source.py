"""The trainer's rounds: weights to the engines, then a round, on an event loop of its own between training steps.

Not here: what a round does (`round`), and whose weights they are (`algorithms.weights` writes them).
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ycore.controller.draws import DrawSource, completion_seed
from ycore.controller.round import Round, RoundStats
from ycore.errors import Interrupted, YcoreError
from ycore.rewards.pool import RewardPool
from ycore.roles.engine import Engine
from ycore.types import Completion, Group, Prompt

T = TypeVar("T")

WriteWeights = Callable[[Path], int]
"""Writes the policy's weights into a folder and returns the bytes written."""

Record = Callable[[str, float], None]


class Rounds:
    """A `RoundSource`: what the trainer asks for its next groups."""

    def __init__(
        self,
        *,
        engines: Sequence[Engine],
        rewards: RewardPool,
        draws: DrawSource,
        group_size: int,
        seed: int,
        weights_folder: Path,
        write_weights: WriteWeights,
        freezes_weights: bool = False,
    ) -> None:
        self.stop = threading.Event()
        self.record: Record = lambda name, value: None
        self._engines = engines
        self._rewards = rewards
        self._draws = draws
        self._round = Round(engines, rewards, group_size=group_size, seed=seed)
        self._weights_folder = weights_folder
        self._write_weights = write_weights
        self._freezes_weights = freezes_weights
        self._synced: int | None = None
        self._runner = asyncio.Runner()

    def start(self, *, timeout_s: float) -> None:
        """Wait for the engines and start the reward workers."""
        self._run(self._start(timeout_s))

    async def _start(self, timeout_s: float) -> None:
        await asyncio.gather(self._rewards.start(), *(engine.wait_ready(timeout_s=timeout_s) for engine in self._engines))

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        """Sync the engines to the policy of this step, then return that many scored groups of this rank."""
        self.sync(step)
        draws = [self._draws.draw() for _ in range(num_groups)]
        started = time.perf_counter()
        groups, stats = self._run(self._round.run(draws, step=step))
        self._report(stats, time.perf_counter() - started)
        return groups

    def sync(self, version: int) -> None:
        """Give every engine the policy's weights as this version, unless it has them."""
        started = time.perf_counter()
        if self._synced != version and not self._freezes_weights:
            num_bytes = self._write_weights(self._weights_folder)
            self._run(self._load(version))
            self.record("ycore/sync_mb", num_bytes / 1e6)
        self._synced = version
        self.record("ycore/time/sync", time.perf_counter() - started)

    async def _load(self, version: int) -> None:
        await asyncio.gather(*(engine.load_weights(self._weights_folder, version) for engine in self._engines))

    def sample(self, prompts: Sequence[tuple[Prompt, tuple[int, ...]]], *, version: int) -> list[dict[str, Any]]:
        """One completion to each prompt by this version of the policy, always with the same seeds."""
        self.sync(version)
        completions = self._run(self._ask(prompts))
        return [
            {"row": prompt.row, "prompt": prompt.content, "completion": completion.text}
            for (prompt, _), completion in zip(prompts, completions, strict=True)
        ]

    async def _ask(self, prompts: Sequence[tuple[Prompt, tuple[int, ...]]]) -> list[Completion]:
        engine = self._engines[0]
        return await asyncio.gather(
            *(engine.complete(token_ids, completion_seed(0, prompt.row, 0)) for prompt, token_ids in prompts)
        )

    def _report(self, stats: RoundStats, seconds: float) -> None:
        self.record("ycore/time/round", seconds)
        self.record("ycore/time/generate", stats.generate_s)
        self.record("ycore/tokens_per_s", stats.num_tokens / seconds)
        self.record("ycore/masked", float(stats.num_masked))

    def close(self) -> None:
        self._run(self._close(), heed_stop=False)
        self._runner.close()

    async def _close(self) -> None:
        await asyncio.gather(self._rewards.close(), *(engine.close() for engine in self._engines))

    def _run(self, work: Coroutine[Any, Any, T], *, heed_stop: bool = True) -> T:
        return self._runner.run(_until(work, self.stop) if heed_stop else work)


async def _until(work: Awaitable[T], stop: threading.Event) -> T:
    """The work's result, or Interrupted as soon as `stop` is set; one plain error out of a group of them."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_watch(stop))
    done, _ = await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    for pending in {task, watch} - done:
        pending.cancel()
    if task not in done:
        await asyncio.gather(task, return_exceptions=True)
        raise Interrupted("interrupted while generating; the last finished step stands")
    try:
        return task.result()
    except BaseExceptionGroup as group:
        raise _first(group) from group


async def _watch(stop: threading.Event) -> None:
    while not stop.is_set():
        await asyncio.sleep(0.1)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show of several that came at once: ours before others, the first before the rest."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((leaf for leaf in leaves if isinstance(leaf, YcoreError)), leaves[0])
