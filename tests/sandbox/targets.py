"""Targets of the probes: files, processes, servers, shared memory beside a confined process, readable to anyone.

Modes give no protection here on purpose, so that it is the sandbox that holds, and not a change of user alone.
"""

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ycore.sandbox import MIB, Limits

CANARY = "canary-5f3a"
LIMITS = Limits(memory=256 * MIB, scratch=16 * MIB, files=300, processes=40, output=2 * MIB)
_LIBC = ctypes.CDLL(None, use_errno=True)

_FILES = {
    "home/secret.txt": CANARY,
    "home/.cache/huggingface/token": CANARY,
    "home/.ssh/id_ed25519": CANARY,
    "home/.bashrc": "",
    "home/.profile": "",
    "home/.config/x": "",
    "home/.local/lib/x": "",
    "home/data/test.jsonl": CANARY,
    "project/.env": f"TOKEN={CANARY}",
    "project/.git/config": f"url = https://me:{CANARY}@host",
    "project/.git/hooks/pre-commit": "",
    "project/data/writable": "as it was",
    "project/data/truncate-open": "as it was",
    "project/data/truncate-name": "as it was",
    "project/data/unlinkable": "as it was",
    "project/data/renamable/file": "as it was",
    "project/data/linkable": "as it was",
    "project/data/changed": "as it was",
    "project/site/__pycache__/module.pyc": "as it was",
    "project/rewards/attack.py": "",  # filled by the trial
    "project/runs/mine/run.json": f'{{"note": "{CANARY}"}}',
    "project/runs/mine/lock": "",
    "project/runs/mine/journal/round-000001.json": CANARY,
    "project/runs/mine/logs/trainer.log": CANARY,
    "project/runs/mine/sockets/kept": "",
}
_VICTIM = """
import ctypes, sys, time
file = open(sys.argv[2])
memory = ctypes.create_string_buffer(sys.argv[1].encode())
print(ctypes.addressof(memory), flush=True)
time.sleep(600)
"""


class Targets:
    """Make them all; `reset` brings back what an attempt without a sandbox has spoilt; `harmed` says what is spoilt."""

    def __init__(self, reward: str) -> None:
        self.files = {**_FILES, "project/rewards/attack.py": reward}
        self.base = Path(tempfile.mkdtemp(prefix="ycore-probes-"))
        self.base.chmod(0o755)
        self.mark = f"ycore-probe-{os.getpid()}"
        self._received = dict[str, int]()
        self._processes = list[subprocess.Popen[str]]()
        self._sockets = list[socket.socket]()
        self._closed = False
        self.names = dict[str, Any]()
        self.reset()
        self._serve()
        self._shared()
        self.victim = self._victim()
        self.expendable = self._victim()
        self._state = self._victim_state()
        base = str(self.base)
        self.names |= {
            "secret": f"{base}/home/secret.txt", "home": f"{base}/home", "project": f"{base}/project",
            "run": f"{base}/project/runs/mine", "site": f"{base}/project/site",
            "reward_file": f"{base}/project/rewards/attack.py", "parent": os.getpid(),
            "victim": self.victim[0].pid, "address": self.victim[1], "mark": self.mark,
            "daemon_mark": f"{self.mark}-daemon",
            "memory": LIMITS.memory, "memory_half": LIMITS.memory // 2, "processes": LIMITS.processes,
            "scratch": LIMITS.scratch, "files": LIMITS.files,
        }  # fmt: skip
        for name in (
            "writable",
            "unlinkable",
            "renamable",
            "linkable",
            "changed",
            "truncate-open",
            "truncate-name",
        ):
            self.names[name.replace("-", "_")] = f"{base}/project/data/{name}"

    def for_probes(self) -> dict[str, Any]:
        """Return what a probe is given, as JSON values."""
        return {**self.names, "expendable": self.expendable[0].pid}

    def reset(self) -> None:
        """Put every file as it should be, and bring every process back to life."""
        for folder in ("home", "project"):
            for path in sorted((self.base / folder).rglob("*"), reverse=True):
                name = str(path.relative_to(self.base))
                if (
                    path.is_socket()
                    or name in self.files
                    or any(file.startswith(f"{name}/") for file in self.files)
                ):
                    continue
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        for name, text in self.files.items():
            path = self.base / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and (
                path.stat().st_nlink != 1 or path.stat().st_uid != os.geteuid()
            ):
                path.unlink()
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
            path.chmod(0o666)
            os.utime(path, (1_000_000, 1_000_000))
        for path in [self.base / "home", self.base / "project", *self.base.rglob("*/")]:
            path.chmod(0o777)
        if (self.base / "project/data/changed").exists():
            with suppress(OSError):
                os.removexattr(self.base / "project/data/changed", "user.x")
        for name in ("shared", "shared_writable", "temporary"):
            if name in self.names:
                Path(self.names[name]).write_text(CANARY)
        if self._processes:
            for index, target in enumerate((self.victim, self.expendable)):
                if target[0].poll() is not None or (
                    index == 0 and self._victim_state() != self._state
                ):
                    target[0].kill()
                    target[0].wait()
                    fresh = self._victim()
                    if index == 0:
                        self.victim = fresh
                        self.names |= {"victim": fresh[0].pid, "address": fresh[1]}
                        self._state = self._victim_state()
                    else:
                        self.expendable = fresh
        self._received.clear()
        for process in self.daemons():
            process.kill()
        time.sleep(0)

    def harmed(self, *, daemons: bool = True, within_s: float = 3.0) -> str | None:
        """Say what an attempt has changed outside, or None; `daemons`: also a process that it left."""
        for name, text in self.files.items():
            path = self.base / name
            if not path.exists() or path.read_text() != text:
                return f"{name} was changed"
            status = path.stat()
            if (
                status.st_mode & 0o7777 != 0o666
                or status.st_mtime != 1_000_000
                or (status.st_nlink, status.st_uid) != (1, os.geteuid())
            ):
                return f"{name} has another mode, time, link or owner"
        for folder in ("home", "project"):
            for path in (self.base / folder).rglob("*"):
                name = str(path.relative_to(self.base))
                known = name in self.files or any(
                    file.startswith(f"{name}/") for file in self.files
                )
                if not known and not path.is_socket() and not name.endswith("rewards.log"):
                    return f"{name} was made"
        for name in ("shared", "shared_writable", "temporary"):
            path = Path(self.names[name])
            if not path.exists() or path.read_text() != CANARY:
                return f"{name} was changed"
        if self.expendable[0].poll() is not None:
            return "a process was killed"
        if self._victim_state() != self._state:
            return "a process was changed"
        if self._received:
            return f"something came over {', '.join(self._received)}"
        deadline = time.monotonic() + within_s
        while daemons and self.daemons():
            if time.monotonic() > deadline:
                return "a daemon is left"
            time.sleep(0.02)
        return None

    def daemons(self) -> list[psutil.Process]:
        """Return what a probe has started that is still alive, wherever it is."""
        alive = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.cmdline()[:1] == [f"{self.mark}-daemon"]:
                    alive.append(process)
        return alive

    def close(self) -> None:
        self._closed = True
        for target in (self.victim, self.expendable):
            target[0].kill()
            target[0].communicate()
        for server in self._sockets:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()
        for process in self.daemons():
            process.kill()
        _LIBC.shmctl(self.names["segment_id"], 0, None)
        _LIBC.msgctl(self.names["queue_id"], 0, None)
        for name in ("shared", "shared_writable", "temporary"):
            Path(self.names[name]).unlink(missing_ok=True)
        for folder in (self.base, self._short):
            shutil.rmtree(folder, ignore_errors=True)

    def _victim(self) -> tuple["subprocess.Popen[str]", int]:
        line = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _VICTIM,
            CANARY,
            str(self.base / "home/secret.txt"),
        ]
        process = subprocess.Popen(
            line, stdout=subprocess.PIPE, text=True, env={"TOKEN": CANARY}
        )
        assert process.stdout is not None
        self._processes.append(process)
        return process, int(process.stdout.readline())

    def _victim_state(self) -> tuple[Any, ...]:
        process = psutil.Process(self.victim[0].pid)
        with suppress(psutil.Error):
            return (
                process.nice(),
                process.cpu_affinity(),
                process.rlimit(psutil.RLIMIT_NOFILE),
                process.ionice(),
            )
        return ()

    def _serve(self) -> None:
        """Start servers that greet with the canary, and sockets that note what comes."""
        folder = self._short = Path(
            tempfile.mkdtemp(prefix="ycore-s-")
        )  # short: a socket's name has at most 107 bytes
        folder.chmod(0o777)
        inside = self.base / "project/runs/mine/sockets/rollout-0.sock"
        streams: list[tuple[str, int, Any]] = [
            ("port", socket.AF_INET, ("127.0.0.1", 0)),
            ("port6", socket.AF_INET6, ("::1", 0)),
            ("socket", socket.AF_UNIX, str(folder / "s")),
            ("inside", socket.AF_UNIX, str(inside)),
            ("abstract", socket.AF_UNIX, f"\0{self.mark}"),
        ]
        for name, family, address in streams:
            try:
                server = socket.socket(family)
                server.bind(address)
            except OSError:  # no IPv6
                self.names[name] = 1
                continue
            server.listen(64)
            self._keep(server, address)
            self.names[name] = server.getsockname()[1] if family != socket.AF_UNIX else address
            threading.Thread(target=self._greet, args=(server,), daemon=True).start()
        for name, family, address in [
            ("datagrams", socket.AF_INET, ("127.0.0.1", 0)),
            ("socket_datagrams", socket.AF_UNIX, str(folder / "d")),
        ]:
            server = socket.socket(family, socket.SOCK_DGRAM)
            server.bind(address)
            self._keep(server, address)
            self.names[name] = server.getsockname()[1] if family != socket.AF_UNIX else address
            threading.Thread(target=self._note, args=(server, name), daemon=True).start()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.names["free_port"] = free.getsockname()[1]
        threading.Thread(target=self._visit, daemon=True).start()

    def _keep(self, server: socket.socket, address: Any) -> None:
        self._sockets.append(server)
        if isinstance(address, str) and address.startswith("/"):
            os.chmod(address, 0o777)

    def _greet(self, server: socket.socket) -> None:
        while not self._closed:
            with suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(CANARY.encode())

    def _note(self, server: socket.socket, name: str) -> None:
        while not self._closed:
            with suppress(OSError):
                if server.recv(100):
                    self._received[name] = 1

    def _visit(self) -> None:
        """Knock at a port on which nobody but a probe could answer."""
        while not self._closed:
            with (
                suppress(OSError),
                socket.create_connection(("127.0.0.1", self.names["free_port"]), timeout=0.1),
            ):
                self._received["a port of the host"] = 1
            time.sleep(0.05)

    def _shared(self) -> None:
        for name, folder in (
            ("shared", "/dev/shm"),
            ("shared_writable", "/dev/shm"),
            ("temporary", "/tmp"),
        ):
            path = Path(folder) / f"{self.mark}-{name}"
            path.write_text(CANARY)
            path.chmod(0o666)
            self.names[name] = str(path)
        key = os.getpid() | 0x59000000
        self.names |= {
            "segment": key,
            "queue": key,
            "segment_id": _LIBC.shmget(key, 4096, 0o1666),
            "queue_id": _LIBC.msgget(key, 0o1666),
        }
