"""Batches of simultaneous requests: their kinds, their sizes, and an error for everyone who waits."""

import asyncio
from collections.abc import Sequence

import pytest

from ycore.engine.transformers_engine import Batches
from ycore.types import Completion


def written(batches: list[list[int]], *, most: int = 3) -> "Batches[int]":
    """Even and odd numbers in batches apart; 13 cannot be written."""

    def write(batch: Sequence[int]) -> list[Completion]:
        batches.append(list(batch))
        if 13 in batch:
            raise RuntimeError("thirteen")
        return [Completion((number,), None, str(number), "stop", 0) for number in batch]

    return Batches(write, kind=lambda number: number % 2, most=most)


def test_requests_of_a_kind_share_batches_and_each_gets_its_own_answer() -> None:
    batches: list[list[int]] = []

    async def work() -> list[Completion]:
        batcher = written(batches)
        return await asyncio.gather(*(batcher.ask(number) for number in (2, 1, 4, 3, 6, 8)))

    answers = asyncio.run(asyncio.wait_for(work(), 30))
    assert [completion.text for completion in answers] == ["2", "1", "4", "3", "6", "8"]
    assert sorted(batches) == [[1, 3], [2, 4, 6], [8]]


def test_an_error_ends_its_batch_and_not_the_next() -> None:
    batches: list[list[int]] = []

    async def work() -> list[Completion | BaseException]:
        batcher = written(batches)
        return await asyncio.gather(
            *(batcher.ask(number) for number in (13, 1, 2)), return_exceptions=True
        )

    broken, beside, fine = asyncio.run(asyncio.wait_for(work(), 30))
    assert isinstance(broken, RuntimeError) and isinstance(beside, RuntimeError)
    assert isinstance(fine, Completion) and fine.text == "2"


@pytest.mark.parametrize("cancelled", [0, 1])
def test_who_stops_waiting_does_not_hold_the_others(cancelled: int) -> None:
    async def work() -> list[str]:
        batcher = written([])
        requests = [asyncio.ensure_future(batcher.ask(number)) for number in (2, 4)]
        await asyncio.sleep(0)
        requests[cancelled].cancel()
        return [
            (await request).text
            for number, request in enumerate(requests)
            if number != cancelled
        ]

    assert asyncio.run(asyncio.wait_for(work(), 30)) == [str(2 + 2 * (1 - cancelled))]
