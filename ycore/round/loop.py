"""What a controller has around its steps: the event loop, the engines, stopping together with other ranks, metrics."""

import asyncio
import copy
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from ycore.engine import Engine
from ycore.errors import Interrupted, YcoreError
from ycore.placement.placement import ROLLOUT
from ycore.placement.slots import Slots
from ycore.rollout.carried import CarryWriter
from ycore.rollout.turns import CompletionWriter, SingleTurnWriter
from ycore.round.journal import Committed, Journal, record_again
from ycore.round.meters import RoundMeter, collect
from ycore.round.peers import Offer, Peers
from ycore.round.sampling import DrawSource, Lengths, Rules, Surplus, Yield
from ycore.run.group_json import finished_from_json, finished_to_json
from ycore.run.tasks import ending
from ycore.run.trace import EVALUATION, ROUND
from ycore.scoring.scoring import Scoring
from ycore.types import Draw, Group, Prompt

T = TypeVar("T")

ShareWeights = Callable[[int], Path]
"""Writes the policy's weights, as this version, to a folder that engines can read. All ranks call it together."""

_STOP_LOOK_S = 0.1
_ABORT_EVERY_S = 0.02  # a request may have been on its way when the others were ended
_OTHER_SIZE = (
    "the journal's round of step {step} comes to {there} groups a rank, and a round has {here} here: it and the later "
    "ones are dropped, and their prompts are drawn again"
)


class RankLoop:
    """One rank's engines, scorers, prompts and peers, and the event loop that they share.

    `record` takes one metric of the step.
    """

    def __init__(
        self,
        *,
        engines: Sequence[Engine],
        scoring: Scoring,
        draws: DrawSource,
        rules: Rules,
        peers: Peers,
        share_weights: ShareWeights | None = None,
        sync_every: int = 1,
        journal: Journal | None = None,
        max_surplus_age: int = 1,
        slots: Slots | None = None,
        writer: CompletionWriter | None = None,
    ) -> None:
        """
        Args:
            share_weights: None where engines have the trainer's own weights, or where they are to stay frozen.
            sync_every: versions from one that a round loads to the next.
            journal: None where a round need not survive a kill (evaluation, preflight).
            max_surplus_age: policy versions that a group left over from a round may lag behind when it is trained on.
            slots: None for one slot an engine, without placement.
            writer: of completions; None for one turn, without tools.
        """
        self.stop = threading.Event()
        self.record: Callable[[str, float], None] = lambda name, value: None
        self.engines, self.scoring, self.draws, self.rules, self.peers = (
            engines,
            scoring,
            draws,
            rules,
            peers,
        )
        self.slots = slots or Slots(len(engines))
        self.writer: CompletionWriter = writer or SingleTurnWriter()
        self.surplus = Surplus(max_age=max_surplus_age)
        self.yields = Yield()
        self.meter = RoundMeter(engines, peers, self.surplus, rules.environments)
        self.lengths = Lengths()
        self._share_weights, self._sync_every = share_weights, sync_every
        self._journal = journal
        self._besides: list[Scoring] = []  # of controllers beside this one, closed with it
        self._generates = False  # the journal has no later round
        self._synced: int | None = None
        self._seconds = 0.0
        self._metrics: dict[str, float] = {}
        self._is_over = False  # the round: what engines still write is given back as far as it is
        self._runner = asyncio.Runner()

    def start(self, *, timeout_s: float) -> None:
        """Wait until engines and scorers answer; an EngineError names the one that does not."""

        async def wait() -> None:
            ready = (engine.wait_ready(timeout_s=timeout_s) for engine in self.engines)
            opened = self.slots.open(timeout_s=timeout_s)
            await asyncio.gather(self.scoring.start(timeout_s=timeout_s), opened, *ready)
            await self.slots.sleep()  # a trainer that ran before this one may have left some awake

        self.run(wait())

    def sync(self, version: int) -> None:
        """Load the policy's weights, as this version, into every engine, unless they hold them already."""
        if self._synced != version and self._share_weights is not None:
            folder = self._share_weights(version)

            async def load() -> None:
                await asyncio.gather(
                    *(engine.load_weights(folder, version) for engine in self.engines)
                )

            self.run(load())
        self._synced = version

    def sync_for_round(self, version: int) -> None:
        """As `sync`, where the weights that the engines hold are `sync_every` versions old."""
        if self._synced is None or version - self._synced >= self._sync_every:
            self.sync(version)

    def sample(
        self, prompts: Sequence[tuple[Prompt, tuple[int, ...]]], *, version: int
    ) -> list[dict[str, Any]]:
        """A completion of each prompt (and its token ids) by this version, with the same seeds at every call.

        Returns a dict of `row`, `prompt`, `images` (sha256), `completion` and `finish_reason` for each prompt.
        """
        self.sync(version)
        writer = self._writer_apart()

        async def one(prompt: Prompt, token_ids: tuple[int, ...]) -> dict[str, Any]:
            start = await writer.start(Draw(prompt.row, prompt, token_ids))
            how: dict[str, Any] = {"prompt": prompt} if prompt.images else {}
            write = partial(self.engines[0].complete, **how)
            written = await writer.write(start, 0, write, seed=0)
            return {
                "row": prompt.row,
                "prompt": start.draw.prompt.content,
                "images": [image.sha256 for image in prompt.images],
                "completion": written.transcript,
                "finish_reason": written.finish_reason,
            }

        async def write() -> list[dict[str, Any]]:
            async with self.slots.awake(ROLLOUT):
                return await asyncio.gather(*(one(*asked) for asked in prompts))

        return self.run(write())

    def close(self) -> None:

        async def end() -> None:
            self.slots.close()
            scorings = (self.scoring, *self._besides)
            await asyncio.gather(*(scoring.close() for scoring in scorings), self.writer.close())
            await asyncio.gather(*(engine.close() for engine in self.engines))

        self._runner.run(end())
        self._runner.close()

    def beside(self, *, draws: DrawSource, rules: Rules, scoring: Scoring) -> Self:
        """A controller of other prompts over the same engines, that neither journals nor records: for an evaluation.

        It takes nothing from this one's draws. It has the weights that this one synced.
        """
        other = copy.copy(self)
        other.draws, other.rules, other.scoring = draws, rules, scoring
        other.record, other.writer = lambda name, value: None, self._writer_apart()
        other.surplus, other.yields, other.lengths = Surplus(max_age=0), Yield(), Lengths()
        other.meter = RoundMeter(self.engines, self.peers, other.surplus, other.rules.environments)
        other._journal, other._metrics = None, {}
        if scoring is not self.scoring:
            self._besides.append(scoring)
        return other

    def run_round(self, work: Coroutine[Any, Any, T], *, step: int, trains: bool = True) -> T:
        """Run a round's work with awake engines, and note what it took on all ranks."""

        async def with_engines_awake() -> T:
            async with self.slots.round(ROUND if trains else EVALUATION):
                result = await work
                await self.meter.note_drafts()
                return result

        self.meter.begin()
        result = self.run(with_engines_awake())
        self.meter.end()
        self.note_all(
            self._runner.run(self.slots.end_round(self.peers.add_up, step=step, trains=trains))
        )
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
        self.note_all({f"ycore/time/{name}": took})

    def note_all(self, metrics: Mapping[str, float]) -> None:
        self._metrics |= metrics

    def settle(self) -> None:
        """Called at a step's end, before anything is measured or saved: return once no round is under way."""

    def take_seconds(self) -> float:
        """Seconds that syncs and rounds took since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def note_waited(self, seconds: float) -> None:
        """Training waited so long for something that is no sync and no round; `take_seconds` counts it too."""
        self._seconds += seconds
        self.record("ycore/time/waited", seconds)

    def committed(self, step: int, num_groups: int) -> Committed | None:
        """The round of this step, where the journal has every rank's part of it, of so many groups.

        Where it has none, this step's round is generated, and what the journal has of it and of later rounds goes.
        """
        if self._journal is None or self._generates:
            return None
        committed = self._journal.read(step)
        if committed is not None and len(committed.groups) != num_groups:
            print(
                _OTHER_SIZE.format(step=step, there=len(committed.groups), here=num_groups),
                flush=True,
            )
            committed = None
        num_ranks = self.peers.add_up([float(committed is not None)])
        if num_ranks == [float(self.peers.world)]:
            return committed
        self._journal.forget_from(
            step
        )  # before the deal, where the ranks meet: none has committed anything new yet
        self._generates = True
        return None

    def take_again(self, committed: Committed) -> list[Group]:
        """Set the controller to its state after a committed round, and return that round's groups."""
        self.restore(committed.state)
        record_again(committed, self.record)
        return committed.groups

    def commit(self, step: int, groups: list[Group]) -> Committed:
        """Generate the round to the journal before the optimizer sees it."""
        held = [] if self.rules.constraints is None else [self.rules.constraints]
        self.note_all(
            collect(
                [self.meter, *self.scoring.meters, *self.writer.meters, *held], self.peers.add_up
            )
        )
        self.note_all(
            self.meter.own_metrics(rate=self.yields.rate, syncs=self._share_weights is not None)
        )
        metrics, self._metrics = self._metrics, {}
        curriculum = (
            self.draws.curriculum
        )  # its memory grows: a round's record has what the round added
        news = {
            "curriculum": None if curriculum is None else curriculum.news,
            "lengths": self.lengths.news,
        }
        state = self._state_now() | news
        if self._journal is not None:
            self._journal.commit(step, groups, state, metrics)
        return Committed(groups, state, metrics)

    def hand_over(self, committed: Committed) -> list[Group]:
        """Record a new round's metrics, and return its groups."""
        for name, value in committed.metrics.items():
            self.record(name, value)
        return committed.groups

    @property
    def carrier(self) -> CarryWriter | None:
        """The writer, where completions may take several rounds."""
        return self.writer if isinstance(self.writer, CarryWriter) else None

    def _writer_apart(self) -> CompletionWriter:
        """Return a writer of completions that are not of the run's rounds."""
        return self.writer if self.carrier is None else SingleTurnWriter()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the controller, as plain JSON values."""
        return self._state_now()

    def _state_now(self) -> dict[str, Any]:
        return {
            "cursor": self.draws.cursor,
            "gaps": list(self.draws.shard.gaps),
            "start": self.draws.shard.start,
            "yield": asdict(self.yields),
            "surplus": [finished_to_json(item) for item in self.surplus.waiting],
            "placement": self.slots.state,
            "curriculum": None if self.draws.curriculum is None else self.draws.curriculum.state,
            "lengths": self.lengths.state,
            "carried": [] if self.carrier is None else self.carrier.state,
            "constraint_weights": None
            if self.rules.constraints is None
            else list(self.rules.constraints.weights),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        gaps, start = (
            tuple(state.get("gaps", ())),
            state.get("start", 0),
        )  # absent from earlier versions
        self.draws.shard = replace(self.draws.shard, gaps=gaps, start=start)
        self.draws.cursor = state["cursor"]
        self.yields = Yield(**state["yield"])
        self.surplus.waiting = [finished_from_json(item) for item in state["surplus"]]
        self.slots.restore(state.get("placement"))  # absent from checkpoints of early versions
        if self.draws.curriculum is not None:
            self.draws.curriculum.restore(state.get("curriculum"))
        self.lengths.restore(state.get("lengths", {"rows": []}))  # absent from earlier versions
        if self.carrier is not None:
            self.carrier.restore(state["carried"])
        weights = state.get(
            "constraint_weights"
        )  # absent from earlier versions, and from a run without constraints
        if self.rules.constraints is not None and weights is not None:
            self.rules.constraints.weights = list(weights)

    @property
    def _ends_at(self) -> threading.Event:
        """What ends the work under way."""
        return self.stop

    @property
    def problems(self) -> dict[str, int]:
        """Why completions of the last round have no reward, with how many each."""
        return dict(self.meter.problems)

    @property
    def constraint_weights(self) -> list[float] | None:
        """Those that the last round is trained with; None without constraints."""
        return None if self.rules.constraints is None else list(self.rules.constraints.weights)

    def next_draws(self, number: int, left: list[Draw]) -> list[Draw]:
        """So many groups to start: first of those that the last round left unfinished, which are taken out of `left`,
        and then new ones."""
        again, left[:] = left[:number], left[number:]
        new = [self.draws.draw() for _ in range(number - len(again))]
        self.meter.drawn += len(new)
        return [*again, *new]

    async def unless_over(self) -> None:
        """Never returns once the round is over: the caller's group is cancelled then."""
        if self._is_over:
            await asyncio.Event().wait()

    async def halt(self) -> None:
        """End the round: have the engines give back what they write, as far as it is."""
        self._is_over = True
        while any(engine.in_flight for engine in self.engines):
            await asyncio.gather(*(engine.abort() for engine in self.engines))
            await asyncio.sleep(_ABORT_EVERY_S)

    def count(self, group: Group) -> None:
        """Note what a group that was written and scored adds to the step's metrics."""
        self.meter.count(group, self.rules.reward_weights)
        if self.rules.constraints is not None:
            self.rules.constraints.count(group)

    def learn_order(self, offers: Sequence[Offer]) -> None:
        """What the groups of all ranks tell of their prompts decides how often those come again, and which are begun
        first."""
        draws = self.draws
        self.lengths.learn((draws.row_at(one.position), one.cost) for one in offers)
        if draws.curriculum is not None:
            draws.curriculum.learn(
                (draws.row_at(one.position), *one.lesson) for one in offers if one.lesson
            )
            self.note_all({"ycore/curriculum/dropped": draws.curriculum.num_dropped})

    def should_stop(self) -> bool:
        """Whether any rank was asked to stop. All ranks call this together and get the same answer."""
        return self._runner.run(self.peers.meet(stopping=self.stop.is_set()))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, once every rank has its own.

        Raises:
            Interrupted: on every rank, when any rank was asked to stop meanwhile.
        """

        async def on_all_ranks() -> T:
            try:
                result = await _until_stopped(work, self._ends_at, self.peers)
            except Interrupted:
                await self.peers.meet(stopping=True)
                raise
            if await self.peers.meet(stopping=False):
                raise Interrupted("another rank was interrupted; the last finished step is kept")
            return result

        return self._runner.run(on_all_ranks())


async def _until_stopped(work: Awaitable[T], stop: threading.Event, peers: Peers) -> T:
    """The work's result; Interrupted as soon as any rank is to stop, RunError as soon as another has failed."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_watch(stop, peers))
    async with ending([task, watch]):
        try:
            done, _ = await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task in done else watch.result()
        except BaseExceptionGroup as group:
            raise _first_error(group) from group


async def _watch(stop: threading.Event, peers: Peers) -> Any:
    while not stop.is_set():
        if peers.stop_asked():
            stop.set()
        await asyncio.sleep(_STOP_LOOK_S)
    peers.ask_to_stop()
    raise Interrupted("interrupted while generating; the last finished step is kept")


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show of several that came at once: ycore's own before others, else the first."""
    leaves = [
        _first_error(one) if isinstance(one, BaseExceptionGroup) else one
        for one in group.exceptions
    ]
    return next((leaf for leaf in leaves if isinstance(leaf, YcoreError)), leaves[0])
