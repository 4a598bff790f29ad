import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from ycore.launch.processes import ManagedProcess, meaningful_line

WITHIN_S = 20.0


def start(tmp_path: Path, code: str, *, cores: list[int] | None = None) -> ManagedProcess:
    return ManagedProcess.start(
        "child",
        [sys.executable, "-c", code],
        environment=os.environ,
        run_id="r1",
        log=tmp_path / "child.log",
        cores=cores,
    )


def test_output_exit_status_and_error_are_told(tmp_path: Path) -> None:
    process = start(
        tmp_path, "import sys; print('hello'); print('error: no room; make some', file=sys.stderr); sys.exit(2)"
    )
    assert process.wait(timeout_s=WITHIN_S) == 2
    assert process.how_it_ended() == "exit status 2"
    assert process.user_error() == "no room; make some"
    assert "hello" in process.log.read_text()
    assert process.log.stat().st_mode & 0o777 == 0o600


def test_a_signal_is_named(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; time.sleep(600)")
    assert process.exit_code is None
    process.send(signal.SIGKILL)
    assert process.wait(timeout_s=WITHIN_S) == -9
    assert process.how_it_ended() == "killed by SIGKILL"
    process.send(signal.SIGKILL)


def test_the_marker_and_a_session_of_its_own(tmp_path: Path) -> None:
    process = start(tmp_path, "import os; print(os.environ['YCORE_RUN'], os.getsid(0) == os.getpid())")
    process.wait(timeout_s=WITHIN_S)
    assert process.log.read_text() == "r1 True\n"


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_a_process_is_kept_on_its_cores(tmp_path: Path) -> None:
    core = psutil.Process().cpu_affinity()[-1]
    process = start(tmp_path, "import os, time; time.sleep(0.5); print(sorted(os.sched_getaffinity(0)))", cores=[core])
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
    assert meaningful_line(TRACEBACK.splitlines()) == "ValueError: Available memory is less than requested."


def test_without_an_error_the_last_line_counts() -> None:
    assert meaningful_line(["INFO 11-20 05:35:07 [utils.py:343] loading", "", "^^^^", "  "]) == "loading"
    assert meaningful_line([]) == ""


def test_a_steps_figures_are_no_reason() -> None:
    assert meaningful_line(["the last words", "{'loss': '0.5', 'ycore/time/sync': '1.8e-06'}"]) == "the last words"
