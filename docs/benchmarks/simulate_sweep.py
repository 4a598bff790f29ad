"""Where moving slots pays: dynamic against every static split and colocated, in virtual time, with drifting lengths.

    python docs/benchmarks/simulate_sweep.py --output runs/sweep

The simulator drives the live run's allocator and sampling decisions. Workload: engines whose step takes `base + each *
n` seconds (8B: 12 ms and 0.1 ms; 0.6B: 3 ms and 0.03 ms), lognormal lengths up to 8192 tokens whose mean rises from
1000 to 3000 and falls back over 200 steps, a judge whose requests keep one size, 8 completions per prompt, seven
groups in ten that can teach, 32 completions per slot and round (8 on 512 slots). Published times: a sleep and a wake
of 8B take 12.8 s at level 1 and 6.8 s at level 2, of 0.6B 1.4 s and 1.9 s.

Of the 200 steps, stretches of consecutive steps are played, so that lengths drift for `dynamic` as fast as in the
whole run. Before each stretch two steps are played for learning and not counted. On 8 slots all splits are tried. On
more slots they are searched from coarse to fine: the quarters, then repeatedly the neighbours of the best at half the
distance, down to a thirty-second of the slots. The best static split is the one with the best mean over all steps, in
hindsight.

With --machines, each of several machines has so many slots and an allocator of its own, as in a run over several
machines. With --engines 4, a slot is four devices: four engines of the policy, or one of a judge over all four.

Break-even depends on the length of a round over the cost of a swap. So the rounds stay the same (8B; 8 slots, and 2,
which no split fits), and the cost of a swap varies from a thousandth of the best split's round to all of it.
"""

import argparse
import functools
import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from simulator.comparison import Result, simulate
from simulator.simulation import (
    Demand,
    GroupAt,
    Lengths,
    Machine,
    SimulatedGroup,
    Workload,
    of_engines,
)
from sweep_picture import draw, table

from ycore.placement.load import Speed
from ycore.placement.placement import DYNAMIC, JUDGE, ROLLOUT, Placement, SlotPool
from ycore.round.sampling import AcceptanceRate

ROLES = (ROLLOUT, JUDGE)
STEPS = 200
MODELS = {
    "8B": (Speed(0.012, 0.0001), {"level 1": 12.8, "level 2": 6.8}),
    "0.6B": (Speed(0.003, 0.00003), {"level 1": 1.4, "level 2": 1.9}),
}
COLOCATED = Placement("colocated")
CAPACITY = 256
TEACH_SHARE = 0.7
APART = 10**6
LOW, HIGH = 1000.0, 3000.0
EVEN = ((8, 32, 1.0), (8, 256, 1.0), (2, 256, 0.3), (2, 256, 3.0))
"""Slots, completions a slot and judge's work in the search for the break-even."""


class Known(AcceptanceRate):
    """The share of groups that teach is known; estimated, it wavers, and every round with it."""

    @property
    def rate(self) -> float:
        return TEACH_SHARE


def mean_tokens(step: float) -> float:
    """Completions grow and shrink again over the run."""
    return LOW + (HIGH - LOW) * math.sin(math.pi * step / STEPS) ** 2


def groups_of(judged: float) -> Callable[[int], GroupAt]:
    """Each step's groups, judged in so many tokens; every placement gets the same ones, so they are drawn once."""

    @functools.cache
    def group(step: int, position: int) -> SimulatedGroup:
        lengths = Lengths(mean_tokens(max(0, step)), 0.8, 8192)
        return Workload(lengths, {JUDGE: judged}, 8, TEACH_SHARE).group_at(position)

    return lambda step: functools.partial(group, step)


def stretches(num_steps: int, parts: int) -> list[range]:
    """So many steps in so many runs of consecutive ones, spread evenly over the 200."""
    length, apart = max(1, num_steps // parts), STEPS / parts
    firsts = [int(part * apart + (apart - length) / 2) for part in range(parts)]
    return [range(first, first + length) for first in firsts]


class Course:
    """One amount of judge work on so many slots: plays it under any placement, over the same steps and groups."""

    def __init__(
        self,
        num_slots: int,
        per_slot: int,
        judge_work: float,
        speed: Speed,
        steps: Sequence[range],
        job: Any,
        *,
        machines: int = 1,
        engines: int = 1,
    ) -> None:
        self.num_slots, self._machines, self._engines = num_slots, machines, engines
        self._demand = Demand(machines * num_slots * per_slot // 8, dynamic=job.dynamic)
        self._speeds = {ROLLOUT: of_engines(speed, engines), JUDGE: speed}
        # The judge's work is a share of a slot's seconds, at the same depth.
        same = self._speeds[ROLLOUT].step_s(per_slot) / self._speeds[JUDGE].step_s(per_slot)
        self._groups = groups_of(judge_work * same * (LOW + HIGH) / 2)
        self._steps = steps
        self._warm_up = job.warm_up

    def play(self, wanted: Placement, swap_s: float = 0.0) -> Result:
        """The counted steps; one that learns plays some before each stretch, which are not counted."""
        before = self._warm_up if wanted.kind == "dynamic" else 0
        told = [
            (step, step in run)
            for run in self._steps
            for step in range(run[0] - before, run[-1] + 1)
        ]
        result = simulate(
            wanted,
            SlotPool(
                self.num_slots,
                ROLES,
                {ROLLOUT: CAPACITY * self._engines, JUDGE: CAPACITY},
                exclusive=True,
                swap_s=swap_s,
            ),
            Machine(self._speeds, dict.fromkeys(ROLES, swap_s)),
            lambda number: self._groups(told[number][0]),
            self._demand,
            num_rounds=len(told),
            num_machines=self._machines,
            ranks=self.num_slots * self._engines,
            position_of=lambda number: told[number][0] * APART,
            yields=Known(),
        )
        counted = tuple(
            outcome for outcome, (_, counts) in zip(result.rounds, told, strict=True) if counts
        )
        return Result(wanted, counted)

    def static_splits(self) -> dict[int, Result]:
        """By slots for rollouts: all of them, or from coarse to fine."""
        slots = self.num_slots
        found: dict[int, Result] = {}

        def look(rollouts: Sequence[int]) -> None:
            for rollout in rollouts:
                if 0 < rollout < slots and rollout not in found:
                    found[rollout] = self.play(Placement("split", (rollout, slots - rollout)))

        if slots <= 8:
            look(range(1, slots))
            return found
        stride = slots // 4
        look(range(stride, slots, stride))
        while stride > max(1, slots // 32):
            stride //= 2
            best = min(found, key=lambda rollout: found[rollout].seconds)
            look((best - stride, best + stride))
        return found


def best_of(static: dict[int, Result]) -> Result:
    return min(static.values(), key=lambda result: result.seconds)


def against(course: Course, best: Result, swap_s: float) -> dict[str, Any]:
    """The placements whose rounds depend on what a swap costs."""
    dynamic, colocated = course.play(DYNAMIC, swap_s), course.play(COLOCATED, swap_s)
    return {
        "swap_s": swap_s,
        "dynamic_s": dynamic.seconds,
        "colocated_s": colocated.seconds,
        "dynamic_over_split": dynamic.seconds / best.seconds,
        "dynamic_over_colocated": dynamic.seconds / colocated.seconds,
        "dynamic_swaps": dynamic.swaps,
        "dynamic_idle": dynamic.idle_share,
    }


def point(course: Course, swaps: dict[str, float]) -> dict[str, Any]:
    """Static splits once, and the others for every cost of a swap."""
    static = course.static_splits()
    best = best_of(static)
    return {
        "best_split": str(best.placement),
        "best_split_s": best.seconds,
        "splits_s": {
            str(rollout): result.seconds for rollout, result in sorted(static.items())
        },
        "swaps": {level: against(course, best, swap_s) for level, swap_s in swaps.items()},
    }


def break_even(num_slots: int, per_slot: int, judge_work: float, job: Any) -> dict[str, Any]:
    """By the round's length in swaps: how far ahead of the best of all others, and from where ahead of the split."""
    course = Course(
        num_slots, per_slot, judge_work, MODELS["8B"][0], stretches(job.even_steps, 4), job
    )
    best = best_of(course.static_splits())
    rows = [
        against(course, best, best.seconds / ratio) | {"ratio": ratio} for ratio in job.ratios
    ]
    for row in rows:
        row["gain"] = 1 - row["dynamic_s"] / min(best.seconds, row["colocated_s"])
    pays = [row["ratio"] for row in rows if row["dynamic_over_split"] <= 0.99]
    told = {
        "slots": num_slots,
        "per_slot": per_slot,
        "judge_work": judge_work,
        "best_split": str(best.placement),
    }
    return told | {
        "best_split_s": best.seconds,
        "pays_from": min(pays, default=None),
        "rows": rows,
    }


def near_best_s(row: dict[str, Any]) -> float:
    """The mean of the best split and its neighbours among those tried: what the best one is without its luck."""
    told = [
        seconds for _, seconds in sorted(row["splits_s"].items(), key=lambda item: int(item[0]))
    ]
    best = told.index(min(told))
    return statistics.fmean(told[max(0, best - 1) : best + 2])


def summary(points: Sequence[dict[str, Any]]) -> dict[str, float]:
    over_near = [
        values["dynamic_s"] / near_best_s(row)
        for row in points
        for values in row["swaps"].values()
    ]
    every = [values for row in points for values in row["swaps"].values()]
    over_split = [values["dynamic_over_split"] for values in every]
    over_colocated = [values["dynamic_over_colocated"] for values in every]
    return {
        "worst_over_split": max(over_split),
        "mean_over_split": statistics.fmean(over_split),
        "share_within_2_percent": statistics.fmean(ratio <= 1.02 for ratio in over_split),
        "worst_over_best_and_neighbours": max(over_near),
        "mean_over_best_and_neighbours": statistics.fmean(over_near),
        "worst_over_colocated": max(over_colocated),
        "mean_over_colocated": statistics.fmean(over_colocated),
        "share_16_percent_ahead_of_colocated": statistics.fmean(
            ratio <= 0.84 for ratio in over_colocated
        ),
    }


def parsed() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument(
        "--machines",
        type=int,
        nargs="+",
        default=[1, 1, 1],
        help="with --slots each, by --slots",
    )
    parser.add_argument(
        "--engines",
        type=int,
        nargs="+",
        default=[1, 1, 1],
        help="of the policy on a slot of a judge, by --slots",
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument(
        "--judge-work", type=float, nargs="+", default=[0.1, 0.3, 1.0, 3.0, 10.0]
    )
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[200, 24, 9], help="steps counted, by --slots"
    )
    parser.add_argument(
        "--stretches", type=int, nargs="+", default=[1, 4, 3], help="runs of steps, by --slots"
    )
    parser.add_argument(
        "--per-slot",
        type=int,
        nargs="+",
        default=[32, 32, 8],
        help="completions a slot, by --slots",
    )
    parser.add_argument(
        "--warm-up", type=int, default=2, help="steps before each stretch, to learn from"
    )
    parser.add_argument("--no-dynamic-sampling", dest="dynamic", action="store_false")
    parser.add_argument(
        "--even-steps", type=int, default=12, help="steps in the search for the break-even"
    )
    parser.add_argument(
        "--ratios", type=float, nargs="*", default=[1, 3, 10, 30, 100, 300, 1000]
    )
    parser.add_argument("--output", type=Path, default=Path("runs/sweep"))
    return parser.parse_args()


def main() -> None:
    job = parsed()
    gc.disable()  # the groups that are kept for all placements would be looked through again and again
    job.output.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {
        "job": {key: str(value) for key, value in vars(job).items()},
        "points": [],
    }
    began = time.monotonic()
    told["break_even"] = [break_even(*case, job) for case in (EVEN if job.ratios else ())]
    sizes = list(
        zip(
            job.slots,
            job.per_slot,
            job.steps,
            job.stretches,
            job.machines,
            job.engines,
            strict=False,
        )
    )
    for model, (num_slots, per_slot, num_steps, parts, machines, engines) in itertools.product(
        job.models, sizes
    ):
        speed, swaps = MODELS[model]
        for judge_work in job.judge_work:
            steps = stretches(num_steps, parts)
            course = Course(
                num_slots,
                per_slot,
                judge_work,
                speed,
                steps,
                job,
                machines=machines,
                engines=engines,
            )
            row = point(course, swaps)
            layout = {"slots": num_slots, "machines": machines, "engines": engines}
            told["points"].append({"model": model, **layout, "judge_work": judge_work, **row})
            ratios = [
                round(values["dynamic_over_split"], 3) for values in row["swaps"].values()
            ]
            took = time.monotonic() - began
            where = f"{machines} x {num_slots} slots of {engines}"
            print(
                f"{took:5.0f} s: {model}, {where}, judge {judge_work:g}: {ratios}", flush=True
            )
            told["summary"] = {**summary(told["points"]), "seconds": took}
            (job.output / "results.json").write_text(json.dumps(told, indent=2))
    (job.output / "table.md").write_text(table(told) + "\n")
    print(table(told))
    print(json.dumps(told["summary"], indent=2))
    if job.ratios:
        draw(told, job.output / "sweep.png")


if __name__ == "__main__":
    main()
