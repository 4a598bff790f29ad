"""The outer part of a role's process: its command line, the signals that stop it, what it says of its end.

Not here: what a role does, and what ranks tell their launcher (`ranks`, `trainer`).
"""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ycore.errors import UserError, YcoreError
from ycore.roles.stacks import tell_stacks


def run_alone(module: str, work: Callable[[Path], None]) -> int:
    """Do a run folder's work in a process of its own: 0 finished, 2 the user's mistake, 130 interrupted, else 1."""
    if len(sys.argv) != 2:
        print(f"usage: python -m {module} RUN_FOLDER", file=sys.stderr)
        return 2
    tell_stacks()
    try:
        work(Path(sys.argv[1]))
    except YcoreError as error:
        return say_how_it_ended(error)
    return 0


def say_how_it_ended(error: YcoreError) -> int:
    """One line, by whose beginning the launcher knows a user's mistake; the exit status."""
    prefix = "error" if isinstance(error, UserError) else "failed"
    print(f"{prefix}: {error}", file=sys.stderr)
    return error.exit_code


def on_stop(ask: Callable[[], None]) -> None:
    """From now on SIGINT and SIGTERM only ask."""

    def heard(signum: int, frame: FrameType | None) -> None:
        ask()

    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, heard)
