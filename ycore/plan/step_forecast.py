"""Forecast a step, its memory by phase and its seconds, for one strategy; compare a finished run with its forecast."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median_high
from typing import Any

from ycore.plan.devices import GIB, Fleet
from ycore.plan.memory import EngineMemory, Parts, capacity_of, step_memory
from ycore.plan.timing import step_seconds
from ycore.plan.workload import Strategy, Workload

TIMED = ("sync", "round", "train", "step")
"""Phases of a step that metrics.jsonl has, as `ycore/time/step` and so on."""


@dataclass(frozen=True, slots=True)
class StepForecast:
    """The memory and time of a step.

    Attributes:
        trainer: one rank's trainer at its peak.
        phases: bytes by phase and role, on the fullest device.
        capacity: bytes that a plan may use of a device, or of the machine for a CPU.
        seconds: see `timing.step_seconds`.
        tokens_per_step: tokens of the completions that are trained on.
    """

    strategy: Strategy
    trainer: Parts
    engines: Mapping[str, EngineMemory]
    phases: Mapping[str, Parts]
    capacity: float
    seconds: Mapping[str, float]
    tokens_per_step: float

    @property
    def peak(self) -> tuple[str, float]:
        """The fullest phase and its bytes."""
        phase = max(self.phases, key=lambda name: sum(self.phases[name].values()))
        return phase, sum(self.phases[phase].values())

    @property
    def fits(self) -> bool:
        has_room = all(engine.at_once >= 1 for engine in self.engines.values())
        return has_room and self.peak[1] <= self.capacity

    @property
    def step_s(self) -> float:
        return self.seconds["step"]

    def as_json(self) -> dict[str, Any]:
        phase, peak = self.peak
        return {
            "strategy": asdict(self.strategy) | {"in_words": self.strategy.in_words},
            "peak_phase": phase,
            "peak_bytes": round(peak),
            "capacity_bytes": round(self.capacity),
            "memory": {name: _rounded(roles) for name, roles in self.phases.items()},
            "trainer": _rounded(self.trainer),
            "engines": {role: asdict(engine) for role, engine in self.engines.items()},
            "seconds": {name: round(seconds, 3) for name, seconds in self.seconds.items()},
        }


def _rounded(parts: Parts) -> dict[str, int]:
    return {name: round(size) for name, size in parts.items()}


def forecast_step(work: Workload, strategy: Strategy, fleet: Fleet) -> StepForecast:
    trainer, engines, phases = step_memory(work, strategy, fleet)
    at_once = {role: max(1, engine.at_once) for role, engine in engines.items()}
    return StepForecast(
        strategy,
        trainer,
        engines,
        phases,
        capacity_of(fleet),
        step_seconds(work, strategy, fleet, at_once=at_once),
        tokens_per_step=float(work.completions * work.completion_tokens),
    )


@dataclass(frozen=True, slots=True)
class PlannedAndMeasured:
    """A figure of a finished run: `planned` with its own lengths and draws, `planned_before` with the assumed ones."""

    what: str
    unit: str
    planned: float
    measured: float
    planned_before: float | None = None

    @property
    def error(self) -> float:
        """How far the formulas are off, as a share of what was measured."""
        return self.planned / self.measured - 1

    def as_json(self) -> dict[str, Any]:
        figures = {"planned": self.planned, "measured": self.measured, "error": self.error}
        if self.planned_before is not None:
            figures["planned_before"] = self.planned_before
        rounded = {name: round(value, 3) for name, value in figures.items()}
        return {"what": self.what, "unit": self.unit, **rounded}


def compare(
    work: Workload,
    strategy: Strategy,
    fleet: Fleet,
    *,
    peaks: Mapping[str, float],
    metrics: Sequence[Mapping[str, Any]],
    before: Mapping[str, float] | None = None,
) -> list[PlannedAndMeasured]:
    """Compare a run on CPU cores with its forecast.

    Dynamic sampling draws as many groups as it must, which no plan can know: the forecast takes the run's own lengths
    and draws, so that the formulas are compared.

    Args:
        peaks: bytes by process, from `memory.json`; those of a role are added up.
        metrics: the rows of `metrics.jsonl`; the first step's times do not count: nothing is cached or compiled yet.
        before: the figures that were planned before the run.
    """
    expected = figures_on_cpu(forecast_step(as_it_was(work, metrics), strategy, fleet))
    measured = {f"memory/{role}": size / GIB for role, size in _sum_by_role(peaks).items()}
    for phase in TIMED:
        if seconds := _values(metrics[1:] or metrics, f"ycore/time/{phase}"):
            measured[f"time/{phase}"] = median_high(seconds)
    planned_before = before or {}
    return [
        PlannedAndMeasured(
            figure,
            "GiB" if figure.startswith("memory") else "s",
            expected[figure],
            value,
            planned_before.get(figure),
        )
        for figure, value in measured.items()
        if value and figure in expected
    ]


def figures_on_cpu(forecast: StepForecast) -> dict[str, float]:
    """Return GiB by role and seconds by phase on CPU cores, as `memory/trainer` and `time/step`."""
    roles = forecast.phases["all at once"]
    memory = {f"memory/{role}": size / GIB for role, size in roles.items()}
    return memory | {f"time/{phase}": forecast.seconds[phase] for phase in TIMED}


def as_it_was(work: Workload, metrics: Sequence[Mapping[str, Any]]) -> Workload:
    """Return the workload with the lengths and draws that the run's steps had."""
    tokens = fmean(_values(metrics, "completions/mean_length") or [0.0])
    drawn = fmean(_values(metrics, "ycore/sampling/drawn") or [0.0])
    totals = _values(metrics, "num_tokens")
    if tokens:
        work = replace(work, completion_tokens=max(1, min(work.max_tokens, round(tokens))))
    if tokens and totals:
        prompt = round(max(totals) / (work.completions * len(totals)) - tokens)
        work = replace(work, prompt_tokens=prompt) if prompt > 0 else work
    return replace(work, draws=drawn / work.prompts_per_step) if drawn else work


def _sum_by_role(peaks: Mapping[str, float]) -> dict[str, float]:
    """Add up the engines of a role: `rollout-0` and `rollout-1` are `rollout`."""
    roles: dict[str, float] = {}
    for name, size in peaks.items():
        role, _, number = name.rpartition("-")
        role = role if number.isdigit() else name
        roles[role] = roles.get(role, 0.0) + size
    return roles


def _values(metrics: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    values = [row.get(name) for row in metrics]
    return [float(value) for value in values if isinstance(value, int | float)]
