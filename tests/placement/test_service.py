"""The allocator's process, for real: two and more ranks on its socket, what it tells them, and the ends of each."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from ycore.errors import RunError
from ycore.placement.placement import JUDGE, ROLLOUT, SlotPool, parse_placement
from ycore.placement.service import RemoteAllocator
from ycore.placement.slots import Slots
from ycore.run.trace import IN_FLIGHT, ROUND, Levels, Span, TraceWriter, parse_event

ROLES = (ROLLOUT, JUDGE)
Start = Callable[[int], subprocess.Popen[bytes]]


@pytest.fixture
def socket() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="yc-") as folder:
        yield Path(folder) / "allocator.sock"


@pytest.fixture
def start(socket: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def start(num_ranks: int) -> subprocess.Popen[bytes]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "ycore.placement.service", str(socket), str(num_ranks)]
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def slots_of(
    rank: int,
    socket: Path,
    *,
    num_ranks: int = 2,
    words: str = "split:1:1",
    trace: Path | None = None,
    first: int = 0,
) -> Slots:
    pool = SlotPool(2, ROLES, dict.fromkeys(ROLES, 2))
    remote = RemoteAllocator(
        socket, pool, parse_placement(words), rank=rank, num_ranks=num_ranks
    )
    return Slots(2, allocator=remote, trace=TraceWriter(trace), rank=first + rank)


async def opened(*ranks: Slots) -> tuple[Slots, ...]:
    await asyncio.gather(*(slots.open(timeout_s=20) for slots in ranks))
    return ranks


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 40))


async def turns(slots: Slots, role: str, count: int, seconds: float = 0.01) -> set[int]:
    async def take_turn() -> int:
        async with slots.turn(role) as slot:
            await asyncio.sleep(seconds)
            slot.num_tokens = 5
            return int(slot)

    return set(await asyncio.gather(*(take_turn() for _ in range(count))))


def test_every_rank_asks_every_slot_and_they_learn_as_one(
    socket: Path, start: Start, tmp_path: Path
) -> None:
    trace, process = tmp_path / "trace.json", start(2)

    async def rank(slots: Slots, ended: list[int]) -> dict[str, float]:
        async with slots.round():
            rollouts, judges = await asyncio.gather(
                turns(slots, ROLLOUT, 6), turns(slots, JUDGE, 6)
            )
        assert (rollouts, judges) == ({0}, {1})
        ended.append(1)
        while len(ended) < 2:
            await asyncio.sleep(0.01)
        # What `add_up` gives with one machine: the first rank has its numbers, the others none.
        return await slots.end_round(lambda values: list(values), step=4)

    async def work() -> tuple[list[dict[str, float]], list[Any]]:
        ranks, ended = (
            await opened(*(slots_of(rank, socket, trace=trace, first=2) for rank in (0, 1))),
            [],
        )
        metrics = await asyncio.gather(*(rank(slots, ended) for slots in ranks))
        states = [slots.state for slots in ranks]
        for slots in ranks:
            slots.close()
        return metrics, states

    metrics, states = run(work())
    assert metrics[0]["ycore/bound_ratio"] >= 1 and metrics[1]["ycore/bound_ratio"] == 1.0, (
        "counted once"
    )
    assert (
        states[0]["work"][ROLLOUT][0] == states[0]["work"][JUDGE][0] == 12.0
        and states[1] is None
    )
    assert process.wait(10) == 0, "it goes when all ranks have gone"
    events = [
        event
        for line in trace.read_text().splitlines()
        if (event := parse_event(line)) is not None
    ]
    spans = [event for event in events if isinstance(event, Span)]
    turned = [span for span in spans if span.name in ROLES]
    assert {(span.rank, span.slot, span.details["asked_by"]) for span in turned} == {
        (2, slot, rank) for slot in (0, 1) for rank in (2, 3)
    }, "a lane a slot of the machine, and who asked"
    assert len({span.details["request"] for span in turned}) == 24
    assert sorted(span.rank for span in spans if span.name == ROUND) == [2, 3]
    assert {
        event.rank for event in events if isinstance(event, Levels) and event.name == IN_FLIGHT
    } == {2}


def test_what_was_learned_comes_back(socket: Path, start: Start) -> None:
    async def lived(state: dict[str, Any] | None) -> dict[str, Any]:
        process = start(1)
        (slots,) = await opened(slots_of(0, socket, num_ranks=1, words="dynamic"))
        if state is not None:
            slots.load_state_dict(state)
        async with slots.round():
            await turns(slots, ROLLOUT, 3)
        await slots.end_round(list)
        slots.close()
        await asyncio.to_thread(process.wait, 20)
        assert slots.state is not None
        return slots.state

    first = run(lived(None))
    again = run(lived(first))
    assert again["work"][ROLLOUT][0] == 3.0 and again["work"][ROLLOUT] != first["work"][ROLLOUT]


def test_waiting_and_new_requests_fail_when_the_allocator_dies(
    socket: Path, start: Start
) -> None:
    async def work() -> None:
        process = start(2)
        first, second = await opened(slots_of(0, socket), slots_of(1, socket))

        async def play(slots: Slots) -> None:
            async with slots.round():
                await turns(slots, ROLLOUT, 9, seconds=30)

        playing = [asyncio.create_task(play(slots)) for slots in (first, second)]
        await asyncio.sleep(0.5)
        os.kill(process.pid, signal.SIGKILL)
        for ended in await asyncio.gather(*playing, return_exceptions=True):
            assert isinstance(
                ended, RunError
            ) and "the allocator of this machine's slots is gone" in str(ended)
        with pytest.raises(RunError, match=r"gone \(see logs/allocator.log\)"):
            await turns(first, JUDGE, 1)

    run(work())


def test_a_rank_that_dies_gives_its_turns_back(socket: Path, start: Start) -> None:
    async def work() -> None:
        start(2)
        holder, waiter = await opened(slots_of(0, socket), slots_of(1, socket))

        holds_one = asyncio.Event()

        async def hold() -> None:
            async with (
                holder.round(),
                holder.turn(ROLLOUT),
                holder.turn(ROLLOUT),
            ):  # all that a slot has
                holds_one.set()
                await asyncio.sleep(60)

        async def wait() -> None:
            async with waiter.round():
                await holds_one.wait()
                done.append(await turns(waiter, ROLLOUT, 4))
                # The round of a rank whose peer is gone has no common end.
                await asyncio.sleep(60)

        done: list[set[int]] = []
        holds = asyncio.create_task(hold())
        waits = asyncio.create_task(wait())
        await holds_one.wait()
        await asyncio.sleep(0.5)
        assert not done
        holder.close()
        while not done:
            await asyncio.sleep(0.02)
        assert done == [{0}]
        for task in (holds, waits):
            task.cancel()
        await asyncio.gather(holds, waits, return_exceptions=True)

    run(work())


def test_a_rank_that_dies_before_it_joins_leaves_the_allocator_to_the_others(
    socket: Path, start: Start
) -> None:
    async def round_of(slots: Slots) -> set[int]:
        async with slots.round():
            return await turns(slots, ROLLOUT, 2)

    async def work() -> list[set[int]]:
        (first,) = await opened(slots_of(0, socket))
        _, writer = await asyncio.open_unix_connection(str(socket))
        writer.close()
        (second,) = await opened(slots_of(1, socket))
        answered = await asyncio.gather(round_of(first), round_of(second))
        first.close()
        second.close()
        return answered

    process = start(2)
    assert run(work()) == [{0}, {0}]
    assert process.wait(20) == 0


def test_an_allocator_that_never_comes_is_an_error_in_time(socket: Path) -> None:
    async def work() -> None:
        with pytest.raises(
            RunError, match=r"the allocator was not there after 0 s; see logs/allocator\.log"
        ):
            await slots_of(0, socket).open(timeout_s=0.2)

    run(work())
