"""Compare runs of a recipe with several seeds with the band that is on record for it.

A band is data: for each step the interval in which one more run falls with 95 %, from the runs of at least three seeds.
A pipeline has a band for each stage. `docs/benchmarks/band.py` makes one.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from ycore.config.algorithms import ALGORITHMS
from ycore.run.files import RunFolder, json_safe, read_json, write_json_atomic
from ycore.run.metrics import REWARD, Row, number, read_metrics
from ycore.types import JsonObject, Record
from ycore.view.report import read_run, write_report

_WINDOW = 5  # steps of a trailing mean; one step's reward says little
_METRICS = (
    *REWARD,
    "rewards/accuracies",
    "accuracy",
    "mean_token_accuracy",
    "rewards/margins",
)
"""Runs are compared by the first of these that they have."""
_LAST = 10  # steps whose mean is the run's final value, and a quarter of them at most
_SHARE_INSIDE = 0.8  # of a run's steps
# Student's t, 97.5 % quantile, by degrees of freedom from 0 (none) to 9, and the last for more.
_T_975 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class BandVerdict(NamedTuple):
    """A run, or a stage of it, against its band."""

    run: str  # its seed, `2`, or a pipeline's stage, `2/sft`
    final: float
    share_inside: float
    is_inside: bool

    def __str__(self) -> str:
        place = "inside" if self.is_inside else "OUTSIDE"
        steps = f"{self.share_inside:.0%} of its steps, final {self.final:.3f}"
        return f"seed {self.run} is {place} the band: {steps}"


def stored_band(recipe: str) -> JsonObject | None:
    """Read the band that ycore brings for a recipe; None where none was measured."""
    file = Path(str(files("ycore_recipes"))) / "bands" / f"{recipe}.json"
    return read_json(file) if file.is_file() else None


def compare_seeds(
    root: Path,
    num_seeds: int,
    band: Record | None,
    *,
    sets: Sequence[str] = (),
    steps: int | None = None,
) -> tuple[JsonObject, list[tuple[str, str]]]:
    """Compare the finished runs `root/seed-0`, `seed-1`, ... with a band; write their page and reproduce.json.

    Returns:
        The content of reproduce.json, and the rows of a table.
    """
    bands = {} if band is None else band.get("stages", {"": band})
    finals = {}
    verdicts = []
    records = []
    for seed in range(num_seeds):
        folder = root / f"seed-{seed}"
        for stage, rows in rows_by_stage(folder).items():
            run = f"{seed}/{stage}" if stage else str(seed)
            finals[run] = final_of(
                [row for row in rows if steps is None or row["step"] <= steps]
            )
            if stage in bands:
                verdicts.append(judge_run(run, rows, bands[stage]))
            if RunFolder(folder / stage).metrics.is_file():
                records.append(replace(read_run(folder / stage), name=f"seed-{run}"))
    page = write_report(records, root / "report.html")
    result = {
        "finals": finals,
        "verdicts": [verdict._asdict() for verdict in verdicts],
        "page": str(page),
    }
    write_json_atomic(root / "reproduce.json", json_safe(result))
    lines = [(f"seed {run}", f"final {final:.3f}") for run, final in finals.items()]
    lines += [("", str(verdict)) for verdict in verdicts]
    if band is None:
        lines.append(("band", "none is stored for this recipe"))
    else:
        made_with = " ".join(f"--set {text}" for text in band["sets"]) or "the recipe alone"
        lines.append(("band", f"made on {band['machine']}, with {made_with}"))
        if band["sets"] != list(sets):
            lines.append(("note", "these runs have other settings than the band's"))
    return result, [*lines, ("page", str(page))]


def compare_settings(
    root: Path,
    settings: Iterable[str],
    num_seeds: int,
    *,
    steps: int | None = None,
    ended: Sequence[Record] = (),
) -> tuple[JsonObject, list[tuple[str, str]]]:
    """Compare a sweep's combinations by the means of their seeds, the largest first; write sweep.json.

    Args:
        settings: the names of their folders in `root`.
        steps: compare them as of this step; None is the last.
        ended: rows of those that ended before.

    Returns:
        The content of sweep.json, and the rows of a table.
    """
    rows: list[Record] = []
    for name in settings:
        result, _ = compare_seeds(root / name, num_seeds, None, steps=steps)
        finals = defaultdict(list)
        for run, final in result["finals"].items():
            finals[run.partition("/")[2]].append(final)
        rows += [
            {
                "setting": f"{name} {stage}" if stage else name,
                "steps": steps,
                "mean": statistics.fmean(values),
                "half_95": half_width(values),
                "finals": values,
                "page": result["page"],
            }
            for stage, values in finals.items()
        ]
    rows = [*sorted(rows, key=lambda row: row["mean"], reverse=True), *ended]
    write_json_atomic(root / "sweep.json", json_safe({"settings": rows}))
    lines = []
    for row in rows:
        half = row["half_95"]
        reach = "no interval of fewer than 3 seeds" if half is None else f"+- {half:.3f}"
        after = "" if row["steps"] is None else f" after {row['steps']} steps"
        lines.append((row["setting"], f"mean {row['mean']:.3f} {reach}{after}; {row['page']}"))
    return {"settings": rows}, lines


def half_width(values: Sequence[float]) -> float | None:
    """Return half the 95 % interval of the mean (Student's t, independent values).

    None with fewer than three values, or where one is NaN.
    """
    if len(values) < 3 or not all(map(math.isfinite, values)):
        return None
    quantile = _T_975[min(len(values), len(_T_975)) - 1]
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def rows_by_stage(folder: Path) -> dict[str, Sequence[Row]]:
    """Read what is compared of a finished run; one that is no pipeline has one stage, without a name."""
    report = folder / "pipeline.json"
    if not report.is_file():
        return {"": read_metrics(RunFolder(folder).metrics)}
    rows: dict[str, Sequence[Row]] = {}
    for stage in read_json(report)["stages"]:
        trains = stage["command"] in ALGORITHMS
        metrics = RunFolder(folder / stage["name"]).metrics
        rows[stage["name"]] = read_metrics(metrics) if trains else [stage["figures"]]
    return rows


def judge_run(run: str, rows: Sequence[Row], band: Record) -> BandVerdict:
    """Judge one stage: inside if the final value is in its interval, and four of five steps are in theirs."""
    curve = curve_of(rows)
    final = final_of(rows)
    inside = [
        low <= value <= high for value, (low, high) in zip(curve, band["steps"], strict=False)
    ]
    share = sum(inside) / max(1, len(inside))
    low, high = band["final"]
    is_whole = len(curve) >= len(band["steps"])
    is_inside = is_whole and low <= final <= high and share >= _SHARE_INSIDE
    return BandVerdict(run, final, share, is_inside)


def metric_of(rows: Sequence[Row]) -> str:
    """Choose what a run is compared by: its reward, or its accuracy where it learns from examples."""
    return next(
        (name for name in _METRICS if any(number(row, name) is not None for row in rows)),
        REWARD[0],
    )


def curve_of(rows: Sequence[Row]) -> list[float]:
    """Return the metric of each step as a trailing mean."""
    values = _values(rows)
    return [
        statistics.fmean(values[max(0, at + 1 - _WINDOW) : at + 1]) for at in range(len(values))
    ]


def final_of(rows: Sequence[Row]) -> float:
    """Return the mean of the metric over the last steps; NaN without steps."""
    values = _values(rows)
    last = max(1, min(_LAST, len(values) // 4))
    return statistics.fmean(values[-last:]) if values else math.nan


def _values(rows: Sequence[Row]) -> list[float]:
    metric = metric_of(rows)
    return [value for row in rows if (value := number(row, metric)) is not None]
