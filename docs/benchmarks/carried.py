"""Completions that take several rounds (`--oversample`): groups an hour of a real run, with and without, in turn.

    python docs/benchmarks/carried.py --output runs/carried

The prompts are the quickstart's sums. An answer that SmolLM2-135M samples has 60 tokens in the mean, and one in twenty
goes on to the limit of 384: a round waits long for its last completions. The rate is so small that this stays. A figure
is of the rounds alone, without training and syncs, and of those after the first two, since a run that carries begins
with more groups than it ends.
"""

import argparse
import json
import sys
import threading
from pathlib import Path
from statistics import fmean, median

from bounded import run_bounded
from machine import describe_machine
from prompts import write_prompts

from ycore.run.metrics import read_metrics

YCORE = [sys.executable, "-c", "from ycore_cli.main import main; main()"]
_BEGIN = 2  # rounds that are not counted
_NEVER = threading.Event()


def run(arguments: argparse.Namespace, oversample: float, seed: int) -> dict[str, float]:
    """Return the figures of the rounds of one run; a run that has ended is not run again."""
    folder = arguments.output / f"{oversample:g}-{seed}"
    if not (folder / "summary.json").is_file():
        logs = arguments.output / f"{oversample:g}-{seed}.log"
        logs.mkdir(parents=True, exist_ok=True)
        rows = write_prompts(
            logs / "rows", kind=arguments.kind, num_prompts=arguments.rows, seed=seed
        )
        words = [
            "grpo", "--recipe", "quickstart", "--dataset", rows, "--reward", "length", "--max-tokens", arguments.tokens,
            "--steps", arguments.steps, "--prompts-per-step", arguments.prompts, "--group-size", arguments.group,
            "--seed", seed, "--learning-rate", "1e-6", "--oversample", oversample, "--set", "max_truncated=1",
            "--output", folder, "--set", f"rewards.0.args.target={arguments.target}",
        ]  # fmt: skip
        run_bounded(
            [*YCORE, *map(str, words)],
            folder=logs,
            environment={},
            timeout_s=arguments.timeout,
            stop=_NEVER,
        )
    steps = [
        row for row in read_metrics(folder / "metrics.jsonl") if "ycore/time/round" in row
    ][_BEGIN:]
    seconds = sum(row["ycore/time/round"] for row in steps)
    return {
        "groups_an_hour": 3600 * arguments.prompts * len(steps) / seconds,
        "round_s": seconds / len(steps),
        "mean_length": fmean(row["completions/mean_length"] for row in steps),
        "carried": fmean(row.get("ycore/carried/completions", 0.0) for row in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--oversample", type=float, default=2.0)
    add("--kind", default="additions", help="prompts of docs/benchmarks/prompts.py")
    add("--target", type=int, default=60, help="words that the reward asks for")
    add("--rows", type=int, default=80)
    add("--prompts", type=int, default=8, help="groups of a step")
    add("--group", type=int, default=4)
    add("--tokens", type=int, default=384)
    add("--steps", type=int, default=10)
    add("--seeds", type=int, default=2)
    add("--timeout", type=float, default=1800.0)
    add("--output", type=Path, default=Path("runs/carried"))
    arguments = parser.parse_args()
    arguments.output = arguments.output.resolve()
    runs: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for seed in range(arguments.seeds):
        runs["without"].append(run(arguments, 1.0, seed))
        runs["with"].append(run(arguments, arguments.oversample, seed))
    pairs = zip(runs["without"], runs["with"], strict=True)
    times = median(
        carried["groups_an_hour"] / plain["groups_an_hour"] for plain, carried in pairs
    )
    results = {
        "machine": describe_machine(),
        "oversample": arguments.oversample,
        "times": round(times, 3),
        **runs,
    }
    (arguments.output / "results.json").write_text(json.dumps(results, indent=2))
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
