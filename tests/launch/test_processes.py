"""One process, and ranks as the supervisor sees them: real processes in the place of torchrun and its ranks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ycore.errors import RunError
from ycore.launch import processes
from ycore.launch.guardian import remove_leftovers
from ycore.launch.processes import (
    ManagedProcess,
    RankedTrainer,
    meaningful_line,
    remove_extension_locks,
)
from ycore.run.files import RunFolder, write_json_atomic
from ycore.run.reports import Rank, Report, forget_reports, read_report, report_end, report_file

WITHIN_S = 60.0


def start(tmp_path: Path, code: str, *, cores: list[int] | None = None) -> ManagedProcess:
    return ManagedProcess(
        "child",
        [sys.executable, "-c", code],
        environment=os.environ,
        run_id="r1",
        log=tmp_path / "child.log",
        cores=cores,
    )


def test_output_exit_status_and_error_are_told(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        "import sys; print('hello'); print('error: no room; make some', file=sys.stderr); sys.exit(2)",
    )
    assert process.wait(timeout_s=WITHIN_S) == 2
    assert process.how_it_ended() == "exit status 2"
    assert process.user_error() == "no room; make some"
    assert "hello" in process.log.read_text()
    assert process.log.stat().st_mode & 0o777 == 0o600


def test_a_signal_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(tmp_path, "import time; time.sleep(600)")
    assert process.exit_code is None
    process.send(signal.SIGKILL)
    assert process.wait(timeout_s=WITHIN_S) == -9
    assert process.how_it_ended() == "killed by SIGKILL"
    count = processes.out_of_memory_kills()
    monkeypatch.setattr(processes, "out_of_memory_kills", lambda: count + 1)
    assert process.how_it_ended().startswith(
        "killed by SIGKILL, and the machine ran out of memory meanwhile"
    )
    process.send(signal.SIGKILL)


def test_the_marker_and_a_session_of_its_own(tmp_path: Path) -> None:
    process = start(
        tmp_path, "import os; print(os.environ['YCORE_RUN'], os.getsid(0) == os.getpid())"
    )
    process.wait(timeout_s=WITHIN_S)
    assert process.log.read_text() == "r1 True\n"


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_a_process_is_kept_on_its_cores(tmp_path: Path) -> None:
    core = psutil.Process().cpu_affinity()[-1]
    process = start(
        tmp_path,
        "import os, time; time.sleep(0.5); print(sorted(os.sched_getaffinity(0)))",
        cores=[core],
    )
    process.wait(timeout_s=WITHIN_S)
    assert process.log.read_text() == f"[{core}]\n"


TRACEBACK = """\
(EngineCore pid=12) INFO 11-20 05:35:07 [utils.py:343] Using LBHNC KV cache layout.
(EngineCore pid=12) ERROR 11-20 05:35:07 [core.py:1] EngineCore failed to start.
(EngineCore pid=12) Traceback (most recent call last):
(EngineCore pid=12)   File "/x/core.py", line 3, in run
(EngineCore pid=12)     raise ValueError("no")
(EngineCore pid=12) ValueError: Available memory is less than requested.
(APIServer pid=10) RuntimeError: Engine core initialization failed. See root cause above.
nanobind: leaked 4 instances!
 - leaked instance 0x7f of type "a.b"
/usr/lib/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked semaphore
  warnings.warn('resource_tracker: There appear to be %d '
"""


def test_the_cause_is_picked_out_of_a_servers_log() -> None:
    assert (
        meaningful_line(TRACEBACK.splitlines())
        == "ValueError: Available memory is less than requested."
    )


def test_without_an_error_the_last_line_counts() -> None:
    assert (
        meaningful_line(["INFO 11-20 05:35:07 [utils.py:343] loading", "", "^^^^", "  "])
        == "loading"
    )
    assert meaningful_line([]) == ""


def test_a_steps_figures_are_no_reason() -> None:
    assert (
        meaningful_line(["the last words", "{'loss': '0.5', 'ycore/time/sync': '1.8e-06'}"])
        == "the last words"
    )


@pytest.fixture(params=["TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"])
def lock(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A lock as `torch.utils.file_baton` makes it, in a cache that this variable names."""
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv(request.param, str(tmp_path))
    python = f"py{sys.version_info.major}{sys.version_info.minor}_cpu"
    inner = "" if request.param == "TORCH_EXTENSIONS_DIR" else f"torch_extensions/{python}"
    lock = tmp_path / inner / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    return lock


def age(lock: Path) -> None:
    long_ago = time.time() - 2 * processes._COMPILES_WITHIN_S
    os.utime(lock, (long_ago, long_ago))


def test_an_old_lock_of_nobody_is_removed_from_the_cache_of_extensions(lock: Path) -> None:
    age(lock)
    lines: list[str] = []
    remove_extension_locks(lines.append, num_machines=1)
    assert not lock.exists() and str(lock) in lines[0]


def test_a_lock_that_a_process_has_open_stays(lock: Path) -> None:
    age(lock)
    code = f"import time; file = open({str(lock)!r}); print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as compiler:
        assert compiler.stdout is not None and compiler.stdout.readline() == b"up\n"
        remove_extension_locks(print, num_machines=1)
        assert lock.exists()
        compiler.kill()


def test_a_young_lock_of_nobody_is_refused_unless_another_machine_may_have_it(
    lock: Path,
) -> None:
    remove_extension_locks(print, num_machines=2)
    with pytest.raises(RunError, match=f"{lock}: no process here has .* open.*; rm {lock}"):
        remove_extension_locks(print, num_machines=1)
    assert lock.exists()


SLEEPER = "import time; time.sleep(60)"
PRINTS = "import signal, sys, time; signal.signal(signal.SIGINT, lambda *_: sys.exit(7)); print('up', flush=True); "


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path / "run")
    for path in (folder.logs, folder.sockets):
        path.mkdir(parents=True, exist_ok=True)
    yield folder
    remove_leftovers(folder)


@pytest.fixture
def rank(folder: RunFolder) -> Iterator[Callable[[int, str], "subprocess.Popen[bytes]"]]:
    """Start a process and report it as a rank."""
    started: list[subprocess.Popen[bytes]] = []

    def start(local: int, code: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        started.append(process)
        if code.startswith(PRINTS):
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
        write_json_atomic(report_file(folder, local), {"number": local, "pid": process.pid})
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def trainer(folder: RunFolder) -> Iterator[RankedTrainer]:
    launcher = ManagedProcess(
        "trainer",
        [sys.executable, "-c", SLEEPER],
        environment={},
        run_id="test-ranks",
        log=folder.log("trainer"),
    )
    yield RankedTrainer(launcher, folder, num_ranks=2)
    launcher.send(signal.SIGKILL)
    launcher.wait(timeout_s=WITHIN_S)


def exit_code(trainer: RankedTrainer) -> int:
    deadline = time.monotonic() + WITHIN_S
    while (code := trainer.exit_code) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return code


def fail(
    folder: RunFolder, local: int, code: int, message: str, *, at: float, expected: bool = True
) -> None:
    previous = read_report(folder, local)
    assert previous is not None
    report = {
        "number": local,
        "pid": previous.pid,
        "exit_code": code,
        "message": message,
        "at": at,
        "expected": expected,
    }
    write_json_atomic(report_file(folder, local), report)


def test_while_all_work_there_is_no_exit_code(
    trainer: RankedTrainer, rank: Callable[[int, str], object]
) -> None:
    rank(0, SLEEPER), rank(1, SLEEPER)
    assert trainer.exit_code is None
    assert trainer.ended.name == "trainer"


def test_the_first_failure_is_the_runs(
    trainer: RankedTrainer, folder: RunFolder, rank: Callable[[int, str], object]
) -> None:
    rank(0, SLEEPER), rank(1, SLEEPER)
    fail(folder, 0, 1, "another rank failed: rank 1: no such row", at=2.0)
    fail(folder, 1, 2, "no such row", at=1.0)
    assert exit_code(trainer) == 2
    assert trainer.user_error() == "no such row"
    log = folder.log("trainer-1")
    assert trainer.ended == ("trainer rank 1", log, "exit status 2: no such row")


def test_a_rank_that_vanished_is_the_cause_of_what_others_then_met(
    trainer: RankedTrainer,
    folder: RunFolder,
    rank: Callable[[int, str], "subprocess.Popen[bytes]"],
) -> None:
    rank(0, SLEEPER)
    gone = rank(1, SLEEPER)
    assert trainer.exit_code is None
    gone.kill()
    fail(folder, 0, 1, "RuntimeError: Connection closed by peer", at=1.0, expected=False)
    assert exit_code(trainer) == 1
    name, _, ending = trainer.ended
    assert (name, ending) == ("trainer rank 1", "a signal, killed or out of memory")


def test_an_allocator_that_vanished_is_the_cause_of_what_ranks_then_met(
    folder: RunFolder, rank: Callable[[int, str], object]
) -> None:
    launcher, allocator = (
        ManagedProcess(
            name,
            [sys.executable, "-c", SLEEPER],
            environment={},
            run_id="test-ranks",
            log=folder.log(name),
        )
        for name in ("trainer", "allocator")
    )
    trainer = RankedTrainer(launcher, folder, num_ranks=2, allocator=allocator)
    try:
        rank(0, SLEEPER), rank(1, SLEEPER)
        assert trainer.exit_code is None
        allocator.send(signal.SIGKILL)
        fail(folder, 0, 1, "the allocator of this machine's slots is gone", at=1.0)
        assert exit_code(trainer) == 1
        assert trainer.ended == ("allocator", folder.log("allocator"), "killed by SIGKILL")
    finally:
        launcher.send(signal.SIGKILL)
        launcher.wait(timeout_s=WITHIN_S)


def test_what_only_says_that_another_rank_is_gone_is_no_cause() -> None:
    from ycore.errors import EngineError, PeerError
    from ycore.trainer.__main__ import _is_a_cause

    assert not _is_a_cause(PeerError("another rank is gone")) and not _is_a_cause(
        RuntimeError("closed by peer")
    )
    assert _is_a_cause(EngineError("rollout-0 did not answer"))


def test_an_interrupt_goes_to_the_ranks_and_not_to_torchrun(
    trainer: RankedTrainer,
    folder: RunFolder,
    rank: Callable[[int, str], "subprocess.Popen[bytes]"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = [rank(local, PRINTS + "time.sleep(60)") for local in (0, 1)]
    trainer.send(signal.SIGINT)
    assert [process.wait(WITHIN_S) for process in ranks] == [7, 7]
    for local in (0, 1):
        fail(folder, local, 130, "stopped", at=1.0)
    assert trainer.exit_code is None, (
        "torchrun still runs, and may have ranks that write a checkpoint"
    )
    monkeypatch.setattr(processes, "_TORCHRUN_ENDS_WITHIN_S", 0.5)
    assert exit_code(trainer) == 130, "it does not wait for another machine's torchrun for ever"


def test_an_interrupt_before_any_rank_is_there_ends_torchrun_and_counts_as_one(
    trainer: RankedTrainer,
) -> None:
    time.sleep(0.5)  # Python has a handler for SIGINT by now
    trainer.send(signal.SIGINT)
    assert exit_code(trainer) == 130


def test_a_report_comes_back_as_it_was_written(folder: RunFolder) -> None:
    assert read_report(folder, 0) is None
    report_end(folder, Rank(3, 4, 1, 2), 2, "no such row", expected=True)
    report = read_report(folder, 1)
    assert isinstance(report, Report)
    assert (report.number, report.exit_code, report.message, report.expected) == (
        3,
        2,
        "no such row",
        True,
    )


def test_reports_of_ranks_are_forgotten_before_others_come(
    folder: RunFolder,
    trainer: RankedTrainer,
    rank: Callable[[int, str], "subprocess.Popen[bytes]"],
) -> None:
    rank(0, SLEEPER)
    rank(1, SLEEPER)
    assert trainer.exit_code is None
    fail(folder, 1, 1, "no memory", at=1.0)
    forget_reports(folder)
    assert read_report(folder, 1) is None, "the next ranks would be taken for failed"
