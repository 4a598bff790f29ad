"""Processes that the launcher starts, each in its own session, marked with its run, and logged to a file.

`ManagedProcess` is one process. `RankedTrainer` shows the trainer's ranks on this machine as one process.
"""

import ctypes
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil
import yaml

from ycore.config.schema import BaseConfig
from ycore.engine.kinds import KINDS
from ycore.errors import Interrupted, RunError
from ycore.launch.layout import Site
from ycore.run.files import ALLOCATOR, RunFolder, open_private, read_json, read_tail
from ycore.run.reports import RUN_MARKER, Report, descendants, is_alive, read_report
from ycore.run.secrets import secrets_environment
from ycore.run.text import Say

_TAIL_BYTES = 64 * 1024
_BEAT_S = 1.0
_PR_SET_CHILD_SUBREAPER = 36
_OTHER_RANKS_WITHIN_S = 3.0
"""How long the other ranks have to end by themselves after one has failed."""
_TORCHRUN_ENDS_WITHIN_S = 10.0
"""After its ranks. It would wait five minutes for that of a machine where it has ended without a word."""

_COMPILES_WITHIN_S = 3600.0  # an extension of torch's, on any machine

_PREFIX = re.compile(
    r"^(?:\([A-Za-z_]+(?:[-_ ]?\w+)*(?: pid=\d+)?\)\s*)?"  # (EngineCore pid=12)
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\]\s*)?)?"
)
_NOISE = re.compile(
    r"nanobind|^\s*- (?:leaked|\.\.\.)|resource_tracker|warnings\.warn|DeprecationWarning|FutureWarning|UserWarning"
    r"|^\s*(?:File \"|\^+|~+|raise |return |await |warn)|Traceback \(most recent|Engine core initialization failed"
    r"|^\s*\{'[\w/]+': "  # a step's metrics, as TRL prints them
    r"|During handling of|direct cause of|\[shutdown\]|^[\s─╭╰│═*=.-]*$|it/s\]|Exception ignored|destroy_process_group"
)
_ERROR = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Failure)\b|error:|fatal)", re.IGNORECASE
)


class EndedProcess(NamedTuple):
    """A process that has ended, for a message; `ending` says how, and what it said last."""

    name: str
    log: Path
    ending: str


class ManagedProcess:
    """A child in its own session, so that Ctrl-C in a terminal reaches the launcher only.

    Args:
        environment: the child's whole environment; the run's marker and PYTHONSAFEPATH are added.
        log: output is appended to it; a new file is readable by its owner only.
        cores: keep the process, its threads and children on these cores (Linux).
        takes_beats: write to its standard input that this process is still there.
        fork_server: forks it, in place of a start from the beginning.
    """

    is_cause = True
    """Whether its end explains itself, and does not follow from another process's."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        run_id: str,
        log: Path,
        cores: Sequence[int] = (),
        takes_beats: bool = False,
        fork_server: "ForkServer | None" = None,
    ) -> None:
        self.name = name
        self.log = log
        self._num_killed = out_of_memory_kills()
        self._popen: subprocess.Popen[bytes] | _Fork
        with open_private(log) as output:
            if fork_server is not None:
                order = {"options": command[3:], "environment": environment, "cores": cores}
                self._popen = fork_server.fork(name, order, output)
                return
            self._popen = subprocess.Popen(
                list(command),
                # Nothing that Python is told to run by name comes from the folder that the user stands in.
                env={**environment, RUN_MARKER: run_id, "PYTHONSAFEPATH": "1"},
                stdin=subprocess.PIPE if takes_beats else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if takes_beats:
            threading.Thread(target=self._beat, args=(self._popen,), daemon=True).start()
        if cores and sys.platform == "linux":
            # It may have ended, which the caller notices; or the container forbids it, which only costs speed.
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                psutil.Process(self.pid).cpu_affinity(list(cores))

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when a signal ended it."""
        return self._popen.poll()

    @staticmethod
    def _beat(process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None, "it is a pipe"
        with suppress(OSError):  # the process has ended
            while True:
                os.write(process.stdin.fileno(), b".")
                time.sleep(_BEAT_S)

    def send(self, number: signal.Signals) -> None:
        """Signal the process itself, and none of its children."""
        if self.exit_code is None:
            os.kill(self.pid, number)

    def wait(self, *, timeout_s: float) -> int | None:
        """Wait for the end and return the exit code; None when it still runs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.exit_code

    def how_it_ended(self) -> str:
        """Return `exit status 1` or `killed by SIGKILL`, for a message."""
        code = self.exit_code
        if code is None:
            return "still running"
        if code >= 0:
            return f"exit status {code}"
        try:
            ending = f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
        if code == -signal.SIGKILL and out_of_memory_kills() > self._num_killed:
            ending += ", and the machine ran out of memory meanwhile (`ycore plan` shows what a run takes)"
        return ending

    @property
    def ended(self) -> EndedProcess:
        line = self.last_line()
        ending = self.how_it_ended() + (f": {line}" if line else "")
        return EndedProcess(self.name, self.log, ending)

    def tree(self) -> list[psutil.Process]:
        """Return the process and everything below it, now."""
        try:
            return [psutil.Process(self.pid), *descendants(self.pid)]
        except psutil.Error:
            return []

    def last_line(self) -> str:
        """Return the line of the log that says what went wrong; empty after a SIGKILL, which gives no warning."""
        return "" if self.exit_code == -signal.SIGKILL else meaningful_line(self._tail())

    def user_error(self) -> str | None:
        """Return the message of the last line that starts with `error: `."""
        for line in reversed(self._tail()):
            if line.startswith("error: "):
                return line.removeprefix("error: ").strip()
        return None

    def _tail(self) -> list[str]:
        return read_tail(self.log, _TAIL_BYTES).decode(errors="replace").splitlines()


class ForkServer:
    """A process that imports vLLM once for several engines, and forks them as children of this process (Linux).

    Args:
        environment: with the settings of threads and memory that the engines share.
        log: of what goes wrong before it forks.
    """

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._num_waiting = 0
        self._pids: dict[str, int] = {}
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _adopt_orphans(True)
        with theirs, open_private(log) as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ycore.engine.serve", "--forks"],
                env={**environment, "PYTHONSAFEPATH": "1"},
                stdin=theirs.fileno(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def fork(self, name: str, order: Mapping[str, Any], output: IO[Any]) -> "_Fork":
        """Order an engine; it is forked once vLLM is imported."""
        message = json.dumps({"name": name, **order}).encode()
        with suppress(OSError):  # the server has ended, as `pid` finds out
            socket.send_fds(self._orders, [message], [output.fileno()])
        self._num_waiting += 1
        return _Fork(self, name)

    def pid(self, name: str) -> int | None:
        """Return the engine's process id; None before it is forked."""
        while self._num_waiting and select.select([self._orders], [], [], 0)[0]:
            try:
                forked, pid = json.loads(self._orders.recv(4096))
                self._pids[forked] = pid
                self._num_waiting -= 1
            except (OSError, ValueError):  # it has ended
                self._num_waiting = 0
            if not self._num_waiting:
                self._orders.close()
                self.process.wait()  # which it does for the parent of the last engine
                _adopt_orphans(False)
        return self._pids.get(name)


def _adopt_orphans(adopts: bool) -> None:
    """Let a process below this one whose parent ends become its child, or not any longer."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts))


class _Fork:
    """A process that a server forks, used like a `Popen`. Until it is forked, its process is the server's."""

    def __init__(self, server: ForkServer, name: str) -> None:
        self._server = server
        self._name = name
        self._exit_code: int | None = None

    @property
    def pid(self) -> int:
        return self._server.pid(self._name) or self._server.process.pid

    def poll(self) -> int | None:
        pid = self._server.pid(self._name)
        if pid is None:
            return self._server.process.poll()
        if self._exit_code is None:
            try:
                ended, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # not adopted yet, or its status was taken elsewhere
                return None if psutil.pid_exists(pid) else 1
            if ended:
                self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code


def out_of_memory_kills() -> int:
    """Count the processes that the kernel has ended so far because the machine or a container was out of memory."""
    with suppress(OSError, ValueError, StopIteration):
        lines = (line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return next(int(count) for name, count in lines if name == "oom_kill")
    return 0


def meaningful_line(lines: Sequence[str]) -> str:
    """Return the last line of a log that names an error, else the last that is not noise; without loggers' prefixes."""
    plain = [_PREFIX.sub("", line).strip() for line in lines]
    kept = [line for line in plain if line and not _NOISE.search(line)]
    errors = [line for line in kept if _ERROR.match(line)]
    return (errors or kept or [""])[-1][:500]


@dataclass(eq=False)
class RankedTrainer:
    """The trainer's ranks on this machine, and their allocator; the supervisor uses it like a `ManagedProcess`.

    torchrun turns every end into its own exit status 1 and a page of text, so each rank reports its end in a file.
    """

    launcher: ManagedProcess
    folder: RunFolder
    _: KW_ONLY
    num_ranks: int
    allocator: ManagedProcess | None = None

    def __post_init__(self) -> None:
        # By process id; None for a rank that had ended at the first look.
        self._ranks: dict[int, psutil.Process | None] = {}
        self._over_at: float | None = None
        self._interrupted_early = False

    @property
    def exit_code(self) -> int | None:
        """None while the ranks work; a failed rank's once the others, or torchrun, have had time to end."""
        reports = self._reports()
        code = self.launcher.exit_code
        failed = _first_failed(reports)
        ends = [report.exit_code for report in reports]
        have_ended = len(ends) == self.num_ranks and None not in ends
        has_failed = failed is not None and failed.exit_code != Interrupted.exit_code
        is_broken = has_failed or bool(self._lost(reports) or self._lost_allocator)
        if code is None:
            if not have_ended and not is_broken:
                return None
            self._over_at = self._over_at or time.monotonic()
            within_s = _OTHER_RANKS_WITHIN_S if is_broken else _TORCHRUN_ENDS_WITHIN_S
            if time.monotonic() - self._over_at < within_s:
                return None
            code = int(is_broken)
        if failed is not None:
            return failed.exit_code
        if have_ended:
            return 0
        return Interrupted.exit_code if code and self._interrupted_early else code

    def send(self, number: signal.Signals) -> None:
        """Signal every rank. torchrun gets SIGKILL only, unless it has no rank yet: it would end the ranks."""
        self._reports()
        ranks = [process for process in self._ranks.values() if process and is_alive(process)]
        for process in ranks:
            process.send_signal(number)
        self._interrupted_early |= number == signal.SIGINT and not self._ranks
        if number == signal.SIGKILL or not self._ranks:
            self.launcher.send(number)

    @property
    def ended(self) -> EndedProcess:
        """The process whose end explains the trainer's: the allocator, a rank, or torchrun."""
        if self._lost_allocator is not None:
            return self._lost_allocator.ended
        culprit = self._culprit()
        if culprit is None:
            return self.launcher.ended
        ending = "a signal, killed or out of memory"
        if culprit.exit_code is not None:
            ending = f"exit status {culprit.exit_code}: {culprit.message}"
        log = self.folder.log(f"trainer-{culprit.number}")
        return EndedProcess(f"{self.launcher.name} rank {culprit.number}", log, ending)

    @property
    def is_cause(self) -> bool:
        """Whether the end of the rank explains itself: the first to end may have lost the others."""
        culprit = self._culprit()
        return culprit is not None and (culprit.exit_code is None or culprit.expected)

    def user_error(self) -> str | None:
        failed = _first_failed(self._reports())
        return None if failed is None else failed.message

    @property
    def _lost_allocator(self) -> ManagedProcess | None:
        """The process that places the ranks' requests, where it has failed. It ends well when all ranks have gone."""
        return self.allocator if self.allocator and self.allocator.exit_code else None

    def _reports(self) -> list[Report]:
        reports = []
        for local in range(self.num_ranks):
            report = read_report(self.folder, local)
            if report is None:
                continue
            reports.append(report)
            if report.pid not in self._ranks:
                self._ranks[report.pid] = None
                with suppress(psutil.Error):
                    self._ranks[report.pid] = psutil.Process(report.pid)
        return reports

    def _culprit(self) -> Report | None:
        """Return the rank that caused the end: one that vanished, unless another's error explains that."""
        reports = self._reports()
        failed = _first_failed(reports)
        lost = self._lost(reports)
        if lost is None or (failed is not None and failed.expected):
            return failed
        return lost

    def _lost(self, reports: list[Report]) -> Report | None:
        """Return a rank that is gone and has not reported its end."""
        for report in reports:
            process = self._ranks[report.pid]
            if report.exit_code is None and (process is None or not is_alive(process)):
                return report
        return None


def _first_failed(reports: list[Report]) -> Report | None:
    """Return the earliest failure; an interrupted rank only where no rank has failed otherwise."""
    failed = [report for report in reports if report.exit_code]
    return min(
        failed,
        key=lambda report: (report.exit_code == Interrupted.exit_code, report.at),
        default=None,
    )


_STACK_WITHIN_S = 0.5


def write_stacks(processes: Iterable[psutil.Process], path: Path, *, why: str) -> Path:
    """Write the stack of each process to a file that only its owner can read; its first line is `why`.

    ycore's processes, and vLLM's engine core, write their stacks to their logs on SIGUSR2 (Python's faulthandler),
    even in the middle of a call that never ends. Of any other process, its state in the kernel is written instead.
    """
    with open_private(path) as file:
        file.write(f"{why}\n")
        for process in processes:
            try:
                title = " ".join(process.cmdline()[:6])
            except psutil.Error:
                title = "ended"
            file.write(f"\n== process {process.pid}: {title}\n{_stack(process.pid)}\n")
    return path


def _stack(pid: int) -> str:
    values: dict[str, str] = {}
    with suppress(OSError):  # it has ended
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        values = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    state = f"state {values.get('State', 'gone')}"
    # A process without a handler would be ended by the signal.
    has_handler = int(values.get("SigCgt", "0"), 16) >> (signal.SIGUSR2 - 1) & 1
    log = Path(os.path.realpath(f"/proc/{pid}/fd/2"))  # of standard error
    if not has_handler or not os.path.isfile(log):
        return f"cannot be asked for its stack; {state}"
    size_before = log.stat().st_size
    os.kill(pid, signal.SIGUSR2)
    # A stopped one is killed next in any case, and can say where it was.
    os.kill(pid, signal.SIGCONT)
    time.sleep(_STACK_WITHIN_S)
    with log.open("rb") as file:
        file.seek(size_before)
        stack = file.read().decode(errors="replace").rstrip()
    return f"{state}\n{stack or 'wrote no stack'}"


_KEEP_FREED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "67108864",
}
"""glibc keeps the large blocks that a step frees. By default the kernel takes them, and clears them for the next."""


def start_trainer(
    config: BaseConfig, site: Site, *, name: str, module: str, say: Say
) -> ManagedProcess | RankedTrainer:
    """Start `python -m MODULE RUN_FOLDER`, once or for every rank of this machine."""
    folder = site.folder
    layout = site.layout
    if layout.uses_deepspeed:
        remove_extension_locks(say, num_machines=layout.num_machines)
    environment = worker_environment(config, on_cpu=not site.machine.devices)
    environment |= site.trainer_environment
    launcher: list[str] = []
    if layout.accelerate:
        settings = folder.root / "accelerate.yaml"
        settings.write_text(yaml.safe_dump(dict(layout.accelerate)), encoding="utf-8")
        launcher = [
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(settings.resolve()),
        ]
        num_threads = max(1, len(site.machine.cores) // layout.local)
        environment["OMP_NUM_THREADS"] = str(num_threads)
    process = ManagedProcess(
        name,
        [sys.executable, *launcher, "-m", module, str(folder.root.resolve())],
        environment=environment,
        run_id=folder.run_id,
        log=folder.log(name),
    )
    if not layout.accelerate:
        return process
    allocator = _start_allocator(site, environment)
    return RankedTrainer(process, folder, num_ranks=layout.local, allocator=allocator)


def remove_extension_locks(say: Say, *, num_machines: int) -> None:
    """Remove locks that killed processes left in torch's cache of compiled extensions: ranks wait for them for ever.

    torch has a lock open while it compiles. One that no process here has open may be another machine's, where the cache
    is shared. So a young one stays; where the run is of one machine, it is a RunError.
    """
    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    pattern = "*/lock"
    if folder is None:
        folder = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
        pattern = f"torch_extensions/py{sys.version_info.major}{sys.version_info.minor}*/*/lock"
    locks = list(Path(folder).glob(pattern))
    processes = psutil.process_iter(["open_files"]) if locks else ()
    open_paths = {
        file.path for process in processes for file in process.info["open_files"] or ()
    }
    for lock in locks:
        if not lock.exists() or str(lock.resolve()) in open_paths:
            continue
        if time.time() - lock.stat().st_mtime > _COMPILES_WITHIN_S:
            lock.unlink(missing_ok=True)
            say(f"removed {lock}, which a killed process has left")
        elif num_machines == 1:
            raise RunError(
                f"{lock}: no process here has this lock of torch's open, so that ranks would wait for it for ever; "
                f"rm {lock}, unless another machine is compiling there"
            )


def _start_allocator(site: Site, environment: Mapping[str, str]) -> ManagedProcess | None:
    """Start the process that places the requests of several ranks. It lives as long as they do."""
    folder = site.folder
    num_ranks = site.layout.local
    kind = KINDS.get(read_json(folder.engines)["kind"])  # None for a run on given examples
    if num_ranks == 1 or kind is None or not kind.has_servers:
        return None
    return ManagedProcess(
        ALLOCATOR,
        [
            sys.executable,
            "-m",
            "ycore.placement.service",
            str(folder.socket(ALLOCATOR)),
            str(num_ranks),
        ],
        environment=environment,
        run_id=folder.run_id,
        log=folder.log(ALLOCATOR),
    )


def worker_environment(config: BaseConfig, *, on_cpu: bool = False) -> dict[str, str]:
    """Return this process's environment with defaults for what it leaves unset, and with the config's secrets."""
    return {
        # Threads that wait for each other by spinning take ten times as long where another process wants a core too.
        "GOMP_SPINCOUNT": "10000",
        **(_KEEP_FREED if on_cpu else {}),
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "SPT_NOENV": "1",
        **secrets_environment(config.model_dump(mode="json")),
    }
