"""The processes of a run: their mark, their ranks, the reports they leave for the launcher, and how to kill them.

Each rank writes a log and a report file, because torchrun, which starts the ranks, would turn every end into its own
exit status 1 and a page of text.
"""

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from ycore.errors import UserError, YcoreError
from ycore.run.files import RunFolder, open_private, read_json, write_json_atomic
from ycore.run.interrupt import keep_printing

RUN_MARKER = "YCORE_RUN"
"""The environment variable that every process of a run carries; its value is `RunFolder.run_id`."""


def dump_stacks_on_signal() -> None:
    """From now on SIGUSR2 writes the stacks of all threads to standard error, also while a call hangs."""
    faulthandler.register(signal.SIGUSR2, file=sys.stderr.fileno(), all_threads=True)


@contextmanager
def hide_packages(names: list[str]) -> Iterator[None]:
    """Let imports find none of the packages, unless they are loaded already."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


class Rank(NamedTuple):
    """A rank as torchrun counts: `number` of `world` in the run, `local` of `local_world` on this machine."""

    number: int = 0
    world: int = 1
    local: int = 0
    local_world: int = 1


_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""The variables that torchrun gives every rank, in the order of `Rank`."""


def is_rank() -> bool:
    """Whether torchrun started this process, be it the only one."""
    return os.environ.keys() >= set(_OF_RANKS)


def this_rank() -> Rank:
    """Return the rank of this process; the only one where no launcher of ranks started it."""
    return Rank(*(int(os.environ[name]) for name in _OF_RANKS)) if is_rank() else Rank()


@dataclass(frozen=True)
class Report:
    """A rank's report; `exit_code` is None while it runs. `message` is the cause of the end only if `expected`."""

    number: int
    pid: int
    exit_code: int | None = None
    message: str = ""
    at: float = 0.0
    expected: bool = True


def report_file(folder: RunFolder, local: int) -> Path:
    return folder.sockets / f"rank-{local}.json"


def read_report(folder: RunFolder, local: int) -> Report | None:
    """Return the report of this machine's rank `local`; None before it has begun."""
    path = report_file(folder, local)
    return Report(**read_json(path)) if path.is_file() else None


def forget_reports(folder: RunFolder) -> None:
    """Remove the reports of ranks that have ended, before others are started."""
    for report in folder.sockets.glob("rank-*.json"):
        report.unlink()


def take_place(folder: RunFolder, rank: Rank) -> None:
    """Make this process the rank: with the rank's log for its output, and its process id in its report."""
    with open_private(folder.log(f"trainer-{rank.number}")) as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
    # From torchrun, which sends it when another rank has failed; it must not look as if this one had just vanished.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write_json_atomic(report_file(folder, rank.local), asdict(Report(rank.number, os.getpid())))


def report_end(
    folder: RunFolder, rank: Rank, exit_code: int, message: str = "", *, expected: bool = True
) -> None:
    """Write how this rank ended. Of several ranks that failed, the launcher shows the first.

    Args:
        message: the error in one line.
        expected: False where the error follows from another rank's end, or nobody foresaw it.
    """
    report = Report(rank.number, os.getpid(), exit_code, message, time.time(), expected)
    write_json_atomic(report_file(folder, rank.local), asdict(report))


def run_alone(work: Callable[[Path], None]) -> int:
    """Do a run folder's work as a whole process, `python -m MODULE RUN_FOLDER`; return the exit status."""
    keep_printing()
    dump_stacks_on_signal()
    try:
        work(Path(sys.argv[1]))
    except YcoreError as error:
        return print_error(error)
    return 0


def print_error(error: YcoreError) -> int:
    """Print one line, by whose beginning the launcher recognises a user's mistake; return the exit status."""
    prefix = "error" if isinstance(error, UserError) else "failed"
    print(f"{prefix}: {error}", file=sys.stderr)
    return error.exit_code


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs. A zombie, which only waits for its exit status to be read, does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def descendants(pid: int) -> list[psutil.Process]:
    """Return every process below `pid` now, at any depth; none when `pid` has ended."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


def kill_tree(leader: int, *, also: Iterable[psutil.Process] = (), wait_s: float = 0.0) -> None:
    """Send SIGKILL to a process group, to everything below its leader, and to `also`, which may have left the tree.

    Args:
        leader: process id of the group's leader, which may have ended already.
        wait_s: how long to wait until all of them but the leader are gone; the caller reaps the leader.
    """
    processes = [*descendants(leader), *also]
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and any(is_alive(process) for process in processes):
        time.sleep(0.02)
