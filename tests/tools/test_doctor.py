"""`ycore doctor`: what works is tried out, and what is broken comes with what mends it."""

import os
import resource
from pathlib import Path

import pytest
from ycore_cli.main import run

from ycore.tools import doctor
from ycore.tools.doctor import machine_checks


def broken(folder: Path) -> dict[str, str]:
    return {check["name"]: check["mend"] for check in machine_checks(folder) if not check["ok"]}


def test_this_machine_can_bind_lock_and_connect(tmp_path: Path) -> None:
    checks = {check["name"]: check for check in machine_checks(tmp_path)}
    assert all(checks[name]["ok"] for name in ("unix sockets", "loopback", "file locks"))


def test_a_cache_that_is_not_there_yet_is_on_its_parents_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cache_dir", lambda: tmp_path / "later" / "still")
    values = {check["name"]: check["value"] for check in machine_checks(tmp_path)}
    assert values["disk of the cache"] == values["disk here"]


def test_few_open_files_come_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    assert broken(tmp_path)["open files"] == "ulimit -n 4096"


def test_a_folder_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(doctor.fcntl, "flock", refuse)
    assert "local disk" in broken(tmp_path)["file locks"]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
def test_what_a_run_left_behind_is_found(tmp_path: Path) -> None:
    left = Path(f"/dev/shm/ycore-doctor{os.getpid()}")
    left.mkdir()
    try:
        assert str(left) in broken(tmp_path)["leftovers"]
    finally:
        left.rmdir()


def test_a_role_that_fails_says_its_last_line() -> None:
    check = doctor._role("trainer", "import no_such_module", mend="install it")
    assert not check["ok"] and check["mend"] == "install it"
    assert "No module named 'no_such_module'" in check["value"]


def test_a_role_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ROLE_WITHIN_S", 0.5)
    check = doctor._role("trainer", "import time; time.sleep(60)", mend="install it")
    assert not check["ok"] and "no end after" in check["value"]


def test_the_rewards_role_scores_here() -> None:
    assert doctor._role("rewards", doctor._REWARD, mend="")["ok"]


def test_the_command_ends_with_1_where_something_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {"name": "x", "ok": False, "value": "broken", "mend": "mend it"}
    monkeypatch.setattr(doctor, "role_checks", lambda **_: [bad])
    assert run(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "broken" in told and "mend it" in told and "to mend" in told


def test_the_command_ends_with_0_where_nothing_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"ok": True, "platform": "a test's", "checks": [{"name": "x", "ok": True, "value": "fine", "mend": None}]}
    monkeypatch.setattr(doctor, "doctor_report", lambda **_: good)
    assert run(["doctor"]) == 0
    assert "everything works" in capsys.readouterr().out
