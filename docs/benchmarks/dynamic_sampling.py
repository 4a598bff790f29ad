r"""Groups per hour that can teach, with and without dynamic sampling, in turn, on real engines.

    python docs/benchmarks/dynamic_sampling.py --output runs/dynamic --repeats 3
    python docs/benchmarks/dynamic_sampling.py --output runs/curriculum --task mixed --sides dynamic,curriculum \
        --steps 20 --tokens 16 --repeats 3 --learning-rate 2e-4

The task `flat` is one-digit additions. For two thirds of them the reward is the same for every completion, so two
thirds of the groups have no variance. For the others the reward differs with every completion. Both sides run
`ycore grpo` with the same seed and sizes; only the side's own option differs.

The task `mixed` has 120 rows for a real reward: 40 sums of one digit, which the model learns, and 80 of five digits,
which it never gets right. The order comes round to a row again every few steps, so a curriculum can remember it.

It does not measure whether more such groups lead to a better policy.
"""

import argparse
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from bounded import run_bounded
from machine import busy_share, describe_machine

from ycore.run.metrics import read_metrics

REWARD = '''
def sometimes(completion_ids, flat, **columns):
    """The same for every completion of a flat row; for the others what the token ids happen to add up to."""
    return [0.5 if is_flat else sum(ids) % 97 / 97 for ids, is_flat in zip(completion_ids, flat)]
'''
SIDES = {
    "without": ["--no-dynamic-sampling"],
    "dynamic": ["--dynamic-sampling"],
    "curriculum": ["--dynamic-sampling", "--curriculum", "on"],
}
EXPECTED = {"without": 1.5, "dynamic": 1.3}
"""Groups that teach an hour of the second side over those of the first, by the name of the first."""


def rows(number: int = 300) -> list[dict[str, Any]]:
    """Make rows of which two in three are flat; the run's own order mixes them."""
    sums = [(n % 10, n // 10 % 10) for n in range(number)]
    return [
        {"prompt": f"What is {a} + {b}?", "flat": n % 3 != 0} for n, (a, b) in enumerate(sums)
    ]


def mixed_rows() -> list[dict[str, Any]]:
    short_sums = [(n % 10, n // 10 * 2 + n % 2) for n in range(40)]
    long_sums = [(10_007 + 997 * n, 98_765 - 811 * n) for n in range(80)]
    ask = "What is {} + {}? Answer with just the number."
    return [
        {"prompt": ask.format(a, b), "answer": str(a + b)} for a, b in short_sums + long_sums
    ]


def command(arguments: argparse.Namespace, output: Path, side: str) -> list[str]:
    sizes = {
        "--prompts-per-step": arguments.prompts,
        "--group-size": arguments.group_size,
        "--max-tokens": arguments.tokens,
    }
    reward = "sometimes.py:sometimes" if arguments.task == "flat" else "exact_answer"
    options: dict[str, Any] = {
        "--model": arguments.model,
        "--dataset": "rows.jsonl",
        "--reward": reward,
    }
    options |= {
        **sizes,
        "--steps": arguments.steps,
        "--seed": 0,
        "--engine": arguments.engine,
        "--output": output,
    }
    words = [str(word) for pair in options.items() for word in pair]
    return [
        sys.executable,
        "-c",
        "from ycore_cli.main import main; main()",
        "grpo",
        *words,
        *SIDES[side],
        *arguments.more,
    ]


def figures(metrics: Sequence[Mapping[str, Any]], *, prompts: int) -> dict[str, float]:
    """Return the figures of the counted steps: all but the first, which warms up."""
    counted = list(metrics)[1:] or list(metrics)
    seconds = sum(row["ycore/time/step"] for row in counted)
    informative = sum(prompts * (1 - row["frac_reward_zero_std"]) for row in counted)
    return {
        "per_hour": 3600 * informative / seconds,
        "zero_std": mean(row["frac_reward_zero_std"] for row in counted),
        "drawn": mean(row["ycore/sampling/drawn"] for row in counted),
        "step_s": seconds / len(counted),
        "round_s": mean(row["ycore/time/round"] for row in counted),
        "train_s": mean(row["ycore/time/train"] for row in counted),
        "yield": counted[-1]["ycore/sampling/yield"],
    }


def as_markdown(results: Mapping[str, Any]) -> str:
    head = "side | groups that teach, an hour | trained without variance | groups drawn a step | s a step | round | train"
    lines = [f"| {head} |", "| " + " | ".join("---" for _ in head.split("|")) + " |"]
    first, second = results["runs"]
    for side in results["runs"]:
        medians = {
            name: median(run[name] for run in results["runs"][side])
            for name in results["runs"][side][0]
        }
        seconds = (
            f"{medians['step_s']:.1f} | {medians['round_s']:.1f} | {medians['train_s']:.1f}"
        )
        lines.append(
            f"| {side} | {medians['per_hour']:.0f} | {medians['zero_std']:.0%} | {medians['drawn']:.1f} | {seconds} |"
        )
    pairs = zip(results["runs"][second], results["runs"][first], strict=True)
    ratios = [mine["per_hour"] / theirs["per_hour"] for mine, theirs in pairs]
    verdict = "holds" if median(ratios) >= EXPECTED[first] else "misses"
    named = f"{second.capitalize()} over {first}"
    lines += [
        "",
        f"{named}: **{median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f}), ",
    ]
    lines[-1] += f"{verdict} >= {EXPECTED[first]:g}. {results['told']}."
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument(
        "--sides", default="without,dynamic", help="two of: " + ", ".join(SIDES)
    )
    parser.add_argument("--task", choices=("flat", "mixed"), default="flat")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=1800.0)
    parser.add_argument("--output", type=Path, default=Path("runs/dynamic_sampling"))
    arguments, arguments.more = parser.parse_known_args()
    arguments.output.mkdir(parents=True)
    (arguments.output / "rows.jsonl").write_text(
        "".join(
            json.dumps(row) + "\n"
            for row in (rows() if arguments.task == "flat" else mixed_rows())
        )
    )
    (arguments.output / "sometimes.py").write_text(REWARD)
    if Path(arguments.model).is_dir():
        arguments.model = str(Path(arguments.model).resolve())
    sizes = (
        f"{arguments.model}, {arguments.prompts} prompts x {arguments.group_size} completions"
    )
    sizes += f" of at most {arguments.tokens} tokens"
    results: dict[str, Any] = {
        "told": f"{sizes}, {arguments.steps} steps a run",
        "machine": describe_machine(),
        "busy": [],
    }
    results["runs"] = {side: [] for side in arguments.sides.split(",")}
    for repeat in range(arguments.repeats):
        for side in results["runs"]:  # in turn
            results["busy"].append(busy_share())
            name = Path(f"{side}-{repeat}")
            stop = threading.Event()
            words = command(arguments, name, side)
            run_bounded(
                words,
                folder=arguments.output,
                environment={},
                timeout_s=arguments.timeout,
                stop=stop,
            )
            metrics = read_metrics(arguments.output / name / "metrics.jsonl")
            results["runs"][side].append(figures(metrics, prompts=arguments.prompts))
            (arguments.output / "results.json").write_text(json.dumps(results, indent=2))
    print(as_markdown(results))


if __name__ == "__main__":
    main()
