"""What a reward's process has started, and its end: daemons too, which stay below a process that adopts orphans.

Not here: what is done to processes of a whole run (`launch.reaper`).
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on a daemon that is started here stays below this process, so that it is found and ends with it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def below(pid: int) -> list[psutil.Process]:
    """Every process below this one, now."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


def kill_below(pid: int) -> None:
    """End everything below a process that goes on itself; twice, for what was being started meanwhile."""
    for _ in range(2):
        for process in below(pid):
            with suppress(psutil.Error):
                process.kill()


def kill_group_and_below(leader: int) -> None:
    """End a process that leads a group, its group, and what has left that group for one of its own."""
    others = below(leader)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)  # the group outlives its leader while one of it runs
    for process in others:
        with suppress(psutil.Error):
            process.kill()
