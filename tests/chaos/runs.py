"""A real `ycore` process and its run folder: start it, look at it, wait, kill it, and list what it left behind."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos import light_trainer
from tests.chaos.command import ENGINE_MODULE
from tests.chaos.moments import Glimpse, count_rows, glimpse
from ycore.errors import Interrupted
from ycore.run.files import RunFolder
from ycore.run.reports import RUN_MARKER, is_alive

_LOOK_EVERY_S = 0.05
_CHUNK = 65536


class Terminal:
    """`process` is the session's leader; what it prints goes to `log`, and nobody types anything."""

    def __init__(
        self, command: Sequence[str], *, cwd: Path, environment: Mapping[str, str], log: Path
    ) -> None:
        self._ours, theirs = pty.openpty()
        self._closing = threading.Event()
        self.process = subprocess.Popen(
            list(command),
            cwd=cwd,
            env=dict(environment),
            preexec_fn=lambda: os.login_tty(theirs),
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, args=(log,), daemon=True)
        self._reader.start()

    def close(self) -> None:
        """The kernel sends SIGHUP to the session's leader."""
        self._closing.set()
        self._reader.join()

    def _read(self, log: Path) -> None:
        """Read what it prints, and close it: a terminal that is being read from in another thread stays open."""
        with log.open("ab") as output:
            while not self._closing.is_set():
                if select.select([self._ours], [], [], _LOOK_EVERY_S)[0]:
                    try:
                        output.write(os.read(self._ours, _CHUNK))
                    except OSError:
                        break  # the other side is gone
                    output.flush()
        os.close(self._ours)


_REPOSITORY = Path(__file__).resolve().parents[2]
_INSTALLED = "import sys; from ycore_cli.main import main; sys.exit(main())"
_POLL_S = 0.002  # as near to a moment as a kill should come
_WAIT_POLL_S = 0.05
_GUARDIAN_WITHIN_S = 10.0

_ENGINES = (ENGINE_MODULE, "ycore.engine.serve")
_MODULES = {
    "trainer": ("ycore.trainer", light_trainer.MODULE),
    "reward": ("ycore.rewards.worker",),
    "tool": ("ycore.rollout.tool_host",),
    "allocator": ("ycore.placement.service",),
}


def has_role(words: Sequence[str], role: str) -> bool:
    """Whether a process with this command line is one of the role; the launcher is the process that we started."""
    if role in _MODULES:
        return any(module in words for module in _MODULES[role])
    if " ".join(words).startswith(f"ycore.engine.serve {role}-"):  # a fork's title
        return True
    return any(module in words for module in _ENGINES) and any(
        f"/{role}-" in word for word in words
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """How `ycore` is started: with which engine, from which copy of the package, in which environment."""

    place: Path
    """A folder for logs, and the working folder of every process."""

    scripted: Mapping[str, str] | None = None
    """Options of the scripted engine; None is real vLLM."""

    package: Path | None = None
    """A folder to import the packages from; None is the repository."""

    environment: Mapping[str, str] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event, compare=False)
    """Set to end every run that is being waited for."""

    def command(self, words: Sequence[str]) -> list[str]:
        if self.scripted is None:
            return [sys.executable, "-c", _INSTALLED, *words]
        return [
            sys.executable,
            "-m",
            "tests.chaos.command",
            json.dumps(dict(self.scripted)),
            *words,
        ]

    def full_environment(self) -> dict[str, str]:
        """Return an environment of one thread a process, for the sake of exact repetition."""
        threads = {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        package = {"PYTHONPATH": str(self.package or _REPOSITORY)}
        return {**os.environ, **threads, **package, "COLUMNS": "100", **self.environment}


class Run:
    """One `ycore` process in its own session, and the folder that it works in."""

    def __init__(
        self, setting: Setting, words: Sequence[str], output: Path, *, in_terminal: bool = False
    ) -> None:
        self.folder = RunFolder(output)
        self.log = setting.place / f"{output.name}.log"
        self.began = time.monotonic()
        self.seen: dict[int, psutil.Process] = {}
        """Every process of the run that was ever seen."""
        self._stop = setting.stop
        self.glimpsed: Glimpse | None = None
        """The run folder when the first signal was sent to a role."""
        self._terminal: Terminal | None = None
        command, environment = setting.command(words), setting.full_environment()
        if in_terminal:
            self._terminal = Terminal(
                command, cwd=setting.place, environment=environment, log=self.log
            )
            self.process = self._terminal.process
            return
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=setting.place,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def wait(self, *, timeout_s: float) -> int | None:
        """Return the exit status; None where it still runs then."""
        self._look_until(
            lambda: self.exit_code is not None, timeout_s=timeout_s, every_s=_WAIT_POLL_S
        )
        return self.exit_code

    def num_steps(self) -> int:
        """Count the rows of metrics.jsonl, now."""
        return count_rows(self.folder.metrics)

    def wait_for(
        self, condition: Callable[[], bool], *, timeout_s: float, every_s: float = _POLL_S
    ) -> bool:
        """Whether it came true while the run was alive."""
        self._look_until(
            lambda: condition() or self.exit_code is not None,
            timeout_s=timeout_s,
            every_s=every_s,
        )
        return condition()

    def _look_until(
        self, condition: Callable[[], bool], *, timeout_s: float, every_s: float
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline:
            if self._stop.wait(every_s):
                raise Interrupted("the scorecard was stopped")

    def members(self) -> list[psutil.Process]:
        """Return the run's living processes besides the launcher: those that carry its marker, and its guardian."""
        processes = []
        guards = ["ycore.launch.guardian", str(self.folder.root.resolve())]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                mark = process.environ().get(RUN_MARKER)
                is_guardian = (
                    mark is None
                    and process.cmdline()[-2:] == guards
                    and _sees_our_files(process.pid)
                )
                if (mark == self.folder.run_id or is_guardian) and is_alive(process):
                    processes.append(process)
        self.seen |= {process.pid: process for process in processes}
        return processes

    def role(self, name: str) -> list[psutil.Process]:
        """Return the living processes of a role, by their process ids."""
        if name == "launcher":
            return [psutil.Process(self.process.pid)] if self.exit_code is None else []
        processes = [process for process in self.members() if has_role(_words(process), name)]
        return sorted(processes, key=lambda process: int(process.pid))

    def send(
        self, role: str, number: signal.Signals, *, which: int = 0, timeout_s: float = 60.0
    ) -> bool:
        """Signal one process of a role, the first unless said, once it is there; False where it never came."""
        sent: list[bool] = []

        def is_over() -> bool:
            sent.append(self._send(role, number, which))
            return sent[-1] or self.exit_code is not None

        self._look_until(is_over, timeout_s=timeout_s, every_s=_WAIT_POLL_S)
        return sent[-1]

    def _send(self, role: str, number: signal.Signals, which: int) -> bool:
        for process in self.role(role)[which:]:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
                self.glimpsed = self.glimpsed or glimpse(self.folder)
                return True
        return False

    def close_terminal(self) -> None:
        """Close the terminal, as its window would."""
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None

    def end(self) -> None:
        """End whatever still lives of it: by its guardian if it has one, so that no folder is left either."""
        self.close_terminal()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + _GUARDIAN_WITHIN_S
        while (
            any("ycore.launch.guardian" in _words(process) for process in self.members())
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)
        for process in self.members():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def tail(self, num_lines: int = 3) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        return " / ".join(line.strip() for line in lines[-num_lines:])


def _sees_our_files(pid: int) -> bool:
    """Whether a process is in this one's mount namespace: in another, the same path is another run's."""
    return os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")


def leftovers(run: Run, *, within_s: float = 10.0) -> list[str]:
    """Name the processes, sockets, shared memory and temporary files that an ended run has after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while remaining := _left(run):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return remaining


def let_end(run: Run, *, timeout_s: float) -> tuple[int | None, tuple[str, ...]]:
    """Return the exit status, None where it still runs then, and what is left of it."""
    status = run.wait(timeout_s=timeout_s)
    return status, tuple(leftovers(run)) if status is not None else ("the run itself",)


def _left(run: Run) -> list[str]:
    run.members()
    processes = [
        f"process {pid} ({_name(process)})"
        for pid, process in run.seen.items()
        if is_alive(process)
    ]
    folder = run.folder
    paths = [folder.sockets, folder.shared_memory, folder.temporary]
    return processes + [str(path) for path in dict.fromkeys(paths) if path.exists()]


def _words(process: psutil.Process) -> list[str]:
    try:
        words: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return words


def _name(process: psutil.Process) -> str:
    words = _words(process)
    return " ".join(words[:4])[:80] if words else "gone"
