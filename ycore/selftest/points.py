"""Places in the code where a run is most easily broken, by name, and how a process dies exactly there.

Each is an edit of a copy of the package (`copies`): a call of `reach`, which does nothing unless the environment names
that point. Random moments seldom land between a rename and the flush behind it; these always do.

Not here: the trials (`rows_points`).
"""

import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ycore.selftest.copies import Edit, Patch

VARIABLE = "YCORE_SELFTEST_POINT"
"""`NAME/COUNT/FILE`: die where NAME is reached for the COUNTth time, unless FILE is there, which is made then."""

_reached: Counter[str] = Counter()


def reach(name: str) -> None:
    """SIGKILL to this process, once in a run and its resume."""
    wanted, count, marker = (os.environ.get(VARIABLE, "") + "//").split("/", 2)
    if name != wanted:
        return
    _reached[name] += 1
    path = Path("/" + marker.strip("/"))
    if _reached[name] == int(count) and not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def dies_at(name: str, count: int, marker: Path) -> dict[str, str]:
    """The environment of a run that is to die there; `marker` tells afterwards whether it did."""
    return {VARIABLE: f"{name}/{count}{marker.resolve()}"}


@dataclass(frozen=True, slots=True)
class Point:
    """A line of a file, and whether to die before it or behind it."""

    name: str
    file: str
    line: str
    before: bool
    each_step: bool = True

    def hits(self, steps: int) -> int:
        """How often a run with a checkpoint every two steps comes here, at least."""
        return steps if self.each_step else steps // 2 - 2

    @property
    def patch(self) -> Patch:
        indent = self.line[: len(self.line) - len(self.line.lstrip())]
        call = f'{indent}__import__("ycore.selftest.points", fromlist=["reach"]).reach("{self.name}")\n'
        new = call + self.line if self.before else self.line + call
        return Patch(f"die at: {self.name}", (Edit(self.file, self.line, new),))


_SOURCE, _JOURNAL = "ycore/round/step.py", "ycore/round/journal.py"
_FOLDER, _SAVER = "ycore/run/checkpoints.py", "ycore/trainer/saved_state.py"
_COMMIT = "        self._journal.commit(step, groups, controller_state(self._rounds), told)\n"

POINTS: tuple[Point, ...] = (
    Point(
        "weights written, no engine told", _SOURCE, "            self._run(self._load(folder, version))\n", before=True
    ),
    Point("engines have the weights", _SOURCE, "        self._synced = version\n", before=False),
    Point("round made, not committed", _JOURNAL, _COMMIT, before=True),
    Point("round committed, not trained on", _JOURNAL, _COMMIT, before=False),
    Point("file flushed, not renamed", "ycore/run/files.py", "        os.replace(partial, path)\n", before=True),
    Point("step taken, not told", _SAVER, "        self._trainer.refuse_broken_weights()\n", before=True),
    Point(
        "row of metrics written",
        "ycore/run/metrics.py",
        "        self._file.write(_line(row))\n",
        before=False,
    ),
    Point("checkpoint written, no manifest", _FOLDER, "    files = _files(staged)\n", before=True, each_step=False),
    Point(
        "manifest written, no name",
        _FOLDER,
        "    for inner in {path.parent for path in files} | {staged}:\n",
        before=True,
        each_step=False,
    ),
    Point("name given, not flushed", _FOLDER, "    os.rename(staged, place)\n", before=False, each_step=False),
    Point(
        "checkpoint published, older ones there",
        _SAVER,
        '                publish(self._folder, step, {"world": self._world})\n',
        before=False,
        each_step=False,
    ),
    Point("old checkpoint renamed", _FOLDER, "    os.rename(checkpoint, dying)\n", before=False, each_step=False),
    Point(
        "rounds dropped",
        _SAVER,
        "            self._journal.prune(before=step_of(checkpoints_in(self._folder)[0]))\n",
        before=False,
        each_step=False,
    ),
)
