"""Rounds ahead of training on cores of their own (`--max-staleness`): steps an hour of a real run, side by side, in turns.

    python docs/benchmarks/stream.py --output runs/stream

The trainer has one core and the engine the other, but where they share both. The prompts are the quickstart's sums, whose
sampled answers have 60 tokens in the mean, one in twenty goes on to the limit. A figure is of the steps after the first
two. The rate is so small that the lengths stay.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from machine import describe_machine
from prompts import write_prompts

from ycore.run.metrics import read_metrics

YCORE = [sys.executable, "-c", "from ycore_cli.main import main; main()"]
SIDES = {
    "shared": [],
    "in turns": ["--set", "engine.devices=1"],
    "1 ahead": ["--set", "engine.devices=1", "--max-staleness", "1"],
    "3 ahead": ["--set", "engine.devices=1", "--max-staleness", "3"],
    "oversample": ["--set", "engine.devices=1", "--oversample", "2"],
}
_NOT_COUNTED = 2  # steps


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
        with folder.with_suffix(".log").open("wb") as log:
            ended = subprocess.run(
                [*YCORE, *map(str, words)], stdout=log, stderr=subprocess.STDOUT, check=False
            )
        if ended.returncode != 0:
            raise SystemExit(f"{side}, seed {seed}, ended with {ended.returncode}: {log.name}")
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
    add("--first-seed", type=int, default=0)
    add("--output", type=Path, default=Path("runs/stream"))
    arguments = parser.parse_args()
    arguments.output = arguments.output.resolve()
    arguments.output.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in arguments.sides}
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
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
