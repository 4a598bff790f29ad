"""Plan against measured: what a finished run took, beside what the formulas say of it. Pure.

The plan is given the run's own lengths and draws, which no plan can know, so that what is compared are the formulas.

Not here: reading the run's files (`launch`, which measures peaks too).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ycore.plan.devices import Device, Fleet
from ycore.plan.job import Job, Sharding, Way
from ycore.plan.phases import Forecast, forecast

PHASES = ("sync", "round", "train", "step")
_WARM_AFTER = 1
"""Steps left out at the beginning: the first has nothing cached or compiled, and no sync in it."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run was laid out."""

    ranks: int
    sharding: Sharding
    engines: int
    at_once: int
    """Completions that one engine writes at the same time."""

    micro_batch: int
    checkpointing: bool
    num_cores: int


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, planned and measured, in `unit`."""

    what: str
    unit: str
    planned: float
    measured: float

    @property
    def error(self) -> float:
        """How far the plan is off, as a share of what was measured."""
        return self.planned / self.measured - 1

    def as_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "unit": self.unit,
            "planned": round(self.planned, 3),
            "measured": round(self.measured, 3),
            "error": round(self.error, 3),
        }


def compare(
    job: Job, ran: Ran, core: Device, *, peaks: Mapping[str, float], metrics: Sequence[Mapping[str, Any]]
) -> list[Row]:
    """Rows of memory (GiB, all processes of a role) and time (seconds, the median of the steps after the first).

    Args:
        job: the run's, with lengths as planned; those of `metrics` take their place.
        core: one core of the machine that it ran on.
        peaks: bytes by role, from `memory.json`.
        metrics: the rows of `metrics.jsonl`.
    """
    expected = expected_of(as_it_was(job, metrics), ran, core)
    planned_memory = expected.phases["all at once"]
    rows = [
        Row(f"memory/{role}", "GiB", planned_memory[role] / 2**30, size / 2**30)
        for role, size in _by_role(peaks).items()
        if role in planned_memory
    ]
    for phase in PHASES:
        measured = _median(_values(metrics[_WARM_AFTER:] or metrics, f"ycore/time/{phase}"))
        if measured:
            rows.append(Row(f"time/{phase}", "s", expected.seconds[phase], measured))
    return rows


def expected_of(job: Job, ran: Ran, core: Device) -> Forecast:
    """The forecast of a run laid out like this, on processor cores."""
    slots = max(1, ran.engines)
    way = Way(ran.ranks, slots, ran.sharding, ran.micro_batch, checkpointing=ran.checkpointing)
    return forecast(job, way, Fleet(core, max(ran.num_cores, ran.ranks)))


def as_it_was(job: Job, metrics: Sequence[Mapping[str, Any]]) -> Job:
    """The job with the lengths and draws that the run's steps had."""
    tokens = _mean(_values(metrics, "completions/mean_length"))
    drawn = _mean(_values(metrics, "ycore/sampling/drawn"))
    total = max(_values(metrics, "num_tokens"), default=0.0)
    sequences = job.completions * len(_values(metrics, "num_tokens"))
    changed = job
    if tokens:
        changed = replace(changed, completion_tokens=max(1, min(job.max_tokens, round(tokens))))
    if tokens and total and sequences and (prompt := round(total / sequences - tokens)) > 0:
        changed = replace(changed, prompt_tokens=prompt)
    if drawn:
        changed = replace(changed, draws=drawn / job.prompts_per_step)
    return changed


def _by_role(peaks: Mapping[str, float]) -> dict[str, float]:
    """Peaks with engines of a role added up: `rollout-0` and `rollout-1` are `rollout`."""
    roles: dict[str, float] = {}
    for name, size in peaks.items():
        role, dash, number = name.rpartition("-")
        role = role if dash and number.isdigit() else name
        roles[role] = roles.get(role, 0.0) + size
    return roles


def _values(metrics: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    told = [row.get(name) for row in metrics]
    return [float(value) for value in told if isinstance(value, int | float)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _median(values: Sequence[float]) -> float:
    middle = sorted(values)
    return middle[len(middle) // 2] if middle else 0.0
