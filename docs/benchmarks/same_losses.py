"""Two ranks, each with its own engine, against one rank: the same seeds, the same rounds, the same losses.

    python docs/benchmarks/same_losses.py --output runs/same_losses

`ycore grpo` runs alone and with `--processes 2 --accelerate ddp|zero2|zero3`, in float32, without dynamic sampling. A
step then has the same prompts for any number of ranks, because a prompt's position in the run, and with it the seed of
each completion, does not depend on the rank. Where the tokens are the same, the losses must be the same, up to float32
rounding. Where rounding made an engine choose another token, the table names the step; this step and those after it
are not compared. tests/distributed/test_same_losses.py does the same on recorded rounds.
"""

import argparse
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bounded import run_bounded
from machine import describe_machine

from ycore.run.metrics import read_metrics

REWARD = '''
def spread(completion_ids, **columns):
    """Differs with every token, so that one other token is seen."""
    return [sum((place + 1) * token for place, token in enumerate(ids)) % 997 / 997 for ids in completion_ids]
'''
WAYS = {
    "alone": [],
    **{name: ["--processes", "2", "--accelerate", name] for name in ("ddp", "zero2", "zero3")},
}
SAME_TOKENS = (
    "reward",
    "reward_std",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
)
Row = Mapping[str, Any]


def command(told: argparse.Namespace, name: str, way: str, weights: str) -> list[str]:
    options: dict[str, Any] = {
        "--model": told.model,
        "--dataset": "task:addition?digits=1",
        "--output": name,
    }
    options |= {
        "--reward": "spread.py:spread",
        "--prompts-per-step": told.prompts,
        "--group-size": told.group_size,
    }
    options |= {
        "--max-tokens": told.tokens,
        "--steps": told.steps,
        "--seed": 0,
        "--learning-rate": told.learning_rate,
    }
    words = [str(word) for pair in options.items() for word in pair]
    fixed = [
        "--set",
        "dtype=float32",
        "--no-dynamic-sampling",
        "--engine",
        "vllm",
        f"--{weights}",
    ]
    run = [sys.executable, "-c", "from ycore_cli.main import main; main()", "grpo"]
    return [*run, *words, *fixed, *WAYS[way], *told.more]


def compare(one: Sequence[Row], two: Sequence[Row]) -> dict[str, Any]:
    """Over the steps that wrote the same tokens: the largest differences, and the first step that did not."""
    same = 0
    while same < min(len(one), len(two)) and all(
        _near(one[same][key], two[same][key]) for key in SAME_TOKENS
    ):
        same += 1
    pairs = list(zip(one[:same], two[:same], strict=True))
    return {
        "steps": same,
        "of": len(one),
        "loss": max((abs(a["loss"] - b["loss"]) for a, b in pairs), default=float("nan")),
        "grad_norm": max(
            (abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in pairs), default=float("nan")
        ),
        "gap": max((row["ycore/logprob_gap"] for row in two), default=float("nan")),
        "moved": sum(row["ycore/bytes_moved"] for row in two),
        "balance": max((row.get("ycore/balance/after", 1.0) for row in two), default=1.0),
    }


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * max(1.0, abs(a))


def as_markdown(results: Mapping[str, Any]) -> str:
    head = "weights | way | steps with the same tokens | loss, largest difference | gradient norm, largest relative"
    head += " | engine's logprob gap | kB moved between ranks | tokens, busiest rank over mean"
    lines = [f"| {head} |", "| " + " | ".join("---" for _ in head.split("|")) + " |"]
    for name, one in results["compared"].items():
        weights, way = name.split("-")
        figures = f"{one['loss']:.1e} | {one['grad_norm']:.1e} | {one['gap']:.1e} | {one['moved'] / 1e3:.1f}"
        lines.append(
            f"| {weights} | {way} | {one['steps']} of {one['of']} | {figures} | {one['balance']:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument(
        "--weights", nargs="+", default=["lora", "full"], choices=["lora", "full"]
    )
    parser.add_argument(
        "--ways", nargs="+", default=["ddp", "zero2", "zero3"], choices=list(WAYS)
    )
    parser.add_argument("--timeout", type=float, default=1800.0)
    parser.add_argument("--output", type=Path, default=Path("runs/same_losses"))
    told, told.more = parser.parse_known_args()
    told.output.mkdir(parents=True)
    (told.output / "spread.py").write_text(REWARD)
    if Path(told.model).is_dir():
        told.model = str(Path(told.model).resolve())
    results: dict[str, Any] = {"machine": describe_machine(), "compared": {}}
    for weights in told.weights:
        rows: dict[str, list[dict[str, Any]]] = {}
        for way in ("alone", *told.ways):
            name = f"{weights}-{way}"
            words, stop = command(told, name, way, weights), threading.Event()
            run_bounded(
                words, folder=told.output, environment={}, timeout_s=told.timeout, stop=stop
            )
            rows[way] = read_metrics(told.output / name / "metrics.jsonl")
            if way != "alone":
                results["compared"][name] = compare(rows["alone"], rows[way])
            (told.output / "results.json").write_text(json.dumps(results, indent=2))
    print(as_markdown(results))


if __name__ == "__main__":
    main()
