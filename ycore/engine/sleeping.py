"""Put engines to sleep, so that others may use their device, and wake them: vLLM's `/sleep` and `/wake_up`.

Level 1 keeps the weights in host memory, level 2 drops them. A policy's weights are dropped, since new ones are sent
anyway. A frozen model's are kept or read from disk again, whichever was measured to be cheaper. On waking, weights come
first and the KV cache second, so that the cache and what is sent never compete for the device.

A file beside the socket says that the engine sleeps, and at which level. The launcher reads it too: it leaves an
engine alone that dies asleep. A restarted trainer finds from it how the last one left the engines. A restarted engine
is awake, so its start removes the file. While an engine falls asleep or wakes, the file has another name: a trainer
that is killed then may leave weights dropped, so the next sleep is at least as deep.

Written to vLLM's documentation and tested against a scripted server only: a CPU has no sleep mode.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ycore.engine.server import Server
from ycore.placement.slots import Sleeper

SLEEP = "/sleep?level={level}"
KEEP = 1
"""vLLM's sleep level that keeps an engine's weights in host memory."""
DROP = 2
"""vLLM's sleep level that drops an engine's weights."""
_CHANGING = ".between"  # suffix of the file while the engine falls asleep or wakes


def asleep_file(socket: Path) -> Path:
    """Return the file that exists while the engine behind the socket sleeps; it holds the level."""
    return socket.with_suffix(".asleep")


def mark_asleep(socket: Path, level: int) -> None:
    """Record that the engine behind the socket sleeps at this level; a reader never sees half a file."""
    changing = socket.with_suffix(_CHANGING)
    changing.write_text(str(level))
    changing.replace(asleep_file(socket))


class SleepLevels:
    """Chooses the sleep level of one frozen model: tries each once, then keeps the cheaper."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}  # by level, of a sleep and the wake after it

    def choose(self) -> int:
        """Return KEEP or DROP, for the next sleep."""
        return min((KEEP, DROP), key=lambda level: self.seconds.get(level, -1.0))

    def observe(self, level: int, seconds: float) -> None:
        """Record what a sleep at this level and the wake after it took together."""
        self.seconds[level] = (self.seconds.get(level, seconds) + seconds) / 2


class SleepingEngine:
    """An engine that can sleep.

    Args:
        refill: Loads weights that were dropped; by default the engine reads its model from disk.
        levels: Chooses the level of every sleep; None always drops the weights.

    Attributes:
        has_weights: False from falling asleep until weights may be loaded again.
    """

    def __init__(
        self,
        server: Server,
        *,
        refill: Callable[[], Awaitable[None]] | None = None,
        levels: SleepLevels | None = None,
    ) -> None:
        self._server = server
        self._asleep = asleep_file(server.socket)
        self._changing = server.socket.with_suffix(_CHANGING)
        self._refill = refill or partial(reload_from_disk, server)
        self._levels = levels
        self._sleep_s: float | None = None
        self.has_weights = not self._asleep.exists()

    async def sleep(self) -> None:
        """Free the device, unless the engine sleeps already; requests in flight are aborted."""
        if self._asleep.exists():
            return
        began = time.perf_counter()
        level = DROP if self._levels is None else self._levels.choose()
        if (
            self._changing.exists()
        ):  # a change was cut off; the deepest level if its file is empty
            level = max(level, int(self._changing.read_text() or DROP))
        self._changing.write_text(str(level))
        await self._server.request("POST", SLEEP.format(level=level))
        self.has_weights = False
        self._changing.replace(self._asleep)
        self._sleep_s = time.perf_counter() - began

    async def wake(self) -> None:
        """Bring weights and KV cache back, unless the engine is awake already; the level learns what it cost."""
        if not self._asleep.exists():
            return
        began = time.perf_counter()
        level = int(self._asleep.read_text())
        # First: from now on the launcher restarts the engine if it has died.
        self._asleep.replace(self._changing)
        await self._server.request("POST", "/wake_up?tags=weights")
        self.has_weights = True
        if level == DROP:
            await self._refill()
        await self._server.request("POST", "/wake_up?tags=kv_cache")
        self._changing.unlink()
        if self._levels is not None and self._sleep_s is not None:
            self._levels.observe(level, self._sleep_s + time.perf_counter() - began)
        self._sleep_s = None


@dataclass(frozen=True, slots=True)
class SleepTogether:
    """The engines of one role on one slot, by model. Models change in turn. A model's engines have devices of their
    own, and change together.
    """

    models: Sequence[Sequence[Sleeper]]

    async def sleep(self) -> None:
        for engines in self.models:
            await asyncio.gather(*(engine.sleep() for engine in engines))

    async def wake(self) -> None:
        for engines in self.models:
            await asyncio.gather(*(engine.wake() for engine in engines))


async def reload_from_disk(server: Server) -> None:
    """Have the engine load the model that it was started with."""
    await server.request("POST", "/collective_rpc", {"method": "reload_weights"})
