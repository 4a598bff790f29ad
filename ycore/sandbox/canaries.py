"""`python -m ycore.sandbox.canaries ATTEMPTS`: an honest piece of work, then the attempts that a sandbox must stop.

Every outcome is a line of JSON, `[name, true]` where it got through (`level` reads them). The last attempts may end the
process, so the line of each is written at once.
Standard library only, and little of it: this is the larger part of the time that a self-test takes.
"""

import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypedDict


class CanaryTargets(TypedDict):
    """Targets of the attempts, all of which exist outside."""

    file: str
    variable: str
    port: int
    socket: str
    parent: int
    memory: int  # bytes
    processes: int


_WATCH_S = 10.0  # for a watch that ends what the kernel did not refuse; it looks every 50 ms
HONEST = "honest"
MEMORY = "memory"
PROCESSES = "processes"


def try_all() -> None:
    for name, attempt in attempts(json.loads(sys.argv[1])):
        try:
            attempt()
            outcome = True
        except (AssertionError, KeyError, MemoryError, OSError, RuntimeError):
            outcome = False
        os.write(1, json.dumps([name, outcome]).encode() + b"\n")


def attempts(targets: CanaryTargets) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield names and attempts, which raise where they are stopped; the honest work first."""
    parent = targets["parent"]
    yield HONEST, _honest
    yield "a file of the user", lambda: _read(targets["file"])
    yield "a variable of the environment", lambda: os.environ[targets["variable"]]
    yield "the environment of the parent", lambda: _read(f"/proc/{parent}/environ")
    yield "a signal to the parent", lambda: os.kill(parent, 0)
    port = ("127.0.0.1", targets["port"])
    yield "a server on loopback", lambda: _connect(socket.AF_INET, port)
    yield "a socket file", lambda: _connect(socket.AF_UNIX, targets["socket"])
    yield MEMORY, lambda: _hold(targets["memory"])
    yield PROCESSES, lambda: _fork(targets["processes"])


def _honest() -> None:
    """Import, write, start a thread and a process: a sandbox in which Python does not work stops everything too."""
    done: list[int] = []
    thread = threading.Thread(target=done.append, args=(1,))
    thread.start()
    thread.join()
    name = os.path.join(os.environ["TMPDIR"], "written")
    with open(name, "x") as file:
        file.write("x")
    os.unlink(name)
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert done == [1] and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def _read(path: str) -> None:
    with open(path, "rb") as file:
        assert file.read(1)


def _connect(family: socket.AddressFamily, address: str | tuple[str, int]) -> None:
    with socket.socket(family) as client:
        client.settimeout(1.0)
        client.connect(address)


def _hold(size: int) -> None:
    """Private memory that can be written to counts as soon as it is mapped, so that it need not be filled."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[-1] = 1


def _fork(count: int) -> None:
    children: list[int] = []
    try:
        for _ in range(count):
            child = os.fork()
            if child == 0:
                signal.pause()
            children.append(child)
        time.sleep(_WATCH_S)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


if __name__ == "__main__":
    try_all()
