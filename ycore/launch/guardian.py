"""The guardian: clears the run away when the launcher is gone, however it went, SIGKILL included.

`python -m ycore.launch.guardian RUN_FOLDER`, started before any other process of the run, in a session of its own,
with a pipe from the launcher as standard input. Nothing is ever written to that pipe; it ends when the launcher does.

Not here: how a run is cleared away (`reaper`). Standard library and psutil only, so that it is small.
"""

import select
import signal
import sys
from pathlib import Path

from ycore.launch.reaper import RunWatch, remove_leftovers
from ycore.run_folder.paths import RunFolder

_LOOK_EVERY_S = 5.0  # a look costs 20 ms; an idle run should cost nothing


def guard(folder: RunFolder) -> None:
    """Wait for the launcher's end, then leave nothing of the run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch = RunWatch(folder.run_id)
    pipe = sys.stdin.fileno()
    while not select.select([pipe], [], [], _LOOK_EVERY_S)[0]:
        watch.look()
    watch.kill()
    watch.remove_segments()
    remove_leftovers(folder)


if __name__ == "__main__":
    guard(RunFolder(Path(sys.argv[1])))
