"""The launcher's side of the guardian: start it first, and let it clear away the run at the end.

Not here: what the guardian does (`guardian`).
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ycore.launch.reaper import kill_run, remove_leftovers
from ycore.roles import RUN_MARKER
from ycore.run_folder.paths import RunFolder
from ycore.run_folder.prepare import Claim

_CLEARS_WITHIN_S = 30.0


@contextmanager
def guarded(folder: RunFolder, held: Claim) -> Iterator[None]:
    """Within it, the run's processes may be started; after it none is left, nor a socket, nor shared memory."""
    kill_run(folder.run_id)  # what is left of a run whose guardian was killed too
    guardian = _start(folder, held)
    try:
        yield
    finally:
        _end(guardian, folder)


def _start(folder: RunFolder, held: Claim) -> "subprocess.Popen[bytes]":
    environment = {name: value for name, value in os.environ.items() if name != RUN_MARKER}
    log = os.open(folder.log("guardian"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "ycore.launch.guardian", str(folder.root.resolve())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            pass_fds=(held.descriptor,),
        )
    finally:
        os.close(log)


def _end(guardian: "subprocess.Popen[bytes]", folder: RunFolder) -> None:
    """Close the pipe and wait; a guardian that failed is stood in for."""
    assert guardian.stdin is not None
    guardian.stdin.close()
    try:
        cleared = guardian.wait(_CLEARS_WITHIN_S) == 0
    except subprocess.TimeoutExpired:
        guardian.kill()
        guardian.wait()
        cleared = False
    if not cleared:
        kill_run(folder.run_id)
        remove_leftovers(folder)
