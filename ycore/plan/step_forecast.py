"""The forecast of a step: memory by phase and seconds, for one way of running a job; and a run's figures beside it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median_high
from typing import Any

from ycore.plan import memory, timing
from ycore.plan.devices import GIB, Fleet
from ycore.plan.job import Job, Way
from ycore.plan.memory import Engine, Parts

TIMED = ("sync", "round", "train", "step")
"""Of a step, in metrics.jsonl as `ycore/time/step` and so on."""


@dataclass(frozen=True, slots=True)
class Forecast:
    way: Way
    trainer: Parts  # one rank's trainer at its peak
    engines: Mapping[str, Engine]
    phases: Mapping[str, Parts]  # bytes by phase and role, on the device that has most in it
    capacity: float  # bytes that a plan may use of a device, or of the machine for a CPU
    seconds: Mapping[str, float]  # see `timing.step_seconds`
    tokens_per_step: float  # of the completions that are trained on

    @property
    def peak(self) -> tuple[str, float]:
        """The fullest phase and its bytes."""
        phase = max(self.phases, key=lambda name: sum(self.phases[name].values()))
        return phase, sum(self.phases[phase].values())

    @property
    def fits(self) -> bool:
        return self.peak[1] <= self.capacity and all(
            engine.at_once >= 1 for engine in self.engines.values()
        )

    @property
    def step_s(self) -> float:
        return self.seconds["step"]

    @property
    def at_once(self) -> Mapping[str, int]:
        """Sequences that an engine of each role holds, at least one."""
        return {role: max(1, engine.at_once) for role, engine in self.engines.items()}


def forecast(job: Job, way: Way, fleet: Fleet) -> Forecast:
    tokens = float(job.completions * job.completion_tokens)
    one = Forecast(way, *memory.step_memory(job, way, fleet), memory.capacity_of(fleet), {}, tokens)
    return replace(one, seconds=timing.step_seconds(job, way, fleet, at_once=one.at_once))


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    unit: str
    planned: float  # with the run's own lengths and draws
    measured: float
    planned_before: float | None = None

    @property
    def error(self) -> float:
        """How far the formulas are off, as a share of what was measured."""
        return self.planned / self.measured - 1

    def as_json(self) -> dict[str, Any]:
        figures = {"planned": self.planned, "measured": self.measured, "error": self.error}
        figures |= {} if self.planned_before is None else {"planned_before": self.planned_before}
        return {
            "what": self.what,
            "unit": self.unit,
            **{name: round(value, 3) for name, value in figures.items()},
        }


def compare(
    job: Job,
    way: Way,
    fleet: Fleet,
    *,
    peaks: Mapping[str, float],
    metrics: Sequence[Mapping[str, Any]],
    before: Mapping[str, float] | None = None,
) -> list[Row]:
    """The forecast of a finished run on CPU cores beside what it took.

    The forecast uses the run's own lengths and draws, which no plan can know, so that the formulas are compared.

    Args:
        peaks: bytes by process, from `memory.json`; those of a role are added up.
        metrics: the rows of `metrics.jsonl`; the first step's times do not count: nothing is cached or compiled yet.
        before: the `figures` that were planned before the run.
    """
    expected = figures_of(forecast(as_it_was(job, metrics), way, fleet))
    measured = {f"memory/{role}": size / GIB for role, size in _by_role(peaks).items()}
    for phase in TIMED:
        seconds = _values(metrics[1:] or metrics, f"ycore/time/{phase}")
        measured |= {f"time/{phase}": median_high(seconds)} if seconds else {}
    return [
        Row(
            what,
            "GiB" if what.startswith("memory") else "s",
            expected[what],
            value,
            (before or {}).get(what),
        )
        for what, value in measured.items()
        if value and what in expected
    ]


def figures_of(one: Forecast) -> dict[str, float]:
    """GiB by role and seconds by phase on CPU cores: `memory/trainer`, `time/step`."""
    memory_of = {f"memory/{role}": size / GIB for role, size in one.phases["all at once"].items()}
    return memory_of | {f"time/{phase}": one.seconds[phase] for phase in TIMED}


def as_it_was(job: Job, metrics: Sequence[Mapping[str, Any]]) -> Job:
    """The job with the lengths and draws that the run's steps had."""
    tokens = fmean(_values(metrics, "completions/mean_length") or [0.0])
    drawn = fmean(_values(metrics, "ycore/sampling/drawn") or [0.0])
    totals = _values(metrics, "num_tokens")
    if tokens:
        job = replace(job, completion_tokens=max(1, min(job.max_tokens, round(tokens))))
        if totals and (prompt := round(max(totals) / (job.completions * len(totals)) - tokens)) > 0:
            job = replace(job, prompt_tokens=prompt)
    return replace(job, draws=drawn / job.prompts_per_step) if drawn else job


def _by_role(peaks: Mapping[str, float]) -> dict[str, float]:
    """Peaks with the engines of a role added up: `rollout-0` and `rollout-1` are `rollout`."""
    roles: dict[str, float] = {}
    for name, size in peaks.items():
        role, _, number = name.rpartition("-")
        role = role if number.isdigit() else name
        roles[role] = roles.get(role, 0.0) + size
    return roles


def _values(metrics: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    found = [row.get(name) for row in metrics]
    return [float(value) for value in found if isinstance(value, int | float)]
