"""Whatever happens to a launcher, nothing of its run is left, whatever its processes did to hide; others live."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from ycore.errors import RunError
from ycore.launch.guardian import RunWatch, guarded, remove_leftovers
from ycore.launch.processes import ManagedProcess
from ycore.run.claim import Claim
from ycore.run.files import RunFolder
from ycore.run.reports import RUN_MARKER
from ycore.sandbox import Confinement, Level
from ycore.sandbox.confine import confined_launch

WITHIN_S = 60.0

LAUNCHER = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup inherit that it is ignored
from pathlib import Path
from ycore.launch.guardian import guarded
from ycore.launch.processes import ManagedProcess
from ycore.run.files import RunFolder
from ycore.run.claim import Claim

folder = RunFolder(Path(sys.argv[1]))
claim = Claim(folder)
child = ("import subprocess, sys, time; subprocess.Popen(['sleep', '600'], start_new_session=True); "
         "subprocess.Popen(['sleep', '600'], start_new_session=True, env={}); time.sleep(600)")
with guarded(folder, claim):
    folder.socket("rollout-0").touch()
    ManagedProcess("worker", [sys.executable, "-c", child], environment=os.environ,
                         run_id=folder.run_id, log=folder.log("worker"))
    (folder.root / "ready").touch()
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    for path in (folder.root, folder.logs):
        path.mkdir()
    return folder


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def processes_of(folder: RunFolder) -> list[psutil.Process]:
    """The run's marked processes, its guardian, and the unmarked grandchildren, which only the test knows."""
    processes = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get(RUN_MARKER) == folder.run_id
            guardian = (
                "ycore.launch.guardian" in process.cmdline()
                and str(folder.root) in process.cmdline()
            )
        except psutil.Error:
            continue
        if (marked or guardian) and process.status() != psutil.STATUS_ZOMBIE:
            processes.append(process)
    return processes


def start_launcher(
    folder: RunFolder, seconds: float
) -> tuple["subprocess.Popen[bytes]", list[psutil.Process]]:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder.root), str(seconds)]
    )
    wait_for(lambda: (folder.root / "ready").exists())
    children: list[psutil.Process] = []

    def all_started() -> bool:
        children[:] = psutil.Process(launcher.pid).children(recursive=True)
        return [process.name() for process in children].count("sleep") == 2

    wait_for(all_started)
    return launcher, list(children)


def assert_nothing_is_left(folder: RunFolder, children: list[psutil.Process]) -> None:
    assert len(children) == 4  # guardian, worker and two sleepers, each in a session of its own
    wait_for(
        lambda: (
            not any(
                child.is_running() and child.status() != psutil.STATUS_ZOMBIE
                for child in children
            )
        )
    )
    wait_for(lambda: not processes_of(folder))
    assert not folder.sockets.exists()
    assert not folder.shared_memory.exists()
    assert not folder.temporary.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_launcher_killed_by_a_signal_leaves_nothing(
    folder: RunFolder, number: signal.Signals
) -> None:
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
    alive = [
        child
        for child in children
        if child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    ]
    claim.release()
    assert [child for child in alive if child.name() == "sleep"] == []


def test_what_an_earlier_run_left_is_cleared_before_the_next(folder: RunFolder) -> None:
    Claim(folder).release()
    left = subprocess.Popen(["sleep", "600"], env={**os.environ, RUN_MARKER: folder.run_id})
    folder.temporary.mkdir()
    (folder.temporary / "stale").touch()
    claim = Claim(folder)
    with guarded(folder, claim):
        assert left.wait(WITHIN_S) == -signal.SIGTERM
        assert list(folder.temporary.iterdir()) == []
        assert [path.stat().st_mode & 0o777 for path in (folder.sockets, folder.temporary)] == [
            0o700,
            0o700,
        ]
        process = ManagedProcess(
            "new",
            ["sleep", "600"],
            environment=os.environ,
            run_id=folder.run_id,
            log=folder.log("new"),
        )
        assert process.exit_code is None
    claim.release()
    assert process.wait(timeout_s=WITHIN_S) == -signal.SIGTERM


@pytest.mark.parametrize("name", ["select.py", "json.py", "random.py", "psutil.py"])
def test_files_where_the_user_stands_are_not_imported(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).write_text("raise SystemExit('the local file was imported')")
    monkeypatch.chdir(tmp_path)
    claim = Claim(folder)
    try:
        with guarded(folder, claim):
            code = [
                sys.executable,
                "-m",
                "ycore.trainer",
            ]  # its argument is missing
            trainer = ManagedProcess(
                "trainer",
                code,
                environment=os.environ,
                run_id=folder.run_id,
                log=folder.log("trainer"),
            )
            trainer.wait(timeout_s=60.0)
            assert "IndexError" in trainer.log.read_text()
    finally:
        claim.release()
    assert folder.log("guardian").read_text() == ""


def test_a_guardian_that_does_not_start_ends_the_run(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.root / "sitecustomize.py").write_text("raise SystemExit('cannot start')")
    monkeypatch.setenv("PYTHONPATH", str(folder.root))
    claim = Claim(folder)
    try:
        message = r"clears up after a run did not start: .*guardian\.log"
        with pytest.raises(RunError, match=message), guarded(folder, claim):
            pytest.fail("nothing may be started")
        assert not folder.temporary.exists()
    finally:
        claim.release()


def pid_in(path: Path) -> int:
    wait_for(lambda: path.is_file() and path.read_text().endswith("\n"))
    return int(path.read_text())


@pytest.fixture
def marked(tmp_path: Path) -> Iterator[RunFolder]:
    marked = RunFolder(tmp_path / "run")
    marked.sockets.mkdir(parents=True)
    yield marked
    RunWatch(marked.run_id).kill(grace_s=0)
    remove_leftovers(marked)


def start(marked: RunFolder, code: str, *arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(
        command, env={**os.environ, RUN_MARKER: marked.run_id}, start_new_session=True
    )


def test_marked_processes_end_and_others_live(marked: RunFolder) -> None:
    ours = [start(marked, "import time; time.sleep(600)") for _ in range(3)]
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, RUN_MARKER: "another"})
    try:
        assert RunWatch(marked.run_id).kill() == 3
        assert [process.wait(WITHIN_S) for process in ours] == [-signal.SIGTERM] * 3
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    assert RunWatch(marked.run_id).kill() == 0


def test_what_ignores_sigterm_or_is_stopped_is_killed(
    marked: RunFolder, tmp_path: Path
) -> None:
    code = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    deaf = start(
        marked,
        code + "print(os.getpid(), file=open(sys.argv[1], 'w')); time.sleep(600)",
        str(tmp_path / "pid"),
    )
    pid_in(tmp_path / "pid")
    stopped = start(marked, "import time; time.sleep(600)")
    stopped.send_signal(signal.SIGSTOP)
    wait_for(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED)
    assert RunWatch(marked.run_id).kill(grace_s=0.3) == 2
    assert deaf.wait(WITHIN_S) == -signal.SIGKILL
    assert stopped.wait(WITHIN_S) == -signal.SIGKILL


def test_the_kept_process_lives(marked: RunFolder) -> None:
    kept = start(marked, "import time; time.sleep(600)")
    assert RunWatch(marked.run_id, keep=[kept.pid]).kill() == 0
    assert kept.poll() is None
    assert RunWatch(marked.run_id).kill() == 1
    kept.wait(WITHIN_S)


DAEMON = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], env={}, start_new_session=True)
print(child.pid, file=open(sys.argv[1], "w"))
time.sleep(float(sys.argv[2]))
"""


def test_a_descendant_that_cleared_its_environment_is_found(
    marked: RunFolder, tmp_path: Path
) -> None:
    parent = start(marked, DAEMON, str(tmp_path / "pid"), "600")
    hidden = psutil.Process(pid_in(tmp_path / "pid"))
    assert RunWatch(marked.run_id).kill() == 2
    parent.wait(WITHIN_S)
    wait_for(lambda: not hidden.is_running() or hidden.status() == psutil.STATUS_ZOMBIE)


def test_a_daemon_that_left_its_parent_is_remembered(marked: RunFolder, tmp_path: Path) -> None:
    parent = start(marked, DAEMON, str(tmp_path / "pid"), "1.5")
    hidden = psutil.Process(pid_in(tmp_path / "pid"))
    watch = RunWatch(marked.run_id)
    wait_for(lambda: len(watch.look()) == 2)
    parent.wait(WITHIN_S)
    assert watch.kill() >= 1
    wait_for(lambda: not hidden.is_running() or hidden.status() == psutil.STATUS_ZOMBIE)


SHARED = """
import os, sys, time
from multiprocessing import shared_memory
import mmap
segments = [shared_memory.SharedMemory(create=True, size=4096)]
for name in sys.argv[2:]:
    with open(name, "rb") as file:
        segments.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
print(segments[0].name, file=open(sys.argv[1], "w"))
time.sleep(600)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_shared_memory_of_others_and_a_users_files_stay(
    folder: RunFolder, tmp_path: Path
) -> None:
    """A user's dataset in /dev/shm is mapped by the run too, and may have a name like a library's."""
    shm = Path("/dev/shm")
    random = secrets.token_hex(4)
    users = [shm / f"{random}-train.jsonl", shm / f"psm_{random}"]
    foreign = shared_memory.SharedMemory(create=True, size=4096)
    try:
        for path in users:
            path.write_bytes(b"{}\n" * 4096)
        claim = Claim(folder)
        with guarded(folder, claim):
            folder.shared_memory.mkdir()
            command = [sys.executable, "-c", SHARED, str(tmp_path / "name"), *map(str, users)]
            worker = ManagedProcess(
                "worker",
                command,
                environment=os.environ,
                run_id=folder.run_id,
                log=folder.log("worker"),
            )
            wait_for(
                lambda: (tmp_path / "name").is_file() and (tmp_path / "name").read_text() != ""
            )
            segment = shm / (tmp_path / "name").read_text().strip()
            assert segment.exists()
        claim.release()
        assert worker.wait(timeout_s=WITHIN_S) is not None
        wait_for(lambda: not segment.exists())  # its resource tracker has removed it
        assert not folder.shared_memory.exists()
        assert [path.stat().st_size for path in users] == [3 * 4096] * 2
        assert (shm / foreign.name).exists()
    finally:
        for path in users:
            path.unlink(missing_ok=True)
        foreign.close()
        foreign.unlink()


def test_sockets_scratch_and_shared_memory_folder_are_removed(marked: RunFolder) -> None:
    marked.socket("rollout-0").touch()
    marked.shared_memory.mkdir()
    confined = confined_launch("json", [], Confinement(Level.NONE, marked.run_id))
    foreign = confined_launch("json", [], Confinement(Level.NONE, "another"))
    assert confined.scratch is not None and foreign.scratch is not None
    remove_leftovers(marked)
    remove_leftovers(marked)
    assert not marked.sockets.exists()
    assert not marked.shared_memory.exists()
    assert not confined.scratch.exists() and foreign.scratch.exists()
    foreign.clear()
