"""A cache entry is whole or absent, whatever happens to the process that builds it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ycore.errors import ModelError
from ycore.models.hub import build_once, cache_dir

KILLED = """
import os, signal, sys
from pathlib import Path
from ycore.models.hub import build_once

def build(folder):
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

build_once(Path(sys.argv[1]), build)
"""
COUNTED = """
import sys, time
from pathlib import Path
from ycore.models.hub import build_once

def build(folder):
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    time.sleep(0.5)
    (folder / "whole").write_text("whole")

build_once(Path(sys.argv[1]), build)
"""


def test_the_cache_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YCORE_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("YCORE_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "ycore"


def test_a_killed_build_is_not_used(tmp_path: Path) -> None:
    entry = tmp_path / "cache" / "entry"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(entry)], timeout=60, check=False)
    assert killed.returncode < 0 and not entry.exists()

    build_once(entry, lambda folder: (folder / "whole").touch())
    assert [path.name for path in entry.iterdir()] == ["whole"]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").touch()
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        build_once(tmp_path / "entry", build)
    assert [path.name for path in tmp_path.iterdir()] == ["entry.lock"]


def test_two_that_meet_build_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COUNTED, str(tmp_path / "entry"), str(tmp_path / "log")]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="set YCORE_CACHE"):
        build_once(tmp_path / "file" / "entry", os.fspath)  # type: ignore[arg-type]
