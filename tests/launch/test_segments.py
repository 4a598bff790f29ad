"""Which files in /dev/shm a run has left, and which are a user's."""

import mmap
import os
import secrets
import select
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ycore.launch.guardian import RunWatch
from ycore.launch.ownership import groups_of, make_group, own, remove_group
from ycore.launch.segments import (
    LIBRARY_NAME,
    SHARED_MEMORY,
    Candidate,
    Creations,
    born_at,
    held_segments,
    is_left,
)

BEGAN = 1000.0
LEFT = Candidate("psm_0123abcd", (26, 7), uid=0, born=1001.0)
HELD = {(26, 7)}


def test_a_file_is_left_by_the_run_only_where_everything_says_so() -> None:
    assert is_left(LEFT, began=BEGAN, held=HELD, in_use=set(), users=[0])
    others = [
        replace(LEFT, name="train.jsonl"),
        replace(LEFT, born=999.0),
        replace(LEFT, born=None),
    ]
    others += [
        replace(LEFT, segment=(26, 8)),
        replace(LEFT, segment=(27, 7)),
        replace(LEFT, uid=1000),
    ]
    for other in others:
        assert not is_left(other, began=BEGAN, held=HELD, in_use=set(), users=[0]), other
    assert not is_left(LEFT, began=BEGAN, held=HELD, in_use=HELD, users=[0])


@pytest.mark.parametrize(
    "name",
    [
        "psm_0123abcd",
        "sem.mp-a_b1c2d3",
        "sem.loky-123-abc",
        "torch_123_456789_0",
        "vllm_mm_QmFzZTY0-_x",
        "12345-tp:0-[0-1]-cpushm",
        "deepspeed_allreduce_buffer_0_127.0.0.1_29500_1",
        "nccl-aB3dE6",
        "__KMP_REGISTERED_LIB_123_0",
    ],
)
def test_names_that_libraries_make_up_are_known(name: str) -> None:
    assert LIBRARY_NAME.fullmatch(name)


@pytest.mark.parametrize(
    "name",
    [
        "train.jsonl",
        "psm_notes.jsonl",
        "psm_0123abcd.jsonl",
        "torch_data",
        "torch_1_2_3.pt",
        "nccl-results",
        "sem.txt",
    ],
)
def test_names_that_people_give_are_not(name: str) -> None:
    assert not LIBRARY_NAME.fullmatch(name)


@pytest.mark.skipif(
    born_at(Path("/dev/shm")) is None, reason="no /dev/shm, or it has no times of birth"
)
def test_birth_is_not_change_and_what_a_process_holds_is_known_by_device_and_inode() -> None:
    path = Path("/dev/shm") / f"ycore-test-{os.getpid()}"
    before = time.time() - 0.1  # the file system's clock has coarse ticks
    path.write_bytes(bytes(4096))
    try:
        born, status = born_at(path), path.stat()
        os.utime(path, (0, 0))
        assert born is not None and before <= born <= time.time() and born_at(path) == born
        with path.open("rb") as file:
            assert (status.st_dev, status.st_ino) in held_segments(os.getpid())
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with mapped:
            assert (status.st_dev, status.st_ino) in held_segments(os.getpid())
        assert (status.st_dev, status.st_ino) not in held_segments(os.getpid())
    finally:
        path.unlink()
    assert born_at(path) is None and held_segments(2**22 + 1) == set()


@pytest.mark.skipif(sys.platform != "linux", reason="no inotify")
@pytest.mark.parametrize("has_fanotify", [True, False])
def test_new_files_are_told_at_once_where_a_library_may_have_named_them(
    has_fanotify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_fanotify:
        monkeypatch.setattr("ycore.launch.segments._FAN_CLOEXEC", -1)  # refused, as in a container
    creations, number = Creations(), os.getpid()
    made = SHARED_MEMORY / f"nccl-{number % 1000000:06d}"
    linked, gone, other = (
        SHARED_MEMORY / f"{name}{number}" for name in ("sem.mp-", "sem.loky-", "ycore-test-")
    )
    assert not select.select(creations.descriptors, [], [], 0)[0] and creations.read() == {}
    try:
        gone.touch()
        gone.unlink()
        for path in (made, other):
            path.touch()
        linked.hardlink_to(other)  # as sem_open does
        assert select.select(creations.descriptors, [], [], 0)[0] == creations.descriptors
        expected = {(path.stat().st_dev, path.stat().st_ino) for path in (made, linked)}
        told = creations.read()
        assert expected <= told.keys() and not creations.read().keys() & expected
        assert {told[segment] for segment in expected} <= {0, number}
    finally:
        for path in (made, linked, other):
            path.unlink(missing_ok=True)


def test_a_system_without_inotify_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda *arguments, **options: object())
    creations = Creations()
    assert creations.descriptors == [] and creations.read() == {}


ON_WORD = """
import mmap, os, signal, sys
sys.stdin.readline()
file = os.open(sys.argv[1], os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
os.ftruncate(file, 4096)
held = mmap.mmap(file, 4096)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(
    born_at(Path("/dev/shm")) is None, reason="no /dev/shm, or it has no times of birth"
)
def test_whose_a_file_is_is_known_of_a_maker_that_is_gone_at_once() -> None:
    """The kernel names the maker, to root; nobody looks while the makers are there with what they made."""
    run_id, began = secrets.token_hex(6), time.time()
    make_group(run_id)
    watch, runs, other = RunWatch(run_id, creations=Creations()), *new_segments(2)
    time.sleep(0.1)  # the file system's clock has coarse ticks
    makers = []
    try:
        for path in (runs, other):
            makers.append(
                subprocess.Popen([sys.executable, "-c", ON_WORD, str(path)], stdin=subprocess.PIPE)
            )
        own(makers[0].pid, run_id)
        watch.look_at_new_segments()
        for maker in makers:
            maker.communicate(b"\n", timeout=60.0)
        if not names_makers() or not groups_of(run_id):
            pytest.skip("no fanotify that names makers, or no cgroup")
        assert runs.exists() and other.exists()
        watch.look_at_new_segments()
        watch.remove_segments(began=began)
        assert not runs.exists() and other.exists()
    finally:
        for maker in makers:
            maker.kill()
            maker.wait()
        for path in (runs, other):
            path.unlink(missing_ok=True)
        remove_group(run_id)


def names_makers() -> bool:
    creations, (path,) = Creations(), new_segments(1)
    path.touch()
    makers = creations.read().values()
    path.unlink()
    return os.getpid() in makers


def new_segments(count: int) -> list[Path]:
    return [SHARED_MEMORY / f"psm_{secrets.token_hex(4)}" for _ in range(count)]
