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
STRATEGIES = {
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


def command(arguments: argparse.Namespace, name: str, strategy: str, weights: str) -> list[str]:
    options: dict[str, Any] = {
        "--model": arguments.model,
        "--dataset": "task:addition?digits=1",
        "--output": name,
    }
    options |= {
        "--reward": "spread.py:spread",
        "--prompts-per-step": arguments.prompts,
        "--group-size": arguments.group_size,
    }
    options |= {
        "--max-tokens": arguments.tokens,
        "--steps": arguments.steps,
        "--seed": 0,
        "--learning-rate": arguments.learning_rate,
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
    return [*run, *words, *fixed, *STRATEGIES[strategy], *arguments.more]


def compare(alone: Sequence[Row], parallel: Sequence[Row]) -> dict[str, Any]:
    """Return the largest differences over the steps that wrote the same tokens, and how many steps did."""
    same = 0
    while same < min(len(alone), len(parallel)) and all(
        _near(alone[same][key], parallel[same][key]) for key in SAME_TOKENS
    ):
        same += 1
    pairs = list(zip(alone[:same], parallel[:same], strict=True))
    return {
        "steps": same,
        "of": len(alone),
        "loss": max((abs(a["loss"] - b["loss"]) for a, b in pairs), default=float("nan")),
        "grad_norm": max(
            (abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in pairs), default=float("nan")
        ),
        "gap": max((row["ycore/logprob_gap"] for row in parallel), default=float("nan")),
        "moved": sum(row["ycore/bytes_moved"] for row in parallel),
        "balance": max((row.get("ycore/balance/after", 1.0) for row in parallel), default=1.0),
    }


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * max(1.0, abs(a))


def as_markdown(results: Mapping[str, Any]) -> str:
    head = "weights | way | steps with the same tokens | loss, largest difference | gradient norm, largest relative"
    head += " | engine's logprob gap | kB moved between ranks | tokens, busiest rank over mean"
    lines = [f"| {head} |", "| " + " | ".join("---" for _ in head.split("|")) + " |"]
    for name, comparison in results["compared"].items():
        weights, strategy = name.split("-")
        gaps = f"{comparison['loss']:.1e} | {comparison['grad_norm']:.1e} | {comparison['gap']:.1e}"
        steps = f"{comparison['steps']} of {comparison['of']}"
        between_ranks = f"{comparison['moved'] / 1e3:.1f} | {comparison['balance']:.3f}"
        lines.append(f"| {weights} | {strategy} | {steps} | {gaps} | {between_ranks} |")
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
        "--ways", nargs="+", default=["ddp", "zero2", "zero3"], choices=list(STRATEGIES)
    )
    parser.add_argument("--timeout", type=float, default=1800.0)
    parser.add_argument("--output", type=Path, default=Path("runs/same_losses"))
    arguments, arguments.more = parser.parse_known_args()
    arguments.output.mkdir(parents=True)
    (arguments.output / "spread.py").write_text(REWARD)
    if Path(arguments.model).is_dir():
        arguments.model = str(Path(arguments.model).resolve())
    results: dict[str, Any] = {"machine": describe_machine(), "compared": {}}
    for weights in arguments.weights:
        rows: dict[str, list[dict[str, Any]]] = {}
        for strategy in ("alone", *arguments.ways):
            name = f"{weights}-{strategy}"
            words, stop = command(arguments, name, strategy, weights), threading.Event()
            run_bounded(
                words,
                folder=arguments.output,
                environment={},
                timeout_s=arguments.timeout,
                stop=stop,
            )
            rows[strategy] = read_metrics(arguments.output / name / "metrics.jsonl")
            if strategy != "alone":
                results["compared"][name] = compare(rows["alone"], rows[strategy])
            (arguments.output / "results.json").write_text(json.dumps(results, indent=2))
    print(as_markdown(results))


if __name__ == "__main__":
    main()
