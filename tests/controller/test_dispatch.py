"""Slots in asyncio: turns, swaps, what is given up, what is recorded."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from ycore.controller.dispatch import ROLLOUT, Slots, usage_metrics
from ycore.errors import EngineError
from ycore.placement.allocator import Allocator, Hall
from ycore.placement.placement import JUDGE
from ycore.placement.words import parse_placement
from ycore.telemetry.trace import ROUND, SWAP, TraceWriter, read_trace

ROLES = (ROLLOUT, JUDGE)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


def placed(words: str, *, num_slots: int = 2, capacity: int = 2, exclusive: bool = False) -> Allocator:
    hall = Hall(num_slots, ROLES, dict.fromkeys(ROLES, capacity), exclusive=exclusive)
    return Allocator(hall, parse_placement(words))


class Log:
    """Turns that take a moment; notes how many of a role were on a slot at once."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.now: list[tuple[str, int]] = []
        self.seen: set[tuple[str, int]] = set()
        self.most = 0

    async def turn(self, role: str, seconds: float = 0.01) -> int:
        async with self.slots.turn(role) as slot:
            self.now.append((role, int(slot)))
            self.seen.add((role, int(slot)))
            self.most = max(self.most, len(self.now))
            await asyncio.sleep(seconds)
            self.now.remove((role, int(slot)))
            slot.num_tokens = 7
            return int(slot)


class SlowSleeper:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    async def sleep(self) -> None:
        await asyncio.sleep(0.01)
        self._log.append(f"sleep {self._name}")

    async def wake(self) -> None:
        await asyncio.sleep(0.01)
        self._log.append(f"wake {self._name}")


class BrokenSleeper(SlowSleeper):
    async def wake(self) -> None:
        raise EngineError(f"{self._name}: gone")


def test_without_roles_to_place_any_role_gets_the_least_busy_slot() -> None:
    async def work() -> list[int]:
        log = Log(Slots(3))
        return await asyncio.gather(*(log.turn(role) for role in [ROLLOUT, JUDGE, "reward_model"] * 2))

    assert run(work()) == [0, 1, 2, 0, 1, 2]


def test_a_split_keeps_roles_apart_and_slots_within_their_capacity() -> None:
    async def work() -> Log:
        log = Log(Slots(2, allocator=placed("split:1:1")))
        await asyncio.gather(*(log.turn(role) for role in ROLES for _ in range(9)))
        return log

    log = run(work())
    assert log.seen == {(ROLLOUT, 0), (JUDGE, 1)} and log.most == 4


@pytest.mark.parametrize("words", ["dynamic", "colocated"])
def test_all_roles_get_through_with_engines_that_sleep(words: str) -> None:
    calls: list[str] = []

    async def work() -> dict[str, float]:
        sleepers = {role: [SlowSleeper(calls, f"{role} {slot}") for slot in range(2)] for role in ROLES}
        slots = Slots(2, allocator=placed(words, exclusive=True), sleepers=sleepers)
        log = Log(slots)
        slots.begin_round()
        await asyncio.gather(*(log.turn(ROLLOUT) for _ in range(6)))
        await asyncio.gather(*(log.turn(JUDGE) for _ in range(6)))
        assert {role for role, _ in log.seen} == set(ROLES)
        return slots.end_round(list)

    metrics = run(work())
    assert calls[0].startswith("sleep rollout") and any(call.startswith("wake judge") for call in calls)
    assert metrics["ycore/swaps"] == len([call for call in calls if call.startswith("wake")]) >= 1
    assert metrics["ycore/swap_s"] > 0.015 * metrics["ycore/swaps"]


def test_a_swap_that_fails_fails_those_who_wait() -> None:
    async def work() -> None:
        sleepers = {role: [BrokenSleeper([], role)] for role in ROLES}
        slots = Slots(1, allocator=placed("dynamic", num_slots=1, exclusive=True), sleepers=sleepers)
        with pytest.raises(EngineError, match="judge: gone"):
            await Log(slots).turn(JUDGE)

    run(work())


def test_who_is_cancelled_frees_the_place() -> None:
    async def work() -> int:
        slots = Slots(1, allocator=placed("dynamic", num_slots=1, capacity=1))
        log = Log(slots)
        running = asyncio.create_task(log.turn(ROLLOUT, 30))
        waiting = asyncio.create_task(log.turn(ROLLOUT, 30))
        await asyncio.sleep(0.02)
        for task in (waiting, running):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        log.now.clear()
        assert slots.allocator.is_idle
        return await log.turn(JUDGE)

    assert run(work()) == 0


def test_a_round_is_recorded_and_measured(tmp_path: Path) -> None:
    async def work() -> dict[str, float]:
        slots = Slots(2, allocator=placed("dynamic"), trace=TraceWriter(tmp_path / "trace.json"), rank=3)
        log = Log(slots)
        for step in range(2):
            slots.begin_round()
            await asyncio.gather(*(log.turn(role) for role in ROLES for _ in range(4)))
            metrics = slots.end_round(list, step=step)
        return metrics

    metrics = run(work())
    assert set(metrics) == {"ycore/idle_share", "ycore/bound_ratio", "ycore/swaps", "ycore/swap_s"}
    assert 0 <= metrics["ycore/idle_share"] < 1 <= metrics["ycore/bound_ratio"]
    spans = read_trace(tmp_path / "trace.json")
    assert {span.rank for span in spans} == {3}
    turns = [span for span in spans if span.name in ROLES]
    assert len(turns) == 16 and all(span.told["tokens"] == 7 and span.seconds > 0 for span in turns)
    assert [span.told["step"] for span in spans if span.name == ROUND] == [0, 1]
    assert all(span.told["awake"] in ROLES for span in spans if span.name == SWAP)


def test_metrics_of_all_ranks_are_sums() -> None:
    metrics = usage_metrics([40.0, 30.0, 2.0, 3.0])
    assert metrics == {
        "ycore/idle_share": pytest.approx(0.2),
        "ycore/bound_ratio": pytest.approx(40 / 30),
        "ycore/swaps": 3.0,
        "ycore/swap_s": 2.0,
    }
    assert usage_metrics([0.0, 0.0, 0.0, 0.0])["ycore/bound_ratio"] == 1.0
