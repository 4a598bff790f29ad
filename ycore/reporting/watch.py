"""Looking at a run from another terminal, while it goes on or once it has ended.

Not here: what is drawn (`telemetry.live`), and the run's own progress (`telemetry.progress`).
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from ycore.errors import RunFolderError
from ycore.run_folder.files import read_json
from ycore.run_folder.paths import RunFolder
from ycore.run_folder.prepare import is_held
from ycore.telemetry.activity import RunActivity
from ycore.telemetry.clock import as_duration
from ycore.telemetry.follow import MetricsFollower
from ycore.telemetry.progress import open_progress

_LOOK_EVERY_S = 0.5


def watch(root: Path, *, stream: TextIO | None = None, once: bool = False) -> None:
    """Show every step of the run in `root`, those that were taken already first, until it has ended.

    `once` shows what there is and returns. A run whose launcher is gone without a summary is said to be so.
    """
    folder = RunFolder(root)
    if not folder.config.is_file():
        raise RunFolderError(f"{root} has no run.json, so it is no run's folder; name the folder that --output named")
    config = read_json(folder.config).get("config", {})
    activity = RunActivity(root, goes_on=lambda: is_held(folder))
    look = None if config.get("algorithm") == "eval" else activity.look  # an evaluation has no steps to be in
    progress = open_progress(config.get("steps"), stream=stream, look=look)
    try:
        progress.say(f"{root}: {config.get('algorithm')} of {config.get('model')} on {config.get('dataset')}")
        for row in _rows(folder, once=once):
            progress.step(row)
        progress.say(_ending(folder))
    finally:
        progress.close()


def _rows(folder: RunFolder, *, once: bool) -> Iterator[Mapping[str, Any]]:
    """Rows as they come; the end of the run ends them, after its last one."""
    follower = MetricsFollower(folder.metrics, from_the_start=True)
    while True:
        over = once or not is_held(folder)  # before reading: what it wrote last is then read too
        yield from follower.read()
        if over:
            return
        time.sleep(_LOOK_EVERY_S)


def _ending(folder: RunFolder) -> str:
    if is_held(folder):
        return "the run goes on"
    if not folder.summary.is_file():
        return f"over without a summary, as after a kill; `ycore resume {folder.root}` goes on"
    summary = read_json(folder.summary)
    told = f"{summary.get('status', 'ended')} after {summary.get('steps', 0)} steps"
    seconds = summary.get("wall_s")
    why = f": {summary['error']}" if summary.get("error") else ""
    return told + ("" if seconds is None else f", {as_duration(seconds)}") + why
