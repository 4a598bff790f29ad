"""A process with a terminal of its own, which can be closed under it as a person closes a window.

Not here: runs without one (`runs`).
"""

import os
import pty
import select
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

_LOOK_EVERY_S = 0.05
_CHUNK = 65536


class Terminal:
    """`process` is the session's leader; what it prints goes to `log`, and nobody types anything."""

    def __init__(self, command: Sequence[str], *, cwd: Path, environment: Mapping[str, str], log: Path) -> None:
        self._ours, theirs = pty.openpty()
        self._closing = threading.Event()
        self.process = subprocess.Popen(
            list(command), cwd=cwd, env=dict(environment), preexec_fn=lambda: os.login_tty(theirs)
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, args=(log,), daemon=True)
        self._reader.start()

    def close(self) -> None:
        """The kernel sends SIGHUP to the session's leader."""
        self._closing.set()
        self._reader.join()

    def _read(self, log: Path) -> None:
        """Also closes: a terminal that is being read from in another thread stays open."""
        with log.open("ab") as output:
            while not self._closing.is_set():
                if select.select([self._ours], [], [], _LOOK_EVERY_S)[0]:
                    try:
                        output.write(os.read(self._ours, _CHUNK))
                    except OSError:
                        break  # the other side is gone
                    output.flush()
        os.close(self._ours)
