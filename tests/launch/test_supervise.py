"""Engines and trainers that die or hang in the midst of a run: what is started again, what ends it, what it says.

The engines are processes of the test's own that answer `/health` over a unix socket. Clients of an engine are tested in
`tests/engine/test_vllm_engine.py`, and a real engine that is killed in a round in `test_engine_restart.py` there.
"""

import io
import math
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny_model import write_tiny_model
from ycore.config.schema import (
    EngineSettings,
    RewardConfig,
    RunConfig,
    SamplingSettings,
    TuneConfig,
)
from ycore.engine import commands
from ycore.engine.commands import EngineSpec
from ycore.engine.server import is_healthy
from ycore.errors import EngineError, TrainerError
from ycore.launch import launcher
from ycore.launch.engine_watch import LiveEngine
from ycore.launch.launcher import RunKind, run_worker
from ycore.launch.supervise import limits_of
from ycore.plan.devices import usable_cores
from ycore.run.files import RunFolder, read_json
from ycore.run.metrics import read_metrics
from ycore.run.reports import RUN_MARKER, kill_tree

ENGINE = """
import http.server, os, socketserver, subprocess, sys, time
part = subprocess.Popen(["sleep", "600"])
class Server(socketserver.ThreadingUnixStreamServer):
    def get_request(self):
        return super().get_request()[0], ("engine", 0)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{os.getpid()} {part.pid}".encode())
Server(sys.argv[1], Handler).serve_forever()
"""
COMPILE = "subprocess.Popen(['sleep', '1.5'])"
WORKER = """
import http.client, os, signal, socket, sys, time
from pathlib import Path
from ycore.run.reports import dump_stacks_on_signal
from ycore.run.files import RunFolder
from ycore.run.reports import kill_tree
from ycore.run.metrics import MetricsWriter
dump_stacks_on_signal()
root = Path(sys.argv[1])
metrics = MetricsWriter(root / "metrics.jsonl")

def ask(number=0):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection("engine", timeout=5)
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.connect(str(RunFolder(root).socket(f"rollout-{number}")))
            connection.request("GET", "/health")
            return [int(word) for word in connection.getresponse().read().split()]
        except OSError:
            time.sleep(0.05)
    sys.exit("the engine did not come")

def ask_another(than, number=0):
    while (pids := ask(number)) == than:
        time.sleep(0.05)
    return pids

def step(number):
    (root / "step_began").touch()
    metrics.write({"step": number, "reward": 0.5, "ycore/time/step": 0.1})
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(tmp_path: Path, model: Path) -> RunConfig:
    return RunConfig(
        model=str(model),
        dataset="task:addition",
        rewards=[RewardConfig(reward="exact_answer")],
        output=str(tmp_path / "r"),
        steps=3,
        engine=EngineSettings(kind="vllm", count=1, health_timeout_s=1.0),
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a worker of this code beside the test's engines; what was shown."""
    root = Path(launcher.__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    monkeypatch.setattr("ycore.engine.kinds.is_vllm_installed", lambda: True)
    command = [sys.executable, "-c", ENGINE]
    monkeypatch.setattr(
        commands, "engine_command", lambda engine: [*command, str(engine.socket)]
    )
    stream = io.StringIO()

    def work(code: str, config: RunConfig, **options: Any) -> str:
        (tmp_path / "made_worker.py").write_text(
            textwrap.dedent(WORKER) + textwrap.dedent(code)
        )
        try:
            with redirect_stdout(stream):
                run_worker(RunKind("trainer", "made_worker"), config, resume=False, **options)
        finally:
            assert_nothing_is_left(config)
        return stream.getvalue()

    return work


def with_engine(config: RunConfig, **changes: Any) -> RunConfig:
    return config.model_copy(update={"engine": config.engine.model_copy(update=changes)})


def assert_nothing_is_left(config: RunConfig) -> None:
    folder = RunFolder(Path(config.output))
    for process in psutil.process_iter():
        try:
            assert process.environ().get(RUN_MARKER) != folder.run_id
        except psutil.Error:
            continue
    assert not folder.sockets.exists()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("os.kill(server, signal.SIGKILL)", r"rollout-0 ended with killed by SIGKILL"),
        (
            "os.kill(part, signal.SIGKILL)",
            r"rollout-0 lost its process sleep \(\d+\), killed or out of memory",
        ),
        (
            "os.kill(server, signal.SIGSTOP)",
            r"rollout-0 has not answered /health for \d+ s \(engine.health_timeout_s\)",
        ),
    ],
    ids=["server-killed", "part-killed", "server-stopped"],
)
def test_an_engine_in_trouble_is_started_again(
    run: Callable[..., str], config: RunConfig, harm: str, said: str
) -> None:
    code = f"""
        time.sleep(2)  # the launcher has seen that it is ready, and of what it is made
        server, part = ask()
        {harm}
        again = ask_another([server, part])
        assert not Path(f"/proc/{{part}}").exists() or Path(f"/proc/{{part}}/stat").read_text().split()[2] == "Z"
        step(1)
        time.sleep(2.5)  # the launcher sees that it is back
    """
    output = run(code, config)
    assert re.search(said + r"(:.*)?; starting it again \(1 of 3\)", output), output
    assert "rollout-0 is back after" in output
    stacks = list(RunFolder(Path(config.output)).logs.glob("stacks-*.txt"))
    assert bool(stacks) == ("STOP" in harm)


def test_only_the_dead_engine_is_started_again(
    run: Callable[..., str], config: RunConfig
) -> None:
    code = """
        time.sleep(2)
        dead, alive = ask(0), ask(1)
        os.kill(dead[0], signal.SIGKILL)
        ask_another(dead, 0)
        assert ask(1) == alive
    """
    output = run(code, with_engine(config, count=2))
    assert output.count("starting it again") == 1


def test_the_budget_of_restarts_is_the_runs(run: Callable[..., str], config: RunConfig) -> None:
    code = """
        pids = None
        while True:
            pids = ask_another(pids)
            time.sleep(1.5)
            os.kill(pids[0], signal.SIGKILL)
    """
    with pytest.raises(
        EngineError,
        match=r"rollout-0 ended with killed by SIGKILL.*the run's 1 restarts are used up.*`ycore resume ",
    ):
        run(code, with_engine(config, restarts=1))


def test_a_compiler_that_an_engine_starts_for_its_first_request_is_none_of_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    slow = "import time; time.sleep(2.5)\n" + ENGINE.replace(
        "def do_GET(self):", f"def do_GET(self):\n        {COMPILE}"
    )
    with tempfile.TemporaryDirectory(prefix="yc-") as place:
        socket = Path(place) / "e.sock"
        monkeypatch.setattr(
            commands, "engine_command", lambda engine: [sys.executable, "-c", slow, str(socket)]
        )
        spec = EngineSpec(
            name="rollout-0", model=tmp_path, socket=socket, temporary=tmp_path, run_id=folder.run_id,
            dtype="float32", max_model_len=64, max_num_seqs=1, seed=0,
        )  # fmt: skip
        folder.logs.mkdir()
        engine = LiveEngine(spec, folder, health_timeout_s=60.0)
        try:
            # A client asks again and again, and so sees before the launcher does that the engine is ready.
            wait_for(lambda: is_healthy(socket) or engine.poll())
            wait_for(lambda: engine.poll() or engine.is_ready)
            time.sleep(2.0)
            assert engine.find_fault() is None
        finally:
            kill_tree(engine.processes()[0].pid, also=engine.processes(), wait_s=10)


def wait_for(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


DIES_ONCE = """
    import subprocess
    once = root / "once"
    if not once.exists():
        once.touch()
        (root / "left").write_text(str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid))
        time.sleep(1.5)
        (root / "engine").write_text(str(ask()))
        step(1)
        os.kill(os.getpid(), signal.SIGKILL)
    left = Path(f"/proc/{(root / 'left').read_text()}")
    assert not left.exists() or (left / "stat").read_text().split()[2] == "Z", "something of the dead trainer lives"
    assert (root / "engine").read_text() == str(ask()), "the engine was started again too"
    step(2)
"""


def test_a_dead_trainer_is_started_again_beside_its_engines(
    run: Callable[..., str], config: RunConfig
) -> None:
    output = run(DIES_ONCE, config.model_copy(update={"restarts": 1}))
    assert "trainer ended with killed by SIGKILL" in output
    assert "in step 2; resuming from the newest checkpoint (1 of 1)" in output
    assert [row["step"] for row in read_metrics(RunFolder(Path(config.output)).metrics)] == [
        1,
        2,
    ]


def test_without_restarts_the_error_names_the_command_that_goes_on(
    run: Callable[..., str], config: RunConfig
) -> None:
    with pytest.raises(
        TrainerError,
        match=r"killed by SIGKILL \(see .*trainer.log\), in step 2; `ycore resume .*/r` continues$",
    ):
        run(
            "print({'loss': '0.5', 'entropy': '2.1'}, flush=True)\n"
            + textwrap.dedent(DIES_ONCE),
            config,
        )


def test_the_step_is_told_from_the_checkpoint_on_that_the_trainer_goes_on_from(
    run: Callable[..., str], config: RunConfig
) -> None:
    code = """
    checkpoint = root / "checkpoints" / "checkpoint-2"
    if checkpoint.is_dir():
        sys.exit("it ends before its first step")
    ask()
    step(1)
    step(2)
    checkpoint.mkdir(parents=True)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    with pytest.raises(TrainerError, match=r"it ends before its first step.*, in step 3"):
        run(code, config.model_copy(update={"restarts": 1}))


def test_a_stopped_trainer_is_named_with_its_step(
    run: Callable[..., str], config: RunConfig
) -> None:
    code = """
        def busy_with_step_two():
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60)
        step(1)
        busy_with_step_two()
    """
    with pytest.raises(
        TrainerError, match=r"trainer has not finished a step for \d+ s .*stacks-step-2"
    ):
        run(code, config.model_copy(update={"step_timeout_s": 1.0}))
    stacks = (RunFolder(Path(config.output)).logs / "stacks-step-2.txt").read_text()
    assert "busy_with_step_two" in stacks, "it was let go on to say where it was"
    assert "cannot be asked for its stack; state S (sleeping)" in stacks, (
        "the engine has no handler, and lives"
    )


def test_a_trainer_may_take_longer_to_start_than_for_a_step(
    run: Callable[..., str], config: RunConfig
) -> None:
    output = run("time.sleep(3); step(1)", config.model_copy(update={"step_timeout_s": 1.0}))
    assert "not finished a step" not in output


def test_a_trainer_that_never_begins_is_named_with_the_limit_of_its_start(
    run: Callable[..., str], config: RunConfig
) -> None:
    with pytest.raises(
        TrainerError, match=r"trainer has been starting for \d+ s \(engine.start_timeout_s\)"
    ):
        run("time.sleep(60)", with_engine(config, start_timeout_s=4.0))


def test_a_trainer_that_does_not_get_on_is_named_with_its_stack(
    run: Callable[..., str], config: RunConfig
) -> None:
    code = """
        def waits_for_godot():
            time.sleep(60)
        step(1)
        waits_for_godot()
    """
    short = config.model_copy(update={"step_timeout_s": 2.0})
    message = r"trainer has not finished a step for \d+ s \(step_timeout_s\), in step 2 \(it was .+; the stack of every"
    with pytest.raises(TrainerError, match=message):
        run(code, short)
    stacks = (RunFolder(Path(config.output)).logs / "stacks-step-2.txt").read_text()
    assert "waits_for_godot" in stacks and "; it was " in stacks.splitlines()[0]


MEASURED = """
import json, threading
from ycore.run.interrupt import on_stop
from ycore.run.metrics import read_metrics
stop = threading.Event()
on_stop(stop.set)
config = json.loads((root / "run.json").read_text())["config"]
devices = config["engine"]["devices"]
train_s, round_s = 100 / (4 - devices), 900 / devices
"""


def test_a_run_moves_a_core_once_and_takes_every_step_once(
    run: Callable[..., str], config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds of its steps are made up; that it ends, starts again, and with what, is not."""
    real = usable_cores()
    cores = tuple(real[number % len(real)] for number in range(4))
    monkeypatch.setattr("ycore.launch.layout.usable_cores", lambda: cores)
    code = f"""{MEASURED}
for number in range(len(read_metrics(root / "metrics.jsonl")) + 1, config["steps"] + 1):
    (root / "step_began").touch()
    metrics.write({{
        "step": number, "reward": 0.5, "ycore/engine_devices": float(devices), "ycore/idle_share": 0.0,
        "ycore/time/step": max(train_s, round_s), "ycore/time/train": train_s, "ycore/time/round": round_s,
    }})
    time.sleep(0.05)
    if stop.is_set():
        sys.exit(130)
"""
    changes = {"steps": 60, "sampling": SamplingSettings(max_staleness=2)}
    config = with_engine(config, count="auto", devices=2, rebalance=True)
    output = run(code, config.model_copy(update=changes))
    rows = read_metrics(Path(config.output) / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 61))
    devices = [int(row["ycore/engine_devices"]) for row in rows]
    assert devices == sorted(devices) and set(devices) == {2, 3}
    assert devices.count(2) >= 11
    sentence = "training waited 89% of the last 10 steps; engine.devices=3 would take about 300.0 s a step"
    assert output.count(sentence) == 1
    assert "finished after 60 steps" in output
    stored = read_json(RunFolder(Path(config.output)).config)["config"]
    assert stored["engine"]["devices"] == 3 and stored["engine"]["rebalance"]


def test_a_run_that_may_not_move_says_once_what_would_be_better(
    run: Callable[..., str], config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = usable_cores()
    cores = tuple(real[number % len(real)] for number in range(4))
    monkeypatch.setattr("ycore.launch.layout.usable_cores", lambda: cores)
    code = f"""{MEASURED}
for number in range(1, 31):
    (root / "step_began").touch()
    metrics.write({{
        "step": number, "reward": 0.5, "ycore/engine_devices": float(devices), "ycore/idle_share": 0.0,
        "ycore/time/step": max(train_s, round_s), "ycore/time/train": train_s, "ycore/time/round": round_s,
    }})
    time.sleep(0.05)
"""
    changes = {"steps": 30, "sampling": SamplingSettings(max_staleness=2)}
    config = with_engine(config, count="auto", devices=2)
    output = run(code, config.model_copy(update=changes))
    assert output.count("engine.devices=3 would take") == 1 and "finished after 30" in output


def test_a_run_on_given_examples_has_no_limit_before_its_first_step() -> None:
    """`ycore dpo --precompute-ref-log-probs` asks the reference about every row before the first step."""
    settings = {"model": "m", "dataset": "d", "output": "o"}
    limits = limits_of(TuneConfig.model_validate(settings | {"algorithm": "dpo"}))
    assert limits.start_s == math.inf and limits.step_s == 3600
    rollouts = settings | {"rewards": [{"reward": "exact_answer"}], "step_timeout_s": 7}
    assert limits_of(RunConfig.model_validate(rollouts)).step_s == 7
