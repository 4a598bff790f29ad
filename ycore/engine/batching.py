"""Batches of simultaneous requests, for an engine in the trainer's own process."""

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from ycore.types import Completion

R = TypeVar("R")


class Batches(Generic[R]):
    """Collects requests, and writes their completions in a thread, one batch at a time.

    Args:
        write: Returns the completions of a batch, in its order.
        kind: Returns a request's kind; only requests of one kind share a batch.
        most: Largest number of requests of a batch.
        wait_s: Seconds from a request to its batch, for more to join; 0 is one turn of the event loop.
    """

    def __init__(
        self,
        write: Callable[[Sequence[R]], list[Completion]],
        *,
        kind: Callable[[R], Hashable],
        most: int,
        wait_s: float = 0,
    ) -> None:
        self.lock = asyncio.Lock()
        """Held while a batch is written."""
        self._write = write
        self._kind = kind
        self._most = most
        self._wait_s = wait_s
        self._waiting: list[tuple[R, asyncio.Future[Completion]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def ask(self, request: R) -> Completion:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._work())
        return await answer

    async def _work(self) -> None:
        while self._waiting:
            await asyncio.sleep(self._wait_s)
            batch = self._take()
            try:
                async with self.lock:
                    completions = await asyncio.to_thread(
                        self._write, [request for request, _ in batch]
                    )
            except Exception as error:  # noqa: BLE001 -- handed to everyone who waits for this batch
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), completion in zip(batch, completions, strict=True):
                if not answer.done():
                    answer.set_result(completion)

    def _take(self) -> list[tuple[R, "asyncio.Future[Completion]"]]:
        """Take the request that has waited longest, and those of its kind."""
        kind = self._kind(self._waiting[0][0])
        same_kind = [entry for entry in self._waiting if self._kind(entry[0]) == kind]
        other_kinds = [entry for entry in self._waiting if self._kind(entry[0]) != kind]
        self._waiting = same_kind[self._most :] + other_kinds
        return same_kind[: self._most]
