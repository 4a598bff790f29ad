"""An engine that leaves its device to another and comes back: vLLM's `/sleep` and `/wake_up`, and what goes with them.

Level 1 keeps the weights in host memory, level 2 drops them. A policy's weights are sent anew, so they are dropped; on
waking they are loaded before the KV cache is allocated, so that the two never compete. Frozen weights are kept, or read
from disk again, whichever was measured cheaper.

Written to vLLM's server as it is documented; a CPU has no sleep mode, so it was run against a scripted server only.

Not here: when an engine should sleep (`placement`), and the levels' choice (`placement.levels`).
"""

import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from ycore.placement.levels import DROP, SleepLevels

Reload = Callable[[], Awaitable[None]]


class Caller(Protocol):
    """What is needed of a server."""

    async def ask(self, method: str, path: str, body: None = None) -> object:
        """One request, answered; an EngineError otherwise."""


class SleepingEngine:
    """A `Sleeper` over one server. `reload` puts the weights back after level 2; `levels` None is always level 2."""

    def __init__(self, server: Caller, *, reload: Reload, levels: SleepLevels | None = None) -> None:
        self._server = server
        self._reload = reload
        self._levels = levels
        self._level = DROP
        self._sleep_s = 0.0

    async def sleep(self) -> None:
        """Free the device; running requests must have ended."""
        began = time.perf_counter()
        self._level = DROP if self._levels is None else self._levels.choose()
        await self._server.ask("POST", f"/sleep?level={self._level}")
        self._sleep_s = time.perf_counter() - began

    async def wake(self) -> None:
        """Weights first, then the KV cache; what both took is learned for the next choice of a level."""
        began = time.perf_counter()
        await self._server.ask("POST", "/wake_up?tags=weights")
        if self._level == DROP:
            await self._reload()
        await self._server.ask("POST", "/wake_up?tags=kv_cache")
        if self._levels is not None:
            self._levels.observe(self._level, self._sleep_s + time.perf_counter() - began)
