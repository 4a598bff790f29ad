"""Where moving slots pays: dynamic against every static split and colocated, in virtual time, over drifting lengths.

    python docs/benchmarks/simulate_sweep.py --output runs/sweep

The simulator drives the live run's allocator and sampling decisions. Assumed: engines whose step takes
`base + each * n` seconds (8B: 12 ms and 0.1 ms; 0.6B: 3 ms and 0.03 ms), lognormal lengths up to 8192 tokens whose mean
goes from 1000 up to 3000 and back over 200 steps, a judge whose requests keep one size, 8 completions a prompt, seven
groups in ten that teach. Published: a sleep and a wake of 8B take 12.8 s at level 1 and 6.8 s at level 2, of 0.6B
1.4 s and 1.9 s.

Steps are thinned out: of the 200, some are simulated, in order, and `dynamic` learns from these only, so the lengths
drift faster for it than they would. The best static split is the best on the mean over all steps, in hindsight.

Not here: real engines (`placement`).
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ycore.placement.allocator import Hall
from ycore.placement.load import Speed
from ycore.placement.placement import JUDGE, ROLLOUT
from ycore.placement.words import DYNAMIC, Wanted
from ycore.simulate.compare import Result, simulate, splits
from ycore.simulate.round import Demand, Machine
from ycore.simulate.workload import Assumed, GroupAt, Lengths

ROLES = (ROLLOUT, JUDGE)
STEPS = 200
MODELS = {
    "8B": (Speed(0.012, 0.0001), {"level 1": 12.8, "level 2": 6.8}),
    "0.6B": (Speed(0.003, 0.00003), {"level 1": 1.4, "level 2": 1.9}),
}
CAPACITY = 256
APART = 10**6
LOW, HIGH = 1000.0, 3000.0


def mean_tokens(step: float) -> float:
    """Completions grow and shrink again over the run."""
    return LOW + (HIGH - LOW) * math.sin(math.pi * step / STEPS) ** 2


def groups_at(judge_work: float, rounds: int, scale: float = 1.0) -> Callable[[int], GroupAt]:
    """Each simulated round's groups; `scale` shortens everything, for the search for the break-even."""
    judged = judge_work * scale * (LOW + HIGH) / 2

    def of(number: int) -> GroupAt:
        mean = scale * mean_tokens(STEPS * max(0, number) / rounds)
        return Assumed(Lengths(mean, 0.8, 8192 * scale), {JUDGE: judged}, 8, 0.7).group_at

    return of


def play(
    wanted: Wanted, num_slots: int, swap_s: float, speed: Speed, groups: Callable[[int], GroupAt], job: Any
) -> Result:
    """The thinned-out run under one placement; the first rounds are played before, to learn from, and not counted."""
    machine = Machine(dict.fromkeys(ROLES, speed), dict.fromkeys(ROLES, swap_s))
    return simulate(
        wanted,
        Hall(num_slots, ROLES, dict.fromkeys(ROLES, CAPACITY), exclusive=True, first_swap_s=swap_s),
        machine,
        lambda number: groups(number - job.warm_up),
        Demand(num_slots * job.per_slot // 8, dynamic=job.dynamic),
        num_rounds=job.rounds,
        warm_up=job.warm_up,
        position_of=lambda number: number * APART,
    )


def point(
    num_slots: int, judge_work: float, speed: Speed, swaps: dict[str, float], job: Any, scale: float = 1.0
) -> dict[str, Any]:
    """One amount of judge work: static splits once, and the others for every cost of a swap."""
    groups = groups_at(judge_work, job.rounds, scale)
    static = [play(wanted, num_slots, 0.0, speed, groups, job) for wanted in splits(ROLES, num_slots, most=job.splits)]
    best = min(static, key=lambda result: result.seconds)
    row: dict[str, Any] = {"slots": num_slots, "judge_work": judge_work, "best_split": str(best.wanted)}
    row |= {"best_split_s": best.seconds, "worst_split_s": max(result.seconds for result in static), "swaps": {}}
    for level, swap_s in swaps.items():
        dynamic = play(DYNAMIC, num_slots, swap_s, speed, groups, job)
        colocated = play(Wanted("colocated"), num_slots, swap_s, speed, groups, job)
        row["swaps"][level] = {
            "swap_s": swap_s,
            "dynamic_s": dynamic.seconds,
            "colocated_s": colocated.seconds,
            "dynamic_over_split": dynamic.seconds / best.seconds,
            "dynamic_over_colocated": dynamic.seconds / colocated.seconds,
            "dynamic_swaps": dynamic.swaps,
            "dynamic_idle": dynamic.idle_share,
        }
    return row


def break_even(job: Any) -> list[dict[str, Any]]:
    """The same rounds made shorter and shorter, 8B on 8 slots: from which length on a swap pays."""
    speed, swaps = MODELS["8B"]
    return [point(8, job.even_at, speed, swaps, job, scale) | {"scale": scale} for scale in job.scales]


def draw(told: dict[str, Any], path: Path) -> None:
    """Left: against the best split. Middle: against colocated. Right: both, as rounds get shorter."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    lines: dict[tuple[str, int, str], list[tuple[float, float, float]]] = {}
    for row in told["points"]:
        for level, values in row["swaps"].items():
            key = (row["model"], row["slots"], level)
            two = (values["dynamic_over_split"], values["dynamic_over_colocated"])
            lines.setdefault(key, []).append((row["judge_work"], *two))
    for (model, slots, level), dots in lines.items():
        works = [dot[0] for dot in dots]
        left.plot(works, [dot[1] for dot in dots], marker="o", label=f"{model}, {slots} slots, {level}")
        middle.plot(works, [dot[2] for dot in dots], marker="o")
    left.axhline(1.02, color="#8a8f98", linestyle="--")
    middle.axhline(0.84, color="#8a8f98", linestyle="--")
    for axes, title in ((left, "dynamic over the best split"), (middle, "dynamic over colocated")):
        axes.set(title=title, xscale="log", xlabel="judge's work over the rollouts'")
        axes.axhline(1.0, color="black", linewidth=0.8)
    left.legend(fontsize=7)
    for level, colour in (("level 1", "#2456a6"), ("level 2", "#d9822b")):
        rows = [(row["best_split_s"], row["swaps"][level]) for row in told["break_even"]]
        right.plot(
            [s for s, _ in rows],
            [v["dynamic_over_split"] for _, v in rows],
            marker="o",
            color=colour,
            label=f"over the best split, {level}",
        )
        right.plot(
            [s for s, _ in rows],
            [v["dynamic_over_colocated"] for _, v in rows],
            marker="s",
            linestyle=":",
            color=colour,
            label=f"over colocated, {level}",
        )
    right.axhline(1.0, color="black", linewidth=0.8)
    right.set(title="8B, 8 slots: shorter and shorter rounds", xscale="log", xlabel="seconds of a round, best split")
    right.legend(fontsize=8)
    figure.savefig(path)


def table(told: dict[str, Any]) -> str:
    names = "model, slots, judge work, best split, its s, swap s, dynamic s, colocated s, over split, over colocated"
    lines = ["| " + names.replace(", ", " | ") + " |", "| --- " * 10 + "|"]
    for row in told["points"]:
        for values in row["swaps"].values():
            cells = [
                row["model"],
                row["slots"],
                row["judge_work"],
                row["best_split"],
                f"{row['best_split_s']:.0f}",
                values["swap_s"],
            ]
            cells += [f"{values['dynamic_s']:.0f}", f"{values['colocated_s']:.0f}"]
            cells += [f"{values['dynamic_over_split']:.3f}", f"{values['dynamic_over_colocated']:.3f}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--judge-work", type=float, nargs="+", default=[0.1, 0.3, 1.0, 3.0, 10.0])
    parser.add_argument("--scales", type=float, nargs="+", default=[0.01, 0.03, 0.1, 0.3, 1.0])
    parser.add_argument("--even-at", type=float, default=0.5, help="judge work of the search for the break-even")
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[12000, 12000, 24000], help="completions a row, by --slots"
    )
    parser.add_argument("--per-slot", type=int, default=32, help="completions a slot and round")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--splits", type=int, default=9, help="static splits tried, evenly chosen")
    parser.add_argument("--no-dynamic-sampling", dest="dynamic", action="store_false")
    parser.add_argument("--output", type=Path, default=Path("runs/sweep"))
    job = parser.parse_args()
    job.output.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {
        "job": {key: str(value) for key, value in vars(job).items()},
        "points": [],
        "break_even": [],
    }
    began = time.monotonic()
    for num_slots, requests in zip(job.slots, job.requests, strict=False):
        job.rounds = min(STEPS, max(2, requests // (num_slots * job.per_slot)))
        for model in job.models:
            speed, swaps = MODELS[model]
            for judge_work in job.judge_work:
                row = point(num_slots, judge_work, speed, swaps, job)
                told["points"].append({"model": model, "rounds": job.rounds, **row})
                ratios = {level: round(v["dynamic_over_split"], 3) for level, v in row["swaps"].items()}
                print(
                    f"{time.monotonic() - began:5.0f} s: {model}, {num_slots} slots, {judge_work:g}: {ratios}",
                    flush=True,
                )
    job.rounds = min(20, job.rounds)
    told["break_even"] = break_even(job)
    every = [values for row in told["points"] for values in row["swaps"].values()]
    told["summary"] = {
        "worst_over_split": max(values["dynamic_over_split"] for values in every),
        "mean_over_split": statistics.fmean(values["dynamic_over_split"] for values in every),
        "share_within_2_percent": statistics.fmean(values["dynamic_over_split"] <= 1.02 for values in every),
        "worst_over_colocated": max(values["dynamic_over_colocated"] for values in every),
        "mean_over_colocated": statistics.fmean(values["dynamic_over_colocated"] for values in every),
        "seconds": time.monotonic() - began,
    }
    (job.output / "results.json").write_text(json.dumps(told, indent=2))
    (job.output / "table.md").write_text(table(told) + "\n")
    print(table(told))
    print(json.dumps(told["summary"], indent=2))
    draw(told, job.output / "sweep.png")


if __name__ == "__main__":
    main()
