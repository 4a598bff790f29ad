"""The trainer's rounds: weights to the engines, a round, groups dealt to the ranks; on an event loop of its own.

Not here: what a round does (`round`), and whose weights they are (`algorithms.weights` writes them).
"""

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ycore.engine import Engine
from ycore.engine.vllm_engine import VllmEngine
from ycore.errors import Interrupted, YcoreError
from ycore.round.peers import Peers
from ycore.round.round import Round, RoundStats, Rules
from ycore.round.sampling import Deal, DrawSource, Offer, Surplus, completion_seed, deal_groups, imbalance
from ycore.round.scoring import Scoring
from ycore.round.slots import ROLLOUT, Slots
from ycore.run.trace import SYNC
from ycore.types import Completion, Finished, Group, Prompt

T = TypeVar("T")

ShareWeights = Callable[[int], Path]
"""Puts the policy's weights, as a version, where engines can read them; all ranks call it together."""

Record = Callable[[str, float], None]


class Rounds:
    """A `RoundSource`: what the trainer asks for its next groups.

    `record` receives the step's metrics; `problems` counts what kept rewards of the last round from being given.
    """

    def __init__(
        self,
        *,
        engines: Sequence[Engine],
        scoring: Scoring,
        draws: DrawSource,
        rules: Rules,
        peers: Peers,
        share_weights: ShareWeights | None,
        max_surplus_age: int = 1,
        slots: Slots | None = None,
    ) -> None:
        self.stop = threading.Event()
        self.record: Record = lambda name, value: None
        self.problems: Counter[str] = Counter()
        self.draws = draws
        self.surplus = Surplus(max_age=max_surplus_age)
        self._engines = engines
        self._scoring = scoring
        self._peers = peers
        self.round = Round(engines, scoring, rules, peers, slots)
        self._share_weights = share_weights
        self._synced: int | None = None
        self._seconds = 0.0
        self._bytes_reported = peers.bytes_sent
        self._restarts_reported = 0
        self._runner = asyncio.Runner()

    def start(self, *, timeout_s: float) -> None:
        """Wait for the engines and whatever scores."""
        self._run(self._start(timeout_s))

    async def _start(self, timeout_s: float) -> None:
        ready = (engine.wait_ready(timeout_s=timeout_s) for engine in self._engines)
        await asyncio.gather(self._scoring.start(timeout_s=timeout_s), *ready)
        await self.round.slots.sleep()  # as some may be awake that a trainer before this one woke

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        """Sync the engines to the policy of this step, then return that many scored groups for this rank."""
        self.round.slots.begin_phase(SYNC)
        started = time.perf_counter()
        self.sync(step)
        self._took("ycore/time/sync", time.perf_counter() - started)
        started = time.perf_counter()
        ready = self.surplus.take(step)
        self.round.slots.begin_round()
        landed, stats = self._run(self._one_round(num_groups, ready=len(ready), step=step))
        seconds = time.perf_counter() - started
        for name, value in self.round.slots.end_round(self._peers.add_up, step=step).items():
            self.record(name, value)
        groups = self._deal([*ready, *landed], num_groups)
        self._took("ycore/time/round", time.perf_counter() - started)
        self._report(stats, seconds)
        return groups

    async def _one_round(self, need: int, *, ready: int, step: int) -> tuple[list[Finished], RoundStats]:
        async with self.round.slots.awake():
            return await self.round.run(self.draws.draw, need=need, ready=ready, step=step)

    def _took(self, metric: str, seconds: float) -> None:
        self.record(metric, seconds)
        self._seconds += seconds

    def take_seconds(self) -> float:
        """Seconds spent on syncs and rounds since this was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _deal(self, finished: list[Finished], num_groups: int) -> list[Group]:
        """The groups this rank trains on; what is not chosen and can teach is kept for the next round."""
        peers = self._peers
        offers = [
            Offer(peers.rank, index, item.group.draw.position, item.group.num_tokens, item.teaches)
            for index, item in enumerate(finished)
        ]
        deal = deal_groups(peers.gather_offers(offers), world=peers.world, per_rank=num_groups)
        came = peers.exchange(deal.moves, [item.group for item in finished])
        taken = {_key(offer) for hand in deal.chosen for offer in hand}
        self.surplus.put([item for item, offer in zip(finished, offers, strict=True) if _key(offer) not in taken])
        self._report_deal(deal)
        mine = deal.chosen[peers.rank]
        return [finished[o.index].group if o.rank == peers.rank else came[_key(o)] for o in mine]

    def sync(self, version: int) -> None:
        """Give every engine the policy's weights as this version, unless it has them."""
        if self._synced != version and self._share_weights is not None:
            folder = self._share_weights(version)
            self._run(self._load(folder, version))
        self._synced = version

    def should_stop(self) -> bool:
        """Whether any rank was asked to stop; all ranks ask together, and get the same answer."""
        return self._runner.run(self._peers.meet(stopping=self.stop.is_set()))

    async def _load(self, folder: Path, version: int) -> None:
        await asyncio.gather(*(engine.load_weights(folder, version) for engine in self._engines))

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
        asked = (engine.complete(token_ids, completion_seed(0, prompt.row, 0)) for prompt, token_ids in prompts)
        async with self.round.slots.awake(ROLLOUT):
            return await asyncio.gather(*asked)

    def _report(self, stats: RoundStats, seconds: float) -> None:
        """What the round took: counts over all ranks, times and the yield of this one."""
        self.problems = stats.problems
        moved = self._peers.bytes_sent - self._bytes_reported
        self._bytes_reported += moved
        rewards = [math.fsum(stats.rewards), len(stats.rewards)]  # exact, so that no order of arrival is told
        counts = [stats.num_tokens, stats.num_masked, stats.drawn, len(self.surplus), moved, self._take_restarts()]
        added = self._peers.add_up([*rewards, *counts])
        reward_sum, num_scored, num_tokens, num_masked, drawn, surplus, moved_by_all, restarts = added
        if num_scored:
            self.record("ycore/reward", reward_sum / num_scored)
        self.record("ycore/time/generate", stats.generate_s)
        self.record("ycore/tokens_per_s", num_tokens / seconds)
        self.record("ycore/masked", num_masked)
        self.record("ycore/sampling/drawn", drawn)
        self.record("ycore/sampling/yield", self.round.yields.rate)
        self.record("ycore/sampling/surplus", surplus)
        self.record("ycore/bytes_moved", moved_by_all)
        self.record("ycore/engine_restarts", restarts)
        for engine in self._engines:
            if isinstance(engine, VllmEngine) and self._share_weights is not None:
                self.record("ycore/sync_proved", engine.verified_share)
        for name, value in self._scoring.take_metrics(self._peers.add_up).items():
            self.record(name, value)

    def _take_restarts(self) -> int:
        """Engines of this rank that were found started again since this was last asked."""
        now = sum(engine.restarts for engine in self._engines if isinstance(engine, VllmEngine))
        new, self._restarts_reported = now - self._restarts_reported, now
        return new

    def _report_deal(self, deal: Deal) -> None:
        chosen = [offer for hand in deal.chosen for offer in hand]
        self.record("ycore/sampling/filled", float(sum(not offer.teaches for offer in chosen)))
        if len(deal.chosen) > 1:
            before = [sum(o.num_tokens for o in chosen if o.rank == rank) for rank in range(len(deal.chosen))]
            self.record("ycore/balance/before", imbalance(before))
            self.record("ycore/balance/after", imbalance([sum(o.num_tokens for o in hand) for hand in deal.chosen]))

    def close(self) -> None:
        self._runner.run(self._close())
        self._runner.close()

    async def _close(self) -> None:
        await asyncio.gather(self._scoring.close(), *(engine.close() for engine in self._engines))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(self._together(work))

    async def _together(self, work: Coroutine[Any, Any, T]) -> T:
        """The result, once every rank has its own; Interrupted on every rank when any of them was stopped meanwhile."""
        try:
            result = await _until(work, self.stop, self._peers)
        except Interrupted:
            await self._peers.meet(stopping=True)
            raise
        if await self._peers.meet(stopping=False):
            raise Interrupted("another rank was interrupted; the last finished step stands")
        return result


def _key(offer: Offer) -> tuple[int, int]:
    return offer.rank, offer.index


async def _until(work: Awaitable[T], stop: threading.Event, peers: Peers) -> T:
    """The work's result; Interrupted as soon as any rank is to stop, RunError as soon as another has failed."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_watch(stop, peers))
    try:
        done, _ = await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task in done else watch.result()
    except BaseExceptionGroup as group:
        raise _first(group) from group
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _watch(stop: threading.Event, peers: Peers) -> Any:
    while not stop.is_set():
        if peers.stop_asked():
            stop.set()
        await asyncio.sleep(0.1)
    peers.ask_to_stop()
    raise Interrupted("interrupted while generating; the last finished step stands")


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show of several that came at once: ours before others, the first before the rest."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((leaf for leaf in leaves if isinstance(leaf, YcoreError)), leaves[0])
