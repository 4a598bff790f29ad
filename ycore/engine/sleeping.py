"""An engine that leaves its device to others and comes back: vLLM's `/sleep` and `/wake_up`, and what goes with them.

Level 1 keeps the weights in host memory, level 2 drops them. A policy's weights are sent anew, so they are dropped.
Frozen ones are kept, or read from disk again, whichever was measured cheaper. On waking the weights come first and the
KV cache after them, so that the two and what is sent never compete for the device.

Whether an engine sleeps, and how deep, is a file beside its socket: the launcher reads it too, which leaves alone what
dies asleep, and a trainer that is started again finds the engines as the last one left them. An engine that is started
again wakes awake, so its start takes the file away. While an engine falls asleep or wakes, the file has another name:
a trainer that is killed then may leave weights that are dropped and not back, so the next sleep is as deep as that one.

Written to vLLM's server as it is documented, and run against a scripted one only: a CPU has no sleep mode, and no
device was there to try it on.

Not here: when an engine should sleep (`controller.dispatch`, `placement`), and the choice of a level
(`placement.levels`).
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ycore.placement.learning import DROP, SleepLevels

SLEEP = "/sleep?level={level}"
WAKE_WEIGHTS, WAKE_CACHE = "/wake_up?tags=weights", "/wake_up?tags=kv_cache"

Refill = Callable[[], Awaitable[None]]
"""Puts the weights back that were dropped, into memory that is there again."""


class Caller(Protocol):
    """What is needed of a server."""

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One request, answered; an EngineError otherwise."""


class SleepingEngine:
    """A `Sleeper` over the server at `socket`; `levels` None always drops the weights.

    `has_weights` is False from falling asleep until there is room for weights again.
    """

    def __init__(self, server: Caller, socket: Path, *, refill: Refill, levels: SleepLevels | None = None) -> None:
        self._server = server
        self._file, self._between = asleep_file(socket), _between(asleep_file(socket))
        self._refill = refill
        self._levels = levels
        self._sleep_s: float | None = None
        self.has_weights = not self._file.exists()

    async def sleep(self) -> None:
        """Free the device, unless it sleeps already; what is still running is aborted."""
        if self._file.exists():
            return
        began = time.perf_counter()
        level = DROP if self._levels is None else self._levels.choose()
        level = max(level, _cut_off(self._between))
        self._between.write_text(str(level))
        await self._server.ask("POST", SLEEP.format(level=level))
        self.has_weights = False
        self._between.replace(self._file)
        self._sleep_s = time.perf_counter() - began

    async def wake(self) -> None:
        """Weights first, then the KV cache; what both took is learned for the next choice of a level."""
        if not self._file.exists():
            return
        began, level = time.perf_counter(), int(self._file.read_text())
        self._file.replace(self._between)  # first: the launcher starts it again now, if it has died meanwhile
        await self._server.ask("POST", WAKE_WEIGHTS)
        self.has_weights = True
        if level == DROP:
            await self._refill()
        await self._server.ask("POST", WAKE_CACHE)
        self._between.unlink()
        if self._levels is not None and self._sleep_s is not None:
            self._levels.observe(level, self._sleep_s + time.perf_counter() - began)
        self._sleep_s = None


class SleepTogether:
    """The engines of one role and slot as one `Sleeper`, where several models serve the role."""

    def __init__(self, engines: Sequence[SleepingEngine]) -> None:
        self._engines = engines

    async def sleep(self) -> None:
        for engine in self._engines:
            await engine.sleep()

    async def wake(self) -> None:
        for engine in self._engines:
            await engine.wake()


async def reload_from_disk(server: Caller) -> None:
    """Have the engine read the model that it was started with again."""
    await server.ask("POST", "/collective_rpc", {"method": "reload_weights"})


def asleep_file(socket: Path) -> Path:
    """The file that is there while the engine behind the socket sleeps, with the level in it."""
    return socket.with_suffix(".asleep")


def note_asleep(file: Path, level: int) -> None:
    """Written aside and renamed, so that whoever sees it can read the level."""
    _between(file).write_text(str(level))
    _between(file).replace(file)


def _between(file: Path) -> Path:
    return file.with_suffix(".between")


def _cut_off(between: Path) -> int:
    """The level of a sleep or a wake that was never finished, the deepest where it cannot be read; 0 for none."""
    return int(between.read_text() or DROP) if between.exists() else 0
