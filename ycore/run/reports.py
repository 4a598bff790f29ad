"""One rank of several: which one this process is, and what it leaves for its launcher to read.

A rank writes to a log of its own, keeps to its own cores, and says in a file that it is there and how it ended:
torchrun, which starts the ranks, would turn every end into its own exit status 1 and a page of text.

One file per role: how its process starts, and what a controller asks of it.

Telling this process's stacks when asked: SIGUSR2 writes those of all its threads to its log.

The outer part of a role's process: its command line, the signals that stop it, what it says of its end.

Not here: reading those files (`launch.ranks`), and what a rank does (`trainer`).
"""

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ycore.errors import UserError, YcoreError
from ycore.run.files import read_json, write_json_atomic
from ycore.run.paths import RunFolder

RUN_MARKER = "YCORE_RUN"
"""The environment variable that every process of a run carries; its value is `RunFolder.run_id`."""


def tell_stacks() -> None:
    """From now on in this process. Python's own handler writes them, also in the midst of a call that never ends."""
    faulthandler.register(signal.SIGUSR2, file=sys.stderr.fileno(), all_threads=True)


@dataclass(frozen=True, slots=True)
class Rank:
    """As torchrun tells it: `number` of `world` in the run, `local` of `local_world` on this machine."""

    number: int = 0
    world: int = 1
    local: int = 0
    local_world: int = 1


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says of itself; `exit_code` is None while it runs."""

    number: int
    pid: int
    exit_code: int | None = None
    message: str = ""
    at: float = 0.0
    expected: bool = True
    """Whether that says why: it finished, or met an error of ycore's other than that another rank was gone."""


def this_rank(environment: Mapping[str, str] | None = None) -> Rank:
    """The rank of this process; one of one where no launcher says otherwise."""
    told = os.environ if environment is None else environment
    if "LOCAL_WORLD_SIZE" not in told:
        return Rank()
    return Rank(*(int(told[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))


def was_launched() -> bool:
    """Whether a launcher of ranks started this process, be it the only one."""
    return "LOCAL_WORLD_SIZE" in os.environ


def report_file(folder: RunFolder, local: int) -> Any:
    return folder.sockets / f"rank-{local}.json"


def read_report(folder: RunFolder, local: int) -> Report | None:
    path = report_file(folder, local)
    return Report(**read_json(path)) if path.is_file() else None


def forget_reports(folder: RunFolder) -> None:
    """Before ranks are started again: what the last ones said is about them alone."""
    for report in folder.sockets.glob("rank-*.json"):
        report.unlink()


def take_place(folder: RunFolder, rank: Rank, *, cores: list[int] | None) -> None:
    """From here on this process is that rank: own log, own cores, and the launcher knows its process id."""
    log = os.open(folder.log(f"trainer-{rank.number}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)
    # From torchrun, which sends it when another rank has failed; it must not look as if this one had just vanished.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if cores and sys.platform == "linux":
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)
    write_json_atomic(report_file(folder, rank.local), asdict(Report(rank.number, os.getpid())))


def report_end(folder: RunFolder, rank: Rank, exit_code: int, message: str = "", *, expected: bool = True) -> None:
    """Say how this rank ended; the launcher believes the first that failed."""
    report = Report(rank.number, os.getpid(), exit_code, message, time.time(), expected)
    write_json_atomic(report_file(folder, rank.local), asdict(report))


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
