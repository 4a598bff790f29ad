"""`ycore selftest`: whether a run survives `kill -9` on this machine, to the bit.

Two runs of a tiny model start from the same seed. The trainer of the second is killed and the run resumed; its metrics
and weights must then equal those of the first, and nothing may be left behind. Both use `--engine transformers`, which
starts in seconds and repeats exactly. The whole scorecard of faults is in the repository: `python -m tests.chaos`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ycore.errors import ConfigError
from ycore.launch.guardian import RunWatch
from ycore.models.tiny import write_tiny_model
from ycore.run.metrics import read_metrics
from ycore.run.paths import RunFolder
from ycore.run.text import Say
from ycore.tools.doctor import Check, check, environment_report

STEPS = 5
ENGINE = "transformers"
_COMPARED = ("step", "loss", "grad_norm", "learning_rate", "reward")
YCORE = (
    sys.executable,
    "-P",
    "-c",
    "import sys; from ycore_cli.main import main; sys.exit(main())",
)
_LIMIT_S = 300.0
_GONE_WITHIN_S = 10.0
_REWARD = '''"""The share of different characters: a pure function of the completion, so that a run repeats."""


def variety(completions, **columns):
    return [len(set(completion[-1]["content"])) / 16 for completion in completions]
'''


def selftest(*, seed: int, output: Path | None, say: Say) -> dict[str, Any]:
    """Check the environment, then compare a killed and resumed run with an undisturbed one.

    Args:
        seed: of both runs and of the step in which the trainer is killed.
        output: a new or empty folder that keeps both runs; None removes them at the end.

    Returns:
        `passes`, `seed`, `seconds`, `engine`; `checks` of the runs, which decide `passes`, and `environment`, which
        does not: the checks of `ycore env`. Each check is `{name, ok, value, mend}`.
    """
    if output is not None and output.exists() and any(output.iterdir()):
        raise ConfigError(
            f"--output must be new or empty, and {output} is not; choose another --output"
        )
    began = time.monotonic()
    environment = environment_report()["checks"]
    with tempfile.TemporaryDirectory(prefix="ycore-selftest-") as temporary:
        place = Path(temporary) if output is None else output.absolute()
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        checks = _run_checks(place, seed=seed, say=say)
    for row in environment:
        say(
            f"  ok   {row['name']}: {row['value']}"
            if row["ok"]
            else f"  note {row['name']}: {row['value']}; {row['mend']}"
        )
    for row in checks:
        say(f"  {'ok  ' if row['ok'] else 'FAIL'} {row['name']}: {row['value']}")
    return {
        "passes": all(row["ok"] for row in checks),
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "engine": ENGINE,
        "environment": environment,
        "checks": checks,
    }


def compare_runs(whole: RunFolder, resumed: RunFolder) -> list[str]:
    """Every difference between two finished runs: steps, metrics and weights must be equal to the bit."""
    folders = (whole, resumed)
    rows, other_rows = (
        [[row.get(name) for name in _COMPARED] for row in read_metrics(one.metrics)]
        for one in folders
    )
    files = (sorted(folder.model.glob("*.safetensors")) for folder in folders)
    weights, other_weights = ([(path.name, path.read_bytes()) for path in paths] for paths in files)
    differences = []
    if rows != other_rows:
        differences.append(f"{', '.join(_COMPARED)} by step: {other_rows}, not {rows}")
    if not weights or not other_weights:
        differences.append("no weights were saved")
    elif weights != other_weights:
        differences.append("the weights differ")
    return differences


def leftovers(folder: RunFolder) -> list[str]:
    """Processes, sockets, shared memory and temporary files that a run has left behind."""
    watch, deadline = RunWatch(folder.run_id), time.monotonic() + _GONE_WITHIN_S
    paths = dict.fromkeys(
        (folder.sockets, folder.shared_memory, folder.temporary)
    )  # two are one for a long path
    while True:
        left = [f"process {process.pid}" for process in watch.look()] + [
            str(path) for path in paths if path.exists()
        ]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _run_checks(place: Path, *, seed: int, say: Say) -> list[Check]:
    words = write_inputs(place, seed)
    whole, killed = RunFolder(place / "whole"), RunFolder(place / "killed")
    say(f"a run of {STEPS} steps, --engine {ENGINE} ...")
    status = run_command(words, whole)
    checks = [_check("run", f"{STEPS} steps", [] if status == 0 else [why(whole, status)])]
    if status != 0:
        return checks
    after = 2 + seed % (STEPS - 3)
    say(f"the same run, its trainer killed after step {after} ...")
    status = run_command(words, killed, kill_after=after)
    problems = (
        [] if status not in (0, None) else [f"the kill was not noticed; exit status {status}"]
    )
    say("resume ...")
    status = run_command([*words, "--resume"], killed)
    problems += [why(killed, status)] if status != 0 else compare_runs(whole, killed)
    checks.append(_check("kill and resume", "metrics and weights equal to the bit", problems))
    left = [*leftovers(whole), *leftovers(killed)]
    return [*checks, _check("leftovers", "no process, socket or temporary file", left)]


def write_inputs(place: Path, seed: int) -> list[str]:
    """The model, the prompts, the reward, and the command line that trains on them."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    write_tiny_model(place / "model")
    rows = [{"prompt": f"{number} + {number + 1} ="} for number in range(64)]
    (place / "train.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    (place / "rewards.py").write_text(_REWARD, encoding="utf-8")
    options = {
        "--model": place / "model",
        "--dataset": place / "train.jsonl",
        "--reward": f"{place / 'rewards.py'}:variety",
        "--engine": ENGINE,
        "--steps": STEPS,
        "--prompts-per-step": 4,
        "--group-size": 4,
        "--max-tokens": 12,
        "--per-device-train-batch-size": 4,
        "--learning-rate": 1e-3,
        "--seed": seed,
    }
    keys = {
        "checkpoint_every": 2,
        "dtype": "float32",
        "lora.dropout": 0.2,
        "sampling.dynamic": "false",
    }
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    return ["grpo", *(str(word) for pair in options.items() for word in pair), *sets]


def run_command(
    words: Sequence[str], folder: RunFolder, *, kill_after: int | None = None, on_cpu: bool = False
) -> int | None:
    """Exit status of one `ycore` command; None where it hung. SIGKILLs the trainer after that many steps."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    with folder.root.with_suffix(".log").open("ab") as log:
        run = subprocess.Popen(
            [*YCORE, *words, "--output", str(folder.root)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **hidden},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + _LIMIT_S
        while run.poll() is None and time.monotonic() < deadline:
            if kill_after is not None and folder.metrics.is_file():
                num_steps = folder.metrics.read_bytes().count(b"\n")
                if num_steps >= kill_after and _kill_trainer(folder):
                    kill_after = None
            time.sleep(0.05)
        return run.poll()
    finally:
        if run.poll() is None:
            run.terminate()
            with suppress(subprocess.TimeoutExpired):
                run.wait(timeout=60)
            run.kill()


def _kill_trainer(folder: RunFolder) -> bool:
    for process in RunWatch(folder.run_id).look():
        with suppress(psutil.Error):
            if "ycore.trainer" in process.cmdline():
                process.kill()
                return True
    return False


def _check(name: str, value: str, problems: Sequence[str]) -> Check:
    return check(name, "; ".join(problems) or value, ok=not problems)


def why(folder: RunFolder, status: int | None) -> str:
    lines = folder.root.with_suffix(".log").read_text(errors="replace").strip().splitlines()
    return f"exit status {status}: {lines[-1].strip() if lines else 'no output'}"
