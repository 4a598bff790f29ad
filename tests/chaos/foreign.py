"""Foreign things beside a run that it must not touch: processes, files, shared memory, a run under its path.

`Witness` is the other half: a cgroup in which the run is started, so that the kernel itself lists what is left of it.
"""

import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any, Self

import psutil

from tests.chaos.runs import has_role
from ycore.run.reports import RUN_MARKER, is_alive

_SLEEP = "import time; time.sleep(3600)"
_TWIN_WITHIN_S = 300.0
_SHARED_MEMORY = Path("/dev/shm")
_HIERARCHIES = ("pids", "cpuacct", "unified", "")


class Witness:
    """Lists every living process of a run, whatever it did to hide; ValueError where no cgroup can be made."""

    def __init__(self, name: str) -> None:
        self._group: Path | None = None
        for hierarchy in _HIERARCHIES:
            place = Path("/sys/fs/cgroup") / hierarchy
            if (place / "cgroup.procs").is_file():
                with suppress(OSError):
                    (place / name).mkdir()
                    self._group = place / name
                    break
        if self._group is None:
            raise ValueError("no cgroup can be made here to see what a run leaves")

    def add(self, pid: int) -> None:
        with suppress(OSError):  # it has ended
            (self._group_path / "cgroup.procs").write_text(str(pid))

    @property
    def _group_path(self) -> Path:
        assert self._group is not None, "made in the beginning"
        return self._group

    def processes(self) -> list[psutil.Process]:
        """Return the processes by their ids, without zombies."""
        pids: set[int] = set()
        for place, _, _ in os.walk(self._group_path):
            with suppress(OSError):
                pids |= {
                    int(line) for line in (Path(place) / "cgroup.procs").read_text().split()
                }
        processes = []
        for pid in sorted(pids):
            with suppress(psutil.Error):
                processes.append(psutil.Process(pid))
        return [process for process in processes if is_alive(process)]

    def role(self, name: str) -> list[psutil.Process]:
        """Return the living processes of a role; `guardian` is one here."""
        members = []
        for process in self.processes():
            with suppress(psutil.Error):
                words = process.cmdline()
                if (
                    "ycore.launch.guardian" in words
                    if name == "guardian"
                    else has_role(words, name)
                ):
                    members.append(process)
        return members

    def close(self) -> None:
        """SIGKILL what is left, and remove the group."""
        deadline = time.monotonic() + 10.0
        while self._group_path.is_dir() and time.monotonic() < deadline:
            for process in self.processes():
                with suppress(psutil.Error):
                    process.kill()
            for place, _, _ in os.walk(self._group_path, topdown=False):
                with suppress(OSError):
                    os.rmdir(place)
            time.sleep(0.02)


class Foreign:
    """Somebody else's processes, and files in /dev/shm and in the system's temporary folder.

    Two of the processes have the run's own variable and command lines; a file has a name like a library's and is
    mapped by one of them; another file is the dataset that the run maps; folders are named like the run's.
    """

    def __init__(self, folder: Path, dataset: Path, temporary: Path) -> None:
        token = secrets.token_hex(6)
        self.dataset = _SHARED_MEMORY / f"ycore-chaos-{token}.jsonl"
        shutil.copy(dataset, self.dataset)
        self._folders = [_SHARED_MEMORY / f"ycore-{token}", temporary / f"ycore-{token}"]
        for place in self._folders:
            place.mkdir()
            (place / "mine").write_text(token)
        self._segments = [shared_memory.SharedMemory(create=True, size=4096)]
        guardian = ["-P", "-m", "ycore.launch.guardian", str(folder)]
        trainer = ["-m", "ycore.trainer", str(folder)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", _SLEEP, *words],
                env={**os.environ, RUN_MARKER: token},
                start_new_session=True,
            )
            for words in (guardian, trainer)
        ]
        self._state = self._look()

    def make_more(self) -> None:
        """Make a segment while the run goes on."""
        self._segments.append(shared_memory.SharedMemory(create=True, size=4096))
        self._state = self._look()

    def touched(self) -> list[str]:
        """Say in words what is not as it was."""
        now = self._look()
        return [
            f"foreign {name}: {now.get(name)}, was {was}"
            for name, was in self._state.items()
            if now[name] != was
        ]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for segment in self._segments:
            segment.close()
            with suppress(FileNotFoundError):
                segment.unlink()
        for place in self._folders:
            shutil.rmtree(place, ignore_errors=True)
        self.dataset.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _look(self) -> dict[str, str]:
        files = [self.dataset, *(place / "mine" for place in self._folders)]
        files += [_SHARED_MEMORY / segment.name.lstrip("/") for segment in self._segments]
        state = {str(path): _fingerprint(path) for path in files}
        return state | {
            f"process {process.pid}": f"exit {process.poll()}" for process in self.processes
        }


def _fingerprint(path: Path) -> str:
    try:
        return f"{path.stat().st_ino} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
    except OSError as problem:
        return type(problem).__name__


_TWIN = """
import json, multiprocessing.shared_memory, os, sys
from pathlib import Path
from ycore.launch.guardian import guarded
from ycore.launch.processes import ManagedProcess
from ycore.run.claim import Claim
from ycore.run.files import RunFolder

folder = RunFolder(Path(sys.argv[1]))
folder.logs.mkdir(parents=True)
claim = Claim(folder)
with guarded(folder, claim):
    folder.shared_memory.mkdir()
    segment = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
    worker = ManagedProcess("trainer", [sys.executable, "-c", sys.argv[2], "-m", "ycore.trainer", str(folder.root)],
                            environment=os.environ, run_id=folder.run_id, log=folder.log("trainer"))
    paths = [str(folder.shared_memory), str(folder.temporary), "/dev/shm/" + segment.name.lstrip("/")]
    print(json.dumps({"run_id": folder.run_id, "worker": worker.pid, "paths": paths}), flush=True)
    sys.stdin.read()
    assert worker.exit_code is None, "the worker was ended"
    segment.close()
    segment.unlink()
claim.release()
"""


class Twin:
    """A run that another mount namespace shows under the same path: claimed, guarded, with a worker and segments."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        mounted = 'mount -t tmpfs tmpfs "$1" && shift && exec "$@"'
        command = ["sh", "-c", mounted, "sh", str(folder.parent)]
        twin = [sys.executable, "-c", _TWIN, str(folder), _SLEEP]
        self._process = subprocess.Popen(
            ["unshare", "-m", *command, *twin],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None, "it has a pipe"
        self.told: dict[str, Any] = json.loads(self._process.stdout.readline() or "{}")
        self._tree = (
            psutil.Process(self._process.pid).children(recursive=True) if self.told else []
        )

    def touched(self) -> list[str]:
        """Say what of it is gone while it should be there, and what it leaves when it ends."""
        if not self.told:
            return ["the run under the same path did not start"]
        gone = [
            f"{path} of the run under the same path"
            for path in self.told["paths"]
            if not Path(path).exists()
        ]
        gone += [
            f"process {process.pid} of the run under the same path"
            for process in self._tree
            if not is_alive(process)
        ]
        self.close()
        if self._process.returncode:
            gone.append(f"the run under the same path ended with {self._process.returncode}")
        left = [
            f"{path}, left by the run under the same path"
            for path in self.told["paths"]
            if Path(path).exists()
        ]
        return gone + left

    def close(self) -> None:
        """Close its standard input, with which it ends."""
        try:
            self._process.communicate(timeout=_TWIN_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # then its guardian clears up
            self._process.communicate()
        except ValueError:
            pass  # closed already


def can_make_twins() -> bool:
    """Whether this user may make a mount namespace in which another folder lies under the same path."""
    return os.geteuid() == 0 and shutil.which("unshare") is not None
