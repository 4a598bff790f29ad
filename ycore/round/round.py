"""The round: prompts asked, completions scored as they end, groups that cannot teach replaced.

Not here: the weights before it (`source`), the prompts (`draws`), what a completion is worth (`scoring`), the decisions
(`sampling`), other ranks' share of the work (`peers`).
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ycore.engine import Engine
from ycore.round.peers import Counts, Peers, Tally
from ycore.round.sampling import Yield, can_teach, completion_seed, num_to_draw, total_reward
from ycore.round.scoring import Scoring, Writing, together
from ycore.round.slots import ROLLOUT, Slots
from ycore.types import Completion, Draw, Finished, Group, Score

_LISTEN_S, _LISTEN_LONGEST_S = 0.05, 0.5
_PATIENCE = 0.1  # of the time since the last news, to the next look: a long wait for others costs little

DrawNext = Callable[[], Draw]


@dataclass(frozen=True, slots=True)
class Rules:
    """How a round decides; `dynamic` False takes every group as it comes."""

    group_size: int
    seed: int
    reward_weights: tuple[float, ...]
    dynamic: bool = False
    max_tries: int = 4
    """Groups drawn for each one needed, at most; then the step goes on with what there is."""

    greedy_baseline: bool = False
    """Also ask for each prompt's greedy completion and score it: ReMax's baseline. It is not trained on."""

    max_in_flight: int | None = None
    """Groups that this rank's engines can write at once; more wait unclaimed, for whichever rank is free first."""


@dataclass(slots=True)
class RoundStats:
    """What one round took on this rank."""

    drawn: int = 0
    num_tokens: int = 0
    num_masked: int = 0
    rewards: list[float] = field(default_factory=list)
    """Of the completions that were scored, as their groups ended."""

    generate_s: float = 0.0
    problems: Counter[str] = field(default_factory=Counter)

    def note_generating(self, seconds: float) -> None:
        """A completion has ended, so many seconds after its group began."""
        self.generate_s = max(self.generate_s, seconds)


class Round:
    """Turns draws into scored groups, as many as all ranks need together."""

    def __init__(
        self, engines: Sequence[Engine], scoring: Scoring, rules: Rules, peers: Peers, slots: Slots | None = None
    ) -> None:
        self.yields = Yield()
        self.slots = slots or Slots(len(engines))
        self._engines = engines
        self._scoring = scoring
        self._rules = rules
        self._peers = peers

    async def run(self, draw: DrawNext, *, need: int, ready: int, step: int) -> tuple[list[Finished], RoundStats]:
        """Finished groups of this rank, in the order they were drawn.

        Args:
            draw: gives the next prompt of this rank.
            need: groups that every rank trains on.
            ready: groups this rank has from before, each of which can teach.
        """
        stats = RoundStats()
        to_start = self._room(self._num_wanted(need, Counts(ready, 0, 0)), 0)  # every rank begins with its own share
        tally = self._peers.open_tally(need=need, ready=ready, starts=to_start)
        seen = tally.counts()
        flying: set[asyncio.Task[Finished]] = set()
        landed: list[Finished] = []
        news = time.monotonic()
        try:
            while True:
                for _ in range(to_start):
                    flying.add(asyncio.create_task(self._finish(draw(), step=step, stats=stats)))
                    stats.drawn += 1
                for finished in await _next_finished(flying, waited_s=time.monotonic() - news):
                    landed.append(finished)
                    news = time.monotonic()
                    tally.finish(counts_as_kept=finished.teaches or not self._rules.dynamic)
                counts = tally.counts()
                self._observe(seen, counts)
                seen = counts
                wanted = self._num_wanted(tally.need, counts)
                if not flying and not wanted and (counts.kept >= tally.need or not counts.in_flight):
                    break
                to_start = self._claim(tally, wanted, len(flying))
        finally:
            for task in flying:
                task.cancel()
            await asyncio.gather(*flying, return_exceptions=True)
        return sorted(landed, key=lambda finished: finished.group.draw.position), stats

    def _observe(self, before: Counts, now: Counts) -> None:
        """The yield follows the groups of all ranks, so that all want the same number."""
        num_taught = now.kept - before.kept
        for index in range(now.finished - before.finished):
            self.yields.observe(taught=index < num_taught)

    def _num_wanted(self, need: int, counts: Counts) -> int:
        dynamic = self._rules.dynamic
        return num_to_draw(
            need=need,
            kept=counts.kept,
            in_flight=counts.in_flight,
            drawn=counts.drawn,
            max_draws=need * (self._rules.max_tries if dynamic else 1),
            rate=self.yields.rate if dynamic else 1.0,
        )

    def _claim(self, tally: Tally, wanted: int, num_flying: int) -> int:
        """How many of the groups that all ranks want this one starts: its part, less what others were faster with."""
        amount = self._room(math.ceil(wanted / self._peers.world), num_flying)
        if amount == 0:
            return 0
        counts = tally.start(amount)
        all_wanted = self._num_wanted(tally.need, Counts(counts.kept, 0, counts.finished))
        over = min(amount, max(0, counts.in_flight - all_wanted))
        if over:
            tally.start(-over)
        return amount - over

    def _room(self, amount: int, num_flying: int) -> int:
        limit = self._rules.max_in_flight
        return amount if limit is None else max(0, min(amount, limit - num_flying))

    async def _finish(self, draw: Draw, *, step: int, stats: RoundStats) -> Finished:
        group = await self.group(draw, step=step, stats=stats)
        return Finished(group, can_teach(group, self._rules.reward_weights))

    async def group(self, draw: Draw, *, step: int, stats: RoundStats) -> Group:
        """Every completion of one prompt, scored; scorers get to work while it is written."""
        started = time.perf_counter()
        size = self._rules.group_size
        asked = [self._complete(draw, index) for index in range(size)]
        if self._rules.greedy_baseline:
            asked.append(self._complete(draw, size, greedy=True))
        tasks = [asyncio.create_task(one) for one in asked]
        for task in tasks:
            task.add_done_callback(lambda _: stats.note_generating(time.perf_counter() - started))
        parts = [tasks[:size], *([tasks[size:]] if self._rules.greedy_baseline else [])]
        try:
            scores, *greedy = await together([self._score(draw, part, step=step) for part in parts])
            completions = await asyncio.gather(*tasks[:size])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        stats.num_tokens += sum(len(completion.token_ids) for completion in completions)
        totals = [total_reward(row, self._rules.reward_weights) for row in scores]
        stats.num_masked += totals.count(None)
        stats.rewards += [total for total in totals if total is not None]
        stats.problems.update(score.problem for row in scores for score in row if score.problem)
        baseline = tuple(greedy[0][0]) if greedy else None
        return Group(draw, tuple(completions), tuple(tuple(row) for row in scores), greedy_scores_R=baseline)

    async def _complete(self, draw: Draw, index: int, *, greedy: bool = False) -> Completion:
        seed = completion_seed(self._rules.seed, draw.position, index)
        async with self.slots.turn(ROLLOUT) as slot:
            completion = await self._engines[slot].complete(draw.token_ids, seed, greedy=greedy)
            slot.num_tokens = len(completion.token_ids)
            return completion

    async def _score(self, draw: Draw, tasks: Sequence[asyncio.Task[Completion]], *, step: int) -> list[list[Score]]:
        return await self._scoring.score(Writing(draw, tasks, step, self.slots))


async def _next_finished(flying: set[asyncio.Task[Finished]], *, waited_s: float) -> list[Finished]:
    """What ends next, taken out of `flying`; nothing, after a moment, so that other ranks' news is heard."""
    moment_s = min(_LISTEN_LONGEST_S, max(_LISTEN_S, _PATIENCE * waited_s))
    if not flying:
        await asyncio.sleep(moment_s)
        return []
    done, _ = await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED, timeout=4 * moment_s)
    flying -= done
    errors = [error for task in done if (error := task.exception()) is not None]
    if errors:  # of several at once, all are looked at and one is told
        raise errors[0]
    return [task.result() for task in done]
