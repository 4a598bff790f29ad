"""Compare placements in virtual time, without an engine: how long a round takes, how idle its slots are.

    python docs/benchmarks/simulate.py --slots 8 --prompts-per-step 64 --max-tokens 8192 --judge-work 0.3 --swap-s 6.8
    python docs/benchmarks/simulate.py quickstart --slots 2 --judge-work 1
    python docs/benchmarks/simulate.py --trace runs/first --slots 2 --group-size 8
    python docs/benchmarks/simulate.py --judge-work 0 --slots 8 --prompts-per-step 64 --train-s 40 --oversample 1.5

The decisions are a live run's; lengths and speeds are assumed, or a run's own. See docs/placement.md.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lanes import draw_panels
from rich.console import Console
from rich.table import Column, Table
from simulator.comparison import (
    Comparison,
    Result,
    Scenario,
    compare_assumed,
    compare_recorded,
    recommend,
)
from simulator.recording import Request, read_trace, requests_of
from simulator.tails import Played, compare_steps

from ycore.config.recipe_files import load_recipe
from ycore.config.resolve import require_rollouts, resolve
from ycore.errors import RunFolderError, YcoreError

_EXAMPLE: dict[str, Any] = {
    "model": "smollm2-135m",
    "dataset": "task:addition",
    "rewards": ["exact_answer"],
    "output": "runs/simulated",
}


def at_least(least: float) -> Any:
    def number(text: str) -> float:
        value = float(text)
        if not least <= value < 1e9:
            raise ValueError(text)
        return value

    return number


def whole(text: str) -> int:
    return int(at_least(1)(int(text)))


def parse_step_time(text: str) -> tuple[float, float]:
    base_ms, _, each_ms = text.partition(":")
    return at_least(0)(base_ms) / 1000, at_least(0)(each_ms or "0") / 1000


def parse_drafts(text: str) -> tuple[int, float]:
    num_tokens, _, share = text.partition(":")
    return whole(num_tokens), min(1.0, at_least(0)(share or "0.5"))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("recipe", nargs="?", help="take the sizes of a recipe, by name or YAML file")
    add("--slots", type=whole, default=8, help="slots of a machine")
    add("--trace", type=Path, metavar="RUN", help="play a run's trace.json again")
    add("--judge-work", type=at_least(0), default=0.5, help="judging time over writing time")
    add("--mean-tokens", type=at_least(1), help="by default a third of the longest")
    add("--swap-s", type=at_least(0), default=0.0, help="seconds of a sleep and a wake-up")
    add("--step-time", type=parse_step_time, default="12:0.2", metavar="BASE:EACH",
        help="milliseconds of an engine's step, and per request in it")  # fmt: skip
    add("--machines", type=whole, default=1, help="machines with so many slots each")
    add("--judge-devices", type=whole, default=1,
        help="devices of a slot: one judge, or so many engines of the policy")  # fmt: skip
    add("--rounds", type=whole, help="by default 8, or fewer that draw about 1,000 prompts")
    add("--train-s", type=at_least(0), help="also play whole steps; seconds of training")
    add("--oversample", type=at_least(1), default=1.5)
    add("--max-staleness", type=whole, nargs="+", default=[4],
        help="with --train-s: streams with groups up to so many steps old")  # fmt: skip
    add(
        "--sync-s",
        type=at_least(0),
        default=0.0,
        help="in which a stream's engines take weights",
    )
    add("--drafts", type=parse_drafts, metavar="N:SHARE",
        help="with --train-s: drafts of N tokens, SHARE of them accepted")  # fmt: skip
    add("--prompts-per-step", type=whole)
    add("--group-size", type=whole)
    add("--max-tokens", type=whole)
    add("--no-dynamic-sampling", action="store_true")
    add("--seed", type=int)
    add("--picture", type=Path, help="draw the last round of each placement")
    add("--json", action="store_true")
    return parser


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    return make_parser().parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    try:
        scenario = make_scenario(args)
        requests = None if args.trace is None else recorded_requests(args.trace)
        steps: list[Played] = []
        if args.train_s is not None:
            steps = compare_steps(
                scenario,
                requests,
                args.train_s,
                oversample=args.oversample,
                drafts=args.drafts,
                max_staleness=args.max_staleness,
                sync_s=args.sync_s,
            )
        played = (
            compare_assumed(scenario)
            if requests is None
            else compare_recorded(requests, scenario)
        )
    except YcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if args.picture is not None:
        draw(played, args.picture)
    best = recommend(played.results)
    if args.json:
        whole_steps = {"steps": [asdict(step) for step in steps]} if steps else {}
        print(json.dumps(as_json(played, best) | whole_steps))
        return 0
    print_results(played, best)
    if steps:
        print_steps(steps)
    return 0


def make_scenario(args: argparse.Namespace) -> Scenario:
    recipe = load_recipe(args.recipe) if args.recipe else {}
    config = require_rollouts(resolve(recipe={**_EXAMPLE, **recipe}))
    max_tokens = args.max_tokens or config.max_tokens
    need = args.prompts_per_step or config.prompts_per_step
    return Scenario(
        num_slots=args.slots,
        swap_s=args.swap_s,
        num_rounds=args.rounds or max(1, min(8, 1024 // need)),
        warm_up=3,
        group_size=args.group_size or config.group_size,
        need=need,
        dynamic=config.sampling.dynamic and not args.no_dynamic_sampling,
        max_tries=config.sampling.max_tries,
        max_tokens=max_tokens,
        mean_tokens=args.mean_tokens or max_tokens / 3,
        judge_work=args.judge_work,
        step_s=args.step_time,
        seed=config.seed if args.seed is None else args.seed,
        num_machines=args.machines,
        engines=args.judge_devices,
    )


def recorded_requests(run: Path) -> list[list[Request]]:
    """Return the requests of the run's first rank, round by round."""
    spans = [span for span in read_trace(run / "trace.json") if span.rank == 0]
    if not spans:
        raise RunFolderError(
            f"no trace in {run / 'trace.json'}; a run writes it while its engines are vLLM's"
        )
    return requests_of(spans)


def print_results(played: Comparison, best: Result) -> None:
    print(played.note)
    table = Table("placement", "round", "idle", "over the bound", "swaps", "swapping")
    for result in sorted(played.results, key=lambda result: result.seconds):
        table.add_row(
            f"{result.placement}{'  <- use this' if result is best else ''}",
            f"{result.seconds:.1f} s",
            f"{result.idle_share:.0%}",
            f"{result.bound_ratio:.2f}",
            f"{result.swaps:.1f}",
            f"{result.swap_s:.1f} s",
        )
    Console().print(table)
    print(f"use --placement {best.placement}: {reason(best, played)}")
    if best.seconds > 1.01 * played.longest_first_s:
        print(
            f"prompts that come again begin with the longest: then a round takes {played.longest_first_s:.1f} s"
        )


def reason(best: Result, played: Comparison) -> str:
    rest = [result for result in played.results if result is not best]
    near = min(rest, key=lambda result: result.seconds, default=None)
    if near is None:
        return "there is no other role to place"
    share = near.seconds / best.seconds - 1
    if share < 0:
        return f"{near.placement} is {-share:.1%} shorter here, but must be chosen anew when lengths drift"
    return f"{near.placement}, the next, takes {share:.1%} longer"


def print_steps(steps: Sequence[Played]) -> None:
    print(
        "whole steps, of writing and training alone; what is carried over is read again at no cost. engines: slots that "
        "write; early: mean tokens of the first three rounds; waits: of training, idle: of engines:"
    )
    table = Table(
        Column("way", no_wrap=True),
        *("engines", "step", "faster", "early", "tokens"),
        *("waits", "idle", "stale", "dropped"),
    )
    for step in steps:
        table.add_row(
            step.name,
            "all" if step.rolling is None else str(step.rolling),
            f"{step.seconds:.1f} s",
            f"{steps[0].seconds / step.seconds:.2f}",
            f"{step.early_tokens:.0f}",
            f"{step.tokens:.0f}",
            "" if step.waits is None else f"{step.waits:.0%}",
            "" if step.idle is None else f"{step.idle:.0%}",
            "" if step.staleness is None else f"{step.staleness:.1f}",
            f"{step.dropped:.1f}" if step.dropped else "",
        )
    Console().print(table)


def as_json(played: Comparison, best: Result) -> dict[str, Any]:
    return {
        "note": played.note,
        "recorded_s": played.recorded_s,
        "use": str(best.placement),
        "longest_first_s": played.longest_first_s,
        "placements": [
            {
                "placement": str(result.placement),
                "round_s": result.seconds,
                "idle_share": result.idle_share,
                "bound_ratio": result.bound_ratio,
                "swaps": result.swaps,
                "swap_s": result.swap_s,
            }
            for result in played.results
        ],
    }


def draw(played: Comparison, path: Path) -> None:
    """Draw the last round of every placement, on one scale."""
    ranked = sorted(played.results, key=lambda result: result.seconds)
    lasts = [(result.placement, result.rounds[-1]) for result in ranked]
    draw_panels(
        [(f"{placement}: {last.seconds:.1f} s", last.lanes) for placement, last in lasts],
        path,
    )


if __name__ == "__main__":
    sys.exit(main())
