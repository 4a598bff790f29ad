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
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partialmethod
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
        self.listeners: dict[int, SlotListener] = {}  # by rank
        self._arrived: dict[str, list[asyncio.Future[Any]]] = {}
        self._num_awake = 0
        self._is_waking = False
        self._decision_due = False
        self._report_due: asyncio.TimerHandle | None = None

    def listen(self, listener: SlotListener, rank: int = 0) -> None:
        self.listeners[rank] = listener

    def leave(self, rank: int) -> None:
        """Withdraw the requests of a rank that is gone."""
        del self.listeners[rank]
        for request, asked in list(self.allocator.requests.items()):
            if asked.rank == rank:
                self.withdraw(request)

    def ask(self, request: int, role: str, length: float) -> None:
        """Queue a request. `length`: the expected length of its answer, 0 where unknown."""
        self.allocator.ask(request, role, request % self.num_ranks, length=length)
        self._decide_soon()

    def ended(self, request: int) -> None:
        self.allocator.ended(request, time.perf_counter())
        self._decide_soon()

    def withdraw(self, request: int) -> None:
        self.allocator.withdraw(request, time.perf_counter())
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
        """Wait until all ranks end the round; return what `Allocator` has measured: `measurements` and `end_round`."""
        return await self._when_all_arrive("end", self._end)

    def _end(self) -> tuple[list[float], list[float]]:
        usage = self.allocator.end_round(time.perf_counter())
        self._report_queues()
        return self.allocator.measurements(), usage

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
                self.listeners[rank].start(action.request, action.slot)
            elif (rank := home_rank(action.slot, self.num_ranks)) in self.listeners:
                self.listeners[rank].swap(action.slot, action.asleep, action.awake)

    def _report_queues(self) -> None:
        if self._report_due is not None:
            self._report_due.cancel()
            self._report_due = None
        first = self.listeners.get(0)
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


class RemoteAllocator:
    """A `SharedAllocator` in another process. Its first message says which rank this is, and of which slots."""

    def __init__(
        self, socket: Path, pool: SlotPool, placement: Placement, *, rank: int, num_ranks: int
    ) -> None:
        self.pool = pool
        self.rank = rank
        self.num_ranks = num_ranks
        self._socket = socket
        self._placement = placement
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[Any]] = {}

    def listen(self, listener: SlotListener) -> None:
        self._listener = listener

    async def open(self, fail: Callable[[BaseException], None], *, timeout_s: float) -> None:
        """Connect; `fail` is called once the allocator is gone."""
        self._fail = fail
        deadline = time.monotonic() + timeout_s
        while self._writer is None:
            with suppress(FileNotFoundError, ConnectionRefusedError):
                reader, self._writer = await asyncio.open_unix_connection(str(self._socket))
                self._send("join", self.rank, asdict(self.pool), str(self._placement))
                self._listening = asyncio.create_task(self._listen(reader))
                self._listening.add_done_callback(self._has_ended)
                return
            if time.monotonic() > deadline:
                raise RunError(
                    f"the allocator was not there after {timeout_s:.0f} s; see logs/allocator.log"
                )
            await asyncio.sleep(_RETRY_EVERY_S)

    def close(self) -> None:
        if self._writer is not None:
            self._listening.cancel()
            self._writer.close()

    async def _call(self, method: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self._send(method, *arguments, call=number)
        return await reply

    def _send(self, method: str, *arguments: Any, call: int | None = None) -> None:
        if self._writer is None or self._writer.is_closing():
            raise RunError(_GONE)
        send(self._writer, [method, call, *arguments])

    # The methods of the `SharedAllocator`: those that are sent, and those that wait for its answer.
    ask = partialmethod(_send, "ask")
    ended = partialmethod(_send, "ended")
    withdraw = partialmethod(_send, "withdraw")
    swapped = partialmethod(_send, "swapped")
    engines_awake = partialmethod(_send, "engines_awake")
    begin_round = partialmethod(_call, "begin_round")
    end_round = partialmethod(_call, "end_round")
    learn = partialmethod(_call, "learn")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            async for line in reader:
                method, *arguments = json.loads(line)
                if method == "reply":
                    number, value = arguments
                    reply = self._replies.pop(number)
                    if not reply.done():
                        reply.set_result(value)
                else:
                    getattr(self._listener, method)(*arguments)

    def _has_ended(self, listening: asyncio.Task[None]) -> None:
        if listening.cancelled():  # closed here
            return
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(RunError(_GONE))
        self._fail(RunError(_GONE))


def send(writer: asyncio.StreamWriter, message: list[Any]) -> None:
    writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")


class Connection:
    """A rank as the shared allocator calls it: a `SlotListener`."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def send(self, method: str, *arguments: Any) -> None:
        if not self._writer.is_closing():
            send(self._writer, [method, *arguments])

    start = partialmethod(send, "start")
    swap = partialmethod(send, "swap")
    queues = partialmethod(send, "queues")

    async def reply(self, call: int, result: Awaitable[Any]) -> None:
        self.send("reply", call, await result)


class Service:
    """The ranks that are connected share an allocator. The first to join says which slots there are."""

    def __init__(self, num_ranks: int) -> None:
        self.is_over = asyncio.Event()
        self._num_ranks = num_ranks
        self._shared: SharedAllocator | None = None
        self._calls: set[asyncio.Future[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Call what a rank asks for, until it is gone."""
        with closing(writer):
            joining = await reader.readline()
            if not joining:
                return  # gone before it said which rank it is
            _, _, rank, pool, placement = json.loads(joining)
            if self._shared is None:
                allocator = Allocator(SlotPool(**pool), parse_placement(placement))
                self._shared = SharedAllocator(allocator, self._num_ranks)
            shared = self._shared
            connection = Connection(writer)
            shared.listen(connection, rank)
            with suppress(ConnectionError):
                async for line in reader:
                    method, call, *arguments = json.loads(line)
                    result = getattr(shared, method)(*arguments)
                    if inspect.isawaitable(result):
                        task = asyncio.ensure_future(connection.reply(call, result))
                        self._calls.add(task)
                        # An error goes to the loop's handler, which ends the process.
                        task.add_done_callback(self._calls.discard)
            shared.leave(rank)
            if not shared.listeners:
                self.is_over.set()


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
    service = Service(num_ranks)

    server = await asyncio.start_unix_server(service.serve, str(socket))
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
