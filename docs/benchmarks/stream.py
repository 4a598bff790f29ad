"""Rounds ahead of training on cores of their own (`--max-staleness`): steps an hour of a real run, side by side, in turns.

    python docs/benchmarks/stream.py --output runs/stream

The trainer has the first core and both engines the second, on every side. The prompts are the quickstart's sums, whose
sampled answers have 60 tokens in the mean, one in twenty goes on to the limit. A figure is of the steps after the first
two. The rate is so small that the lengths stay.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import psutil
from machine import describe_machine
from prompts import write_prompts

from ycore.run.metrics import read_metrics

YCORE = [sys.executable, "-c", "from ycore_cli.main import main; main()"]
SIDES = {
    "in turns": [],
    "1 ahead": ["--max-staleness", "1"],
    "3 ahead": ["--max-staleness", "3"],
    "oversample": ["--oversample", "2"],
}
_NOT_COUNTED = 2  # steps


def keep_apart(launcher: psutil.Process) -> None:
    """Put every thread of the run's processes on the first core, and those of its engines on the second."""
    cores = sorted(os.sched_getaffinity(0))
    for process in launcher.children(recursive=True):
        try:
            words = " ".join(process.cmdline())
            is_engine = "vllm" in words.lower() or "EngineCore" in process.name()
            core = cores[1] if is_engine else cores[0]
            for thread in process.threads():
                os.sched_setaffinity(thread.id, [core])
        except (psutil.Error, OSError):
            continue  # it has just ended


def run(arguments: argparse.Namespace, side: str, seed: int) -> dict[str, float]:
    """Return the figures of one run; a run that has ended is not run again."""
    folder = arguments.output / f"{side.replace(' ', '-')}-{seed}"
    if not (folder / "summary.json").is_file():
        rows = write_prompts(
            arguments.output / f"rows-{seed}", kind="additions", num_prompts=80, seed=seed
        )
        words = [
            "grpo", "--recipe", "quickstart", "--dataset", rows, "--reward", "length", "--max-tokens", arguments.tokens,
            "--steps", arguments.steps, "--prompts-per-step", 8, "--group-size", 4, "--seed", seed, "--learning-rate",
            "1e-6", "--set", "max_truncated=1", "--output", folder, "--set", "rewards.0.args.target=60", *SIDES[side],
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with folder.with_suffix(".log").open("wb") as log:
            launcher = psutil.Popen(
                [*YCORE, *map(str, words)],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            while launcher.poll() is None:
                keep_apart(launcher)
                time.sleep(1.0)
        if launcher.returncode != 0:
            raise SystemExit(
                f"{side}, seed {seed}, ended with {launcher.returncode}: {log.name}"
            )
    steps = [row for row in read_metrics(folder / "metrics.jsonl") if "ycore/time/train" in row]
    return figures(steps[_NOT_COUNTED:])


def figures(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    seconds = fmean(row["ycore/time/step"] for row in steps)
    return {
        "steps_an_hour": 3600 / seconds,
        "trainer_idle_share": 1 - fmean(row["ycore/time/train"] for row in steps) / seconds,
        "staleness": fmean(row["ycore/staleness"] for row in steps),
        "tokens": fmean(row["completions/mean_length"] for row in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    add("--tokens", type=int, default=256)
    add("--steps", type=int, default=10)
    add("--seeds", type=int, default=1)
    add("--output", type=Path, default=Path("runs/stream"))
    arguments = parser.parse_args()
    arguments.output = arguments.output.resolve()
    arguments.output.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in arguments.sides}
    for seed in range(arguments.seeds):
        for side in arguments.sides:
            runs[side].append(run(arguments, side, seed))
    base = [result["steps_an_hour"] for result in runs[arguments.sides[0]]]
    times = {
        side: round(
            median(b["steps_an_hour"] / a for a, b in zip(base, results, strict=True)), 3
        )
        for side, results in runs.items()
    }
    results = {"machine": describe_machine(), "times": times, **runs}
    (arguments.output / "results.json").write_text(json.dumps(results, indent=2))
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
