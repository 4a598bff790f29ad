"""What a reward's process can still do where ycore runs as root; each probe is seen to succeed without the drop."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ycore.rewards.child import readable_by_all

ROOT = os.geteuid() == 0 if hasattr(os, "geteuid") else False
needs_root = pytest.mark.skipif(sys.platform != "linux" or not ROOT, reason="only root has something to give up")

PROBES = """
import json, os, resource, signal, subprocess, sys
from pathlib import Path
from ycore.rewards.child import drop_root, python_files
folder, drops, closed = Path(sys.argv[1]), sys.argv[2] == "drop", sys.argv[3] == "closed"
outcome = drop_root("run-1", [folder / "private" / "secret"] if closed else []) if drops else "kept"

def can(probe):
    try:
        probe()
        return True
    except OSError:
        return False

def forks():
    resource.setrlimit(resource.RLIMIT_NPROC, (3, 3))
    children = []
    try:
        for _ in range(8):
            child = os.fork()
            if child == 0:
                signal.pause()
            children.append(child)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

parent = os.getppid()
print(json.dumps({
    "outcome": outcome,
    "uid": os.getuid(),
    "read": can(lambda: (folder / "private" / "secret").read_text()),
    "write": can(lambda: (folder / "private" / "secret").write_text("mine")),
    "make": can(lambda: (folder / "new").touch()),
    "signal": can(lambda: os.kill(parent, 0)),
    "look": can(lambda: Path(f"/proc/{parent}/environ").read_bytes()),
    "root": can(lambda: os.setuid(0)),
    "itself": can(lambda: Path("/proc/self/environ").read_bytes()),
    "python": can(lambda: subprocess.run([sys.executable, "-c", "import asyncio"], check=True)),
    "forks": can(forks),
}))
"""


def probe(folder: Path, *how: str) -> dict[str, object]:
    private = folder / "private"
    private.mkdir(mode=0o700, exist_ok=True)
    (private / "secret").write_text("s")
    (folder / "new").unlink(missing_ok=True)
    command = [sys.executable, "-c", PROBES, str(folder), *how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    answer: dict[str, object] = json.loads(ended.stdout)
    return answer


HARM = ("write", "make", "signal", "look", "root", "forks")


@needs_root
def test_without_the_drop_every_probe_succeeds(tmp_path: Path) -> None:
    seen = probe(tmp_path, "keep", "closed")
    assert seen["uid"] == 0 and all(seen[name] for name in (*HARM, "read", "itself", "python"))


@needs_root
def test_a_worker_whose_files_are_closed_keeps_only_reading(tmp_path: Path) -> None:
    seen = probe(tmp_path, "drop", "closed")
    assert seen["uid"] != 0 and not any(seen[name] for name in HARM), seen
    assert seen["read"] and seen["itself"] and seen["python"]
    assert "it may still read every file" in str(seen["outcome"])


@needs_root
def test_a_worker_whose_files_are_open_keeps_nothing_of_roots(tmp_path: Path) -> None:
    seen = probe(tmp_path, "drop", "open")
    assert seen["uid"] != 0 and not any(seen[name] for name in (*HARM, "read")), seen
    assert seen["itself"]
    assert str(seen["outcome"]).endswith("without any right of root's")


def test_what_is_readable_by_all_is_found_by_every_folder_on_the_way(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    file = inner / "rewards.py"
    file.write_text("")
    assert readable_by_all(Path("/")) and readable_by_all(Path("/no/such/thing"))
    (tmp_path / "a").chmod(0o700)
    assert not readable_by_all(file)
    file.chmod(0o600)
    assert not readable_by_all(file)
