"""Rounds one step ahead: which version writes them, what a checkpoint and a kill leave, and how a stop ends them."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from ycore.engine import Engine as BaseEngine
from ycore.errors import EngineError
from ycore.round.ahead import ControllerAhead
from ycore.round.journal import Journal
from ycore.round.peers import Peers
from ycore.round.sampling import DrawSource, Rules
from ycore.round.step import Controller
from ycore.scoring.scoring import PendingGroup, Scoring
from ycore.types import Completion, Group, Prompt, Score

STEPS = 5


class Engine(BaseEngine):
    """Writes a token that its version and the seed decide; `gate` holds its answers back."""

    name = "scripted"

    def __init__(self) -> None:
        self.differs = 7  # what a version adds to the tokens
        self.gate = threading.Event()
        self.gate.set()
        self.fails_at: int | None = None

    async def complete(
        self,
        prompt_ids: Sequence[int],
        seed: int,
        *,
        greedy: bool = False,
        max_tokens: int | None = None,
    ) -> Completion:
        if self.fails_at == self.version:
            raise EngineError("scripted: gone")
        while not self.gate.is_set():
            await asyncio.sleep(0.002)
        token = (seed + self.differs * self.version) % 10
        return Completion((token,), (-1.0,), str(token), "stop", self.version)


class Even:
    """A reward for even tokens, so that some groups cannot teach and others are left over."""

    meters = ()

    async def start(self, *, timeout_s: float) -> None:
        pass

    async def score(self, writing: PendingGroup) -> list[Score]:
        written = await writing.all()
        return [Score(float(completion.token_ids[0] % 2 == 0)) for completion in written]

    async def close(self) -> None:
        pass


Make = Callable[..., Controller]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Controller] = []

    def controller(
        folder: str = "journal",
        *,
        ahead: bool = True,
        engine: Engine | None = None,
        steps: int = STEPS,
        dynamic: bool = False,
        reuse: float = 0.0,
    ) -> Controller:
        parts = {
            "engines": [engine or Engine()],
            "scoring": Scoring([Even()]),
            "draws": DrawSource(
                [Prompt(row, f"prompt {row}") for row in range(50)],
                seed=3,
                encode=lambda prompt: (prompt.row + 1,),
                max_prompt_tokens=2,
            ),
            "rules": Rules(
                group_size=2,
                seed=1,
                reward_weights=(1.0,),
                dynamic=dynamic,
                in_order=True,
                reuse=reuse,
            ),
            "peers": Peers(),
            "share_weights": lambda version: tmp_path,
            "journal": Journal(tmp_path / folder, rank=0),
        }
        new_controller = (
            ControllerAhead(num_steps=steps, max_staleness=1, **parts)
            if ahead
            else Controller(**parts)
        )
        made.append(new_controller)
        return new_controller

    yield controller
    for made_controller in made:
        made_controller.close()


def versions(groups: Sequence[Group]) -> set[int]:
    return {completion.policy_version for group in groups for completion in group.completions}


def take(controller: Controller, steps: Sequence[int]) -> list[list[Group]]:
    rounds = []
    for step in steps:
        rounds.append(controller.next_round(step=step, num_groups=3))
        controller.settle()
    return rounds


def test_a_round_is_written_by_the_version_before_its_step_and_the_first_by_its_own(
    make: Make,
) -> None:
    written = [max(versions(groups)) for groups in take(make(), range(STEPS))]
    assert written == [0, 0, 1, 2, 3]


def test_what_is_measured_is_measured_with_the_weights_of_its_step(make: Make) -> None:
    engine = Engine()
    controller = make(ahead=False, engine=engine)
    take(controller, [0, 1])
    controller.sync(2)  # as an evaluation does
    assert engine.version == 2


def test_with_weights_that_do_not_change_the_rounds_are_those_of_no_lag(make: Make) -> None:
    engine = Engine()
    engine.differs = 0

    def plain(groups: Sequence[Group]) -> object:
        return [
            (group.draw.position, [completion.token_ids for completion in group.completions])
            for group in groups
        ]

    ahead = take(make("a", engine=engine, dynamic=True), range(STEPS))
    level = take(make("b", engine=engine, ahead=False, dynamic=True), range(STEPS))
    assert [plain(groups) for groups in ahead] == [plain(groups) for groups in level]


def test_what_is_left_over_ages_by_the_version_that_wrote_it(make: Make) -> None:
    """Counted by the step, a left-over group would be two old when it is taken, and dropped."""
    rounds = take(make(dynamic=True), range(STEPS))
    positions = sorted(group.draw.position for groups in rounds for group in groups)
    taken_later = [
        group
        for step, groups in enumerate(rounds)
        for group in groups
        if versions([group]) == {max(0, step - 2)}
    ]
    assert taken_later and len(set(positions)) == len(positions)


def test_the_round_ahead_is_written_while_the_caller_trains(make: Make) -> None:
    engine = Engine()
    controller = make(engine=engine)
    controller.next_round(step=0, num_groups=3)
    controller.settle()
    engine.gate.clear()
    controller.next_round(step=1, num_groups=3)  # returns, though the engine answers nothing
    threading.Timer(0.2, engine.gate.set).start()
    began = time.perf_counter()
    controller.settle()
    assert time.perf_counter() - began > 0.1
    assert controller.take_seconds() > 0.1


def test_a_checkpoint_has_the_state_before_the_round_ahead_whose_commit_it_waits_for(
    make: Make, tmp_path: Path
) -> None:
    level = make("b", ahead=False)
    controller = make()
    for step in range(2):
        controller.next_round(step=step, num_groups=3)
        controller.settle()
    saved = controller.state()
    assert Journal(tmp_path / "journal", rank=0).read(2) is not None
    take(level, [0])
    assert level.state()["draws"]["cursor"] < saved["draws"]["cursor"]

    again = make()  # resumes from the checkpoint of step 2
    again.restore(saved)
    whole = take(make("whole"), range(STEPS))
    assert take(again, range(2, STEPS)) == whole[2:]


@pytest.mark.parametrize("reuse", [0.0, 0.4])
def test_a_kill_at_any_commit_gives_the_same_rounds_and_versions(
    make: Make, tmp_path: Path, reuse: float
) -> None:
    make = partial(make, reuse=reuse)
    whole = take(make("whole", dynamic=True), range(STEPS))
    for last in range(STEPS):
        folder = f"killed-{last}"
        take(
            make(folder, steps=last + 1, dynamic=True), range(last + 1)
        )  # what a run has written when it is killed there
        assert take(make(folder, dynamic=True), range(STEPS)) == whole, (
            f"killed after the commit of round {last}"
        )


@pytest.mark.parametrize("ahead", [False, True])
def test_groups_are_used_once_more_by_a_later_step_with_what_wrote_them(
    make: Make, ahead: bool
) -> None:
    """A third of the second round and of each later one; the rest are new draws, in their order."""
    rounds = take(make(ahead=ahead, reuse=0.4), range(STEPS))
    first: dict[int, Group] = {}
    for step, groups in enumerate(rounds):
        again = [group for group in groups if group.draw.position in first]
        assert len(groups) == 3 and len(again) == (step > 0)
        assert all(group == first.pop(group.draw.position) for group in again)
        first |= {group.draw.position: group for group in groups if group not in again}


def test_a_longer_run_later_writes_its_first_round_without_lag(make: Make) -> None:
    first = make()
    take(first, range(STEPS))
    longer = make(steps=STEPS + 3)
    longer.restore(first.state())  # from the checkpoint of its last step
    rounds = take(longer, range(STEPS, STEPS + 3))
    assert [max(versions(groups)) for groups in rounds] == [5, 5, 6]


def test_a_stop_lets_the_round_under_way_end(make: Make, tmp_path: Path) -> None:
    engine = Engine()
    controller = make(engine=engine)
    controller.next_round(step=0, num_groups=3)
    controller.settle()
    engine.gate.clear()
    controller.next_round(step=1, num_groups=3)
    controller.stop.set()
    threading.Timer(0.1, engine.gate.set).start()
    controller.settle()
    assert controller.should_stop()
    assert Journal(tmp_path / "journal", rank=0).read(2) is not None


def test_an_error_of_the_round_ahead_names_its_step(make: Make) -> None:
    engine = Engine()
    engine.fails_at = 1
    controller = make(engine=engine)
    take(controller, [0])
    controller.next_round(step=1, num_groups=3)
    with pytest.raises(EngineError, match="the round of step 2: scripted: gone"):
        controller.settle()


def test_a_run_that_fails_in_training_does_not_wait_for_the_round_ahead(make: Make) -> None:
    engine = Engine()
    controller = make(engine=engine)
    engine.gate.clear()
    threading.Timer(0.05, engine.gate.set).start()
    controller.next_round(step=0, num_groups=3)
    engine.gate.clear()  # for ever
    began = time.perf_counter()
    controller.close()
    controller.close = lambda: None  # type: ignore[method-assign]  # the fixture's
    assert time.perf_counter() - began < 60


def test_metrics_are_recorded_when_the_round_is_handed_over(make: Make) -> None:
    controller = make()
    recorded: list[str] = []
    controller.record = lambda name, value: recorded.append(name)
    controller.next_round(step=0, num_groups=3)
    assert recorded.count("ycore/reward") == 1
    controller.settle()
    assert recorded.count("ycore/reward") == 1 and "ycore/time/waited" in recorded
    controller.next_round(step=1, num_groups=3)
    assert recorded.count("ycore/reward") == 2
