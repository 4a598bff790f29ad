"""Whatever happens to a launcher, nothing of its run is left, and the guardian is gone too."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ycore.launch.guardian import guarded
from ycore.launch.processes import ManagedProcess
from ycore.run.claim import Claim
from ycore.run.paths import RunFolder
from ycore.run.reports import RUN_MARKER

WITHIN_S = 20.0

LAUNCHER = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup inherit that it is ignored
from pathlib import Path
from ycore.launch.guardian import guarded
from ycore.launch.processes import ManagedProcess
from ycore.run.paths import RunFolder
from ycore.run.claim import Claim

folder = RunFolder(Path(sys.argv[1]))
held = Claim(folder)
child = ("import subprocess, sys, time; subprocess.Popen(['sleep', '600'], start_new_session=True); "
         "subprocess.Popen(['sleep', '600'], start_new_session=True, env={}); time.sleep(600)")
with guarded(folder, held):
    folder.socket("rollout-0").touch()
    ManagedProcess.start("worker", [sys.executable, "-c", child], environment=os.environ,
                         run_id=folder.run_id, log=folder.log("worker"))
    (folder.root / "ready").touch()
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    for path in (folder.root, folder.logs, folder.sockets, folder.shared_memory, folder.temporary):
        path.mkdir(exist_ok=True)  # tests that were killed left it
    return folder


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def processes_of(folder: RunFolder) -> list[psutil.Process]:
    """The run's marked processes, its guardian, and the unmarked grandchildren, which only the test knows."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get(RUN_MARKER) == folder.run_id
            guardian = "ycore.launch.guardian" in process.cmdline() and str(folder.root) in process.cmdline()
        except psutil.Error:
            continue
        if (marked or guardian) and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def start_launcher(folder: RunFolder, seconds: float) -> tuple["subprocess.Popen[bytes]", list[psutil.Process]]:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(folder.root), str(seconds)])
    wait_for(lambda: (folder.root / "ready").exists())
    children: list[psutil.Process] = []

    def all_started() -> bool:
        children[:] = psutil.Process(launcher.pid).children(recursive=True)
        return [process.name() for process in children].count("sleep") == 2

    wait_for(all_started)
    return launcher, list(children)


def assert_nothing_is_left(folder: RunFolder, children: list[psutil.Process]) -> None:
    assert len(children) == 4  # guardian, worker and two sleepers, each in a session of its own
    wait_for(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))
    wait_for(lambda: not processes_of(folder))
    assert not folder.sockets.exists()
    assert not folder.shared_memory.exists()
    assert not folder.temporary.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_launcher_killed_by_a_signal_leaves_nothing(folder: RunFolder, number: signal.Signals) -> None:
    launcher, children = start_launcher(folder, 600)
    launcher.send_signal(number)
    launcher.wait(WITHIN_S)
    assert_nothing_is_left(folder, children)


def test_a_normal_end_leaves_nothing_not_even_the_guardian(folder: RunFolder) -> None:
    launcher, children = start_launcher(folder, 3)
    assert launcher.wait(WITHIN_S) == 0
    assert not processes_of(folder)
    assert_nothing_is_left(folder, children)


def test_a_killed_guardian_is_stood_in_for(folder: RunFolder) -> None:
    launcher, children = start_launcher(folder, 4)
    guardian = next(child for child in children if "ycore.launch.guardian" in child.cmdline())
    guardian.kill()
    assert launcher.wait(WITHIN_S) == 0
    assert_nothing_is_left(folder, children)


def test_the_folder_stays_claimed_until_the_run_is_cleared_away(folder: RunFolder) -> None:
    launcher, children = start_launcher(folder, 600)
    launcher.kill()
    launcher.wait(WITHIN_S)
    claim = Claim(folder)
    alive = [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    claim.release()
    assert [child for child in alive if child.name() == "sleep"] == []


def test_what_an_earlier_run_left_is_cleared_before_the_next(folder: RunFolder) -> None:
    left = subprocess.Popen(["sleep", "600"], env={**os.environ, RUN_MARKER: folder.run_id})
    held = Claim(folder)
    with guarded(folder, held):
        assert left.wait(WITHIN_S) == -signal.SIGTERM
        process = ManagedProcess.start(
            "new", ["sleep", "600"], environment=os.environ, run_id=folder.run_id, log=folder.log("new")
        )
        assert process.exit_code is None
    held.release()
    assert process.wait(timeout_s=WITHIN_S) == -signal.SIGTERM
