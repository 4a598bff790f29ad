"""Two runs compared to the bit: every step's numbers, the prompts they were taken on, the weights at the end.

Not here: how the runs came about (`trial`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from ycore.run_folder.paths import RunFolder
from ycore.telemetry.metrics import read_metrics

COMPARED = ("loss", "grad_norm", "reward", "ycore/reward", "learning_rate", "entropy", "completions/mean_length")
"""Of a step's metrics; the others are times, or tell what became of the process."""

WEIGHTS = "weights"
_INFINITE = math.inf  # of what is missing on one side


@dataclass(frozen=True, slots=True)
class Result:
    """What a run left: its rows in the order written, its weights, and whether they could be read."""

    rows: Sequence[Mapping[str, Any]]
    weights: Mapping[str, Any]
    samples: Any = None


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest absolute difference by name; `notes` say what no number can."""

    largest: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def is_none(self) -> bool:
        return not self.notes and all(value == 0 for value in self.largest.values())

    def __str__(self) -> str:
        told = [f"{name} {value:.3g}" for name, value in self.largest.items() if value != 0]
        return ", ".join([*self.notes, *told]) or "none"


def read_result(folder: RunFolder) -> Result:
    """Rows and weights of a run that has ended; a missing model has no weights."""
    weights: dict[str, Any] = {}
    for file in sorted(folder.model.glob("*.safetensors")) if folder.model.is_dir() else []:
        weights |= load_file(file)
    samples = folder.samples.read_text(encoding="utf-8") if folder.samples.is_file() else None
    return Result(read_metrics(folder.metrics), weights, samples)


def compare(expected: Result, seen: Result) -> Difference:
    """How far `seen` is from `expected`; a step that is missing, doubled or out of order is a note."""
    notes = [*_steps_note(expected, seen)]
    largest = {name: _largest(_column(expected, name), _column(seen, name)) for name in COMPARED}
    largest[WEIGHTS] = _weights(expected.weights, seen.weights)
    if not seen.weights:
        notes.append("no model was saved")
    if expected.samples != seen.samples:
        notes.append("samples.json differs")
    return Difference(largest, tuple(notes))


def worst(differences: Iterable[Difference]) -> dict[str, float]:
    """The largest of several, by name."""
    found: dict[str, float] = {name: 0.0 for name in (*COMPARED, WEIGHTS)}
    for difference in differences:
        for name, value in difference.largest.items():
            found[name] = max(found.get(name, 0.0), value)
    return found


def is_lively(result: Result) -> str | None:
    """Why equality with this run would prove nothing; None where it proves something."""
    losses, norms, rewards = (_column(result, name) for name in ("loss", "grad_norm", "reward"))
    if len(set(losses)) < len(losses):
        return f"losses repeat: {losses}"
    if not all(norm > 0 for norm in norms):
        return f"a gradient is zero: {norms}"
    if len(set(rewards)) < 2:
        return f"every step has the same reward: {rewards}"
    return None


def _steps_note(expected: Result, seen: Result) -> list[str]:
    there, here = ([row.get("step") for row in result.rows] for result in (expected, seen))
    return [] if there == here else [f"steps {here} for {there}"]


def _column(result: Result, name: str) -> list[float]:
    return [float(row[name]) if row.get(name) is not None else math.nan for row in result.rows]


def _largest(expected: Sequence[float], seen: Sequence[float]) -> float:
    if len(expected) != len(seen):
        return _INFINITE
    return max((_apart(one, other) for one, other in zip(expected, seen, strict=True)), default=0.0)


def _apart(one: float, other: float) -> float:
    if math.isnan(one) or math.isnan(other):
        return 0.0 if math.isnan(one) and math.isnan(other) else _INFINITE
    return abs(one - other)


def _weights(expected: Mapping[str, Any], seen: Mapping[str, Any]) -> float:
    if expected.keys() != seen.keys():
        return _INFINITE
    pairs = ((expected[name], seen[name]) for name in expected)
    return max((_tensor(one, other) for one, other in pairs), default=0.0)


def _tensor(one: Any, other: Any) -> float:
    if one.shape != other.shape or one.dtype != other.dtype:
        return _INFINITE
    if np.array_equal(one, other):
        return 0.0
    return float(np.max(np.abs(one.astype(np.float64) - other.astype(np.float64))))


def model_folder(output: Path) -> Path:
    return RunFolder(output).model
