"""pipeline.json: what a pipeline is, how far it has come and what every stage reached; and the table of its end.

Not here: a stage's own summary, which its run writes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard

from ycore.pipeline.state import state_of
from ycore.pipeline.steps import Step
from ycore.run_folder.files import read_json, write_json_atomic
from ycore.run_folder.paths import RunFolder

Status = Literal["running", "finished", "interrupted", "failed"]

_NOT_FIGURES = ("status", "wall_s", "error")


def report_file(root: Path) -> Path:
    return root / "pipeline.json"


def write_report(
    root: Path, declared: Mapping[str, Any], steps: Sequence[Step], status: Status, *, error: str | None = None
) -> dict[str, Any]:
    """Write and return the report; its figures are those of the stages' own summaries."""
    stages = [_stage(step) for step in steps]
    seconds = [stage["wall_s"] for stage in stages if stage["wall_s"] is not None]
    report: dict[str, Any] = {"status": status, "wall_s": round(sum(seconds), 1), "stages": stages}
    if error is not None:
        report["error"] = error
    report["pipeline"] = dict(declared)
    write_json_atomic(report_file(root), report)
    return report


def table_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A line a stage: what it is called, how it ended, and the figure that tells most."""
    rows = []
    for stage in report["stages"]:
        took = "" if stage["wall_s"] is None else f", {stage['wall_s']:.0f} s"
        told = headline(stage["figures"])
        rows.append((stage["name"], f"{stage['command']}: {stage['status']}{took}" + (f", {told}" if told else "")))
    return rows


def headline(figures: Mapping[str, Any]) -> str:
    """What went from where to where, or the one number that there is; held-out rows before the run's own."""
    held_out = figures.get("held_out") or {}
    before, after = held_out.get("before") or {}, held_out.get("after") or {}
    for name, first, last in (
        ("held-out accuracy", before.get("accuracy"), after.get("accuracy")),
        ("reward", figures.get("reward_first"), figures.get("reward_last")),
        ("held-out loss", before.get("loss"), after.get("loss")),
        ("loss", figures.get("loss_first"), figures.get("loss_last")),
    ):
        if _is_number(first) and _is_number(last):
            return f"{name} {first:.3f} -> {last:.3f}"
    told = [f"{name} {figures[name]:.3f}" for name in ("reward", "pass@1") if _is_number(figures.get(name))]
    pairs = figures.get("num_pairs")
    return ", ".join([*([f"{pairs} pairs"] if pairs is not None else []), *told])


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _stage(step: Step) -> dict[str, Any]:
    folder = RunFolder(step.folder)
    summary = read_json(folder.summary) if folder.summary.is_file() else {}
    state = state_of(step)
    return {
        "name": step.name,
        "command": step.command,
        "status": summary.get("status", "to do" if state == "to do" else "begun"),
        "wall_s": summary.get("wall_s"),
        "figures": {key: value for key, value in summary.items() if key not in _NOT_FIGURES},
        "makes": step.makes,
    }
