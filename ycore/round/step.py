"""One training step, up to where TRL takes over: the algorithm on one screen.

    sync -> draw -> generate -> score -> keep or replace -> deal -> commit -> TRL

Every training rank runs this for its own shard of the prompts. While a round runs the ranks exchange counts only; when
it is dealt, a few whole groups change ranks so that training costs every rank about the same.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ycore.engine import Engine
from ycore.placement.placement import ROLLOUT
from ycore.placement.slots import Slots
from ycore.rollout.turns import Generate, GroupStart, SingleTurnWriter
from ycore.round.in_flight import NOTHING, InFlight
from ycore.round.journal import Committed, Journal, load_states, record_metrics, states_of
from ycore.round.meters import RoundMeter, collect
from ycore.round.peers import LOOK_S, GroupSummary, Peers, RankEventLoop, deal_groups
from ycore.round.sampling import (
    AcceptanceRate,
    DrawSource,
    ExpectedLengths,
    LeftoverGroups,
    Quota,
    ReuseBuffer,
    Rules,
)
from ycore.run.tasks import ending, next_finished, together
from ycore.run.trace import EVALUATION, ROUND, SYNC
from ycore.scoring.scoring import PendingGroup, Scoring
from ycore.types import Completion, Draw, Finished, Group, JsonObject, Metrics, Prompt, Record

T = TypeVar("T")

ShareWeights = Callable[[int], Path]
"""Writes the policy's weights, as this version, to a folder that engines can read. All ranks call it together."""

_ABORT_EVERY_S = 0.02  # a request may have been on its way when the others were ended


class Controller:
    """The loop on one training rank; TRL's trainer calls `next_round` whenever it needs groups to learn from.

    Example: `controller.start(timeout_s=300); groups = controller.next_round(step=0, num_groups=4); controller.close()`

    `record` takes one metric of the step. Setting `stop` ends the work under way on all ranks.
    """

    def __init__(
        self,
        *,
        engines: Sequence[Engine],
        scoring: Scoring,
        draws: DrawSource,
        rules: Rules,
        peers: Peers | None = None,
        share_weights: ShareWeights | None = None,
        journal: Journal | None = None,
        max_surplus_age: int = 1,
        slots: Slots | None = None,
        writer: SingleTurnWriter | None = None,
        event_loop: RankEventLoop | None = None,
        in_flight: InFlight | None = None,
        with_thinking: Callable[
            [Completion, Sequence[int]], Completion
        ] = lambda completion, prompt_ids: completion,
    ) -> None:
        """
        Args:
            peers: None for a single rank.
            share_weights: None where engines have the trainer's own weights, or where they are to stay frozen.
            journal: None where a round need not survive a kill (evaluation, preflight).
            max_surplus_age: policy versions that a left-over group may lag behind when it is trained on.
            slots: None for one slot an engine, without placement.
            writer: of completions; None for one turn, without tools.
            event_loop: of a controller over the same engines; None for a new one.
            in_flight: holds the groups that newer weights go on with; None where a round ends with its last completion.
            with_thinking: says of a completion, which follows a prompt of these token ids, what of it is thinking.
        """
        self.record: Callable[[str, float], None] = lambda name, value: None
        self.engines = engines
        self.scoring = scoring
        self.draws = draws
        self.rules = rules
        peers = peers or Peers()
        self.peers = peers
        self.slots = slots or Slots(len(engines))
        self.with_thinking = with_thinking
        self.writer = writer or SingleTurnWriter()
        self.in_flight = in_flight
        self.leftover_groups = LeftoverGroups(max_age=max_surplus_age)
        self.reuse_buffer = ReuseBuffer(rules)
        self.acceptance = AcceptanceRate()
        self.lengths = ExpectedLengths()
        self.meter = RoundMeter(engines, peers, self.leftover_groups, rules.environments)
        self._event_loop = event_loop or RankEventLoop(peers)
        self._share_weights = share_weights
        self._journal = journal
        self.scorings = [scoring]
        """The run's, and those of its evaluations, which start and close with it."""
        self._generates = False  # the journal has no later round
        self._synced: int | None = None
        self._seconds = 0.0
        self._metrics: Metrics = {}
        self._summaries: Sequence[GroupSummary] = ()  # of the round's groups, of all ranks
        self.problems: Mapping[str, int] = {}
        """Reasons why completions of the last round have no reward, with their numbers."""
        self.constraint_weights: list[float] | None = None
        """The weights that the last round is trained with; None without constraints."""
        self.effective_share = 1.0

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        """Scored groups for this rank, committed to the journal. Every rank calls this at the same step.

        Args:
            step: optimizer steps taken so far, which is also the version of the policy that writes.
            num_groups: groups that each rank trains on.

        Raises:
            Interrupted: this rank or another was asked to stop.
            YcoreError: an engine, a scorer or another rank failed.
        """
        committed = self.committed(step, num_groups)
        if committed is None:
            with self.phase(SYNC):
                self.sync(step)
            committed = self.make_round(step=step, num_groups=num_groups, version=step)
        return self.hand_over(committed)

    def make_round(self, *, step: int, num_groups: int, version: int) -> Committed:
        """Write the round of a step, and commit it.

        Args:
            version: that of the engines' weights, or the oldest that may write the round.
        """
        with self.phase(ROUND):
            num_waiting = len(self.leftover_groups)
            leftover = self.leftover_groups.take(version)
            num_reused = self.reuse_buffer.num_ready(num_groups)
            num_new = num_groups - num_reused
            work = self.fill(need=num_new, ready=len(leftover), step=step)
            written = self.run_round(work, step=step)
            self.meter.stale += num_waiting - len(leftover)
            groups = self.deal([*leftover, *written], num_new)
            reused = self.reuse_buffer.take(num_reused)
            self.reuse_buffer.put(groups)
        return self.commit(step, [*groups, *reused])

    async def fill(self, *, need: int, ready: int, step: int) -> list[Finished]:
        """Draw prompts until all ranks together have enough groups that can teach (dynamic sampling).

        Args:
            need: groups that each rank trains on.
            ready: groups that this rank has from an earlier round, each of which can teach.

        Returns:
            The groups that this rank finished, in the order of their draws.
        """
        in_flight = self.in_flight
        writing: dict[asyncio.Task[Finished], Draw] = {}  # in the order of their draws
        if in_flight is not None:
            writing = in_flight.groups
            in_flight.begin_round(step)
        finished: list[Finished] = []
        quota = Quota(
            self.rules,
            self.acceptance,
            self.peers,
            need=need,
            ready=ready,
            num_writing=len(writing),
            num_rounds=partial(self.num_rounds_from, step),
        )
        async with ending(writing if in_flight is None else ()):
            while (num_new := quota.claim(num_writing=len(writing))) is not None:
                for draw in self.next_draws(num_new):
                    writing[asyncio.create_task(self.group(draw, step=step))] = draw
                # In order, what is drawn next follows from the groups drawn before, and not from which ends first.
                awaited = list(writing)[:1] if self.rules.in_order else list(writing)
                done = await next_finished(awaited, asyncio.sleep(LOOK_S))
                young = self.take_whole(writing, done, step)
                quota.finish(young, num_stale=len(done) - len(young))
                finished += young
        if in_flight is not None:  # there are groups enough without those that are not whole
            if not in_flight.streams:
                await self.halt()
            finished += self.take_whole(
                writing, [task for task in writing if task.done()], step
            )
            await in_flight.end_round()
        return sorted(finished, key=lambda item: item.group.draw.position)

    def take_whole(
        self,
        writing: dict[asyncio.Task[Finished], Draw],
        done: Sequence[asyncio.Task[Finished]],
        step: int,
    ) -> list[Finished]:
        """Count groups that are whole, and return those that are not too old for this step."""
        young = []
        for task in done:
            del writing[task]
            item = task.result()
            self.count(item.group)
            if self.in_flight is None or self.in_flight.finish(item.group, step):
                young.append(item)
        self.meter.stale += len(done) - len(young)
        return young

    async def group(self, draw: Draw, *, step: int) -> Finished:
        """Generate and score every completion of one prompt; scorers start as soon as a completion is written."""
        rules = self.rules
        start = await self.writer.start(draw)
        draw = start.draw
        sampled = [
            asyncio.create_task(self.complete(start, index))
            for index in range(rules.group_size)
        ]
        greedy = []
        if rules.greedy_baseline:
            greedy.append(
                asyncio.create_task(self.complete(start, rules.group_size, greedy=True))
            )
        async with ending([*sampled, *greedy]):
            parts = [
                PendingGroup(draw, tasks, step, self.slots)
                for tasks in (sampled, greedy)
                if tasks
            ]
            scores_GR, *baseline = await together([self.scoring.score(part) for part in parts])
            completions_G = await asyncio.gather(*sampled)
        group = Group(
            draw,
            tuple(completions_G),
            tuple(map(tuple, scores_GR)),
            greedy_scores_R=tuple(baseline[0][0]) if baseline else None,
        )
        teaches = rules.can_teach(group)
        has_curriculum = self.draws.curriculum is not None
        stats = rules.stats_of(group, teaches=teaches) if has_curriculum else None
        return Finished(group, teaches, stats)

    async def complete(
        self, start: GroupStart, index: int, *, greedy: bool = False
    ) -> Completion:
        """Write one completion. Each of the policy's turns is one request, whose seed does not depend on who answers it."""
        write: Generate = partial(self.request, greedy=greedy, prompt=start.draw.prompt)
        if self.in_flight is not None:  # as many requests as it takes until it is whole
            write = partial(self.in_flight.write, write)
        completion = await self.writer.write(start, index, write, seed=self.rules.seed)
        self.meter.note_written()
        return self.with_thinking(completion, completion.prompt_ids or start.draw.token_ids)

    async def request(
        self,
        token_ids: Sequence[int],
        seed: int,
        *,
        greedy: bool,
        prompt: Prompt,
        max_tokens: int | None = None,
    ) -> Completion:
        """Have the engine of a slot write after these tokens."""
        options: JsonObject = {}
        if max_tokens is not None:
            options["max_tokens"] = max_tokens
        if prompt.images:
            options["prompt"] = prompt
        async with self.slots.turn(ROLLOUT, self.lengths.of(prompt.row)) as slot:
            if self.in_flight is not None and not self.in_flight.open.is_set():
                return NOTHING
            completion = await slot.pick(self.engines).complete(
                token_ids, seed, greedy=greedy, **options
            )
            slot.num_tokens = len(completion.token_ids)
            slot.seed = seed
        return completion

    def deal(self, finished: Sequence[Finished], num_groups: int) -> list[Group]:
        """Return the groups that this rank trains on. What can teach and is not dealt is kept for the next round."""
        peers = self.peers
        summaries = [
            GroupSummary(
                peers.rank,
                index,
                item.group.draw.position,
                self.rules.cost_of(item.group),
                item.teaches,
                item.stats,
            )
            for index, item in enumerate(finished)
        ]
        all_summaries = peers.gather_summaries(summaries)
        deal = deal_groups(all_summaries, world=peers.world, per_rank=num_groups)
        self._summaries = all_summaries
        self.learn_order(all_summaries)
        groups = peers.exchange(deal, [item.group for item in finished])
        dealt = {summary.key for assigned in deal.chosen for summary in assigned}
        self.leftover_groups.put(
            [
                item
                for item, summary in zip(finished, summaries, strict=True)
                if summary.key not in dealt
            ]
        )
        self._metrics |= deal.metrics()
        return groups

    # -- engines and weights -----------------------------------------------------------------------------------------

    def start(self, *, timeout_s: float) -> None:
        """Wait until engines and scorers answer; an EngineError names the one that does not."""

        async def wait() -> None:
            ready = (engine.wait_ready(timeout_s=timeout_s) for engine in self.engines)
            opened = self.slots.open(timeout_s=timeout_s)
            scored = (scoring.start(timeout_s=timeout_s) for scoring in self.scorings)
            await asyncio.gather(opened, *scored, *ready)
            await (
                self.slots.sleep()
            )  # a trainer that ran before this one may have left some awake

        self.run(wait())

    def close(self) -> None:
        async def end() -> None:
            self.slots.close()
            if self.in_flight is not None:
                await self.in_flight.close()
            await asyncio.gather(
                *(scoring.close() for scoring in self.scorings), self.writer.close()
            )
            await asyncio.gather(*(engine.close() for engine in self.engines))

        self._event_loop.close(end())

    def sync(self, version: int) -> None:
        """Load the policy's weights, as this version, into every engine, unless they hold them already."""
        if self._synced != version and self._share_weights is not None:
            folder = self._share_weights(version)
            self.load(folder, version)
        self._synced = version

    def load(self, folder: Path, version: int) -> None:
        self.run(self.load_engines(folder, version))

    async def load_engines(self, folder: Path, version: int) -> None:
        await asyncio.gather(*(engine.load_weights(folder, version) for engine in self.engines))

    def sample(
        self, prompts: Sequence[tuple[Prompt, tuple[int, ...]]], *, version: int
    ) -> list[JsonObject]:
        """Write a completion of each prompt (and its token ids) by this version, with the same seeds at every call.

        Returns a dict of `row`, `prompt`, `images` (sha256), `completion` and `finish_reason` for each prompt.
        """
        self.rest()
        self.sync(version)
        writer = self.writer

        async def complete(prompt: Prompt, token_ids: tuple[int, ...]) -> JsonObject:
            start = await writer.start(Draw(prompt.row, prompt, token_ids))
            write = self.engines[0].complete
            if prompt.images:
                write = partial(write, prompt=prompt)
            completion = await writer.write(start, 0, write, seed=0)
            return {
                "row": prompt.row,
                "prompt": start.draw.prompt.content,
                "images": [image.sha256 for image in prompt.images],
                "completion": completion.transcript,
                "finish_reason": completion.finish_reason,
            }

        async def write() -> list[JsonObject]:
            async with self.slots.awake(ROLLOUT):
                return await asyncio.gather(
                    *(complete(prompt, token_ids) for prompt, token_ids in prompts)
                )

        return self.run(write())

    async def halt(self) -> None:
        """Have the engines give back what they write, as far as it is, and begin no request."""
        assert self.in_flight is not None
        self.in_flight.open.clear()
        while any(engine.in_flight for engine in self.engines):
            await asyncio.gather(*(engine.abort() for engine in self.engines))
            await asyncio.sleep(_ABORT_EVERY_S)

    # -- a round's work and metrics ----------------------------------------------------------------------------------

    def for_evaluation(
        self, *, draws: DrawSource, rules: Rules, scoring: Scoring
    ) -> "Controller":
        """Return a controller of other prompts over the same engines, that neither journals nor records.

        It takes nothing from this one's draws. It has the weights that this one synced.
        """
        if scoring is not self.scoring:
            self.scorings.append(scoring)
        return Controller(
            engines=self.engines,
            scoring=scoring,
            draws=draws,
            rules=rules,
            peers=self.peers,
            max_surplus_age=0,
            slots=self.slots,
            writer=self.writer,
            event_loop=self._event_loop,
            with_thinking=self.with_thinking,
        )

    def run_round(self, work: Coroutine[Any, Any, T], *, step: int, trains: bool = True) -> T:
        """Run a round's work with awake engines, and note what it took on all ranks."""

        async def with_engines_awake() -> T:
            async with self.slots.round(ROUND if trains else EVALUATION):
                return await work

        self.meter.begin()
        result = self.run(with_engines_awake())
        self.meter.end()
        ended = self.slots.end_round(self.peers.add_up, step=step, trains=trains)
        self._metrics |= self._event_loop.run_alone(ended)
        return result

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a phase of the step (SYNC, ROUND) in the trace, and note its seconds."""
        if name != ROUND:  # a round marks itself, when it really begins
            self.slots.begin_phase(name)
        began = time.perf_counter()
        yield
        took = time.perf_counter() - began
        self._seconds += took
        self._metrics[f"ycore/time/{name}"] = took

    def settle(self) -> None:
        """Called at a step's end, before anything is saved."""

    def rest(self) -> None:
        """Return once no round is under way, so that engines can be used for something else."""

    def num_rounds_from(self, step: int) -> int:
        """Return how many rounds may be begun, from the one of this step on."""
        return 1

    def take_seconds(self) -> float:
        """Return the seconds that syncs and rounds took since the last call."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    def next_draws(self, number: int) -> list[Draw]:
        """Return prompts to start: first those of unfinished groups, then new draws."""
        again: list[Draw] = []
        if self.in_flight is not None:
            again = self.in_flight.again[:number]
            del self.in_flight.again[:number]
        new = [self.draws.draw() for _ in range(number - len(again))]
        self.meter.drawn += len(new)
        return [*again, *new]

    def count(self, group: Group) -> None:
        """Note what a group that was written and scored adds to the step's metrics."""
        self.meter.count(group, self.rules.reward_weights)
        if self.rules.constraints is not None:
            self.rules.constraints.count(group)

    def learn_order(self, summaries: Sequence[GroupSummary]) -> None:
        """Update curriculum and expected lengths from the groups of all ranks."""
        draws = self.draws
        self.lengths.learn((draws.row_at(group.position), group.cost) for group in summaries)
        if draws.curriculum is not None:
            draws.curriculum.learn(
                (draws.row_at(group.position), *group.stats)
                for group in summaries
                if group.stats
            )
            self._metrics["ycore/curriculum/dropped"] = draws.curriculum.num_dropped

    # -- journal and checkpoints -------------------------------------------------------------------------------------

    def committed(self, step: int, num_groups: int) -> Committed | None:
        """Return the round of this step from the journal, where every rank has its part, of so many groups.

        The run was killed after the commit, and trains on the very same completions. The controller gets its state after
        that round. Where there is none, the round is generated, and what the journal has of it and later ones goes.
        """
        if self._journal is None or self._generates:
            return None
        committed = self._journal.read(step)
        if committed is not None and len(committed.groups) != num_groups:
            print(
                f"the journal's round of step {step} has another size: it is drawn again",
                flush=True,
            )
            committed = None
        num_ranks = self.peers.add_up([float(committed is not None)])
        if committed is not None and num_ranks == [float(self.peers.world)]:
            self.restore(committed.state)
            self.learn_order(committed.summaries)
            return committed
        # Before the deal, where the ranks meet: none has committed anything new yet.
        self._journal.forget_from(step)
        self._generates = True
        return None

    def commit(self, step: int, groups: list[Group]) -> Committed:
        """Write the round to the journal before the optimizer sees it."""
        self._metrics |= self._event_loop.run_alone(self.add_up_meters())
        self._metrics |= self.meter.own_metrics(
            rate=self.acceptance.rate, syncs=self._share_weights is not None
        )
        metrics = self._metrics
        self._metrics = {}
        state = states_of(self, of_rows=False)
        summaries, self._summaries = self._summaries, ()
        if self._journal is not None:
            self._journal.commit(step, groups, state, metrics, summaries)
        return Committed(groups, state, metrics, summaries, dict(self.meter.problems))

    async def add_up_meters(self) -> Metrics:
        """Return the round's metrics over all ranks; in the event loop nothing counts meanwhile."""
        meters = [self.meter, *self.scoring.meters, *self.writer.meters]
        if self.in_flight is not None:
            meters.append(self.in_flight.meter)
        if self.rules.constraints is not None:
            meters.append(self.rules.constraints)
        return collect(meters, self.peers.add_up)

    def hand_over(self, committed: Committed) -> list[Group]:
        """Record a round's metrics, and return its groups."""
        record_metrics(committed, self.record)
        self.problems = committed.problems
        self.constraint_weights = committed.state["constraints"]
        return committed.groups

    def state(self) -> JsonObject:
        """Return what a checkpoint keeps of the controller, as plain JSON values."""
        return states_of(self)

    def restore(self, state: Record) -> None:
        load_states(self, state)

    # -- the event loop ----------------------------------------------------------------------------------------------

    @property
    def stop(self) -> threading.Event:
        return self._event_loop.stop

    def should_stop(self) -> bool:
        """Whether any rank was asked to stop. All ranks call this together."""
        return self.any_rank(self.stop.is_set(), "step")

    def any_rank(self, holds: bool, name: str) -> bool:
        """Whether something holds on any rank. All ranks call this together, and get the same answer."""
        return self._event_loop.run_alone(self.peers.meet(stopping=holds, name=name))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, once every rank has its own.

        Raises:
            Interrupted: on every rank, when any rank was asked to stop meanwhile.
        """
        return self._event_loop.run(work)
