"""A process and everything below it: which of it is alive, and how to end all of it at once."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs. A zombie, which only waits for its exit status to be read, does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def descendants(pid: int) -> list[psutil.Process]:
    """Every process below `pid` now, at any depth; none when `pid` has ended."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


def kill_tree(leader: int, *, also: Iterable[psutil.Process] = (), wait_s: float = 0.0) -> None:
    """Send SIGKILL to a process group, to everything below its leader, and to `also`, which may have left the tree.

    Args:
        leader: process id of the group's leader, which may have ended already.
        wait_s: how long to wait until all of them but the leader are gone; the caller reaps the leader.
    """
    others = [*descendants(leader), *also]
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    for process in others:
        with suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and any(is_alive(process) for process in others):
        time.sleep(0.02)
