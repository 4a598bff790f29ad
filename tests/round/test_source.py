"""The trainer's side of a round: weights before it, one plain error out of it, an end to it within a second.

The engines here are the test's own (an `Engine` without a process); the reward workers are the real ones.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.rollout.talks import rules_alone
from tests.scoring.pools import pool_in
from ycore.config.schema import RewardConfig, RewardSettings
from ycore.engine import Engine
from ycore.errors import EngineError, Interrupted, SyncError
from ycore.round.peers import Peers
from ycore.round.sampling import DrawSource, Rules
from ycore.round.step import Controller, ShareWeights
from ycore.types import Completion, Prompt

REWARDS = """
import time
def last_digit(completions, **columns):
    return [float(text[-1]) for text in completions]
def slow(completions, **columns):
    time.sleep(60)
"""


class TestEngine(Engine):
    """Writes its version and the seed's last digit; hangs or fails when told to."""

    __test__ = False

    def __init__(
        self,
        name: str = "one",
        *,
        hangs: bool = False,
        fails: bool = False,
        stale: bool = False,
    ) -> None:
        self.name = name
        self.version = 0
        self.loaded: list[tuple[Path, int]] = []
        self.closed = False
        self._hangs, self._fails, self._stale = hangs, fails, stale

    async def wait_ready(self, *, timeout_s: float) -> None:
        pass

    async def logprobs_of(
        self, context_ids: Sequence[int], target_ids: Sequence[int]
    ) -> tuple[float, ...]:
        return tuple(-1.0 for _ in target_ids)

    async def load_weights(self, folder: Path, version: int) -> None:
        if self._stale:
            raise SyncError(f"{self.name}: holds policy version 0, not {version}")
        self.loaded.append((folder, version))
        self.version = version

    async def complete(
        self, prompt_ids: Sequence[int], seed: int, *, greedy: bool = False
    ) -> Completion:
        if self._fails:
            raise EngineError(f"{self.name}: /v1/completions failed")
        if self._hangs:
            await asyncio.Event().wait()
        digit = seed % 10
        return Completion((digit,), (-1.0,), str(digit), "stop", self.version)

    async def close(self) -> None:
        self.closed = True


MakeRounds = Callable[..., Controller]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRounds]:
    (tmp_path / "their_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    made: list[Controller] = []
    before = set(psutil.Process().children(recursive=True))

    def make_rounds(
        *engines: TestEngine,
        share_weights: ShareWeights | None = lambda version: tmp_path / f"weights-{version}",
        reward: str = "last_digit",
        dynamic: bool = False,
        max_age: int = 1,
    ) -> Controller:
        rounds = Controller(
            engines=engines,
            scoring=rules_alone(
                pool_in(
                    tmp_path / "run",
                    RewardConfig(reward=f"their_rewards.py:{reward}"),
                    settings=RewardSettings(workers=1, deadline_s=30),
                )
            ),
            draws=DrawSource(
                [Prompt(row=row, content=f"prompt {row}") for row in range(9)],
                seed=0,
                encode=lambda prompt: (prompt.row + 1,),
                max_prompt_tokens=5,
            ),
            rules=Rules(group_size=2, seed=1, reward_weights=(1.0,), dynamic=dynamic),
            peers=Peers(),
            share_weights=share_weights,
            max_surplus_age=max_age,
        )
        made.append(rounds)
        rounds.start(timeout_s=30)
        return rounds

    yield make_rounds
    for rounds in made:
        rounds.close()
    assert set(psutil.Process().children(recursive=True)) <= before, (
        "reward workers outlived their round"
    )


def test_weights_reach_every_engine_before_the_round_and_once_a_version(
    make: MakeRounds, tmp_path: Path
) -> None:
    engines = [TestEngine("one"), TestEngine("two")]
    rounds = make(*engines)
    groups = rounds.next_round(step=0, num_groups=3)
    assert len(groups) == 3
    rounds.next_round(step=0, num_groups=1)
    later = rounds.next_round(step=1, num_groups=2)
    for engine in engines:
        assert engine.loaded == [(tmp_path / "weights-0", 0), (tmp_path / "weights-1", 1)]
    assert {
        completion.policy_version for group in later for completion in group.completions
    } == {1}


def test_frozen_weights_are_never_sent(make: MakeRounds) -> None:
    engine = TestEngine()
    rounds = make(engine, share_weights=None)
    rounds.next_round(step=0, num_groups=1)
    rounds.next_round(step=3, num_groups=1)
    assert engine.loaded == []


def test_the_draws_go_on_from_round_to_round(make: MakeRounds) -> None:
    rounds = make(TestEngine())
    positions = [
        group.draw.position
        for step in range(3)
        for group in rounds.next_round(step=step, num_groups=2)
    ]
    assert positions == list(range(6))


def test_metrics_of_a_round(make: MakeRounds) -> None:
    rounds = make(TestEngine())
    recorded: dict[str, float] = {}
    rounds.record = recorded.__setitem__
    rounds.next_round(step=0, num_groups=2)
    assert {
        "ycore/time/sync",
        "ycore/time/round",
        "ycore/tokens_per_s",
        "ycore/masked",
    } <= recorded.keys()
    assert recorded["ycore/masked"] == 0
    assert recorded["ycore/time/round"] >= recorded["ycore/time/generate"] > 0


@pytest.mark.parametrize(
    ("hangs", "reward"), [(True, "last_digit"), (False, "slow")], ids=["generating", "scoring"]
)
def test_a_stop_ends_the_round(make: MakeRounds, hangs: bool, reward: str) -> None:
    rounds = make(TestEngine(hangs=hangs), reward=reward)
    asked_at = []

    def ask() -> None:
        asked_at.append(time.monotonic())
        rounds.stop.set()

    timer = threading.Timer(0.5, ask)
    timer.start()
    with pytest.raises(Interrupted):
        rounds.next_round(step=0, num_groups=4)
    assert time.monotonic() - asked_at[0] < 60
    with pytest.raises(Interrupted):  # and no later one begins
        rounds.next_round(step=0, num_groups=1)


def test_one_engines_error_comes_out_as_itself_while_others_hang(make: MakeRounds) -> None:
    rounds = make(TestEngine("one", fails=True), TestEngine("two", hangs=True))
    started = time.monotonic()
    with pytest.raises(EngineError, match="one: /v1/completions failed"):
        rounds.next_round(step=0, num_groups=4)
    assert time.monotonic() - started < 60


def test_an_engine_that_keeps_old_weights_ends_the_round(make: MakeRounds) -> None:
    rounds = make(TestEngine("one"), TestEngine("two", stale=True))
    with pytest.raises(SyncError, match="two: holds policy version 0, not 1"):
        rounds.next_round(step=1, num_groups=1)


def test_samples_are_the_same_whenever_they_are_asked(make: MakeRounds) -> None:
    rounds = make(TestEngine())
    prompts = [(Prompt(row=row, content=f"prompt {row}"), (row + 1,)) for row in range(3)]
    first = rounds.sample(prompts, version=0)
    rounds.next_round(step=1, num_groups=2)
    assert rounds.sample(prompts, version=2) == first
    assert [sample["row"] for sample in first] == [0, 1, 2]


def test_groups_left_over_start_the_next_round_unless_too_old(make: MakeRounds) -> None:
    rounds = make(TestEngine(), dynamic=True)
    rounds.acceptance.kept, rounds.acceptance.finished = (
        10.0,
        30.0,
    )  # a third taught so far: three times are drawn
    first = rounds.next_round(step=0, num_groups=2)
    left = [item.group.draw.position for item in rounds.leftover_groups.waiting]
    assert left, "the seeds of this test leave nothing over"
    second = rounds.next_round(step=1, num_groups=len(left))
    assert {group.draw.position for group in second} == set(left)
    assert not {group.draw.position for group in first} & set(left)
    rounds.acceptance.kept, rounds.acceptance.finished = 10.0, 30.0
    rounds.next_round(step=2, num_groups=2)
    assert rounds.leftover_groups.take(9) == []


def test_a_restored_controller_goes_on_where_the_first_one_was(make: MakeRounds) -> None:
    first, second = make(TestEngine(), dynamic=True), make(TestEngine(), dynamic=True)
    first.acceptance.kept, first.acceptance.finished = 10.0, 30.0
    first.next_round(step=0, num_groups=2)
    second.restore(first.state())
    assert second.next_round(step=1, num_groups=3) == first.next_round(step=1, num_groups=3)
