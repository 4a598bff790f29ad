"""A person's reward does honest work of every kind in its worker, and nothing to the run, files or machine.

Every attempt is also made outside (`outside`), where it succeeds: one that fails everywhere shows nothing.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scoring.pools import StartedPool, pool_in, rows_of
from ycore.config.schema import RewardConfig, RewardSandbox, RewardSettings, SandboxSettings
from ycore.errors import RewardError
from ycore.rewards.worker_client import check_reward
from ycore.run.files import RunFolder
from ycore.sandbox import Confinement, Level, Limits, confined_worker, namespaces
from ycore.sandbox.confined_worker import ConfinedWorker
from ycore.sandbox.level import level_refusal
from ycore.types import Score

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux confines processes")

ATTEMPTS = """
import ctypes, json, os, signal, socket, sqlite3, subprocess, sys, tempfile, threading, time
from pathlib import Path

here = Path(__file__).resolve().parent
RUN, PORT, PARENT = here / "runs" / "one", int((here / "port").read_text()), int((here / "parent").read_text())

def reads(path):
    return Path(path).read_text() != ""

def lists_run():
    return "run.json" in os.listdir(RUN)

def reads_tokens_of_the_parent():
    return b"PATH=" in Path(f"/proc/{PARENT}/environ").read_bytes()

def has_tokens():
    return "HF_TOKEN" in os.environ

def connects():
    with socket.create_connection(("127.0.0.1", PORT), timeout=2) as one:
        return one.recv(5) == b"hello"

def connects_by_name():
    with socket.socket(socket.AF_UNIX) as one:
        os.chdir(here)  # a socket's whole path may be too long
        one.connect("inner/engine.sock")
        return one.recv(5) == b"hello"

def signals():
    os.kill(PARENT, 0)
    return True

def writes_beside_itself():
    (here / "written").write_text("mine")
    return (here / "written").exists()

def sees_others():
    return len([name for name in os.listdir("/proc") if name.isdigit()]) > 3

ATTEMPTED = {
    "lists the run": lists_run,
    "reads the run": lambda: reads(RUN / "metrics.jsonl"),
    "reads dot files": lambda: reads(here / ".env"),
    "reads inner dot files": lambda: reads(here / "inner" / ".netrc"),
    "reads elsewhere": lambda: reads(here.parent / "elsewhere" / "secret"),
    "reads the parent's tokens": reads_tokens_of_the_parent,
    "has tokens": has_tokens,
    "connects": connects,
    "connects to a socket file": connects_by_name,
    "signals": signals,
    "writes beside itself": writes_beside_itself,
    "sees other processes": sees_others,
}

def threads():
    done = []
    for thread in [threading.Thread(target=done.append, args=(n,)) for n in range(8)]:
        thread.start()
        thread.join()
    return sorted(done) == list(range(8))

def multiprocessing_pool():
    import multiprocessing
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(abs, [-1, -2]) == [1, 2]

def numpy_multiplies():
    import numpy
    return float((numpy.eye(300) @ numpy.eye(300)).sum()) == 300

def asyncio_and_a_child():
    import asyncio
    async def echo():
        child = await asyncio.create_subprocess_exec("echo", "hi", stdout=-1)
        return (await child.communicate())[0]
    return asyncio.run(echo()) == b"hi\\n"

def sqlite():
    with tempfile.TemporaryDirectory() as folder:
        base = sqlite3.connect(Path(folder) / "a.db")
        base.execute("create table t (a)")
        base.execute("insert into t values (7)")
        base.commit()
        return base.execute("select a from t").fetchall() == [(7,)]

def copies():
    import shutil
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(here / "words.txt", folder)
        return os.listdir(folder) == ["words.txt"]

HONEST = {
    "reads a file beside it": lambda: reads(here / "words.txt"),
    "reads from the working folder": lambda: reads("words.txt"),
    "writes a temporary file": lambda: Path(tempfile.mkdtemp(), "a").write_text("x") == 1,
    "writes at home": lambda: Path("~/cache").expanduser().write_text("x") == 1,
    "threads": threads,
    "numpy": numpy_multiplies,
    "asyncio, subprocess": asyncio_and_a_child,
    "sqlite": sqlite,
    "shutil.copy": copies,
    "another Python": lambda: subprocess.run([sys.executable, "-c", "import json"]).returncode == 0,
    "multiprocessing": multiprocessing_pool,
}

def tried(names):
    outcomes = {}
    for name, attempt in names.items():
        try:
            outcomes[name] = bool(attempt())
        except Exception as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
    return outcomes

def attempts(completions, **columns):
    raise RuntimeError("|" + "".join("1" if found is True else "0" for found in tried(ATTEMPTED).values()))

def honest(completions, **columns):
    print(json.dumps(tried(HONEST)), flush=True)
    return [float(all(found is True for found in tried(HONEST).values())) for _ in completions]

def connected(completions, **columns):
    return [float(connects()) for _ in completions]

if __name__ == "__main__":
    print(json.dumps(tried(ATTEMPTED if sys.argv[1] == "attempts" else HONEST)))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a working folder with a run, rewards, secrets and a server; a token is in this process's environment."""
    place = tmp_path / "work"
    (place / "runs" / "one").mkdir(parents=True)
    (place / "inner").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("s")
    for name in (
        "runs/one/run.json",
        "runs/one/metrics.jsonl",
        ".env",
        "inner/.netrc",
        "words.txt",
    ):
        (place / name).write_text("some\n")
    (place / "theirs.py").write_text(ATTEMPTS)
    (place / "parent").write_text(str(os.getpid()))
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("PYTHONPATH", "")
    server, local = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    local.bind("inner/engine.sock")
    local.listen()
    (place / "port").write_text(str(server.getsockname()[1]))
    with server, local:
        for listener in (server, local):
            _greet_forever(listener)
        yield place


def _greet_forever(server: socket.socket) -> None:
    import threading

    def greet() -> None:
        try:
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(b"hello")
        except OSError:
            return

    threading.Thread(target=greet, daemon=True).start()


def outside(folder: Path, function: str) -> dict[str, Any]:
    environment = os.environ | {"HF_TOKEN": "x"}
    command = [sys.executable, str(folder / "theirs.py"), function]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environment, cwd=folder
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def pool_of(
    *specs: RewardConfig,
    level: str = "auto",
    workers: int = 1,
    deadline_s: float = 30.0,
    memory_gib: float = 4.0,
) -> StartedPool:
    return pool_in(
        Path("runs/one"),
        *specs,
        settings=RewardSettings(workers=workers, deadline_s=deadline_s, memory_gib=memory_gib),
        level=level,
    )


def scores_of(pool: StartedPool, *groups: list[str]) -> list[list[list[Score]]]:
    async def run() -> list[list[list[Score]]]:
        async with asyncio.timeout(400), pool:
            return [
                await rows_of(pool, ["?"] * len(group), list(group), [[1]] * len(group), {})
                for group in groups
            ]

    return asyncio.run(run())


LEVELS = ["namespaces", "landlock"]


@pytest.mark.parametrize("level", LEVELS)
def test_what_a_reward_must_not_do_it_cannot(folder: Path, level: str) -> None:
    control = outside(folder, "attempts")
    assert all(outcome is True for outcome in control.values()), control
    (folder / "written").unlink()
    ((score,),) = scores_of(
        pool_of(RewardConfig(reward="theirs.py:attempts"), level=level), ["a"]
    )[0]
    assert score.problem is not None
    got = score.problem.rpartition("|")[2]
    through = [name for name, result in zip(control, got, strict=True) if result != "0"]
    assert through == (
        ["lists the run"] if level == "landlock" else []
    )  # that level does not hide names
    assert not (folder / "written").exists()


@pytest.mark.parametrize("level", LEVELS)
def test_honest_rewards_work(folder: Path, level: str) -> None:
    text = ATTEMPTS
    if level == "landlock":  # which has no /dev/shm, where multiprocessing keeps its locks
        text = text.replace('    "multiprocessing": multiprocessing_pool,\n', "")
    (folder / "theirs.py").write_text(text)
    assert all(outcome is True for outcome in outside(folder, "honest").values())
    scores = scores_of(pool_of(RewardConfig(reward="theirs.py:honest"), level=level), ["a"])
    assert scores == [[[Score(1.0)]]], (folder / "runs/one/logs/rewards.log").read_text()


def test_the_check_before_a_run_is_confined_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail = "got = ''.join(str(int(found is True)) for found in tried(ATTEMPTED).values())\n"
    tail += "raise RuntimeError(f'uid {os.getuid()} |{got}')\n"
    (folder / "eager.py").write_text(ATTEMPTS.partition("if __name__")[0] + tail)
    with pytest.raises(RewardError, match="RuntimeError: uid") as caught:
        check_reward(RewardConfig(reward="eager.py:attempts"), [], run_folder=Path("runs/one"))
    assert set(str(caught.value).rpartition("|")[2]) == {"0"}
    if os.geteuid() == 0:
        assert "uid 0 " not in str(caught.value)


def test_a_file_that_goes_away_while_it_is_being_hidden_refuses_no_reward(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run in the folder writes files under names that last for milliseconds."""
    assert (
        level_refusal(Level.NAMESPACES) is None
    )  # and is remembered, so that the first start below is the reward's
    (folder / "plain.py").write_text(
        "def one(completions, **columns):\n    return [1.0 for _ in completions]\n"
    )
    binds, starts = namespaces._binds, list[int]()

    def with_one_that_went(visible: Iterable[Path], hidden: Iterable[Path]) -> list[str]:
        starts.append(len(starts))
        gone = (
            ["--ro-bind", os.devnull, str(folder / ".run.json.1")] if len(starts) == 1 else []
        )
        return [*binds(visible, hidden), *gone]

    monkeypatch.setattr(namespaces, "_binds", with_one_that_went)
    sandbox = SandboxSettings(level="namespaces")
    check_reward(
        RewardConfig(reward="plain.py:one"), [], sandbox=sandbox, run_folder=Path("runs/one")
    )
    assert starts == [0, 1]


def test_a_reward_sees_the_network_or_more_files_where_the_recipe_says_so(folder: Path) -> None:
    opened = RewardConfig(reward="theirs.py:connected", sandbox=RewardSandbox(network=True))
    closed = RewardConfig(reward="theirs.py:connected")
    elsewhere = folder.parent / "elsewhere"
    (folder / "more.py").write_text(
        "from pathlib import Path\n"
        "def more(completions, **columns):\n"
        f"    return [float(Path({str(elsewhere / 'secret')!r}).read_text() == 's')]\n"
    )
    readable = RewardConfig(reward="more.py:more", sandbox=RewardSandbox(read=[str(elsewhere)]))
    hidden = RewardConfig(reward="more.py:more")
    ((scores,),) = scores_of(pool_of(opened, closed, readable, hidden), ["a"])
    assert [score.value for score in scores] == [1.0, None, 1.0, None]


FORGERS = """
import json, os

def _write(text):
    for number in range(3, 64):
        try:
            os.write(number, text)
        except OSError:
            pass

def forger(completions, how, **columns):
    if how[0] == "ids":
        _write(b'{"id": 1, "values": [9.0, 9.0], "problems": [null, null]}\\n')
    if how[0] == "nan":
        _write(b'{"nonce": "0", "values": [NaN, 9.0], "problems": [null, null]}\\n')
    if how[0] == "strings":
        _write(b'{"nonce": "0", "values": ["9", "9"], "problems": [null, null]}\\n')
    if how[0] == "flood":
        for _ in range(1000):
            _write(b"9" * 100_000)
    if how[0] == "after":
        if os.fork() == 0:
            import time
            time.sleep(0.3)
            _write(b'{"nonce": "0", "values": [9.0], "problems": [null]}\\n' * 2)
            os._exit(0)
    return [1.0 for _ in completions]
"""


def test_a_reward_that_writes_answers_of_its_own_masks_its_items_and_the_next_call_scores(
    folder: Path,
) -> None:
    (folder / "forgers.py").write_text(FORGERS)

    async def run() -> None:
        pool = pool_of(RewardConfig(reward="forgers.py:forger"), deadline_s=20.0)
        async with asyncio.timeout(400), pool:
            for forgery in ("ids", "nan", "strings", "flood", "after"):
                columns = {"how": [forgery, forgery]}
                scores = await rows_of(pool, ["?"] * 2, ["a", "b"], [[1]] * 2, columns)
                expected = 1.0 if forgery == "after" else None
                assert [score.value for (score,) in scores] == [expected] * 2, forgery
                if forgery == "after":
                    await asyncio.sleep(1.0)  # what comes unasked must not answer the next call
                scores = await rows_of(pool, ["?"], ["a"], [[1]], {"how": ["no"]})
                assert [score.value for (score,) in scores] == [1.0], forgery

    asyncio.run(run())


def test_a_log_of_many_processes_keeps_what_was_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each completion has a process of its own, whose output is bounded alone."""
    log = tmp_path / "logs" / "tools.log"
    monkeypatch.setattr(confined_worker, "MAX_LOG_BYTES", 8192)
    for number in range(50):
        confinement = Confinement(Level.NONE, "x", limits=Limits(output=1000))
        worker = ConfinedWorker[None]({}, lambda *_: None, confinement, log=log)
        worker.kind = "worker"
        for _ in range(3):
            worker._write_log(f"line of {number}\n".encode() * 40)
        assert log.stat().st_size < 8192 + 1000
    lines = log.read_text().splitlines()
    assert lines[0].startswith("older lines are gone: a log keeps")
    assert sum("older lines are gone" in line for line in lines) == 1
    assert "line of 49" in lines and "line of 30" not in lines


HOGS = """
import os, sys, tempfile

def hog(completions, how, **columns):
    if how[0] == "log":
        for number in (1, 2):
            try:
                os.ftruncate(number, 0)
            except OSError:
                pass
        for _ in range(200):
            os.write(1, b"x" * 200_000)
    if how[0] == "memory":
        held = [bytearray(os.urandom(1)) * (64 << 20) for _ in range(40)]
    if how[0] == "shared":
        import mmap
        held = [mmap.mmap(-1, 64 << 20) for _ in range(40)]
        for one in held:
            one.write(b"x" * (64 << 20))
    if how[0] == "disk":
        with open(tempfile.mktemp(), "wb") as file:
            for _ in range(100):
                file.write(b"x" * (8 << 20))
                file.flush()
    if how[0] == "files":
        folder = tempfile.mkdtemp()
        for number in range(30_000):
            open(os.path.join(folder, str(number)), "w").close()
    return [1.0 for _ in completions]
"""


@pytest.mark.parametrize("level", LEVELS)
def test_memory_disk_files_and_output_are_bounded(folder: Path, level: str) -> None:
    (folder / "hogs.py").write_text(HOGS)
    log = RunFolder(folder / "runs/one").log("rewards")
    log.parent.mkdir()
    log.write_text("before\n")

    async def run() -> None:
        pool = pool_of(RewardConfig(reward="hogs.py:hog"), level=level, memory_gib=0.5)
        async with asyncio.timeout(400), pool:
            for resource in ("memory", "shared", "disk", "files", "log"):
                scores = await rows_of(pool, ["?"], ["a"], [[1]], {"how": [resource]})
                assert (scores[0][0].value is None) == (resource != "log"), resource

    asyncio.run(run())
    assert log.read_text().startswith("before\n") and log.stat().st_size < 20 * 2**20
    assert "dropped" in log.read_text()[-200:]


INTO_A_CONTAINER = """
import ctypes, json, os, struct, sys
from ycore.sandbox.stage import install_filter
kept = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}  # moby/moby, oci/caps/defaults.go
for number in set(range(64)) - kept:
    ctypes.CDLL(None).prctl(24, number, 0, 0, 0)
allow, refuse, absent = (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x50026)
program = [(0x20, 0, 0, 0)]
for number in (272, 308, 165, 166, 155):  # unshare, setns, mount, umount2, pivot_root
    program += [(0x15, 0, 1, number), refuse]
for number in (435, *json.loads(sys.argv[1])):  # clone3, and what the test says
    program += [(0x15, 0, 1, number), absent]
program += [(0x15, 0, 3, 56), (0x20, 0, 0, 16), (0x45, 0, 1, 0x7E020000), refuse, allow]
install_filter(b"".join(struct.pack("<HBBI", *one) for one in program))
os.execv(sys.executable, [sys.executable, "-c", sys.argv[2]])
"""

CHECK_AND_SCORE = """
import asyncio, json
from pathlib import Path
from ycore.config.schema import RunConfig
from ycore.rewards.worker_client import check_reward
from ycore.run.files import RunFolder
from ycore.scoring.scoring import RewardPool
from ycore.sandbox.level import choose_level
config = RunConfig(model="m", dataset="d", output="run", reward_workers={"workers": 1},
    rewards=[{"reward": "numerical.py:mean"}])
(spec,), folder = config.rewards, RunFolder(Path("run"))

async def score():
    pool = RewardPool(config, folder, [spec])
    try:
        offered = {"prompts": ["?"], "completions": ["a"], "completion_ids": [[1]]}
        return await pool.score(0, offered, step=0)
    finally:
        await pool.close()

check_reward(spec, [])
scores = asyncio.run(score())
print(json.dumps({"level": choose_level().level, "line": choose_level().line,
    "value": scores[0].value, "log": folder.log("rewards").read_text()}))
"""

NUMERICAL = """
def mean(completions, **columns):
    import numpy, os, sqlite3, subprocess, sys
    subprocess.run([sys.executable, "-c", "import decimal"], check=True)
    print("uid", os.getuid(), flush=True)
    return [float(numpy.ones(3).mean())] * len(completions)
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or os.uname().machine != "x86_64",
    reason="imitates root in a container, x86-64",
)
@pytest.mark.parametrize("also_absent", [[], [444]])
def test_with_a_containers_rights_a_worker_is_another_user_or_there_is_none(
    folder: Path, also_absent: list[int]
) -> None:
    """Docker's default: no namespaces, 14 capabilities. 444 is Landlock's first system call, which old kernels lack."""
    (folder / "numerical.py").write_text(NUMERICAL)
    repository = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", INTO_A_CONTAINER, json.dumps(also_absent), CHECK_AND_SCORE],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": repository},
    )
    if also_absent:
        last_line = done.stderr.splitlines()[-1]
        assert "ConfigError: code that is not ycore's own needs a sandbox" in last_line
        assert last_line.endswith("or --sandbox none")
        return
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert (seen["level"], seen["value"]) == ("landlock", 1.0)
    assert "uid 0" not in seen["log"] and "sandbox level landlock" in seen["log"]
