"""The scorecard as a person reads it, and as a program does.

Not here: how the rows came about (`rows_*`).
"""

import math
from collections.abc import Sequence
from typing import Any

from ycore.selftest.bench import Row
from ycore.selftest.phases import PHASES

Tiers = Sequence[tuple[str, Sequence[Row]]]
_SHOWN_FAILURES = 5


def as_lines(tiers: Tiers, *, seed: int) -> list[str]:
    """A line a row, the two tiers apart; under them the phases, the largest differences, and what failed."""
    lines: list[str] = []
    for tier, rows in tiers:
        width = max((len(row.name) for row in rows), default=0)
        lines += [f"{tier}, seed {seed}", *(_line(row, width) for row in rows)]
        lines += _totals(rows)
        for row in rows:
            shown = row.failures[:_SHOWN_FAILURES]
            lines += [f"    {row.name}: {failure}" for failure in shown]
            if len(row.failures) > len(shown):
                lines.append(f"    {row.name}: and {len(row.failures) - len(shown)} more, in the JSON")
    return lines


def _line(row: Row, width: int) -> str:
    return f"  {'ok  ' if row.passes else 'FAIL'} {row.name:<{width}}  {row.passed:>5}/{row.total:<5}  {row.what}"


def _totals(rows: Sequence[Row]) -> list[str]:
    landed = {phase: sum(row.phases.get(phase, 0) for row in rows) for phase in PHASES}
    lines = []
    if any(landed.values()):
        lines.append("  kills landed in: " + ", ".join(f"{phase} {count}" for phase, count in landed.items()))
    largest = largest_differences(rows)
    if largest:
        told = ", ".join(f"{name} {value:g}" for name, value in largest.items())
        lines.append(f"  largest difference from the whole run: {told}")
    wrong, left = sum(row.wrong for row in rows), sum(row.left for row in rows)
    return [*lines, f"  wrong results with exit status 0: {wrong}; runs that left something: {left}"]


def largest_differences(rows: Sequence[Row]) -> dict[str, float]:
    """Over all rows of trials, by name."""
    found: dict[str, float] = {}
    for row in rows:
        for name, value in row.worst.items():
            found[name] = max(found.get(name, 0.0), value)
    return found


def as_json(tiers: Tiers, *, seed: int, seconds: float) -> dict[str, Any]:
    """Everything, as JSON values."""
    told = {tier: [_row_json(row) for row in rows] for tier, rows in tiers}
    every = [row for _, rows in tiers for row in rows]
    return {
        "passes": all(row.passes for row in every) and bool(every),
        "seed": seed,
        "seconds": round(seconds, 1),
        "wrong_with_exit_0": sum(row.wrong for row in every),
        "runs_that_left_something": sum(row.left for row in every),
        "tiers": told,
    }


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "what": row.what,
        "passed": row.passed,
        "total": row.total,
        "passes": row.passes,
        "failures": list(row.failures),
        "phases": dict(row.phases),
        "largest_difference": {
            name: value if math.isfinite(value) else "missing on one side" for name, value in row.worst.items()
        },
        "wrong_with_exit_0": row.wrong,
        "runs_that_left_something": row.left,
        **({"more": dict(row.more)} if row.more else {}),
    }
