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
from collections.abc import Callable, Iterator
from typing import TypedDict


class CanaryTargets(TypedDict):
    """Targets of the attempts. `word` is in the file, in a variable, and in the servers' greeting."""

    word: str
    file: str
    port: int
    socket: str
    parent: int
    memory: int  # bytes
    processes: int


HONEST = "honest"
MEMORY = "memory"
PROCESSES = "processes"


def main() -> None:
    for name, attempt in attempts(json.loads(sys.argv[1])):
        try:
            outcome = bool(attempt())
        except (OSError, MemoryError, RuntimeError):
            outcome = False
        os.write(1, json.dumps([name, outcome]).encode() + b"\n")


def attempts(targets: CanaryTargets) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield names and attempts, the honest work first."""
    yield HONEST, _honest
    yield "a file of the user", lambda: _has(targets, targets["file"])
    yield "a variable of the environment", lambda: targets["word"] in str(os.environ)
    yield "the environment of the parent", lambda: _opens(f"/proc/{targets['parent']}/environ")
    yield "a signal to the parent", lambda: _signals(targets["parent"])
    yield (
        "a server on loopback",
        lambda: _greeted(targets, socket.AF_INET, ("127.0.0.1", targets["port"])),
    )
    yield "a socket file", lambda: _greeted(targets, socket.AF_UNIX, targets["socket"])
    yield MEMORY, lambda: _holds(targets["memory"])
    yield PROCESSES, lambda: _forks(targets["processes"])


def _honest() -> bool:
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
    return done == [1] and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def _has(targets: CanaryTargets, path: str) -> bool:
    with open(path) as file:
        return targets["word"] in file.read()


def _opens(path: str) -> bool:
    with open(path, "rb") as file:
        return len(file.read(1)) == 1


def _signals(pid: int) -> bool:
    os.kill(pid, 0)
    return True


def _greeted(
    targets: CanaryTargets, family: socket.AddressFamily, address: str | tuple[str, int]
) -> bool:
    with socket.socket(family) as client:
        client.settimeout(1.0)
        client.connect(address)
        return targets["word"].encode() in client.recv(1024)


def _holds(size: int) -> bool:
    """Private memory that can be written to counts as soon as it is mapped, so that it need not be filled."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[-1] = 1
    return True


def _forks(count: int) -> bool:
    children: list[int] = []
    try:
        for _ in range(count):
            child = os.fork()
            if child == 0:
                signal.pause()
            children.append(child)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return True


if __name__ == "__main__":
    main()
