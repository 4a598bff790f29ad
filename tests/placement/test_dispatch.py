"""Slots in asyncio: turns, swaps, what is given up, what is recorded."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from simulator.recording import read_trace

from ycore.errors import EngineError
from ycore.placement.allocator import Allocator
from ycore.placement.placement import JUDGE, ROLLOUT, SlotPool, parse_placement
from ycore.placement.slots import Slots, usage_metrics
from ycore.run.trace import (
    ROUND,
    SWAP,
    SYNC,
    Levels,
    Mark,
    TraceWriter,
    parse_event,
)

ROLES = (ROLLOUT, JUDGE)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


def placed(
    words: str, *, num_slots: int = 2, capacity: int = 2, exclusive: bool = False
) -> Allocator:
    pool = SlotPool(num_slots, ROLES, dict.fromkeys(ROLES, capacity), exclusive=exclusive)
    return Allocator(pool, parse_placement(words))


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
        return await asyncio.gather(
            *(log.turn(role) for role in [ROLLOUT, JUDGE, "reward_model"] * 2)
        )

    assert run(work()) == [0, 1, 2, 0, 1, 2]


def test_a_split_keeps_roles_apart_and_slots_within_their_capacity() -> None:
    async def work() -> Log:
        log = Log(Slots(2, allocator=placed("split:1:1")))
        await asyncio.gather(*(log.turn(role) for role in ROLES for _ in range(9)))
        return log

    log = run(work())
    assert log.seen == {(ROLLOUT, 0), (JUDGE, 1)} and log.most == 4


@pytest.mark.parametrize(("words", "num_slots"), [("dynamic", 1), ("colocated", 2)])
def test_all_roles_get_through_with_engines_that_sleep(words: str, num_slots: int) -> None:
    calls: list[str] = []
    changed: list[str] = []

    async def work() -> dict[str, float]:
        sleepers = {
            role: {slot: SlowSleeper(calls, f"{role} {slot}") for slot in range(num_slots)}
            for role in ROLES
        }
        allocator = placed(words, num_slots=num_slots, exclusive=True)
        slots = Slots(num_slots, allocator=allocator, sleepers=sleepers)
        log = Log(slots)
        async with slots.round():
            await asyncio.gather(*(log.turn(ROLLOUT) for _ in range(6)))
            await asyncio.gather(*(log.turn(JUDGE) for _ in range(6)))
            changed.extend(calls)
        assert {role for role, _ in log.seen} == set(ROLES)
        return await slots.end_round(list)

    metrics = run(work())
    assert changed[:num_slots] == [f"wake rollout {slot}" for slot in range(num_slots)]
    changed = changed[num_slots:]
    assert changed[0].startswith("sleep rollout") and any(
        call.startswith("wake judge") for call in changed
    )
    assert (
        metrics["ycore/swaps"]
        == len([call for call in changed if call.startswith("wake")])
        >= 1
    )
    assert metrics["ycore/swap_s"] > 0.015 * metrics["ycore/swaps"]


def test_a_swap_that_fails_fails_those_who_wait() -> None:
    async def work() -> None:
        sleepers = {role: {0: BrokenSleeper([], role)} for role in ROLES}
        slots = Slots(
            1, allocator=placed("dynamic", num_slots=1, exclusive=True), sleepers=sleepers
        )
        with pytest.raises(EngineError, match="judge: gone"):
            await Log(slots).turn(JUDGE)

    run(work())


class Sleeper:
    """Is awake or not, and says which changes it."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    async def sleep(self) -> None:
        self._log.append(f"sleep {self._name}")

    async def wake(self) -> None:
        self._log.append(f"wake {self._name}")


def sleeping(log: list[str], words: str) -> Slots:
    sleepers = {
        role: {slot: Sleeper(log, f"{role} {slot}") for slot in range(2)} for role in ROLES
    }
    return Slots(2, allocator=placed(words, exclusive=True), sleepers=sleepers)


ALL_SLEEP = ["sleep rollout 0", "sleep rollout 1", "sleep judge 0", "sleep judge 1"]


def test_around_a_round_one_engine_of_a_slot_is_awake_and_then_none() -> None:
    async def work() -> list[str]:
        log: list[str] = []
        slots = sleeping(log, "split:1:1")
        async with slots.round():
            log.append("round")
        async with slots.awake(ROLLOUT):
            log.append("samples")
        return log

    assert run(work()) == [
        *["wake rollout 0", "wake judge 1", "round", *ALL_SLEEP],
        *["wake rollout 0", "wake rollout 1", "samples", *ALL_SLEEP],
    ]


def test_a_round_that_is_given_up_ends_asleep_and_one_that_failed_asks_nothing_more() -> None:
    async def work() -> tuple[list[str], list[str]]:
        given_up: list[str] = []
        failed: list[str] = []

        async def wait() -> None:
            async with sleeping(given_up, "dynamic").round():
                await asyncio.Event().wait()

        task = asyncio.create_task(wait())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(EngineError, match="lost"):
            async with sleeping(failed, "dynamic").round():
                raise EngineError("lost")
        return given_up, failed

    given_up, failed = run(work())
    assert given_up == ["wake rollout 0", "wake judge 1", *ALL_SLEEP]
    assert failed == ["wake rollout 0", "wake judge 1"]


def test_engines_that_stay_up_are_neither_woken_nor_put_to_sleep() -> None:
    async def work() -> None:
        slots = Slots(2, allocator=placed("dynamic"))
        async with slots.round():
            await slots.sleep()

    run(work())


def test_who_is_cancelled_frees_the_place() -> None:
    async def work() -> int:
        allocator = placed("dynamic", num_slots=1, capacity=1)
        log = Log(Slots(1, allocator=allocator))
        running = asyncio.create_task(log.turn(ROLLOUT, 30))
        waiting = asyncio.create_task(log.turn(ROLLOUT, 30))
        await asyncio.sleep(0.02)
        for task in (waiting, running):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        log.now.clear()
        assert allocator.is_idle
        return await log.turn(JUDGE)

    assert run(work()) == 0


def test_a_round_is_recorded_and_measured(tmp_path: Path) -> None:
    async def work() -> dict[str, float]:
        slots = Slots(
            2, allocator=placed("dynamic"), trace=TraceWriter(tmp_path / "trace.json"), rank=3
        )
        log = Log(slots)
        for step in range(2):
            async with slots.round():
                await asyncio.gather(*(log.turn(role) for role in ROLES for _ in range(4)))
            metrics = await slots.end_round(list, step=step)
        return metrics

    metrics = run(work())
    assert set(metrics) == {
        "ycore/idle_share",
        "ycore/bound_ratio",
        "ycore/swaps",
        "ycore/swap_s",
    }
    assert 0 <= metrics["ycore/idle_share"] < 1 <= metrics["ycore/bound_ratio"]
    spans = read_trace(tmp_path / "trace.json")
    assert {span.rank for span in spans} == {3}
    turns = [span for span in spans if span.name in ROLES]
    assert len(turns) == 16 and all(
        span.details["tokens"] == 7 and span.seconds > 0 for span in turns
    )
    assert [span.details["step"] for span in spans if span.name == ROUND] == [0, 1]
    assert all(span.details["awake"] in ROLES for span in spans if span.name == SWAP)


def test_queue_depths_are_told_while_the_round_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soon after they change, and once more at the round's end, when nothing is left."""
    monkeypatch.setattr("ycore.placement.service._REPORT_EVERY_S", 0.02)
    path = tmp_path / "trace.json"

    def traced_levels() -> list[Levels | Mark]:
        events = map(parse_event, path.read_text().splitlines())
        return [event for event in events if isinstance(event, Levels | Mark)]

    async def work() -> list[Levels | Mark]:
        slots = Slots(2, allocator=placed("split:1:1"), trace=TraceWriter(path), rank=3)
        slots.begin_phase(SYNC)
        async with slots.round():
            turns = [asyncio.create_task(Log(slots).turn(ROLLOUT, 0.3)) for _ in range(5)]
            await asyncio.sleep(0)
            while len(traced_levels()) < 4:
                await asyncio.sleep(0.01)
            meanwhile = traced_levels()
            await asyncio.gather(*turns)
        await slots.end_round(list)
        return meanwhile

    sync, begun, waiting, flying = run(work())
    assert [sync.name, begun.name] == [SYNC, ROUND]
    assert isinstance(waiting, Levels) and waiting.values == {ROLLOUT: 3, JUDGE: 0}
    assert isinstance(flying, Levels) and flying.values == {
        "rollout 0": 2,
        "rollout 1": 0,
        "judge 0": 0,
        "judge 1": 0,
    }
    assert set(flying.oldest_s) == {"rollout 0"} and flying.rank == 3
    last = traced_levels()[-1]
    assert isinstance(last, Levels) and set(last.values.values()) == {0} and not last.oldest_s


def test_metrics_of_all_ranks_are_sums() -> None:
    metrics = usage_metrics([40.0, 30.0, 2.0, 3.0])
    assert metrics == {
        "ycore/idle_share": pytest.approx(0.2),
        "ycore/bound_ratio": pytest.approx(40 / 30),
        "ycore/swaps": 3.0,
        "ycore/swap_s": 2.0,
    }
    assert usage_metrics([0.0, 0.0, 0.0, 0.0])["ycore/bound_ratio"] == 1.0
