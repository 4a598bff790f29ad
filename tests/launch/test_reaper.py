"""Processes, shared memory and sockets of a run are found and removed, whatever they did to hide; others are not."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from ycore.launch.guardian import RunWatch, kill_run, remove_leftovers
from ycore.run.paths import RunFolder
from ycore.run.reports import RUN_MARKER

WITHIN_S = 20.0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def pid_in(path: Path) -> int:
    wait_for(lambda: path.is_file() and path.read_text().endswith("\n"))
    return int(path.read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path / "run")
    folder.sockets.mkdir(parents=True)
    yield folder
    kill_run(folder.run_id, grace_s=0)
    remove_leftovers(folder)


def start(folder: RunFolder, code: str, *arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, env={**os.environ, RUN_MARKER: folder.run_id}, start_new_session=True)


def test_marked_processes_end_and_others_live(folder: RunFolder) -> None:
    ours = [start(folder, "import time; time.sleep(600)") for _ in range(3)]
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, RUN_MARKER: "another"})
    try:
        assert kill_run(folder.run_id) == 3
        assert [process.wait(WITHIN_S) for process in ours] == [-signal.SIGTERM] * 3
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    assert kill_run(folder.run_id) == 0


def test_what_ignores_sigterm_or_is_stopped_is_killed(folder: RunFolder, tmp_path: Path) -> None:
    code = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    deaf = start(
        folder, code + "print(os.getpid(), file=open(sys.argv[1], 'w')); time.sleep(600)", str(tmp_path / "pid")
    )
    pid_in(tmp_path / "pid")
    stopped = start(folder, "import time; time.sleep(600)")
    stopped.send_signal(signal.SIGSTOP)
    assert kill_run(folder.run_id, grace_s=0.3) == 2
    assert deaf.wait(WITHIN_S) == -signal.SIGKILL
    assert stopped.wait(WITHIN_S) == -signal.SIGKILL


def test_the_kept_process_lives(folder: RunFolder) -> None:
    kept = start(folder, "import time; time.sleep(600)")
    assert RunWatch(folder.run_id, keep=[kept.pid]).kill() == 0
    assert kept.poll() is None
    assert kill_run(folder.run_id) == 1
    kept.wait(WITHIN_S)


DAEMON = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], env={}, start_new_session=True)
print(child.pid, file=open(sys.argv[1], "w"))
time.sleep(float(sys.argv[2]))
"""


def test_a_descendant_that_cleared_its_environment_is_found(folder: RunFolder, tmp_path: Path) -> None:
    parent = start(folder, DAEMON, str(tmp_path / "pid"), "600")
    hidden = psutil.Process(pid_in(tmp_path / "pid"))
    assert kill_run(folder.run_id) == 2
    parent.wait(WITHIN_S)
    wait_for(lambda: not hidden.is_running() or hidden.status() == psutil.STATUS_ZOMBIE)


def test_a_daemon_that_left_its_parent_is_remembered(folder: RunFolder, tmp_path: Path) -> None:
    parent = start(folder, DAEMON, str(tmp_path / "pid"), "1.5")
    hidden = psutil.Process(pid_in(tmp_path / "pid"))
    watch = RunWatch(folder.run_id)
    wait_for(lambda: len(watch.look()) == 2)
    parent.wait(WITHIN_S)
    assert watch.kill() >= 1
    wait_for(lambda: not hidden.is_running() or hidden.status() == psutil.STATUS_ZOMBIE)


SEGMENT = """
import os, sys, time
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *arguments: None  # as if the tracker had been killed too
segment = shared_memory.SharedMemory(create=True, size=4096)
print(segment.name, file=open(sys.argv[1], "w"))
time.sleep(600)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_shared_memory_of_killed_processes_is_removed_and_nobody_elses(folder: RunFolder, tmp_path: Path) -> None:
    others = shared_memory.SharedMemory(create=True, size=4096)
    try:
        process = start(folder, SEGMENT, str(tmp_path / "name"))
        wait_for(lambda: (tmp_path / "name").is_file() and (tmp_path / "name").read_text().endswith("\n"))
        segment = Path("/dev/shm") / (tmp_path / "name").read_text().strip()
        assert segment.exists()
        kill_run(folder.run_id, grace_s=0)
        process.wait(WITHIN_S)
        assert not segment.exists()
        assert (Path("/dev/shm") / others.name).exists()
    finally:
        others.close()
        others.unlink()


def test_sockets_and_shared_memory_folder_are_removed(folder: RunFolder) -> None:
    folder.socket("rollout-0").touch()
    folder.shared_memory.mkdir()
    remove_leftovers(folder)
    remove_leftovers(folder)
    assert not folder.sockets.exists()
    assert not folder.shared_memory.exists()
