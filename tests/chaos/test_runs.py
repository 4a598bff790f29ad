"""The harness is tried on small processes: terminals, kills, leftovers, a stop of the selftest."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.runs import Run, Setting, Terminal, has_role, leftovers
from ycore.errors import Interrupted
from ycore.run.files import RunFolder
from ycore.run.reports import RUN_MARKER

SLEEPER = "import time; time.sleep(600)"


class Small(Setting):
    """Runs Python code in place of ycore."""

    def command(self, words: object) -> list[str]:
        assert isinstance(words, list)
        return [sys.executable, "-c", *words]


def small(place: Path, *words: str) -> Run:
    return Run(Small(place), list(words), place / "run")


def test_a_closed_terminal_is_a_hangup(tmp_path: Path) -> None:
    code = "import signal, sys, time; signal.signal(1, lambda *_: sys.exit(7)); print('ready', flush=True); time.sleep(60)"
    log = tmp_path / "log"
    terminal = Terminal([sys.executable, "-c", code], cwd=tmp_path, environment={}, log=log)
    deadline = time.monotonic() + 120
    while not log.exists() or b"ready" not in log.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    terminal.close()
    assert terminal.process.wait(30) == 7


def test_a_run_is_waited_for_killed_and_looked_after(tmp_path: Path) -> None:
    run = small(tmp_path, SLEEPER)
    try:
        assert run.wait(timeout_s=0.1) is None
        assert run.send("launcher", signal.SIGKILL)
        assert run.wait(timeout_s=30) == -signal.SIGKILL
        assert not run.send("trainer", signal.SIGKILL)
        assert leftovers(run) == []
    finally:
        run.end()


def test_one_process_of_several_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small(tmp_path, SLEEPER)
    children = [subprocess.Popen([sys.executable, "-c", SLEEPER]) for _ in range(2)]
    processes = [psutil.Process(child.pid) for child in children]
    monkeypatch.setattr(run, "role", lambda name: processes)
    try:
        assert run.send("trainer", signal.SIGKILL, which=1)
        assert children[1].wait(30) == -signal.SIGKILL and children[0].poll() is None
        assert not run.send("trainer", signal.SIGKILL, which=2, timeout_s=0.1)
    finally:
        for child in children:
            child.kill()
            child.wait()
        monkeypatch.undo()
        run.end()


def test_a_process_of_the_run_and_a_folder_of_its_are_leftovers(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    code = (
        "import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True, "
        f"env={{**os.environ, {RUN_MARKER!r}: {folder.run_id!r}}})"
    )
    run = small(tmp_path, code, SLEEPER)
    try:
        assert run.wait(timeout_s=120) == 0
        folder.sockets.mkdir(parents=True, exist_ok=True)
        left = leftovers(run, within_s=0.2)
        assert (
            len(left) == 2 and left[0].startswith("process ") and left[1] == str(folder.sockets)
        )
    finally:
        run.end()
        folder.sockets.rmdir()
    assert leftovers(run) == []


def test_stopping_the_selftest_ends_a_wait(tmp_path: Path) -> None:
    setting = Small(tmp_path)
    run = Run(setting, [SLEEPER], tmp_path / "run")
    setting.stop.set()
    try:
        with pytest.raises(Interrupted):
            run.wait(timeout_s=60)
    finally:
        run.end()
    assert run.exit_code == -signal.SIGKILL


def test_roles_are_known_by_their_command_lines() -> None:
    engine = [
        "python",
        "-m",
        "ycore.engine.serve",
        "--uds",
        "/runs/a/sockets/rollout-0.sock",
    ]
    assert has_role(engine, "rollout") and not has_role(engine, "judge")
    assert has_role(["ycore.engine.serve rollout-1", ""], "rollout")
    scripted = [
        "python",
        "-m",
        "tests.chaos.scripted_engine",
        "--uds",
        "/runs/a/sockets/judge-0.sock",
    ]
    assert has_role(scripted, "judge") and not has_role(scripted, "rollout")
    assert has_role(["python", "-m", "ycore.trainer", "/runs/a"], "trainer")
    assert has_role(["python", "-P", "-m", "ycore.rewards.worker"], "reward")
