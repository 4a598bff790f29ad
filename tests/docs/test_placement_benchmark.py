"""The placement benchmark's own parts: the same work for all, and a prediction for it. Engines are made up here."""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulator.recording import Steps
from simulator.speeds import Speed

from ycore.engine import Engine
from ycore.types import Completion

BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], Any]) -> Any:
    return load_script("placement")


class MadeUpEngine(Engine):
    """Answers after a moment that grows with the length, with as many tokens."""

    def __init__(self, length_of: Any) -> None:
        self._length_of = length_of

    async def complete(
        self, prompt_ids: Sequence[int], seed: int, *, greedy: bool = False
    ) -> Completion:
        return await self.write(prompt_ids, seed, self._length_of(seed))

    async def write(self, prompt_ids: Sequence[int], seed: int, length: int) -> Completion:
        await asyncio.sleep(length * 1e-4)
        return Completion((1,) * length, None, "", "length", 0)


@pytest.fixture
def job() -> argparse.Namespace:
    sizes = {
        "rounds": 2,
        "warm_up": 1,
        "need": 4,
        "group_size": 4,
        "teach_share": 0.6,
        "mean": 40.0,
        "sigma": 0.8,
    }
    return argparse.Namespace(
        **sizes,
        longest=200,
        prompt_tokens=8,
        judge_reads=16,
        judge_tokens=12,
        max_num_seqs=8,
        output=None,
        ranks=1,
        asleep=False,
    )


def test_every_placement_draws_and_writes_the_same(
    script: Any, job: argparse.Namespace, tmp_path: Path
) -> None:
    engines = SimpleNamespace(
        rollouts=[MadeUpEngine(lambda seed: script.length_of(seed, job)) for _ in range(2)],
        judges=[MadeUpEngine(lambda length: length) for _ in range(2)],
    )
    drawn = script.counters(job)
    contestants = [
        script.Contestant(words, engines, job, tmp_path, drawn[words])
        for words in script.PLACEMENTS
    ]
    rows, measured = asyncio.run(script.play_all(contestants, engines, job))
    assert {words: len(rounds) for words, rounds in rows.items()} == dict.fromkeys(
        script.PLACEMENTS, 2
    )
    assert len(measured) == 2, "before the counted rounds and after them"
    assert all(
        len(measurement.speed.seconds) == 7 and measurement.reading_s >= 0
        for by_role in measured
        for measurement in by_role.values()
    )
    steady = script.Measured(
        Steps(1e-4, 1e-6, (1.0,), (1e-4,)), 0.0
    )  # what was measured of such short waits is noise
    speed = {"base": 1e-4, "each": 1e-6, "depths": (1.0,), "seconds": (1e-4,)}
    assert steady.as_json() == {"speed": speed, "reading_s": 0.0}
    measured = [dict.fromkeys(script.ROLES, steady)]
    predicted = {words: script.predict(words, measured, job) for words in script.PLACEMENTS}
    replayed = {
        contestant.words: script.replay(contestant.trace, job) for contestant in contestants
    }
    summary = script.summarise(rows, predicted, replayed)
    assert set(summary["replayed_over_real"]["dynamic"]) == set(script.PLACEMENTS)
    assert summary["same_work"] is True
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in predicted.values())
    assert rows["split:1:1"][0]["swaps"] == 0 and rows["colocated"][0]["swaps"] >= 2
    assert {span.name for span in script._last_round(contestants[2].trace)} >= {
        "rollout",
        "judge",
    }


def test_prompts_that_do_not_teach_are_replaced_one_for_one(
    script: Any, job: argparse.Namespace
) -> None:
    """So the prompts drawn are the first that hold as many teachers as are needed, whatever ends first."""
    position, teachers = 3 * script.APART, 0
    while teachers < job.need:
        teachers += script.teaches(position, job)
        position += 1
    from simulator.simulation import Demand, Machine, SimulatedRound

    from ycore.placement.allocator import Allocator
    from ycore.placement.placement import SlotPool, parse_placement

    for words in script.PLACEMENTS:
        allocator = Allocator(
            SlotPool(2, script.ROLES, dict.fromkeys(script.ROLES, 8)), parse_placement(words)
        )
        outcome = SimulatedRound(
            [allocator],
            Machine(dict.fromkeys(script.ROLES, Speed(0.01, 0.001)), {}),
            lambda place: script.simulated_group(place, job),
            Demand(job.need, dynamic=True),
            position=3 * script.APART,
            yields=script.OneForOne(),
        ).run()
        assert outcome.drawn == position - 3 * script.APART
