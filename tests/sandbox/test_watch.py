import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event

import psutil
import pytest

from ycore.sandbox import Limits
from ycore.sandbox import watch as watch_module
from ycore.sandbox.watch import (
    Watch,
    below,
    deleted_bytes,
    end_all_below,
    excess_of,
    files_in,
    memory_of,
    remove_tree,
)

MIB = 2**20
AMPLE = Limits(memory=2**40, processes=10_000, scratch=2**40, files=10_000)


@pytest.fixture
def start() -> Iterator:
    """Start Python with this code and wait for its first line of output."""
    started = []

    def run(code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        for pid in below(process.pid):
            os.kill(pid, 9)
        process.kill()
        process.communicate()


def test_a_grandchild_in_a_session_of_its_own_is_below(start) -> None:
    process = start("""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print("ready", flush=True)
    time.sleep(60)
time.sleep(60)
""")
    assert len(below(process.pid)) == 2


def test_private_and_shared_memory_of_children_is_counted(start) -> None:
    process = start("""
import mmap, os, time
if os.fork() == 0:
    private, shared = bytearray(os.urandom(1)) * (64 << 20), mmap.mmap(-1, 32 << 20)
    shared.write(b"x" * (32 << 20))
    print("ready", flush=True)
time.sleep(60)
""")
    held_bytes = memory_of(below(process.pid), at_most=2**40)
    assert 96 * MIB <= held_bytes <= 160 * MIB


def test_a_page_that_forks_share_counts_once_when_it_decides(start) -> None:
    process = start("""
import os, time
if os.fork() == 0:
    memory = b"x" * (64 << 20)
    for _ in range(4):
        if os.fork() == 0:
            time.sleep(60)
    print("ready", flush=True)
time.sleep(60)
""")
    pids = below(process.pid)
    assert memory_of(pids, at_most=2**40) >= 5 * 64 * MIB
    assert 64 * MIB <= memory_of(pids, at_most=100 * MIB) <= 100 * MIB


def test_files_are_counted_with_those_that_were_deleted_and_are_open(
    tmp_path: Path, start
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"x" * MIB)
    (tmp_path / "link").symlink_to("/usr")
    num_bytes, num_files = files_in(str(tmp_path), at_most=100)
    assert num_files == 4 and MIB <= num_bytes <= 2 * MIB
    assert files_in(str(tmp_path), at_most=2)[1] == 3

    process = start(f"""
import os, time
if os.fork() == 0:
    file = open({str(tmp_path / "gone")!r}, "wb")
    os.unlink(file.name)
    file.write(b"x" * (3 << 20)), file.flush()
    print("ready", flush=True)
time.sleep(60)
""")
    assert 3 * MIB <= deleted_bytes(below(process.pid)) <= 4 * MIB
    limits = replace(AMPLE, scratch=4 * MIB - 1)
    excess = excess_of(below(process.pid), limits, str(tmp_path))
    assert excess == "4 MiB of files, 3 MiB allowed"
    assert excess_of([], replace(AMPLE, files=3), str(tmp_path)) == "4 files, 3 allowed"


def test_a_folder_closed_to_its_owner_is_removed(tmp_path: Path) -> None:
    """Root opens any folder, so this is another user where the tests run as root."""
    work = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from ycore.sandbox.watch import remove_tree
scratch, aside = Path({str(tmp_path)!r}, "scratch"), Path({str(tmp_path)!r}, "aside")
if os.getuid() == 0:
    os.chown({str(tmp_path)!r}, 61184, 61184)
    os.setresuid(61184, 61184, 61184)
aside.mkdir(0o500)
(scratch / "a" / "b").mkdir(parents=True)
(scratch / "a" / "b" / "file").touch()
(scratch / "link").symlink_to(aside)
(scratch / "a" / "b").chmod(0)
(scratch / "a").chmod(0)
remove_tree(scratch)
print(scratch.exists(), oct(aside.stat().st_mode & 0o777))
"""
    for parent in [*tmp_path.parents][:3]:
        parent.chmod(parent.stat().st_mode | 0o011)
    done = subprocess.run(
        [sys.executable, "-c", work], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False 0o500\n", done.stderr


def test_folders_nested_too_deeply_for_a_path_are_removed(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    make = "import os\nfor _ in range(1100):\n    os.mkdir('a'), os.chdir('a')"
    scratch.mkdir()
    subprocess.run([sys.executable, "-I", "-S", "-c", make], cwd=scratch, check=True)
    remove_tree(scratch)
    assert not scratch.exists()


def test_what_is_over_is_named() -> None:
    pids = [os.getpid(), os.getppid()]
    assert excess_of(pids, AMPLE) is None
    excess = excess_of(pids, replace(AMPLE, processes=1))
    assert excess is not None and excess.endswith("processes and threads, 1 allowed")
    excess = excess_of(pids, replace(AMPLE, memory=MIB))
    assert excess is not None and excess.endswith("MiB of memory, 1 MiB allowed")


def test_threads_count_like_processes(start) -> None:
    process = start("""
import threading, time
for _ in range(6):
    threading.Thread(target=time.sleep, args=(60,)).start()
print("ready", flush=True)
""")
    assert excess_of([process.pid], replace(AMPLE, processes=7)) is None
    excess = excess_of([process.pid], replace(AMPLE, processes=6))
    assert excess == "7 processes and threads, 6 allowed"


def test_all_are_stopped_before_one_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb fills each free place: the third process is found late."""
    looks = iter([[1], [1, 2], [1, 2, 3], [1, 2, 3], []])
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(watch_module, "below", lambda pid: next(looks))
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    assert end_all_below(-1)
    stops = [(pid, signal.SIGSTOP) for pid in (1, 2, 3)]
    assert sent == [*stops, *((pid, signal.SIGKILL) for pid in (1, 2, 3))]


def test_a_machine_without_time_leaves_nothing(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look takes seconds, and the first one finds only a part."""
    process = start("""
import os, time
for _ in range(8):
    os.fork() or time.sleep(60)
print("ready", flush=True)
time.sleep(60)
""")
    family = psutil.Process(process.pid).children(recursive=True)
    real = watch_module.below
    clock = itertools.count(0.0, 6.0)
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: next(clock))
    num_looks = itertools.count()
    monkeypatch.setattr(
        watch_module, "below", lambda pid: real(pid)[: 2 if next(num_looks) < 2 else None]
    )

    killed: set[int] = set()
    send, sleep = watch_module._send, time.sleep

    def record(number: signal.Signals, pids: list[int]) -> None:
        send(number, pids)
        if number == signal.SIGKILL:
            killed.update(pids)

    def wait(seconds: float) -> None:  # the parent reaps nothing, so its children stay zombies
        for child in family:
            while child.pid in killed and child.status() != psutil.STATUS_ZOMBIE:
                sleep(seconds)
        if killed >= {child.pid for child in family}:
            monkeypatch.setattr(watch_module, "below", lambda pid: [])

    monkeypatch.setattr(watch_module, "_send", record)

    monkeypatch.setattr(watch_module.time, "sleep", wait)
    assert end_all_below(process.pid)


def test_the_watch_ends_what_grows_and_leaves_what_does_not(start) -> None:
    process = start("""
import os, time
print("ready", flush=True)
if os.fork() == 0:
    held = []
    while True:
        held.append(b"x" * (8 << 20)), time.sleep(0.01)
time.sleep(60)
""")
    killed, spared = Event(), Event()
    watch = Watch(process.pid, replace(AMPLE, memory=64 * MIB), killed.set)
    other = Watch(process.pid, AMPLE, spared.set)
    watch.start(), other.start()
    assert killed.wait(120.0)
    assert watch.excess is not None and watch.excess.endswith("of memory, 64 MiB allowed")
    other.stop()
    other.join(5.0)
    assert other.excess is None and not spared.is_set()


def test_the_watch_ends_with_its_process(start) -> None:
    process = start("print('ready', flush=True)")
    process.wait(120.0)
    watch = Watch(process.pid, AMPLE, lambda: None)
    watch.start()
    watch.join(120.0)
    assert not watch.is_alive() and watch.excess is None


def test_a_look_is_cheap(start) -> None:
    """Every 50 ms: a look of 5 ms would take a tenth of a core."""
    process = start("import time; print('ready', flush=True); time.sleep(60)")
    times = []
    for _ in range(50):
        began = time.perf_counter()
        excess_of(below(process.pid), AMPLE)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.005
