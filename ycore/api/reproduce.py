"""Compare runs of a recipe with several seeds with the band of the runs that are on record.

A band is data: for each step the interval in which one more run falls with 95 %, from the runs of at least three seeds
(Student's t; a prediction interval, so it is wider than that of the mean). It names the machine, versions and command.
A pipeline has a band for each stage: for a stage that trains its curve, for one that measures its reward.
"""

import math
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from ycore.config.algorithms import ALGORITHMS
from ycore.errors import ConfigError
from ycore.launch.layout import describe_machine
from ycore.run.claim import installed_versions, stored_config
from ycore.run.files import read_json, write_json_atomic
from ycore.run.metrics import REWARD, Row, number, read_metrics
from ycore.run.paths import RunFolder
from ycore.run.secrets import redact_command
from ycore.view.page import BandCurves, make_report, write_report
from ycore.view.record import half_width, read_run

Stages = Mapping[str, Sequence[Row]]
"""Metrics by stage; a run that is no pipeline has one stage, without a name."""

Band = Mapping[str, Any]

MIN_SEEDS = 3
_WINDOW = 5  # steps of a trailing mean; one step's reward says little
_METRICS = (*REWARD, "rewards/accuracies", "accuracy", "mean_token_accuracy")
_LAST = 10  # steps whose mean is the run's final value, and a quarter of them at most
_NO_DIFFERENCE = 0.02
_SHARE_INSIDE = 0.8  # of a run's steps


@dataclass(frozen=True, slots=True)
class BandVerdict:
    """A run, or a stage of it, against a band."""

    seed: int
    final: float
    share_inside: float
    is_inside: bool
    stage: str = ""

    @property
    def name(self) -> str:
        return f"seed {_run_name(self.seed, self.stage)}"

    @property
    def place(self) -> str:
        return "inside" if self.is_inside else "OUTSIDE"

    @property
    def in_words(self) -> str:
        steps = f"{self.share_inside:.0%} of its steps, final {self.final:.3f}"
        return f"{self.name} is {self.place} the band: {steps}"

    @property
    def in_cells(self) -> tuple[str, ...]:
        return (self.name, self.place, f"{self.share_inside:.0%}", f"{self.final:.3f}")


def compare_seeds(
    name: str,
    root: Path,
    num_seeds: int,
    *,
    sets: Sequence[str],
    band_file: Path | None,
    write_band: Path | None,
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Compare finished runs with a band, and write their page and reproduce.json, which holds the returned values.

    Args:
        name: the recipe's.
        root: holds `seed-0`, `seed-1`, ...
        band_file: the band; None is that of the recipe, if it has one.
        write_band: where to write a band of these runs.
    """
    band = stored_band(name) if band_file is None else read_json(band_file)
    runs = {seed: stages_in(root / f"seed-{seed}") for seed in range(num_seeds)}
    about = about_runs(name, sets, root / "seed-0")
    if write_band is not None:
        write_json_atomic(write_band, make_band(runs, about))
    verdicts: list[BandVerdict] = []
    curves: list[BandCurves] = []
    notes: list[str] = []
    if band is not None:
        for seed, stages in runs.items():
            verdicts += judge_stages(band, seed, stages)
        curves = band_curves(band, runs, verdicts)
        notes = notes_on(band, sets)
    records = []
    for seed in runs:
        folder = last_trained(root / f"seed-{seed}")
        records.append(replace(read_run(folder), name=str(folder.relative_to(root))))
    page, *_ = write_report(
        make_report(records), root / "report.html", bands=curves, notes=notes
    )
    finals = {
        _run_name(seed, stage): final_of(rows)
        for seed, stages in runs.items()
        for stage, rows in stages.items()
    }
    result = {
        **about,
        "finals": finals,
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "page": str(page),
    }
    write_json_atomic(root / "reproduce.json", result)
    lines = [(f"seed {run}", f"final {final:.3f}") for run, final in finals.items()]
    lines += [("", verdict.in_words) for verdict in verdicts]
    if band is None:
        lines.append(("band", "none is stored for this recipe"))
    lines += [("note", note) for note in notes]
    return result, [*lines, ("page", str(page))]


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


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return where one more value falls with 95 %: mean +- t * s * sqrt(1 + 1/n), and at least 2 % of the largest value.

    Seeds that all solve a task end equal, which does not say that the next one ends so to the digit.
    """
    half = half_width(values)
    if half is None:
        raise ConfigError(
            f"a band needs the runs of {MIN_SEEDS} seeds or more; there are {len(values)}"
        )
    middle = statistics.fmean(values)
    reach = max(half * math.sqrt(len(values) + 1), _NO_DIFFERENCE * max(map(abs, values)))
    return middle - reach, middle + reach


def stages_in(folder: Path) -> dict[str, Sequence[Row]]:
    """Read what is compared of a finished run, by stage."""
    stages = _stages_of(folder)
    if stages is None:
        return {"": read_metrics(RunFolder(folder).metrics)}
    rows: dict[str, Sequence[Row]] = {}
    for stage in stages:
        trains = stage["command"] in ALGORITHMS
        metrics = RunFolder(folder / stage["name"]).metrics
        rows[stage["name"]] = read_metrics(metrics) if trains else [stage["figures"]]
    return rows


def last_trained(folder: Path) -> Path:
    """Return the folder of the run that a report shows: that of a pipeline's last stage that trained."""
    for stage in reversed(_stages_of(folder) or []):
        if stage["command"] in ALGORITHMS:
            return folder / str(stage["name"])
    return folder


def _stages_of(folder: Path) -> list[dict[str, Any]] | None:
    """Read the stages of a pipeline's report; None for a single run."""
    report = folder / "pipeline.json"
    if not report.is_file():
        return None
    stages: list[dict[str, Any]] = read_json(report)["stages"]
    return stages


def band_of(runs: Mapping[int, Sequence[Row]]) -> dict[str, Any]:
    """Make the band of one stage from its metrics by seed, as JSON values."""
    curves = [curve_of(rows) for rows in runs.values()]
    steps = min(map(len, curves), default=0)
    finals = {str(seed): round(final_of(rows), 4) for seed, rows in runs.items()}
    ends = [
        [round(end, 4) for end in interval([curve[step] for curve in curves])]
        for step in range(steps)
    ]
    final = [round(end, 4) for end in interval([*finals.values()])]
    return {
        "metric": metric_of(next(iter(runs.values()))),
        "finals": finals,
        "final": final,
        "steps": ends,
    }


def judge(band: Band, seed: int, rows: Sequence[Row]) -> BandVerdict:
    """Judge one stage: inside if the final value is in its interval, and four of five steps are in theirs."""
    curve, final = curve_of(rows), final_of(rows)
    inside = [
        low <= value <= high for value, (low, high) in zip(curve, band["steps"], strict=False)
    ]
    share, (low, high) = sum(inside) / max(1, len(inside)), band["final"]
    is_whole = len(curve) >= len(band["steps"])
    return BandVerdict(
        seed, final, share, is_whole and low <= final <= high and share >= _SHARE_INSIDE
    )


def make_band(runs: Mapping[int, Stages], about: Mapping[str, Any]) -> dict[str, Any]:
    """Make the content of `band.json` from finished runs by seed; `about` says where and how they were made."""
    bands = {
        stage: band_of({seed: stages[stage] for seed, stages in runs.items()})
        for stage in next(iter(runs.values()))
    }
    if list(bands) == [""]:
        return {**about, **bands[""]}
    return {**about, "stages": bands}


def judge_stages(band: Band, seed: int, stages: Stages) -> list[BandVerdict]:
    """Judge each stage that the band knows."""
    return [
        replace(judge(stage_band, seed, stages.get(stage, [])), stage=stage)
        for stage, stage_band in _stage_bands(band).items()
    ]


def band_curves(
    band: Band, runs: Mapping[int, Stages], verdicts: Sequence[BandVerdict]
) -> list[BandCurves]:
    """Put the curves of the runs by seed and their verdicts beside the band of each stage, for a page."""
    return [
        BandCurves(
            stage,
            stage_band["metric"],
            steps=stage_band["steps"],
            final=stage_band["final"],
            curves={
                f"seed {seed}": curve_of(stages.get(stage, [])) for seed, stages in runs.items()
            },
            verdicts=[verdict.in_cells for verdict in verdicts if verdict.stage == stage],
        )
        for stage, stage_band in _stage_bands(band).items()
    ]


def _stage_bands(band: Band) -> Mapping[str, Band]:
    stages: Mapping[str, Band] = band.get("stages", {"": band})
    return stages


def _run_name(seed: int, stage: str) -> str:
    """Name a run by its seed, `2`, or a pipeline's stage, `2/sft`."""
    return f"{seed}/{stage}" if stage else str(seed)


def about_runs(recipe: str, sets: Sequence[str], folder: Path) -> dict[str, Any]:
    """Describe for a band where and how runs were made; `folder` is that of one of them."""
    config = stored_config(RunFolder(last_trained(folder)))
    return {
        "recipe": recipe,
        "sets": list(sets),
        "command": shlex.join(["ycore", *redact_command(sys.argv)[1:]]),
        "machine": machine_in_words(describe_machine(), dtype=config["dtype"]),
        "versions": installed_versions(),
    }


def machine_in_words(machine: Mapping[str, Any], *, dtype: str) -> str:
    """Describe a machine: `2 cores of AMD EPYC (avx2), 24 GiB, bfloat16`."""
    names = machine.get("devices", ())
    devices = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    flags = f" ({', '.join(machine['flags'])})" if machine.get("flags") else ""
    cores = f"{machine['cores']} cores of {machine['processor']}{flags}"
    return ", ".join([*devices, cores, f"{machine['memory_gib']} GiB", dtype])


def notes_on(band: Band, sets: Sequence[str]) -> list[str]:
    """Say how a band was made, and where its settings are not those of the runs beside it."""
    first, *_ = _stage_bands(band).values()
    note = f"the band is of {len(first['finals'])} seeds, on {band['machine']}"
    if "command" in band:
        note += f", by `{band['command']}`"
    notes = [note]
    if band["sets"] != list(sets):
        notes.append(
            f"the band was made with {_sets_in_words(band['sets'])}, these runs with {_sets_in_words(sets)}"
        )
    return notes


def _sets_in_words(sets: Sequence[str]) -> str:
    return " ".join(f"--set {text}" for text in sets) or "the recipe alone"


def stored_band(recipe: str) -> dict[str, Any] | None:
    """Read the band that ycore brings for a recipe; None where none was measured."""
    file = Path(str(files("ycore_recipes"))) / "bands" / f"{recipe}.json"
    return dict(read_json(file)) if file.is_file() else None
