"""The marks that a run's processes pass on, and a cgroup of a run's own."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ycore.launch import ownership
from ycore.launch.ownership import groups_of, is_owned, make_group, mark_of, own, remove_group

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="marks are Linux's")
RUN = f"{os.getpid():012x}"


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(["sleep", "600"], env={})
    yield process
    process.kill()
    process.wait()


def test_a_limit_marks_a_process_and_what_it_starts_and_limits_nothing(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    assert not is_owned(psutil.Process(sleeper.pid), RUN)
    own(sleeper.pid, RUN)
    assert is_owned(psutil.Process(sleeper.pid), RUN) and not is_owned(
        psutil.Process(sleeper.pid), "another"
    )
    assert resource.prlimit(sleeper.pid, resource.RLIMIT_RTTIME) == (
        mark_of(RUN),
        resource.RLIM_INFINITY,
    )
    assert mark_of(RUN) > 10**6 * 3600 * 24 * 365 * 1000, "microseconds of a thousand years"
    ended = subprocess.Popen(["true"])
    ended.wait()
    own(ended.pid, RUN)  # too late, which is no error


def test_everybody_can_read_the_mark(sleeper: "subprocess.Popen[bytes]") -> None:
    own(sleeper.pid, RUN)
    assert Path(f"/proc/{sleeper.pid}/limits").stat().st_mode & 0o004


def test_a_cgroup_holds_what_the_limit_does_not_and_goes_when_it_is_empty(
    sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    make_group(RUN)
    groups = groups_of(RUN)
    if not groups:
        pytest.skip("this user may make no cgroup here")
    try:
        monkeypatch.setattr(resource, "prlimit", lambda *_: (_ for _ in ()).throw(OSError()))
        own(sleeper.pid, RUN)
        own(sleeper.pid, "another")
        assert len(groups) == 1 and is_owned(psutil.Process(sleeper.pid), RUN)
        assert not is_owned(psutil.Process(sleeper.pid), RUN[:-1]) and not is_owned(
            psutil.Process(), RUN
        )
        (groups[0] / "inner").mkdir()
    finally:
        ownership.kill_group(RUN)
        sleeper.kill()
        sleeper.wait(20)
        began = time.monotonic()
        remove_group(RUN)
    assert groups_of(RUN) == [] and time.monotonic() - began < 10


def test_where_nothing_can_be_marked_nothing_fails(
    sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_places", list)
    make_group(RUN)
    remove_group(RUN)
    own(sleeper.pid, RUN)
    assert groups_of(RUN) == []


@pytest.mark.parametrize(
    ("mounts", "groups", "expected"),
    [
        (
            "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
            "0::/user.slice/s.scope",
            ["user.slice/s.scope"],
        ),
        ("30 1 0:26 /job/7 /sys/fs/cgroup rw - cgroup2 cgroup2 rw", "0::/job/7/step", ["step"]),
        ("30 1 0:26 /job/7 /sys/fs/cgroup rw - cgroup2 cgroup2 rw", "0::/elsewhere", []),
        (
            "31 1 0:27 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
            "32 1 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
            "8:pids:/a\n0::/b",
            ["unified/b", "pids/a"],
        ),
        ("31 1 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu", "8:cpu:/a", []),
    ],
)
def test_the_own_cgroup_is_found_in_every_arrangement(
    monkeypatch: pytest.MonkeyPatch, mounts: str, groups: str, expected: list[str]
) -> None:
    answers = {"/proc/self/mountinfo": mounts, "/proc/self/cgroup": groups}
    monkeypatch.setattr(Path, "read_text", lambda path: answers[str(path)])
    assert ownership._places() == [Path("/sys/fs/cgroup") / place for place in expected]
