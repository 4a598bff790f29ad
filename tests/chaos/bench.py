"""The bench that every row of the scorecard works with, and the scorecard as text and as JSON."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.chaos.job import Job, Tier
from tests.chaos.moments import PHASES
from tests.chaos.results import worst
from tests.chaos.runs import Setting
from tests.chaos.trial import Oracle, Outcome, make_oracle

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the scorecard: `passed` of `total`, and everything that failed, in words."""

    name: str
    description: str
    passed: int
    total: int
    failures: tuple[str, ...] = ()
    phases: Mapping[str, int] = field(default_factory=dict)
    worst: Mapping[str, float] = field(default_factory=dict)
    wrong: int = 0
    """Runs that end with exit status 0 and another result."""

    left: int = 0
    """Runs of which something was left behind."""

    more: Mapping[str, Any] = field(default_factory=dict)
    wants_all: bool = True
    """False where the row counts rather than judges, as a control does."""

    @property
    def passes(self) -> bool:
        return (
            self.total > 0
            and self.wrong == 0
            and (self.passed == self.total or not self.wants_all)
        )


def is_good(outcome: Outcome) -> bool:
    """Whether it is equal, nothing is left, and what was to be done was done: most rows want this."""
    return outcome.passes and outcome.landed


@dataclass(slots=True)
class Bench:
    """`count` is how many trials a row takes; `pool` has as many threads as runs may go on at a time."""

    job: Job
    setting: Setting
    pool: Executor
    seed: int
    count: int
    say: Callable[[str], None]
    oracle_runs: int = 2
    """How often a whole run is taken; from the second on, it must repeat the first."""

    began: float = field(default_factory=time.monotonic)
    _oracles: dict[Job, Oracle] = field(default_factory=dict)

    @property
    def tier(self) -> Tier:
        return self.job.tier

    @property
    def place(self) -> Path:
        return self.setting.place

    def oracle(self, job: Job | None = None) -> Oracle:
        """Return the whole run of a job, made once."""
        job = job or self.job
        if job not in self._oracles:
            self._oracles[job] = make_oracle(
                job,
                self.setting,
                self.pool,
                name=f"whole-{len(self._oracles)}",
                times=self.oracle_runs,
            )
        return self._oracles[job]

    def all(
        self,
        work: Callable[[T], Outcome],
        over: Iterable[T],
        *,
        good: Callable[[Outcome], bool] = is_good,
    ) -> list[Outcome]:
        """Return the outcomes in order, as many at a time as the pool has threads; each is printed as it comes."""

        def attempt(item: T) -> Outcome:
            outcome = work(item)
            self.say(
                f"  {'ok  ' if good(outcome) else 'FAIL'} {outcome} ({outcome.seconds:.0f} s)"
            )
            return outcome

        return list(self.pool.map(attempt, over))


def row_of(
    name: str,
    description: str,
    outcomes: Sequence[Outcome],
    *,
    good: Callable[[Outcome], bool] = is_good,
) -> Row:
    """Make a row from its trials; `good` says which pass."""
    failed = [outcome for outcome in outcomes if not good(outcome)]
    landed = Counter(outcome.phase for outcome in outcomes if outcome.landed and outcome.phase)
    return Row(
        name=name,
        description=description,
        passed=len(outcomes) - len(failed),
        total=len(outcomes),
        failures=tuple(map(str, failed)),
        phases={phase: landed[phase] for phase in PHASES} if landed else {},
        worst=worst(outcome.difference for outcome in outcomes if outcome.exits[-1] == 0),
        wrong=sum(outcome.is_wrong for outcome in outcomes),
        left=sum(not outcome.is_clean for outcome in outcomes),
        more={
            "landed": sum(outcome.landed for outcome in outcomes),
            "resumed": sum(len(outcome.exits) > 1 for outcome in outcomes),
            "differ_from_whole_run": sum(outcome.differs_from_whole for outcome in outcomes),
        },
    )


Tiers = Sequence[tuple[str, Sequence[Row]]]
_SHOWN_FAILURES = 5


def as_lines(tiers: Tiers, *, seed: int) -> list[str]:
    """Write a line a row, the two tiers apart; under them the phases, the largest differences, and what failed."""
    lines: list[str] = []
    for tier, rows in tiers:
        width = max((len(row.name) for row in rows), default=0)
        lines += [f"{tier}, seed {seed}", *(_line(row, width) for row in rows)]
        lines += _totals(rows)
        for row in rows:
            failures = row.failures[:_SHOWN_FAILURES]
            lines += [f"    {row.name}: {failure}" for failure in failures]
            if len(row.failures) > len(failures):
                lines.append(
                    f"    {row.name}: and {len(row.failures) - len(failures)} more, in the JSON"
                )
    return lines


def _line(row: Row, width: int) -> str:
    return f"  {'ok  ' if row.passes else 'FAIL'} {row.name:<{width}}  {row.passed:>5}/{row.total:<5}  {row.description}"


def _totals(rows: Sequence[Row]) -> list[str]:
    landed = {phase: sum(row.phases.get(phase, 0) for row in rows) for phase in PHASES}
    lines = []
    if any(landed.values()):
        lines.append(
            "  kills landed in: "
            + ", ".join(f"{phase} {count}" for phase, count in landed.items())
        )
    largest = largest_differences(rows)
    if largest:
        listed = ", ".join(f"{name} {value:g}" for name, value in largest.items())
        lines.append(f"  largest difference from the whole run: {listed}")
    wrong, left = sum(row.wrong for row in rows), sum(row.left for row in rows)
    return [
        *lines,
        f"  wrong results with exit status 0: {wrong}; runs that left something: {left}",
    ]


def largest_differences(rows: Sequence[Row]) -> dict[str, float]:
    """Return the largest differences over all rows of trials, by name."""
    largest: dict[str, float] = {}
    for row in rows:
        for name, value in row.worst.items():
            largest[name] = max(largest.get(name, 0.0), value)
    return largest


def as_json(tiers: Tiers, *, seed: int, seconds: float) -> dict[str, Any]:
    """Return everything as JSON values."""
    by_tier = {tier: [_row_json(row) for row in rows] for tier, rows in tiers}
    every = [row for _, rows in tiers for row in rows]
    return {
        "passes": all(row.passes for row in every) and bool(every),
        "seed": seed,
        "seconds": round(seconds, 1),
        "wrong_with_exit_0": sum(row.wrong for row in every),
        "runs_that_left_something": sum(row.left for row in every),
        "tiers": by_tier,
    }


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "what": row.description,
        "passed": row.passed,
        "total": row.total,
        "passes": row.passes,
        "failures": list(row.failures),
        "phases": dict(row.phases),
        "largest_difference": {
            name: value if math.isfinite(value) else "missing on one side"
            for name, value in row.worst.items()
        },
        "wrong_with_exit_0": row.wrong,
        "runs_that_left_something": row.left,
        **({"more": dict(row.more)} if row.more else {}),
    }
