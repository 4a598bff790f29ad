"""ProgramPool in the real sandbox: how each way to end is named, that nothing is left, and that cheats pass no tests."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from ycore.run.reports import RUN_MARKER
from ycore.sandbox import Level
from ycore.sandbox.level import level_refusal
from ycore.sandbox.program_pool import (
    ProgramPool,
    ScriptResult,
    UnitTestResult,
    unit_test_result,
)

T = TypeVar("T")
LEVELS = [Level.NAMESPACES, Level.LANDLOCK]


class Bench:
    """A pool at one level, with a loop to run it in."""

    def __init__(self, level: Level, folder: Path) -> None:
        self.level, self.runner = level, asyncio.Runner()
        self.run_id = f"{os.getpid()}-{level}"
        self.programs = ProgramPool(
            level, at_once=1, log=folder / "programs.log", run_id=self.run_id
        )
        self(self.programs.start())

    def __call__(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def processes(self) -> set[int]:
        """The processes that this pool's servers and programs are, by their run's id."""
        return {
            process.pid
            for process in psutil.process_iter(["environ"])
            if (process.info["environ"] or {}).get(RUN_MARKER) == self.run_id
        }

    def run(self, source: str, *, stdin: bytes = b"", deadline_s: float = 20.0) -> ScriptResult:
        return self(self.programs.run(source, stdin=stdin, deadline_s=deadline_s))

    def examine(
        self, source: str, *tests: str, timeout_s: float = 20.0, **more: Any
    ) -> UnitTestResult:
        exam = {
            "tests": tests,
            "setup": [],
            "entry_point": "",
            "given": "",
            "calls": [],
            "timeout_s": timeout_s,
            "tolerance": 1e-6,
            "stop_at_failure": False,
        }
        return self(self.programs.run_tests(source, exam | more, deadline_s=2 * timeout_s))


@pytest.fixture(scope="module", params=LEVELS)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    if (answer := level_refusal(request.param)) is not None:
        pytest.skip(f"level {request.param} does not hold here: {answer}")
    made = Bench(request.param, tmp_path_factory.mktemp("programs"))
    yield made
    made(made.programs.close())
    made.runner.close()


@pytest.fixture(scope="module")
def in_namespaces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    if (answer := level_refusal(Level.NAMESPACES)) is not None:
        pytest.skip(f"no namespaces here: {answer}")
    made = Bench(Level.NAMESPACES, tmp_path_factory.mktemp("programs"))
    yield made
    made(made.programs.close())
    made.runner.close()


def passes(verdict: UnitTestResult) -> bool:
    return verdict.ended and bool(verdict.units) and all(verdict.units)


def test_an_honest_program_reads_and_prints(bench: Bench) -> None:
    outcome = bench.run(
        "import json, math, sys\nprint(json.dumps([math.pi, sys.stdin.read()]))", stdin=b"hi"
    )
    assert (outcome.status, outcome.output, outcome.errors) == (
        "ok",
        b'[3.141592653589793, "hi"]\n',
        b"",
    )


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("raise SystemExit(3)", "error"),
        ("1 / 0", "error"),
        ("def f(:", "error"),
        ("import os; os._exit(7)", "error"),
        ("while True: print('x' * 100_000)", "output"),
        ("import ctypes; ctypes.string_at(0)", "killed"),
    ],
)
def test_how_a_program_ends_is_named(bench: Bench, source: str, status: str) -> None:
    assert bench.run(source).status == status


def test_a_program_has_temporary_files_and_modules_that_were_not_loaded_before(
    bench: Bench,
) -> None:
    source = "import mmap, tempfile\nwith tempfile.TemporaryDirectory() as folder: print(len(folder) > 4)"
    assert bench.run(source).output == b"True\n"


def test_a_traceback_is_kept(bench: Bench) -> None:
    assert b"ZeroDivisionError" in bench.run("1 / 0").errors


def test_a_program_that_hangs_is_ended(bench: Bench) -> None:
    assert bench.run("while True: pass", deadline_s=1.0).status == "timeout"


def test_memory_of_many_processes_is_bounded_together(bench: Bench) -> None:
    source = "import os, time\nfor _ in range(4): os.fork()\nkept = bytearray(100 << 20)\ntime.sleep(30)"
    assert bench.run(source).status == "memory"


def test_nothing_lives_on(bench: Bench) -> None:
    assert bench.run("print(1)").output == b"1\n"
    servers = bench.processes()
    source = "import os, time\nfor _ in range(20):\n    if not os.fork(): os.setsid(), time.sleep(100)\nprint(1)"
    assert bench.run(source).output == b"1\n"
    assert servers and bench.processes() == servers


def test_a_fork_bomb_leaves_the_next_program_its_place(bench: Bench) -> None:
    assert bench.run(
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", deadline_s=1.5
    ).status in (
        "timeout",
        "memory",
    )
    assert bench.run("print(1)").status == "ok"


def test_folders_within_folders_cost_their_program_alone(bench: Bench) -> None:
    deep = "import os\nfor _ in range(3000):\n    os.mkdir('a'), os.chdir('a')"
    assert bench.run(deep, deadline_s=5.0).status != "infra_error"
    assert bench.run("print(1)").status == "ok"


def test_nothing_passes_from_one_program_to_the_next(bench: Bench) -> None:
    assert (
        bench.run(
            "open('left.txt', 'w').write('x'); import builtins; builtins.print = None"
        ).status
        == "ok"
    )
    outcome = bench.run("import os; print(os.path.exists('left.txt'))")
    assert outcome.output == b"False\n"


def test_a_program_sees_an_empty_environment_and_no_module_of_ours(
    in_namespaces: Bench,
) -> None:
    ours = "[name for name in sys.modules if 'ycore' in name]"
    source = f"import os, sys\nprint(sorted(os.environ))\nprint({ours}, os.listdir('/proc'))"
    lines = in_namespaces.run(source).output.splitlines()
    assert lines == [
        b"['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH', 'PYTHONHASHSEED', 'TMPDIR']",
        b"[] []",
    ]


def test_a_server_that_died_is_asked_again_and_then_named(in_namespaces: Bench) -> None:
    server: Any = in_namespaces.programs._servers[0]
    assert in_namespaces.run("print(1)").status == "ok"
    first = server._process
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert in_namespaces.run("print(2)").output == b"2\n"
    assert server._process is not first


def test_what_cannot_be_made_is_nobodys_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if level_refusal(Level.NAMESPACES) is not None:
        pytest.skip("no namespaces here")
    monkeypatch.setattr("ycore.sandbox.confine.filter_bytes", lambda *_, **__: b"not a filter")
    programs = ProgramPool(Level.NAMESPACES, at_once=1, log=tmp_path / "log", run_id="test")

    async def work() -> ScriptResult:
        try:
            return await programs.run("print(1)", deadline_s=5.0)
        finally:
            await programs.close()

    outcome = asyncio.run(work())
    assert outcome.status == "infra_error" and outcome.problem


def test_tests_call_the_program_in_another_process(bench: Bench) -> None:
    source = "def add(a, b):\n    return a + b\n"
    verdict = bench.examine(
        source,
        "assert add(1, 2) == 3",
        "assert add([1], [2]) == [1, 2]",
        "assert add(1, 1) == 3",
    )
    assert verdict.units == (True, True, False) and verdict.ended


@pytest.mark.parametrize(
    ("source", "began"),
    [
        ("def f(:\n", "compile_error"),
        ("1 / 0\n", "run_error"),
        ("import sys; sys.exit(0)\n", "run_error"),
        ("import os; os._exit(0)\n", "gone"),
    ],
)
def test_a_program_that_does_not_begin_passes_nothing(
    bench: Bench, source: str, began: str
) -> None:
    verdict = bench.examine(source, "assert f(1) == 1")
    assert verdict.began == began and not passes(verdict) and verdict.status == "ok"


def test_a_call_that_hangs_is_a_timeout(bench: Bench) -> None:
    verdict = bench.examine(
        "def f(x):\n    while True: pass\n", "assert f(1) == 1", timeout_s=1.0
    )
    assert verdict.status == "timeout" and not passes(verdict)


def test_tests_that_cannot_run_are_called_broken(bench: Bench) -> None:
    assert bench.examine(
        "def f(x): return x", "assert f(1) == 1", setup=["import no_such_module"]
    ).broken


CHEATS = dict(
    part.split("\n", 1)
    for part in Path(__file__).with_name("cheats.txt").read_text().split("### ")[1:]
)


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_pass_no_test(bench: Bench, cheat: str) -> None:
    """Each defines `f`, and none knows that f(SECRET) is 7919; the fake answers say `true` and 7919 at every chance."""
    tests = [
        "assert f('SECRET') == 7919 and f('SECRET') == f('SECRET') and f(1) == 7907",
        "assert abs(f(2) - 0.5) < 1e-6",
    ]
    verdict = bench.examine(CHEATS[cheat], *tests, timeout_s=4.0)
    assert not passes(verdict) and True not in verdict.units, verdict


def test_the_same_tests_pass_for_a_program_that_is_right(bench: Bench) -> None:
    tests = [
        "assert f('SECRET') == 7919 and f('SECRET') == f('SECRET') and f(1) == 7907",
        "assert abs(f(2) - 0.5) < 1e-6",
    ]
    assert passes(bench.examine("def f(x): return {1: 7907, 2: 0.5}.get(x, 7919)", *tests))


def test_a_verdict_that_is_cut_short_has_not_ended() -> None:
    ended = {"reason": None, "status": 0}
    lines = b'{"state": "ready"}\n{"units": 2}\n{"unit": 0, "passed": true}\n{"unit": 1, "pass'
    verdict = unit_test_result(lines, ended, ended, seconds=0.0)
    assert verdict.units == (True, None) and not verdict.ended
    assert unit_test_result(b"", ended, ended, seconds=0.0).status == "infra_error"
    assert (
        unit_test_result(lines, {"reason": "deadline"}, ended, seconds=0.0).status == "timeout"
    )


def test_a_killed_parent_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    script = (
        "import asyncio, sys; from pathlib import Path; from ycore.sandbox import Level; "
        "from ycore.sandbox.program_pool import ProgramPool; "
        "programs = ProgramPool(Level(sys.argv[1]), at_once=1, log=Path(sys.argv[2]), run_id='t'); "
        "asyncio.run(programs.run('import time; time.sleep(600)', deadline_s=600))"
    )
    line = [sys.executable, "-c", script, bench.level, str(tmp_path / "log")]
    parent = psutil.Popen(line, stderr=subprocess.DEVNULL)
    below = _wait_for(
        lambda: [process for process in parent.children(recursive=True) if _is_program(process)]
    )
    everything = parent.children(recursive=True)
    parent.kill()
    parent.wait(60.0)
    gone, alive = psutil.wait_procs(everything, timeout=60.0)
    assert below and not alive and len(gone) == len(everything)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root looks as another user")
def test_a_parent_that_ends_while_the_server_looks_as_another_user_is_noticed(
    tmp_path: Path,
) -> None:
    """The kernel forgets the signal of a parent's end with each change of user, so none comes of an end right then."""
    script = (
        "import os, signal, sys, time\n"
        "from ycore.sandbox import program_server, stage, watch\n"
        "if not os.fork():\n"
        "    parent = os.getppid()\n"
        "    stage.checked_prctl(stage.PR_SET_PDEATHSIG, signal.SIGTERM)\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    def look(pids):\n"
        "        os.kill(parent, signal.SIGKILL)\n"
        "        while os.getppid() == parent: time.sleep(0.01)\n"
        "        return 0\n"
        "    watch.deleted_bytes = look\n"
        "    watch.excess_of = lambda *_: None\n"
        "    limits = {'memory': 1, 'scratch': 1, 'files': 1, 'processes': 1, 'output': 1}\n"
        "    program_server._is_excess({'limits': limits, 'uid': 70000}, '/nowhere')\n"
        "    open(sys.argv[1], 'w').close()\n"
        "    os._exit(0)\n"
        "time.sleep(600)\n"
    )
    went_on = tmp_path / "went on"
    # The pipe is closed by the last of the two processes.
    done = subprocess.run(
        [sys.executable, "-c", script, str(went_on)],
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL and not went_on.exists()


def _is_program(process: psutil.Process) -> bool:
    """Whether it has run for a while and has no children: what waits for it does have."""
    try:
        return not process.children() and time.time() - process.create_time() > 2
    except psutil.NoSuchProcess:  # the process that makes the namespaces ends at once
        return False


def _wait_for(find: Callable[[], list[Any]], within_s: float = 60.0) -> list[Any]:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if result := find():
            return result
        time.sleep(0.1)
    raise AssertionError("it did not come")


def test_cheats_pass_where_program_and_tests_share_a_process() -> None:
    """The control: exit status 0 of the program with its asserts below it, which is how such tests are often run."""
    asserts = "\nassert f('SECRET') == 7919\nassert f('SECRET') == f('SECRET')\nassert abs(f(2) - 0.5) < 1e-6\n"
    cheats = [
        "exit",
        "hard exit",
        "hard exit at once",
        "exit in a thread",
        "compares all ways",
        "a signal handler",
    ]
    for cheat in cheats:
        line = [sys.executable, "-I", "-S", "-c", CHEATS[cheat] + asserts]
        assert subprocess.run(line, capture_output=True, timeout=240).returncode == 0, cheat
