"""Short runs in which one file operation fails, each forked from a process that has imported everything.

`LD_PRELOAD=faults.so python -m tests.chaos.faulty_runs PLACE`, where PLACE has a model: reads a fault a line (as in
faults.c, or `none`), runs, resumes what did not finish without the fault, and prints an Outcome a line.
"""

import ctypes
import json
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import replace as replaced
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from ycore_cli.main import main

from tests.chaos import arithmetic_trainer
from ycore.config.schema import RunConfig
from ycore.data.prompts import load_prompts
from ycore.engine import kinds
from ycore.launch import launcher, processes
from ycore.run.claim import contents_of
from ycore.run.files import RunFolder
from ycore.trainer import __main__ as trainer
from ycore.view.pictures import new_figure, save_png

DATASET = "task:addition"
REWARD = "exact_answer"
KINDS = ("open", "write", "fsync", "rename", "unlink", "mkdir")
_STATE_BYTES = mmap.PAGESIZE * 3


@dataclass
class Outcome:
    """How a run with a fault ended, and what it had learned after its resume."""

    status: int
    output: str
    summary: dict[str, Any] | None
    failed_path: str
    """The file whose operation failed first; empty where none did."""
    counts: dict[str, int]
    """File operations of the run by kind."""
    resumed: str = ""
    """The output of the resume and its exit status, where there was one."""
    rows: list[Any] = field(default_factory=list)
    model: str = ""


def try_fault(place: Path, fault: str) -> Outcome:
    """Run with the fault, resume without it where that failed, and return how both went."""
    folder = RunFolder(place / "run")
    shutil.rmtree(folder.root, ignore_errors=True)
    state = place / "state"
    state.write_bytes(bytes(_STATE_BYTES))
    os.environ |= {
        "YCORE_FAULT_ROOT": str(folder.root),
        "YCORE_FAULT_STATE": str(state),
        "YCORE_FAULT": fault,
    }
    words = ["grpo", "--model", str(place / "model"), "--dataset", DATASET]
    words += ["--reward", REWARD, "--engine", "transformers", "--steps", "6"]
    words += ["--output", str(folder.root)]
    status, output = _forked(words, place / "log")
    counters = struct.unpack_from("<7Q", data := state.read_bytes())
    outcome = Outcome(
        status,
        output,
        json.loads(folder.summary.read_text()) if folder.summary.is_file() else None,
        data[60:].split(b"\0")[0].decode() if counters[-1] else "",
        dict(zip(KINDS, counters, strict=False)),
    )
    if status:
        os.environ["YCORE_FAULT"] = "none"
        again = [*words, "--resume"] if folder.config.is_file() else words
        code, printed = _forked(again, place / "log")
        outcome.resumed = f"exit status {code}\n{printed}"
    if folder.metrics.is_file():
        for line in folder.metrics.read_text().splitlines():
            row = json.loads(line)
            outcome.rows.append([row["step"], row["reward"], row["loss"]])
    model = folder.model / arithmetic_trainer.MODEL
    outcome.model = model.read_text() if model.is_file() else ""
    return outcome


def _forked(words: list[str], log: Path) -> tuple[int, str]:
    pid = os.fork()
    if pid == 0:
        _run(words, log)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), log.read_text(errors="replace")


class ForkedTrainer:
    """Stands for the Popen of a trainer: a fork of the launcher, which has imported all that a trainer needs."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self._exit_code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become_trainer(command[3:], options["env"], options["stdout"].fileno())

    def poll(self) -> int | None:
        if self._exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._exit_code = os.waitstatus_to_exitcode(status) if pid else None
        return self._exit_code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _become_trainer(
    arguments: Sequence[str], environment: dict[str, str], log: int
) -> NoReturn:
    status = 1
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.closerange(3, 256)  # the launcher's pipes and its claim
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["trainer", *arguments]
        status = trainer.main()
    except BaseException:  # noqa: BLE001 -- as Python does at the end of a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _popen(command: Sequence[str], **options: Any) -> "ForkedTrainer | subprocess.Popen[bytes]":
    if list(command[1:3]) == ["-m", arithmetic_trainer.MODULE]:
        return ForkedTrainer(command, **options)
    return subprocess.Popen(command, **options)


def _run(words: list[str], log: Path) -> NoReturn:
    status = 99
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        ctypes.CDLL(None).ycore_fault_begin()
        sys.argv = ["ycore", *words]
        main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    launcher.TRAINER = replaced(launcher.TRAINER, module=arithmetic_trainer.MODULE)
    trainer.open_run = arithmetic_trainer.ArithmeticRun
    vars(launcher)["draw_curve"] = lambda metrics, path, title: save_png(new_figure(1, 1), path)
    vars(processes)["subprocess"] = SimpleNamespace(**vars(subprocess) | {"Popen": _popen})
    kinds.is_vllm_installed = lambda: True

    import matplotlib.pyplot  # noqa: F401 -- once for all

    import ycore.api.running  # noqa: F401 -- from now on it knows the trainer above

    model = Path(sys.argv[1]) / "model"
    words = {"model": str(model), "dataset": DATASET, "output": str(model)}
    settings = words | {"rewards": [{"reward": REWARD}]}
    prompts = load_prompts(RunConfig.model_validate(settings), as_chat=True)
    contents = contents_of(prompts.identity, model, {})
    os.environ[arithmetic_trainer.CONTENTS] = json.dumps(contents)
    for line in sys.stdin:
        print(json.dumps(asdict(try_fault(Path(sys.argv[1]), line.strip()))), flush=True)
