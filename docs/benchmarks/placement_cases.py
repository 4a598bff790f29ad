"""Every placement over some loads, in virtual time: the seconds of a round, as in docs/placement.md.

    python docs/benchmarks/placement_cases.py

Eight or two slots of an 8B model (a step takes 12 ms, and 0.1 ms more for each request), 8 completions a prompt, seven
groups in ten that teach, lognormal lengths; or two CPU cores with a small model, where all engines stay awake.
"""

from dataclasses import dataclass, field

from simulator.comparison import simulate, splits
from simulator.simulation import Demand, Lengths, Machine, Workload
from simulator.speeds import Speed

from ycore.placement.placement import JUDGE, ROLLOUT, SlotPool, parse_placement

ROLES = (ROLLOUT, JUDGE)
DEVICE = Speed(0.012, 0.0001)
CORE = Speed(0.0223, 0.0007)
LONG = Lengths(2000, 0.8, 8192)


@dataclass(frozen=True)
class Case:
    """A load. `verdict`: tokens of a judge's request; `reading_s`: seconds for the prompt of each role."""

    name: str
    slots: int
    verdict: float
    swap_s: float = 6.8
    per_slot: int = 32
    speed: Speed = DEVICE
    lengths: Lengths = LONG
    group_size: int = 8
    replaces: bool = True
    reading_s: dict[str, float] = field(default_factory=dict)


def on_cores(verdict: float) -> Case:
    return Case(
        f"2 cores, verdicts of {verdict:g}", 2, verdict, 0.0, 64, CORE,
        Lengths(64, 0.8, 384), 4, reading_s=dict.fromkeys(ROLES, 0.03),
    )  # fmt: skip


CASES = [
    *(Case(f"8 slots, judge work {work:g}", 8, 2000 * work) for work in (0.1, 0.3, 1, 3)),
    *(Case(f"2 slots, judge work {work:g}", 2, 2000 * work, per_slot=64) for work in (0.1, 1, 3)),
    Case("1 slot, judge work 1", 1, 2000, per_slot=64),
    Case("8 slots, 256 completions each, judge work 1", 8, 2000, per_slot=256),
    Case("8 slots, no prompt replaced, judge work 1", 8, 2000, replaces=False),
    Case(
        "8 slots, a judge reads 0.3 s", 8, 50, 2.0, 64, reading_s={JUDGE: 0.3, ROLLOUT: 0.02}
    ),
    Case(
        "2 slots, a judge reads 0.6 s", 2, 1, 6.8, 24, CORE,
        Lengths(48, 0.8, 384), 4, reading_s={JUDGE: 0.61},
    ),
    *map(on_cores, (1, 8, 32, 64)),
]  # fmt: skip


def seconds(case: Case, placement: str) -> float:
    teach_share = 0.7 if case.replaces else 1.0
    work = Workload(case.lengths, {JUDGE: case.verdict}, case.group_size, teach_share)
    pool = SlotPool(
        case.slots,
        ROLES,
        dict.fromkeys(ROLES, 256),
        exclusive=case.swap_s > 0,
        swap_s=case.swap_s,
    )
    machine = Machine(
        dict.fromkeys(ROLES, case.speed), dict.fromkeys(ROLES, case.swap_s), case.reading_s
    )
    demand = Demand(case.slots * case.per_slot // case.group_size, case.replaces, 4)
    return simulate(
        parse_placement(placement),
        pool,
        machine,
        lambda number: work.group_at,
        demand,
        num_rounds=8 if case.slots < 8 else 5,
        warm_up=4,
        ranks=case.slots,
    ).seconds


def main() -> None:
    for case in CASES:
        fixed = {str(split): seconds(case, str(split)) for split in splits(ROLES, case.slots)}
        best = min(fixed, key=lambda split: fixed[split], default=None)
        best_split = f"{fixed[best]:.1f} s ({best})" if best else "-"
        print(
            f"{case.name}: dynamic {seconds(case, 'dynamic'):.1f} s, "
            f"colocated {seconds(case, 'colocated'):.1f} s, best split {best_split}",
            flush=True,
        )


if __name__ == "__main__":
    main()
