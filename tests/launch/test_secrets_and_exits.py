"""A whole run with a real trainer, real reward workers and the scripted engine: where its secrets are not, what it lets
others into, and that a closed terminal and every other end leave nothing of it.
"""

import json
import os
import pty
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny_model import write_tiny_model
from ycore.run.files import RunFolder
from ycore.run.reports import RUN_MARKER

SCRIPTED = [sys.executable, "-m", "tests.chaos.command", json.dumps({"--think-s": "0.05"})]
SECRETS = {
    "HF_TOKEN": "hf_" + "c4n4ry" * 5,
    "WANDB_API_KEY": "w4ndb" * 8,
    "MY_SECRET": "s3cr3t-c4n4ry",
}
REWARD = """
import os, subprocess, sys, time
print("environment of the reward:", sorted(os.environ))
# A grandchild in a session of its own, with an environment of its own, whose parent soon ends.
subprocess.Popen(
    [sys.executable, "-c", "import subprocess; subprocess.Popen(['sleep', '601'], start_new_session=True, env={})"],
    start_new_session=True, env={},
)

def variety(completions, **columns):
    time.sleep(0.1)
    return [len(set(completion[0]["content"])) / 8 for completion in completions]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    for process in of_run(RunFolder(tmp_path / "run")):
        process.kill()


def words(model: Path, output: Path) -> list[str]:
    (output.parent / "rewards.py").write_text(REWARD)
    options: dict[str, Any] = {
        "--model": model,
        "--dataset": "task:addition?digits=1",
        "--reward": f"{output.parent / 'rewards.py'}:variety",
        "--output": output,
        "--steps": 300,
        "--prompts-per-step": 4,
        "--group-size": 4,
        "--max-tokens": 8,
        "--engine": "vllm",
    }
    option_words = [str(word) for option, value in options.items() for word in (option, value)]
    settings = [
        "dtype=float32",
        "sampling.dynamic=false",
        "engine.max_model_len=64",
        "engine.count=1",
    ]
    return [
        *SCRIPTED,
        "grpo",
        *option_words,
        *(word for value in settings for word in ("--set", value)),
    ]


def start(model: Path, output: Path, **pipes: Any) -> "subprocess.Popen[Any]":
    log = (output.parent / "shown").open("ab")
    environment = {**os.environ, **SECRETS, "WANDB_MODE": "offline"}
    run = subprocess.Popen(
        words(model, output), env=environment, **({"stdout": log, "stderr": log} | pipes)
    )
    wait_for(lambda: rows(output) >= 1 or run.poll() is not None, within_s=150)
    assert run.poll() is None, (output.parent / "shown").read_text()
    return run


def rows(output: Path) -> int:
    path = output / "metrics.jsonl"
    return path.read_text().count("\n") if path.is_file() else 0


def wait_for(condition: Callable[[], bool], *, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def of_run(folder: RunFolder) -> list[psutil.Process]:
    """Return living processes that carry the run's mark, name its folder, or are the reward's grandchild."""
    processes = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            ours = process.environ().get(RUN_MARKER) == folder.run_id or any(
                str(folder.root) in w for w in command
            )
            if (
                ours or command == ["sleep", "601"]
            ) and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except psutil.Error:
            continue
    return [process for process in processes if process.pid != os.getpid()]


def assert_nothing_is_left(output: Path) -> None:
    folder = RunFolder(output)
    deadline = (
        time.monotonic() + 30
    )  # ten seconds are what is promised, on a machine that has time
    while left := of_run(folder):
        assert time.monotonic() < deadline, [
            (process.pid, process.name(), process.status()) for process in left
        ]
        time.sleep(0.1)
    for path in (folder.sockets, folder.shared_memory, folder.temporary):
        assert not path.exists(), path


@pytest.mark.slow
def test_secrets_stay_where_they_were_given_and_a_killed_launcher_leaves_nothing(
    model: Path, output: Path
) -> None:
    run = start(model, output)
    folder = RunFolder(output)
    try:
        assert len(of_run(folder)) >= 6, (
            "launcher, guardian, engine, trainer, reward worker, its grandchild"
        )
        seen: dict[str, set[str]] = {}
        for process in of_run(folder):
            command = " ".join(process.cmdline())
            assert not any(secret in command for secret in SECRETS.values())
            role = re.search(r"rewards\.worker|scripted_engine|ycore\.trainer", command)
            if role:
                names = {
                    name
                    for name, secret in SECRETS.items()
                    if secret in process.environ().values()
                }
                seen.setdefault(role[0], set()).update(names)
        assert seen == {
            "rewards.worker": set(),
            "scripted_engine": set(),
            "ycore.trainer": set(SECRETS),
        }
        assert (
            stat.S_IMODE(folder.sockets.stat().st_mode)
            == stat.S_IMODE(output.stat().st_mode)
            == 0o700
        )
        below = [
            run.pid,
            *(child.pid for child in psutil.Process(run.pid).children(recursive=True)),
        ]
        listening = [
            connection
            for pid in below
            for connection in psutil.Process(pid).net_connections("inet")
            if connection.status == "LISTEN"
        ]
        assert listening == []
    finally:
        run.kill()
        run.wait(10)
    assert_nothing_is_left(output)
    written = [path for path in [*output.rglob("*"), output.parent / "shown"] if path.is_file()]
    assert len(written) > 10
    for path in written:
        data = path.read_bytes()
        assert not any(secret.encode() in data for secret in SECRETS.values()), path
    assert "environment of the reward" in folder.log("rewards").read_text()


@pytest.mark.slow
@pytest.mark.verify
def test_a_terminal_that_is_closed_ends_the_run_in_order(model: Path, output: Path) -> None:
    """The launcher leads a session on a terminal of its own; closing that is SIGHUP, and nowhere to write to."""
    ours, theirs = pty.openpty()
    run = start(
        model,
        output,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lead,
    )
    os.close(theirs)
    os.close(ours)
    run.wait(60)
    assert json.loads((output / "summary.json").read_text())["status"] == "interrupted"
    assert list((output / "checkpoints").glob("checkpoint-*")), (
        "the trainer had no time to save"
    )
    assert run.returncode == 130
    assert_nothing_is_left(output)


def lead() -> None:
    """Make standard input this session's terminal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
