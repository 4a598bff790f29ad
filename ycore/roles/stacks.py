"""Telling this process's stacks when asked: SIGUSR2 writes those of all its threads to its log.

Not here: who asks, and where they are collected (`launch.stacks`).
"""

import faulthandler
import signal
import sys


def tell_stacks() -> None:
    """From now on in this process. Python's own handler writes them, also in the midst of a call that never ends."""
    faulthandler.register(signal.SIGUSR2, file=sys.stderr.fileno(), all_threads=True)
