"""A process group, its daemons, and processes that left the tree all end; packages are hidden for a while."""

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ycore.run.reports import descendants, hide_packages, is_alive, kill_tree

STARTS_TWO = (
    "import subprocess, sys, time; "
    "subprocess.Popen(['sleep', '600']); subprocess.Popen(['sleep', '600'], start_new_session=True); "
)


def start(code: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", STARTS_TWO + code], start_new_session=True)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_a_tree_ends_with_its_daemons_and_with_what_left_it() -> None:
    other = psutil.Popen(["sleep", "600"], start_new_session=True)
    leader = start("time.sleep(600)")
    wait_for(lambda: len(descendants(leader.pid)) == 2)
    below = descendants(leader.pid)
    kill_tree(leader.pid, also=[other], wait_s=10)
    assert not any(is_alive(process) for process in [*below, other])
    assert leader.wait(10) == -9 and descendants(leader.pid) == []
    assert other.wait(10) == -9
    kill_tree(leader.pid)  # nothing is left to kill, and that is no error


def test_a_group_outlives_its_leader_and_ends_all_the_same() -> None:
    leader = subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!"], start_new_session=True, stdout=subprocess.PIPE
    )
    assert leader.stdout is not None
    orphan = psutil.Process(int(leader.stdout.readline()))
    wait_for(lambda: not is_alive(psutil.Process(leader.pid)))
    kill_tree(leader.pid)
    wait_for(lambda: not is_alive(orphan))
    leader.wait(10)


def test_hidden_packages_are_found_again_and_loaded_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_extra.py").write_text("VALUE = 1")
    monkeypatch.syspath_prepend(tmp_path)
    with hide_packages(["some_extra", "json"]):
        assert importlib.util.find_spec("some_extra") is None
        assert sys.modules["json"] is json
        with pytest.raises(ModuleNotFoundError):
            import some_extra
    import some_extra

    assert some_extra.VALUE == 1
    del sys.modules["some_extra"]


def test_what_failed_to_load_hides_nothing() -> None:
    with pytest.raises(RuntimeError), hide_packages(["some_other_extra"]):
        raise RuntimeError("the algorithm cannot be loaded")
    assert "some_other_extra" not in sys.modules
