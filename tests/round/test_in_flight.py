"""Completions that take several rounds: what is kept, what goes on, what a kill leaves, and what no round may lose."""

import asyncio
import itertools
import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from ycore.engine import Engine
from ycore.errors import EngineError
from ycore.rollout.turns import ABORTED, joined
from ycore.round.ahead import ControllerAhead, RoundsAhead
from ycore.round.in_flight import InFlight
from ycore.round.journal import Journal
from ycore.round.peers import Peers
from ycore.round.sampling import DrawSource, Rules
from ycore.round.step import Controller
from ycore.scoring.scoring import PendingGroup, Scoring
from ycore.types import Completion, Group, Prompt, Score

MAX_TOKENS = 40
NEED = 3


class TickingEngine(Engine):
    """Writes a token a tick, and as many as the seed of a completion's first request says; `abort` as vLLM's.

    A token is its version, and its log-probability tells how many tokens the context had.
    """

    name = "scripted"

    def __init__(self, *, tick_s: float = 0.0) -> None:
        self._tick_s = tick_s
        self.seeds: list[int] = []
        self._aborted = asyncio.Event()

    def tokens(self, prompt_ids: Sequence[int], seed: int) -> Iterator[int]:
        """The tokens that this request writes up to the last."""
        length = 2 + prompt_ids[0] * 7 % 37
        num_before = len(prompt_ids) - 1
        return itertools.repeat(self.version, length - num_before)

    async def complete(
        self,
        prompt_ids: Sequence[int],
        seed: int,
        *,
        greedy: bool = False,
        max_tokens: int | None = None,
    ) -> Completion:
        self.in_flight += 1
        self.seeds.append(seed)
        limit = MAX_TOKENS if max_tokens is None else max_tokens
        version, aborted = self.version, self._aborted
        tokens: list[int] = []
        reason = "stop"
        for token in self.tokens(prompt_ids, seed):
            await asyncio.sleep(self._tick_s)
            if aborted.is_set():
                reason = ABORTED
                break
            if len(tokens) == limit:
                reason = "length"
                break
            tokens.append(token)
        self.in_flight -= 1
        logprobs = tuple(-float(len(prompt_ids) + number) for number in range(len(tokens)))
        return Completion(tuple(tokens), logprobs, str(seed % 10), reason, version)

    async def abort(self) -> None:
        self._aborted.set()
        self._aborted = asyncio.Event()


class Numbered:
    """Rewards that differ within each group."""

    meters = ()

    async def start(self, *, timeout_s: float) -> None:
        pass

    async def score(self, writing: PendingGroup) -> list[Score]:
        return [Score(float(number)) for number, _ in enumerate(await writing.all())]

    async def close(self) -> None:
        pass


Make = Callable[..., Controller]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Controller] = []

    def controller(
        folder: str = "journal",
        *,
        oversample: float = 2.0,
        max_age: int = 99,
        max_staleness: int = 0,
        **more: Any,
    ) -> Controller:
        rules = Rules(group_size=2, seed=1, reward_weights=(1.0,), oversample=oversample)
        parts: dict[str, Any] = {
            "engines": [TickingEngine()],
            "scoring": Scoring([Numbered()]),
            "draws": DrawSource(
                [Prompt(row, f"prompt {row}") for row in range(60)],
                seed=3,
                encode=lambda prompt: (prompt.row + 1,),
                max_prompt_tokens=2,
            ),
            "rules": rules,
            "peers": Peers(),
            "share_weights": lambda version: tmp_path,
            "journal": Journal(tmp_path / folder, rank=0),
            "in_flight": InFlight(
                lambda ids: " ".join(map(str, ids)),
                max_tokens=MAX_TOKENS,
                max_age=max_age,
                seed=rules.seed,
                group_size=rules.group_size,
                streams=max_staleness > 1,
            ),
            **more,
        }
        make_one = Controller
        if max_staleness:
            make_one = partial(ControllerAhead, num_steps=99, max_staleness=max_staleness)
        new_controller = make_one(**parts)
        made.append(new_controller)
        return new_controller

    yield controller
    for made_controller in made:
        made_controller.close()


def take(controller: Controller, steps: Sequence[int]) -> list[list[Group]]:
    rounds = []
    for step in steps:
        rounds.append(controller.next_round(step=step, num_groups=NEED))
        controller.settle()
    return rounds


def completions(rounds: Sequence[Sequence[Group]]) -> list[Completion]:
    return [
        completion for groups in rounds for group in groups for completion in group.completions
    ]


def expected_length(group: Group) -> int:
    return 2 + group.draw.token_ids[0] * 7 % 37


def test_a_carried_completion_is_whole_and_each_token_has_its_versions_logprob(
    make: Make,
) -> None:
    rounds = take(make(), range(8))
    carried = [written for written in completions(rounds) if written.segments]
    assert carried, "nothing was carried"
    for group in (group for groups in rounds for group in groups):
        for completion in group.completions:
            assert len(completion.token_ids) == expected_length(group)
            assert completion.logprobs == tuple(
                -float(1 + number) for number in range(len(completion.token_ids))
            )
    for completion in carried:
        ends = [end for end, _ in completion.segments]
        assert ends == sorted({*ends}) and ends[0] > 0 and ends[-1] < len(completion.token_ids)
        written_by = [version for end, version in completion.segments] + [
            completion.policy_version
        ]
        starts = [0, *ends, len(completion.token_ids)]
        for version, begin, end in zip(written_by, starts, starts[1:], strict=False):
            assert {*completion.token_ids[begin:end]} == {version}
        assert (
            completion.first_version < completion.policy_version
            and completion.text == " ".join(map(str, completion.token_ids))
        )


def test_no_group_is_lost_or_comes_twice_and_the_long_ones_come_too(make: Make) -> None:
    controller = make()
    rounds = take(controller, range(12))
    trained = [group.draw.position for groups in rounds for group in groups]
    left = [draw.position for draw in controller.in_flight.unfinished]
    kept = [item.group.draw.position for item in controller.leftover_groups.waiting]
    assert sorted([*trained, *left, *kept]) == list(range(controller.draws.cursor))
    assert max(expected_length(group) for groups in rounds for group in groups) > 30


def test_a_round_is_over_before_its_longest_completion(make: Make) -> None:
    first, level = (
        take(make("a"), [0])[0],
        take(make("b", oversample=1.0, in_flight=None), [0])[0],
    )
    assert max(map(expected_length, first)) < max(map(expected_length, level))


def test_a_continued_completion_has_a_seed_of_its_own(make: Make) -> None:
    controller = make()
    take(controller, range(8))
    (engine,) = controller.engines
    assert isinstance(engine, TickingEngine)
    assert len({*engine.seeds}) == len(engine.seeds) > 8 * NEED * 2


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_kill_loses_none_of_the_pool(make: Make, max_staleness: int) -> None:
    """The pool is in each round's record. What is written after it depends on when engines are told to stop."""
    first = make(max_staleness=max_staleness)
    rounds = take(first, range(4))
    again = make(max_staleness=max_staleness)
    assert take(again, range(4)) == rounds
    pool = again.state()["unfinished_groups"]
    waiting = {group["draw"]["position"] for group in pool}
    assert waiting and pool == first.state()["unfinished_groups"]
    later = take(again, range(4, 12))
    assert waiting <= {group.draw.position for groups in later for group in groups} | {
        draw.position for draw in again.in_flight.unfinished
    }


def test_the_pool_is_plain_json_and_comes_back_from_a_checkpoint(make: Make) -> None:
    first = make()
    take(first, range(3))
    state = json.loads(json.dumps(first.state()))
    again = make("other")
    again.restore(state)
    assert (
        again.in_flight.state_dict() == first.in_flight.state_dict()
        and again.in_flight.unfinished
    )


def test_what_is_too_old_begins_anew(make: Make) -> None:
    controller = make(max_age=1, oversample=4.0)
    recorded: dict[str, float] = {}
    controller.record = lambda name, value: recorded.__setitem__(
        name, recorded.get(name, 0.0) + value
    )
    rounds = take(controller, range(10))
    assert all(
        completion.policy_version - completion.first_version <= 1
        for completion in completions(rounds)
    )
    assert recorded["ycore/carried/dropped"] > 0 and recorded["ycore/carried/tokens"] > 0


def test_the_metrics_tell_what_was_carried(make: Make) -> None:
    controller = make()
    recorded: dict[str, float] = {}
    controller.record = recorded.__setitem__
    take(controller, [0])
    begun = [
        len(completion["token_ids"])
        for group in controller.in_flight.state_dict()
        for completion in group["begun"].values()
        if completion["finish_reason"] == ABORTED
    ]
    assert recorded["ycore/carried/groups"] == len(controller.in_flight.unfinished) > 0
    assert recorded["ycore/carried/completions"] == len([num for num in begun if num])
    assert recorded["ycore/carried/tokens"] == sum(begun)


def test_what_two_versions_wrote_is_one_completion() -> None:
    begun = Completion((1, 2), (-1.0, -2.0), "ab", ABORTED, 3)
    rest = Completion((4,), (-3.0,), "c", "stop", 5)
    decode = lambda ids: "".join(map(str, ids))  # noqa: E731
    assert joined(begun, rest, decode) == Completion(
        (1, 2, 4), (-1.0, -2.0, -3.0), "124", "stop", 5, segments=((2, 3),)
    )
    nothing = Completion((), (), "", ABORTED, 5)
    assert joined(begun, nothing, decode).first_version == 3
    assert joined(joined(begun, nothing, decode), rest, decode).segments == ((2, 3),)


class DrawingEngine(TickingEngine):
    """Draws each token, and whether it is the last (one in eight), from the seed of its request."""

    def tokens(self, prompt_ids: Sequence[int], seed: int) -> Iterator[int]:
        numbers = random.Random(seed)
        is_last = False
        while not is_last:
            yield numbers.randrange(10)
            is_last = numbers.random() < 1 / 8


# -- a stream ----------------------------------------------------------------------------------------------------------


def train(controller: Controller, steps: Sequence[int]) -> list[list[Group]]:
    """Take rounds as a trainer does that needs some time for each step."""
    rounds = []
    for step in steps:
        rounds.append(controller.next_round(step=step, num_groups=NEED))
        controller.settle()
        time.sleep(0.02)
    return rounds


def stream(make: Make, folder: str = "journal", **more: Any) -> Controller:
    engine = TickingEngine(tick_s=0.002)
    return make(
        folder,
        max_staleness=3,
        max_age=3,
        oversample=1.0,
        engines=[engine],
        max_surplus_age=3,
        **more,
    )


def test_in_a_stream_no_token_is_older_than_its_step_allows_and_each_has_its_version(
    make: Make,
) -> None:
    rounds = train(stream(make), range(12))
    for step, groups in enumerate(rounds):
        for completion in (written for group in groups for written in group.completions):
            start = 0
            for end, version in completion.versions:
                assert {*completion.token_ids[start:end]} == {version}
                assert step - 3 <= version <= step
                start = end
            assert completion.logprobs == tuple(
                -float(1 + number) for number in range(len(completion.token_ids))
            )
    assert any(written.segments for written in completions(rounds)), "nothing met new weights"


def test_a_stream_trains_on_every_group_once_or_counts_it_as_too_old(make: Make) -> None:
    controller = stream(make)
    recorded: dict[str, float] = {}
    controller.record = lambda name, value: recorded.__setitem__(
        name, recorded.get(name, 0.0) + value
    )
    rounds = train(controller, range(12))
    controller.rest()
    ahead = [
        group
        for future in controller._rounds.values()  # type: ignore[attr-defined]
        for group in future.result().groups
    ]
    positions = [group.draw.position for groups in [*rounds, ahead] for group in groups]
    positions += [draw.position for draw in controller.in_flight.unfinished]
    positions += [item.group.draw.position for item in controller.leftover_groups.waiting]
    assert len({*positions}) == len(positions)
    missing = controller.draws.cursor - len(positions)
    metrics = [future.result().metrics for future in controller._rounds.values()]  # type: ignore[attr-defined]
    stale = sum(metric["ycore/sampling/stale"] for metric in metrics)
    assert missing == recorded["ycore/sampling/stale"] + stale


def test_with_weights_that_do_not_change_a_stream_has_the_lengths_and_tokens_of_no_lag(
    make: Make,
) -> None:
    """Within 4.5 standard errors of 594 completions: the long ones, which meet most syncs, are neither lost nor cut."""
    stream = make(
        max_staleness=4,
        max_age=4,
        max_surplus_age=4,
        oversample=1.0,
        engines=[DrawingEngine(tick_s=0.001)],
    )
    in_turns = make(
        "b",
        oversample=1.0,
        in_flight=None,
        engines=[DrawingEngine()],
        rules=Rules(group_size=2, seed=2, reward_weights=(1.0,)),
    )
    streamed = completions(train(stream, range(99)))
    written = completions(take(in_turns, range(99)))
    assert any(completion.segments for completion in streamed), "nothing met new weights"
    errors = []
    for figure in (
        lambda completion: len(completion.token_ids),
        lambda completion: completion.finish_reason == "length",
        lambda completion: completion.token_ids[0],
        lambda completion: completion.token_ids[-1],
    ):
        pairs = [
            [float(figure(completion)) for completion in side] for side in (streamed, written)
        ]
        difference = fmean(pairs[0]) - fmean(pairs[1])
        errors.append(
            abs(difference) / math.hypot(*(stdev(side) / len(side) ** 0.5 for side in pairs))
        )
    assert max(errors) < 4.5, errors


def test_a_stream_keeps_the_engine_busy_while_a_step_trains(make: Make) -> None:
    controller = stream(make)
    controller.next_round(step=0, num_groups=NEED)
    (engine,) = controller.engines
    idle = 0
    for step in range(1, 8):
        for _ in range(10):
            time.sleep(0.002)
            idle += engine.in_flight == 0
        controller.next_round(step=step, num_groups=NEED)
    # Rounds one after another are idle at all of them; on a busy machine a stream is at a few.
    assert idle < 35, f"idle at {idle} of 70 looks"


@pytest.mark.parametrize("last", [0, 3, 6])
def test_a_stream_that_is_killed_repeats_what_was_committed(make: Make, last: int) -> None:
    first = stream(make)
    rounds = train(first, range(last + 1))
    saved = json.loads(json.dumps(first.state()))
    first.rest()
    ahead = {
        step: future.result().groups
        for step, future in first._rounds.items()  # type: ignore[attr-defined]
    }
    assert ahead
    again = stream(make)
    assert train(again, range(last + 1)) == rounds
    assert again.state() == saved
    resumed = stream(make)
    resumed.restore(saved)
    for step, groups in ahead.items():
        assert resumed.next_round(step=step, num_groups=NEED) == groups
    later = train(resumed, range(max(ahead) + 1, last + 8))
    trained = [
        group.draw.position for groups in [*rounds, *ahead.values(), *later] for group in groups
    ]
    assert len({*trained}) == len(trained), "a group came twice"


def test_rounds_are_begun_no_earlier_than_training_needs_them(make: Make) -> None:
    """An engine that is faster than the trainer stays one version behind it, whatever the limit."""
    controller = stream(make)
    ages = []
    for step in range(10):
        groups = controller.next_round(step=step, num_groups=NEED)
        ages += [
            step - completion.first_version
            for group in groups
            for completion in group.completions
        ]
        controller.rest()  # training takes longer than writing
    assert max(ages[6 * NEED :]) <= 2


def test_rounds_are_begun_ahead_as_far_as_training_waits() -> None:
    """Fewer after two calm steps, or where groups came too late: a stream that has begun too much delays long ones."""
    ahead = RoundsAhead(3)
    waits = {"waits": True, "is_tight": True, "too_old": False}
    tight = {"waits": False, "is_tight": True, "too_old": False}
    calm = {"waits": False, "is_tight": False, "too_old": False}
    steps = [waits, waits, waits, tight, calm, tight, calm, calm, calm, calm, calm, calm]
    assert [ahead.choose(**step) for step in steps] == [2, 3, 3, 3, 3, 3, 3, 2, 2, 1, 1, 1]
    assert [ahead.choose(**step) for step in [waits, waits]] == [2, 3]
    assert ahead.choose(**{**waits, "too_old": True}) == 2


def test_fewer_rounds_are_begun_where_groups_came_too_late(make: Make) -> None:
    controller = stream(make)
    train(controller, range(4))
    assert isinstance(controller, ControllerAhead)
    controller._ahead.number = 3
    controller._num_dropped = 1.0
    assert controller._enough_ahead(4) == 2


@pytest.mark.parametrize(("share", "ahead"), [(0.79, 1), (0.81, 3)])
def test_fewer_rounds_are_begun_where_too_few_tokens_count(
    make: Make, share: float, ahead: int
) -> None:
    controller = stream(make, min_effective_share=0.8)
    train(controller, range(4))
    assert isinstance(controller, ControllerAhead)
    controller._ahead.number = 2
    controller._rounds.clear()  # so that training waits
    controller.effective_share = share
    assert controller._enough_ahead(4) == ahead


def test_an_error_in_a_stream_ends_the_run_with_its_step(make: Make) -> None:
    controller = stream(make)
    train(controller, range(2))

    async def fail(*_: Any, **__: Any) -> Completion:
        raise EngineError("scripted: gone")

    controller.engines[0].complete = fail  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=r"the round of step \d+: scripted: gone"):
        train(controller, range(2, 9))


def test_a_stream_is_closed_while_groups_are_in_flight(make: Make) -> None:
    controller = stream(make)
    train(controller, range(2))
    controller.close()
    controller.close = lambda: None  # type: ignore[method-assign]  # the fixture's
    assert not [thread for thread in threading.enumerate() if thread.name == "rounds"]


def test_deterministic_rounds_two_ahead_have_one_version_each(make: Make) -> None:
    def versions_of_rounds() -> list[set[int]]:
        controller = make(max_staleness=2, oversample=1.0, in_flight=None, journal=None)
        return [
            {*completion.versions} for completion in completions(train(controller, range(6)))
        ]

    written = versions_of_rounds()
    assert written == versions_of_rounds()
    assert {version for ((_, version),) in written} == {0, 1, 2, 3}
