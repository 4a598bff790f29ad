"""The allocator's process, one on a machine with several ranks, and the ranks' connection to it over a unix socket.

`python -m ycore.placement.service SOCKET NUM_RANKS` decides for the slots of the machine, and ends when all ranks have
gone. The requests of a rank that is gone are withdrawn. With one rank the same `SharedAllocator` runs in its event loop.
Ranks name roles, request numbers and slots, and never a prompt or a completion. Request n is of rank n modulo the number
of ranks. Slot k is swapped by rank k modulo that number (`home_rank`): it alone wakes the slot's engines, puts them to
sleep and sends them weights. Messages are a JSON list on each line. A rank sends
`[method, call, *arguments]`, where `call` is null or a number that the reply repeats. It receives
`["reply", call, value]`, and the calls of `SlotListener` as `[method, *arguments]`.
"""

import asyncio
import inspect
import itertools
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ycore.errors import RunError
from ycore.placement.allocator import Allocator
from ycore.placement.placement import Placement, SlotPool, StartRequest, parse_placement
from ycore.run.reports import dump_stacks_on_signal

T = TypeVar("T")
_REPORT_EVERY_S = 1.0


class SlotListener(Protocol):
    """The calls that a rank gets from the allocator."""

    def start(self, request: int, slot: int) -> None:
        """Send this request to the slot's engine now."""

    def swap(self, slot: int, asleep: str, awake: str) -> None:
        """Put the role `asleep` of a home slot to sleep, wake the role `awake`, then report `swapped`."""

    def queues(
        self,
        waiting: Mapping[str, int],
        in_flight: Mapping[str, int],
        oldest_s: Mapping[str, float],
    ) -> None:
        """Record how many requests wait by role, how many run by role and slot, and the age of the oldest of these."""


class SharedAllocator:
    """Decides after everything that happens at one moment, and reports the queues at most once a second."""

    rank = 0

    def __init__(self, allocator: Allocator, num_ranks: int = 1) -> None:
        self.num_ranks = num_ranks
        self.allocator = allocator
        self.pool = allocator.pool
        self._listeners: dict[int, SlotListener] = {}
        self._roles: dict[int, str] = {}  # of every request that was asked and has not ended
        self._arrived: dict[str, list[asyncio.Future[Any]]] = {}
        self._num_awake = 0
        self._is_waking = False
        self._decision_due = False
        self._report_due: asyncio.TimerHandle | None = None

    def listen(self, listener: SlotListener, rank: int = 0) -> None:
        self._listeners[rank] = listener

    def leave(self, rank: int) -> None:
        """Withdraw the requests of a rank that is gone."""
        del self._listeners[rank]
        for request in [request for request in self._roles if request % self.num_ranks == rank]:
            self.withdraw(request)

    def ask(self, request: int, role: str, length: float) -> None:
        """Queue a request. `length`: the expected length of its answer, 0 where unknown."""
        self._roles[request] = role
        self.allocator.ask(request, role, request % self.num_ranks, length=length)
        self._decide_soon()

    def ended(self, request: int) -> None:
        del self._roles[request]
        self.allocator.ended(request, time.perf_counter())
        self._decide_soon()

    def withdraw(self, request: int) -> None:
        role = self._roles.pop(request)
        self.allocator.withdraw(request, role, time.perf_counter(), request % self.num_ranks)
        self._decide_soon()

    def swapped(self, slot: int) -> None:
        self.allocator.swapped(slot, time.perf_counter())
        self._decide_soon()

    async def begin_round(self, state: Mapping[str, Any] | None) -> tuple[list[str], bool]:
        """Wait until all ranks begin a round; return the role to wake on each slot, and `Allocator.gathers`.

        `state`: what a checkpoint knows of the placement.
        """
        if state is not None:
            self.allocator.restore(state)
        return await self._when_all_arrive("begin", self._begin)

    def _begin(self) -> tuple[list[str], bool]:
        self._is_waking = True
        # Where engines sleep, requests of an earlier round keep their places.
        if self.allocator.is_idle or not self.pool.exclusive:
            self.allocator.begin_round(time.perf_counter())
        return list(self.allocator.awake), self.allocator.gathers

    def engines_awake(self) -> None:
        """Let requests start once all ranks have called this."""
        self._num_awake += 1
        if self._num_awake == self.num_ranks:
            self._num_awake = 0
            self._is_waking = False
            self._decide_soon()

    async def end_round(self) -> tuple[list[float], list[float]]:
        """Wait until all ranks end the round; return `Allocator.measurements` and `Usage.sums`."""
        return await self._when_all_arrive("end", self._end)

    def _end(self) -> tuple[list[float], list[float]]:
        usage = self.allocator.end_round(time.perf_counter())
        self._report_queues()
        return self.allocator.measurements(), usage.sums()

    async def learn(self, sums: list[float]) -> dict[str, Any]:
        """Learn from the measurements of all machines, added up; return the state for the next checkpoint."""
        self.allocator.learn(sums)
        return self.allocator.state()

    async def _when_all_arrive(self, event: str, act: Callable[[], T]) -> T:
        """Return what `act` returns once the last rank has come."""
        arrived = self._arrived.setdefault(event, [])
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        arrived.append(future)
        if len(arrived) == self.num_ranks:
            del self._arrived[event]
            result = act()
            for waiting in arrived:
                if not waiting.done():
                    waiting.set_result(result)
        return await future

    def _decide_soon(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._decision_due:
            self._decision_due = True
            loop.call_soon(self._decide)
        if self._report_due is None:
            self._report_due = loop.call_later(_REPORT_EVERY_S, self._report_queues)

    def _decide(self) -> None:
        self._decision_due = False
        if self._is_waking:
            return
        for action in self.allocator.decide(time.perf_counter()):
            if isinstance(action, StartRequest):
                rank = action.request % self.num_ranks
                self._listeners[rank].start(action.request, action.slot)
            elif (rank := home_rank(action.slot, self.num_ranks)) in self._listeners:
                self._listeners[rank].swap(action.slot, action.asleep, action.awake)

    def _report_queues(self) -> None:
        if self._report_due is not None:
            self._report_due.cancel()
            self._report_due = None
        first = self._listeners.get(0)
        if first is None:
            return
        now = time.perf_counter()
        in_flight = {
            f"{role} {slot}": 0
            for role in self.pool.roles
            for slot in range(self.pool.num_slots)
        }
        oldest_s = {}
        for (role, slot), (number, began) in self.allocator.in_flight().items():
            in_flight[f"{role} {slot}"] = number
            oldest_s[f"{role} {slot}"] = round(now - began, 3)
        first.queues(self.allocator.waiting(), in_flight, oldest_s)


def home_rank(slot: int, num_ranks: int) -> int:
    return slot % num_ranks


_RETRY_EVERY_S = 0.05
_GONE = "the allocator of this machine's slots is gone (see logs/allocator.log)"


class RemoteAllocator(asyncio.Protocol):
    """A `SharedAllocator` in another process. Its first message says which rank this is, and of which slots."""

    def __init__(
        self, socket: Path, pool: SlotPool, placement: Placement, *, rank: int, num_ranks: int
    ) -> None:
        self.pool = pool
        self.rank = rank
        self.num_ranks = num_ranks
        self._socket = socket
        self._placement = placement
        self._fail: Callable[[BaseException], None] = lambda error: None
        self._transport: asyncio.WriteTransport | None = None
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._unread = b""
        self._is_closing = False

    def listen(self, listener: SlotListener, fail: Callable[[BaseException], None]) -> None:
        """Call `fail` once the allocator is gone."""
        self._listener = listener
        self._fail = fail

    async def open(self, *, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + timeout_s
        while self._transport is None:
            with suppress(FileNotFoundError, ConnectionRefusedError):
                await loop.create_unix_connection(lambda: self, str(self._socket))
                return
            if time.monotonic() > deadline:
                raise RunError(
                    f"the allocator was not there after {timeout_s:.0f} s; see logs/allocator.log"
                )
            await asyncio.sleep(_RETRY_EVERY_S)

    def close(self) -> None:
        self._is_closing = True
        if self._transport is not None:
            self._transport.close()

    def ask(self, request: int, role: str, length: float) -> None:
        self._send("ask", None, request, role, length)

    def ended(self, request: int) -> None:
        self._send("ended", None, request)

    def withdraw(self, request: int) -> None:
        self._send("withdraw", None, request)

    def swapped(self, slot: int) -> None:
        self._send("swapped", None, slot)

    async def begin_round(self, state: Mapping[str, Any] | None) -> tuple[list[str], bool]:
        awake, gathers = await self._call("begin_round", state)
        return awake, gathers

    def engines_awake(self) -> None:
        self._send("engines_awake", None)

    async def end_round(self) -> tuple[list[float], list[float]]:
        measurements, usage = await self._call("end_round")
        return measurements, usage

    async def learn(self, sums: list[float]) -> dict[str, Any]:
        state: dict[str, Any] = await self._call("learn", sums)
        return state

    async def _call(self, method: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self._send(method, number, *arguments)
        return await reply

    def _send(self, method: str, call: int | None, *arguments: Any) -> None:
        if self._transport is None or self._transport.is_closing():
            raise RunError(_GONE)
        self._transport.write(encode([method, call, *arguments]))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._send("join", None, self.rank, asdict(self.pool), str(self._placement))

    def data_received(self, data: bytes) -> None:
        messages, self._unread = decode(self._unread + data)
        for method, *arguments in messages:
            if method == "reply":
                number, value = arguments
                reply = self._replies.pop(number)
                if not reply.done():
                    reply.set_result(value)
            else:
                getattr(self._listener, method)(*arguments)

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_closing:
            return
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(RunError(_GONE))
        self._fail(RunError(_GONE))


def encode(message: list[Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(data: bytes) -> tuple[list[list[Any]], bytes]:
    """Return the whole messages, and the beginning of the next one."""
    *lines, unread = data.split(b"\n")
    return [json.loads(line) for line in lines], unread


class Service:
    """The shared allocator and the ranks that are connected. The first rank to join says which slots there are."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.is_over = asyncio.Event()
        self._ranks: set[int] = set()
        self._slots: tuple[dict[str, Any], str] | None = None
        self._shared: SharedAllocator | None = None

    def join(
        self, rank: int, pool: dict[str, Any], placement: str, connection: "Connection"
    ) -> SharedAllocator:
        if self._shared is None:
            slot_pool = SlotPool(**{**pool, "roles": tuple(pool["roles"])})
            allocator = Allocator(slot_pool, parse_placement(placement))
            self._shared = SharedAllocator(allocator, self.num_ranks)
            self._slots = (pool, placement)
        if (pool, placement) != self._slots or rank in self._ranks:
            raise ValueError(
                f"rank {rank} comes with {pool} and {placement}; the slots are {self._slots}"
            )
        self._ranks.add(rank)
        self._shared.listen(connection, rank)
        return self._shared

    def leave(self, rank: int) -> None:
        assert self._shared is not None
        self._ranks.remove(rank)
        self._shared.leave(rank)
        if not self._ranks:
            self.is_over.set()


class Connection(asyncio.Protocol):
    """One rank, as the shared allocator calls it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._rank: int | None = None
        self._shared: SharedAllocator | None = None
        self._unread = b""
        self._calls: set[asyncio.Future[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        messages, self._unread = decode(self._unread + data)
        for method, call, *arguments in messages:
            if self._shared is None:
                self._rank, pool, placement = arguments
                self._shared = self._service.join(self._rank, pool, placement, self)
                continue
            result = getattr(self._shared, method)(*arguments)
            if inspect.isawaitable(result):
                task = asyncio.ensure_future(self._reply(call, result))
                self._calls.add(task)
                task.add_done_callback(self._reply_done)

    async def _reply(self, call: int, result: Awaitable[Any]) -> None:
        self._send("reply", call, await result)

    def _reply_done(self, task: asyncio.Future[None]) -> None:
        self._calls.discard(task)
        task.result()  # an error goes to the loop's handler, which ends the process

    def start(self, request: int, slot: int) -> None:
        self._send("start", request, slot)

    def swap(self, slot: int, asleep: str, awake: str) -> None:
        self._send("swap", slot, asleep, awake)

    def queues(self, *counts: Any) -> None:
        self._send("queues", *counts)

    def _send(self, method: str, *arguments: Any) -> None:
        if not self._transport.is_closing():
            self._transport.write(encode([method, *arguments]))

    def connection_lost(self, error: Exception | None) -> None:
        if self._rank is not None:
            self._service.leave(self._rank)


async def serve_allocator(socket: Path, num_ranks: int) -> None:
    """Return when all ranks have come and gone; raise where a decision or a message fails."""
    loop = asyncio.get_running_loop()
    failed = loop.create_future()

    def fail(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if not failed.done():
            failed.set_exception(context.get("exception") or RuntimeError(context["message"]))

    loop.set_exception_handler(
        fail
    )  # a decision that fails ends the process, and with it the run
    socket.unlink(missing_ok=True)
    service = Service(num_ranks)
    server = await loop.create_unix_server(partial(Connection, service), str(socket))
    async with server:
        over = asyncio.ensure_future(service.is_over.wait())
        await asyncio.wait([over, failed], return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        failed.result()


def main() -> None:
    dump_stacks_on_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its ranks
    asyncio.run(serve_allocator(Path(sys.argv[1]), int(sys.argv[2])))


if __name__ == "__main__":
    main()
