"""Asyncio tasks that end together: used by the step, by scorers and by the event loop around them."""

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_LISTEN_S, _LISTEN_LONGEST_S = 0.05, 0.5
_PATIENCE = 0.1  # share of the time since the last result that passes before the caller looks elsewhere


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


async def next_finished(tasks: set[asyncio.Task[T]], *, idle_s: float) -> list[T]:
    """Wait for the next results, take their tasks out of `tasks`, and return them.

    Returns an empty list after a moment without any, so that the caller can look at other ranks' counts. The longer
    the last result is ago (`idle_s`), the longer the moment: a long wait costs few looks.
    """
    moment_s = min(_LISTEN_LONGEST_S, max(_LISTEN_S, _PATIENCE * idle_s))
    if not tasks:
        await asyncio.sleep(moment_s)
        return []
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=4 * moment_s)
    tasks -= done
    errors = [error for task in done if (error := task.exception()) is not None]
    if errors:  # every exception is retrieved, so that asyncio warns of none; the first is raised
        raise errors[0]
    return [task.result() for task in done]
