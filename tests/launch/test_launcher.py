"""A whole run with a worker of the test's own in the trainer's place: every way it can end."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import pytest

from ycore.config.schema import EngineSettings, RewardConfig, RunConfig
from ycore.engine import commands
from ycore.errors import (
    EngineError,
    Interrupted,
    MachineLost,
    RunError,
    TrainerError,
    UserError,
)
from ycore.launch import launcher, layout, supervise
from ycore.launch.engine_watch import EngineWatch
from ycore.launch.launcher import TRAINER, LocalRun, RunKind, run_worker
from ycore.launch.layout import Machine
from ycore.launch.processes import worker_environment
from ycore.run.files import RunFolder, read_json
from ycore.run.reports import RUN_MARKER

WITHIN_S = 120.0

STEPS = """
    import json, os, subprocess, sys, time
    from pathlib import Path
    from ycore.run.metrics import MetricsWriter
    root = Path(sys.argv[1])
    metrics = MetricsWriter(root / "metrics.jsonl")
    for step in range(1, 4):
        metrics.write({"step": step, "reward": step / 4, "ycore/time/step": 0.1})
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    shape = {
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "hidden_size": 8,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
    (folder / "tokenizer.json").write_text("{}")
    header = b"{}"
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


@pytest.fixture
def config(tmp_path: Path, model: Path) -> RunConfig:
    return RunConfig(
        model=str(model),
        dataset="task:addition",
        rewards=[RewardConfig(reward="exact_answer")],
        output=str(tmp_path / "run"),
        steps=3,
        engine=EngineSettings(kind="transformers"),
    )


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunKind]:
    """Make a worker module that takes three steps and then does what it is told."""
    root = Path(launcher.__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")

    def make(code: str, **changes: Any) -> RunKind:
        (tmp_path / "made_worker.py").write_text(textwrap.dedent(STEPS) + textwrap.dedent(code))
        return RunKind(**{"name": "trainer", "module": "made_worker", **changes})

    return make


def run(worker: RunKind, config: RunConfig) -> tuple[dict[str, Any], str]:
    stream = io.StringIO()
    with redirect_stdout(stream):
        summary = run_worker(worker, config, resume=False)
    return summary, stream.getvalue()


def assert_nothing_is_left(config: RunConfig) -> None:
    folder = RunFolder(Path(config.output))
    for process in psutil.process_iter():
        try:
            assert process.environ().get(RUN_MARKER) != folder.run_id
        except psutil.Error:
            continue
    assert not folder.sockets.exists()
    assert not folder.shared_memory.exists()


def test_a_run_that_finishes(worker: Callable[..., RunKind], config: RunConfig) -> None:
    code = """
        engines = json.loads((root / "engines.json").read_text())
        assert engines["kind"] == "transformers" and engines["engines"] == [] and Path(engines["model"]).is_dir()
        assert os.environ["YCORE_RUN"]
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    """
    summary, output = run(worker(code), config)
    assert summary == read_json(RunFolder(Path(config.output)).summary)
    assert (summary["status"], summary["steps"], summary["reward_first"]) == (
        "finished",
        3,
        0.25,
    )
    assert RunFolder(Path(config.output)).curve.is_file()
    assert "step 3/3  reward 0.750" in output
    assert "transformers" in output
    assert_nothing_is_left(config)


def test_one_rank_on_a_machine_with_several_devices_sees_one(
    worker: Callable[..., RunKind], config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        layout, "this_machine", lambda: Machine(cores=(0, 1), devices=("2", "0"))
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    code = """assert os.environ["CUDA_VISIBLE_DEVICES"] == "2", os.environ["CUDA_VISIBLE_DEVICES"]"""
    summary, _ = run(
        worker(code), config.model_copy(update={"processes": 1, "dtype": "float32"})
    )
    assert summary["status"] == "finished"


def test_a_lock_that_ranks_would_wait_for_ends_the_run_before_they_start(
    worker: Callable[..., RunKind],
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock = tmp_path / "extensions" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parents[1]))
    monkeypatch.setattr(layout, "find_spec", lambda name: name)
    monkeypatch.setattr(layout, "this_machine", lambda: Machine(cores=(0, 1), devices=()))
    sharded = config.model_copy(update={"accelerate": "zero2", "processes": 2})
    with pytest.raises(RunError, match=f"; rm {lock}"):
        run(worker(""), sharded)
    assert not RunFolder(Path(config.output)).log("trainer").exists()
    assert_nothing_is_left(config)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_trainer_keeps_what_it_frees_on_a_cpu(
    on_cpu: bool, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MALLOC_TOP_PAD_", raising=False)
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "7")
    environment = worker_environment(config, on_cpu=on_cpu)
    assert ("MALLOC_TOP_PAD_" in environment) == on_cpu
    assert environment["MALLOC_MMAP_MAX_"] == "7", "what the user has set counts first"


def test_run_json_has_the_number_of_processes(
    worker: Callable[..., RunKind], config: RunConfig
) -> None:
    """So that a resumed run has as many, wherever it goes on."""
    run(worker(""), config)
    assert config.processes == "auto"
    assert read_json(RunFolder(Path(config.output)).config)["config"]["processes"] == 1


def test_an_evaluators_result_is_part_of_the_summary(
    worker: Callable[..., RunKind], config: RunConfig
) -> None:
    code = """(root / "eval.json").write_text(json.dumps({"pass@1": 0.5}))"""
    summary, output = run(worker(code, name="evaluator", result_file="eval.json"), config)
    assert summary["pass@1"] == 0.5
    assert "prompts 3  reward 0.750" in output
    assert "reward_first" not in summary
    assert not RunFolder(Path(config.output)).curve.exists()


def test_a_trainer_that_fails_is_told_with_its_last_line_and_log(
    worker: Callable[..., RunKind], config: RunConfig
) -> None:
    with pytest.raises(
        TrainerError,
        match=r"trainer ended with exit status 1: ValueError: no good \(see .*trainer\.log\)",
    ):
        run(worker("raise ValueError('no good')"), config)
    summary = read_json(RunFolder(Path(config.output)).summary)
    assert (summary["status"], summary["steps"]) == ("failed", 3)
    assert "ValueError: no good" in summary["error"]
    assert_nothing_is_left(config)


def test_a_trainer_that_is_killed_is_told(
    worker: Callable[..., RunKind], config: RunConfig
) -> None:
    with pytest.raises(TrainerError, match="killed by SIGKILL"):
        run(worker("os.kill(os.getpid(), 9)"), config)
    assert_nothing_is_left(config)


def test_a_users_mistake_is_passed_on_as_it_is(
    worker: Callable[..., RunKind], config: RunConfig
) -> None:
    code = "print('error: row 3 has no prompt; fill it in', file=sys.stderr); sys.exit(2)"
    with pytest.raises(UserError, match=r"^row 3 has no prompt; fill it in$"):
        run(worker(code), config)


def test_a_folder_that_is_gone_leaves_the_cause_in_its_line(
    worker: Callable[..., RunKind], config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, value: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(launcher, "write_json_atomic", fails)
    monkeypatch.setattr(LocalRun, "start_engines", lambda run: EngineWatch())
    stream = io.StringIO()
    with redirect_stdout(stream), pytest.raises(TrainerError, match="ValueError: no good"):
        run_worker(worker("raise ValueError('no good')"), config)
    assert "summary.json could not be written: Read-only file system" in stream.getvalue()
    assert_nothing_is_left(config)


def test_a_picture_or_result_that_fails_leaves_a_summary(
    worker: Callable[..., RunKind], config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object, **named: object) -> None:
        raise KeyError("no such column")

    monkeypatch.setattr(launcher, "summarise", fails)
    with pytest.raises(RunError, match=r"the launcher failed, .*KeyError.*launcher\.log"):
        run(worker(""), config)
    summary = read_json(RunFolder(Path(config.output)).summary)
    assert summary["status"] == "failed" and "no such column" in summary["error"]
    assert "Traceback" in RunFolder(Path(config.output)).log("launcher").read_text()


def test_a_summary_that_cannot_be_renamed_is_one_line(
    worker: Callable[..., RunKind], config: RunConfig
) -> None:
    code = """(root / "summary.json").mkdir()"""
    with pytest.raises(
        RunError, match=r"summary\.json cannot be used \(Is a directory\); look"
    ):
        run(worker(code), config)


def in_vllms_place(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    """Have the launcher start this command instead of vLLM's."""
    monkeypatch.setattr(commands, "engine_command", lambda engine: command)
    monkeypatch.setattr("ycore.engine.kinds.is_vllm_installed", lambda: True)


def test_an_engine_that_dies_is_named(
    worker: Callable[..., RunKind], config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = [
        sys.executable,
        "-c",
        "import sys, time; time.sleep(1); sys.exit('RuntimeError: no memory')",
    ]
    in_vllms_place(monkeypatch, dying)
    with pytest.raises(
        EngineError,
        match=r"rollout-\d ended with exit status 1: RuntimeError: no memory \(see .*rollout-",
    ):
        run(
            worker("time.sleep(600)"),
            config.model_copy(update={"engine": EngineSettings(kind="vllm")}),
        )
    assert read_json(RunFolder(Path(config.output)).summary)["status"] == "failed"
    assert_nothing_is_left(config)


def test_an_engine_that_is_never_ready_is_named(
    worker: Callable[..., RunKind], config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_vllms_place(monkeypatch, ["sleep", "600"])
    impatient = EngineSettings(kind="vllm", count=1, start_timeout_s=0.5)
    with pytest.raises(
        EngineError, match=r"rollout-0 was not ready after 0 s.*start_timeout_s"
    ):
        run(worker("time.sleep(600)"), config.model_copy(update={"engine": impatient}))
    assert_nothing_is_left(config)


LAUNCH = """
import json, sys
from ycore.config.schema import RunConfig
from ycore.errors import YcoreError
from ycore.launch.engine_watch import EngineWatch
from ycore.launch.launcher import TRAINER, LocalRun, RunKind, run_worker
from ycore.launch.layout import Machine
config = RunConfig(**json.loads(sys.argv[1]))
try:
    run_worker(RunKind("trainer", "made_worker"), config, resume=False)
except YcoreError as error:
    print(type(error).__name__, error)
    sys.exit(error.exit_code)
"""


def launch(config: RunConfig) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", LAUNCH, config.model_dump_json()]
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + WITHIN_S
    while not (Path(config.output) / "at-work").exists():
        assert time.monotonic() < deadline and started.poll() is None
        time.sleep(0.05)
    return started


SAVES = """
    import signal
    def save(number, frame):
        (root / "saved").touch()
        sys.exit(130)
    signal.signal(signal.SIGINT, save)
    (root / "at-work").touch()
    time.sleep(600)
"""
DEAF = """
    import signal
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (root / "at-work").touch()
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_lets_the_trainer_save(
    worker: Callable[..., RunKind], config: RunConfig, number: signal.Signals
) -> None:
    worker(SAVES)
    started = launch(config)
    started.send_signal(number)
    output, _ = started.communicate(timeout=WITHIN_S)
    assert started.returncode == Interrupted.exit_code
    assert (
        f"Interrupted stopped after step 3; `ycore resume {config.output}` continues" in output
    )
    assert (Path(config.output) / "saved").exists()
    assert read_json(RunFolder(Path(config.output)).summary)["status"] == "interrupted"
    assert_nothing_is_left(config)


def test_a_second_signal_stops_at_once(
    worker: Callable[..., RunKind], config: RunConfig
) -> None:
    worker(DEAF)
    started = launch(config)
    started.send_signal(signal.SIGINT)
    time.sleep(1)
    assert started.poll() is None
    started.send_signal(signal.SIGINT)
    started.communicate(timeout=WITHIN_S)
    assert started.returncode == Interrupted.exit_code
    assert_nothing_is_left(config)


def test_a_save_that_fails_after_ctrl_c_fails_the_run(
    worker: Callable[..., RunKind], config: RunConfig
) -> None:
    worker("""
        import signal
        def fails(number, frame):
            sys.exit("failed: no room left on the disk; make room, and go on with --resume")
        signal.signal(signal.SIGINT, fails)
        (root / "step_began").touch()
        (root / "at-work").touch()
        time.sleep(600)
    """)
    started = launch(config)
    started.send_signal(signal.SIGINT)
    output, _ = started.communicate(timeout=WITHIN_S)
    assert started.returncode == TrainerError.exit_code == 1
    assert (
        "stopping: the trainer finishes its step and saves a checkpoint; press Ctrl-C again to stop at once"
        in output
    )
    summary = read_json(RunFolder(Path(config.output)).summary)
    assert summary["status"] == "failed"
    assert (
        "trainer ended with exit status 1: failed: no room left on the disk" in summary["error"]
    )
    assert ", while stopping after step 3; `ycore resume " in summary["error"]
    assert_nothing_is_left(config)


def test_ctrl_c_while_a_run_is_summed_up_makes_no_other_end_of_it(
    worker: Callable[..., RunKind], config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "draw_curve", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    other = config.model_copy(update={"output": f"{config.output}-2"})
    assert run(worker(""), config)[0]["stop_asked"]
    assert read_json(RunFolder(Path(config.output)).summary)["status"] == "finished"
    with pytest.raises(TrainerError, match="the loss is nan"):
        run(worker("sys.exit('failed: the loss is nan')"), other)
    assert read_json(RunFolder(Path(other.output)).summary)["status"] == "failed"


IS_STOPPED = """
    import signal
    (root / "step_began").touch()
    signal.signal(signal.SIGINT, lambda *_: None)
    os.kill(os.getppid(), signal.SIGINT)
"""


def test_a_save_that_never_ends_fails_the_run(
    worker: Callable[..., RunKind], config: RunConfig
) -> None:
    made = worker(textwrap.dedent(IS_STOPPED) + "time.sleep(600)")
    with pytest.raises(
        TrainerError,
        match=r"trainer did not save and end within \d+ s \(step_timeout_s\).*stacks-step-4",
    ):
        run(made, config.model_copy(update={"step_timeout_s": 1.5}))
    assert read_json(RunFolder(Path(config.output)).summary)["status"] == "failed"
    assert_nothing_is_left(config)


@pytest.mark.parametrize(
    "code",
    [
        "",
        "signal.signal(signal.SIGINT, lambda *_: None)",
        "signal.signal(signal.SIGINT, lambda *_: sys.exit('PanicException: an import failed'))",
    ],
    ids=["not listening yet", "never ends", "ends as a library does that is being imported"],
)
def test_a_stop_before_the_first_step_waits_for_no_save(
    worker: Callable[..., RunKind],
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
) -> None:
    monkeypatch.setattr(supervise, "_END_WITHIN_S", 2.0)
    made = worker(
        f"import signal\n{code}\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(600)"
    )
    with pytest.raises(Interrupted, match=r"; `ycore resume .*` continues"):
        run(made, config)
    assert_nothing_is_left(config)


def test_a_trainer_that_lost_the_signal_is_asked_again_when_it_begins_a_step(
    worker: Callable[..., RunKind], config: RunConfig
) -> None:
    made = worker("""
        import signal
        lost = []
        signal.signal(signal.SIGINT, lambda *_: lost.append(1))
        os.kill(os.getppid(), signal.SIGINT)
        while not lost:
            time.sleep(0.01)
        signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
        time.sleep(0.5)
        (root / "step_began").touch()
        time.sleep(20)
    """)
    with pytest.raises(Interrupted, match="stopped after step 3"):
        run(made, config)
    assert_nothing_is_left(config)


def test_a_killed_launcher_leaves_nothing(
    worker: Callable[..., RunKind], config: RunConfig
) -> None:
    worker(DEAF)
    started = launch(config)
    os.kill(started.pid, signal.SIGKILL)
    started.communicate(timeout=WITHIN_S)
    deadline = time.monotonic() + WITHIN_S
    while RunFolder(Path(config.output)).sockets.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert_nothing_is_left(config)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_lost_machine_that_is_waited_for_is_no_failure_yet(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    ends = [MachineLost("machine 1 (b): silent for 5 s"), None]

    def work(*_: Any) -> None:
        if error := ends.pop(0):
            raise error

    monkeypatch.setattr(LocalRun, "work", work)
    config = config.model_copy(update={"restarts": restarts})
    if restarts:
        assert run_worker(TRAINER, config)["status"] == "finished"
    else:
        with pytest.raises(MachineLost, match="silent"):
            run_worker(TRAINER, config)


def test_ctrl_c_while_a_loss_is_summed_up_ends_the_run(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It only counted, and the command waited five minutes for the machine."""

    def lose(*_: Any) -> None:
        raise MachineLost("machine 1 (b): silent for 5 s")

    def interrupt(*_: Any, **__: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGINT)
        return {}

    monkeypatch.setattr(LocalRun, "work", lose)
    monkeypatch.setattr(LocalRun, "sum_up", interrupt)
    with pytest.raises(Interrupted, match="silent"):
        run_worker(TRAINER, config.model_copy(update={"restarts": 3}))
