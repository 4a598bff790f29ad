"""The two sides of a child process that speaks JSON lines: its pipes, and its tie to its parent.

Not here: what is said (`worker`, `check`). Nothing is pickled, so a hostile line is at worst a wrong value.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

_PR_SET_PDEATHSIG = 1


class Channel:
    """This process's standard input and output, taken for the protocol alone.

    Afterwards file descriptor 0 is empty and 1 is standard error, so that nothing that is printed, by Python, C or a
    child process, can come between the answers.
    """

    def __init__(self) -> None:
        self._requests: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._replies: BinaryIO = os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        sys.stdout = sys.stderr

    def __iter__(self) -> Iterator[Any]:
        return map(json.loads, self._requests)

    def reply(self, answer: dict[str, Any]) -> None:
        self._replies.write(json.dumps(answer).encode() + b"\n")
        self._replies.flush()


def end_with_parent() -> None:
    """Where the kernel can (Linux), die with the parent, even in the middle of a call that never ends.

    Also be the first that the kernel kills when memory runs out: a reward can be masked, a trainer cannot.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
