"""Asyncio tasks that end together: used by the step, by scorers and rewards and by the event loop around them."""

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@asynccontextmanager
async def ending(tasks: Collection[asyncio.Task[Any]]) -> AsyncIterator[None]:
    """Cancel what is left of `tasks` at the end, and wait for it. `tasks` may grow and shrink meanwhile."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def together(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run side by side; when one fails, end the others before its error goes on."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    async with ending(tasks):
        return await asyncio.gather(*tasks)


async def next_finished(
    tasks: Collection[asyncio.Task[T]], news: Coroutine[Any, Any, None]
) -> list[asyncio.Task[T]]:
    """Wait for the next results, and return the tasks that have them; none where `news` came first."""
    waiting = asyncio.create_task(news)
    async with ending([waiting]):
        await asyncio.wait([*tasks, waiting], return_when=asyncio.FIRST_COMPLETED)
    if waiting.done() and not waiting.cancelled():
        waiting.result()
    done = [task for task in tasks if task.done()]
    errors = [error for task in done if (error := task.exception()) is not None]
    if (
        errors
    ):  # every exception is retrieved, so that asyncio warns of none; the first is raised
        raise errors[0]
    return done
