"""The round over an engine of the test's own (an `Engine` without a process) and the real reward workers."""

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.rollout.talks import rules_alone
from tests.scoring.pools import pool_in
from ycore.config.schema import RewardConfig, RewardSettings
from ycore.engine import Engine
from ycore.errors import EngineError, RunError
from ycore.placement.allocator import Allocator
from ycore.placement.placement import ROLLOUT, SlotPool
from ycore.placement.slots import Slots
from ycore.rollout.turns import completion_seed
from ycore.round.meters import RoundMeter
from ycore.round.peers import Peers
from ycore.round.sampling import DrawSource, Rules
from ycore.round.step import Controller
from ycore.types import Completion, Draw, Finished, Group, Prompt, Score

T = TypeVar("T")

REWARDS = """
def parity(completions, answer):
    if any("7" in text for text in completions):
        raise ValueError("seven")
    return [float(int(text) % 2 == int(a)) for text, a in zip(completions, answer)]

def same(completions, **columns):
    return [1.0 for _ in completions]

def last_digit(completions, **columns):
    return [float(text[-1]) for text in completions]
"""


class TestEngine(Engine):
    """Writes the seed's last digits, after a wait; notes what it was asked."""

    __test__ = False

    def __init__(
        self,
        name: str = "one",
        *,
        wait_s: Callable[[Sequence[int]], float] = lambda prompt: 0.0,
    ) -> None:
        self.name = name
        self.asked: list[tuple[tuple[int, ...], int]] = []
        self.most_in_flight = 0
        self._wait_s = wait_s
        self._in_flight = 0

    async def wait_ready(self, *, timeout_s: float) -> None:
        pass

    async def logprobs_of(
        self, context_ids: Sequence[int], target_ids: Sequence[int]
    ) -> tuple[float, ...]:
        return tuple(-1.0 for _ in target_ids)

    async def load_weights(self, folder: Path, version: int) -> None:
        pass

    async def close(self) -> None:
        pass

    async def complete(
        self, prompt_ids: Sequence[int], seed: int, *, greedy: bool = False
    ) -> Completion:
        self.asked.append((tuple(prompt_ids), seed))
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        await asyncio.sleep(self._wait_s(prompt_ids))
        self._in_flight -= 1
        digits = tuple(int(digit) for digit in str(seed)[-2:])
        return Completion(digits, (-1.0,) * len(digits), "".join(map(str, digits)), "stop", 0)


class BrokenEngine(TestEngine):
    async def complete(
        self, prompt_ids: Sequence[int], seed: int, *, greedy: bool = False
    ) -> Completion:
        await asyncio.sleep(0.01)
        raise EngineError(f"{self.name}: gone")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "their_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def prompts(num: int) -> list[Prompt]:
    return [
        Prompt(
            row=row,
            content=f"prompt {row}",
            columns={"answer": str(row % 2), "environment": ("even", "odd")[row % 2]},
        )
        for row in range(num)
    ]


def source(num: int = 6) -> DrawSource:
    return DrawSource(
        prompts(num), seed=None, encode=lambda p: (p.row + 10,), max_prompt_tokens=5
    )


async def run_round(
    engines: Sequence[TestEngine],
    rules: Rules,
    *,
    rewards: Sequence[str] = ("same",),
    need: int = 4,
    ready: int = 0,
) -> tuple[list[Finished], RoundMeter]:
    specs = [RewardConfig(reward=f"their_rewards.py:{name}") for name in rewards]
    settings = RewardSettings(workers=2, deadline_s=10)
    async with pool_in(Path("run"), *specs, settings=settings) as pool:
        controller = Controller(
            engines=engines,
            scoring=rules_alone(pool, num_sources=len(specs)),
            draws=source(),
            rules=rules,
            peers=Peers(),
        )
        finished = await asyncio.wait_for(controller.fill(need=need, ready=ready, step=0), 30)
        return finished, controller.meter


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def rules(**settings: Any) -> Rules:
    return Rules(**{"group_size": 3, "seed": 5, "reward_weights": (1.0,), **settings})


def test_groups_come_in_the_order_drawn_whichever_ends_first(folder: Path) -> None:
    engine = TestEngine(wait_s=lambda prompt: 0.3 - 0.05 * (prompt[0] - 10))
    finished, stats = run(run_round([engine], rules()))
    assert [item.group.draw.position for item in finished] == [0, 1, 2, 3]
    for item in finished:
        seeds = [completion_seed(5, item.group.draw.position, index) for index in range(3)]
        assert [completion.text for completion in item.group.completions] == [
            str(seed)[-2:] for seed in seeds
        ]
        assert all(
            prompt_and_seed in engine.asked
            for prompt_and_seed in ((item.group.draw.token_ids, seed) for seed in seeds)
        )
    assert (stats.drawn, stats.num_tokens, stats.num_masked) == (4, 24, 0)


def test_rewards_get_their_columns_and_masked_ones_are_counted(folder: Path) -> None:
    finished, stats = run(
        run_round([TestEngine()], rules(reward_weights=(1.0, 1.0)), rewards=["parity", "same"])
    )
    masked = 0
    for item in finished:
        for completion, (parity, same) in zip(
            item.group.completions, item.group.scores_GR, strict=True
        ):
            assert same.value == 1.0
            if "7" in completion.text:
                masked += 1
                assert parity.value is None and "seven" in str(parity.problem)
            else:
                assert parity.value == float(
                    int(completion.text) % 2 == item.group.draw.prompt.row % 2
                )
    assert masked > 0, "the seeds of this test write no 7"
    assert sum(stats.problems.values()) == masked
    assert stats.num_masked == 0, "a completion with one reward left is not masked"


def test_rewards_in_each_of_several_environments_are_told_apart(folder: Path) -> None:
    odd = {"environments": ("odd", "even", "none")}
    finished, meter = run(run_round([TestEngine()], rules(**odd), rewards=["parity"]))
    totals: dict[str, list[float]] = {"odd": [], "even": []}
    for item in finished:
        known = [
            value for scores in item.group.scores_GR if (value := scores[0].value) is not None
        ]
        totals[item.group.draw.prompt.columns["environment"]] += known
    meter.end()
    metrics = meter.metrics(meter.take())
    assert {name: metrics[f"ycore/reward/{name}"] for name in totals} == {
        name: pytest.approx(sum(values) / len(values)) for name, values in totals.items()
    }
    assert "ycore/reward/none" not in metrics


def test_a_completion_without_any_reward_is_masked(folder: Path) -> None:
    finished, stats = run(run_round([TestEngine()], rules(), rewards=["parity"]))
    texts = [completion.text for item in finished for completion in item.group.completions]
    assert stats.num_masked == sum("7" in text for text in texts) > 0


def test_what_was_long_before_is_begun_first(folder: Path) -> None:
    """An engine with one seat. Prompts 10 to 13 get completions of 1 to 4 tokens; at first nobody knows that."""

    class Lengthy(TestEngine):
        async def complete(
            self, prompt_ids: Sequence[int], seed: int, *, greedy: bool = False
        ) -> Completion:
            written = await super().complete(prompt_ids, seed, greedy=greedy)
            return replace(
                written,
                token_ids=(1,) * (prompt_ids[0] - 9),
                logprobs=(-1.0,) * (prompt_ids[0] - 9),
            )

    engine = Lengthy()
    settings = RewardSettings(workers=1, deadline_s=10)
    specs = [RewardConfig(reward="their_rewards.py:same")]
    pool = pool_in(Path("run"), *specs, settings=settings)
    controller = Controller(
        engines=[engine],
        scoring=rules_alone(pool),
        draws=source(4),
        rules=rules(group_size=1),
        peers=Peers(),
        slots=Slots(1, allocator=Allocator(SlotPool(1, (ROLLOUT,), {ROLLOUT: 1}))),
    )
    controller.start(timeout_s=30)
    try:
        for step in range(2):
            controller.next_round(step=step, num_groups=4)
    finally:
        controller.close()
    rows = [prompt[0] for prompt, _ in engine.asked]
    assert rows == [10, 11, 12, 13, 13, 12, 11, 10]


def test_engines_share_the_work_evenly(folder: Path) -> None:
    engines = [TestEngine(name, wait_s=lambda prompt: 0.1) for name in ("one", "two", "three")]
    run(run_round(engines, rules()))
    assert [len(engine.asked) for engine in engines] == [4, 4, 4]
    assert [engine.most_in_flight for engine in engines] == [4, 4, 4]


def test_groups_that_cannot_teach_are_replaced(folder: Path) -> None:
    finished, stats = run(
        run_round([TestEngine()], rules(dynamic=True), rewards=["last_digit"], need=4)
    )
    assert sum(item.teaches for item in finished) >= 4
    for item in finished:
        assert item.teaches == (
            len({completion.text[-1] for completion in item.group.completions}) > 1
        )
    assert stats.drawn == len(finished)


def test_in_order_the_draws_do_not_depend_on_which_group_ends_first(folder: Path) -> None:
    """The groups end in three orders. Taken as they end, each order draws other groups."""
    waits = [
        lambda prompt: 0.0,
        lambda prompt: 0.02 * (prompt[0] % 5),
        lambda prompt: 0.02 * (-prompt[0] % 5),
    ]
    drawn = []
    for in_order in (True, False):
        some = [
            run(
                run_round(
                    [TestEngine(wait_s=wait)],
                    rules(
                        dynamic=True,
                        in_order=in_order,
                        group_size=2,
                        max_in_flight=4,
                        max_tries=20,
                    ),
                    rewards=["parity"],
                    need=8,
                )
            )[0]
            for wait in waits
        ]
        drawn.append(
            {tuple(item.group.draw.position for item in finished) for finished in some}
        )
    assert len(drawn[0]) == 1 < len(drawn[1])


def test_tries_are_limited_when_nothing_can_teach(folder: Path) -> None:
    finished, stats = run(
        run_round([TestEngine()], rules(dynamic=True, max_tries=3), rewards=["same"], need=2)
    )
    assert stats.drawn == len(finished) == 6
    assert not any(item.teaches for item in finished)


def test_groups_from_before_are_not_drawn_again(folder: Path) -> None:
    _, stats = run(run_round([TestEngine()], rules(), need=4, ready=3))
    assert stats.drawn == 1


def test_an_engine_that_breaks_is_one_plain_error(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All of its requests fail at once: one error is raised, and no other is left to be printed by asyncio."""
    with pytest.raises(EngineError, match="one: gone") as caught:
        run(run_round([BrokenEngine()], rules()))
    del caught
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_a_step_whose_every_score_failed_ends_the_run(folder: Path) -> None:
    meter = RoundMeter([], Peers(), [])
    failed = Score(None, problem="raised ValueError: no key")
    draw = Draw(0, prompts(1)[0], (1,))
    written = Completion((1,), None, "a", "stop", 0)

    def count(*scores: Score) -> None:
        meter.begin()
        group = Group(draw, (written,) * len(scores), tuple((score,) for score in scores))
        meter.count(group, (1.0,))
        meter.end()

    count(failed, failed)
    with pytest.raises(RunError, match=r"all 2 failed .raised ValueError: no key.; correct"):
        meter.metrics(meter.take())
    for scores in ((failed, Score(1.0)), (Score(None), Score(None)), (failed, Score(None))):
        count(*scores)
        assert meter.metrics(meter.take())["ycore/masked"] >= 1
