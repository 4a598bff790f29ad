"""Run a recipe with several seeds, and lay its curves over the band of the runs that are on record.

A band is data: for each step the interval in which one more run falls with 95 %, from the runs of at least three seeds
(Student's t; a prediction interval, so it is wider than that of the mean). It names the machine, versions and command.
A pipeline has a band for each stage: of a stage that trains, its curve; of one that measures, the reward it found.
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
from ycore.run.files import read_json
from ycore.run.metrics import REWARD, Row, number, read_metrics
from ycore.run.paths import RunFolder
from ycore.run.secrets import redact_command
from ycore.view.page import BandCurves
from ycore.view.record import half_width

Stages = Mapping[str, Sequence[Row]]

MIN_SEEDS = 3
_WINDOW = 5  # steps of a trailing mean; one step's reward says little
_METRICS = (
    *REWARD,
    "rewards/accuracies",
    "accuracy",
    "mean_token_accuracy",
)  # the first that a run has is its curve
_LAST = 10  # steps whose mean is the run's final value, and a quarter of them at most
_NO_DIFFERENCE = 0.02
_SHARE_INSIDE = 0.8  # of a run's steps


def metric_of(rows: Sequence[Row]) -> str:
    """What a run is compared by: its reward, or its accuracy where it learns from examples."""
    return next(
        (name for name in _METRICS if any(number(row, name) is not None for row in rows)), REWARD[0]
    )


def curve_of(rows: Sequence[Row]) -> list[float]:
    """The metric of each step as a trailing mean."""
    values = _values(rows)
    return [
        statistics.fmean(values[max(0, at + 1 - _WINDOW) : at + 1]) for at in range(len(values))
    ]


def final_of(rows: Sequence[Row]) -> float:
    """The mean of the metric over the last steps; NaN of a run without steps."""
    values = _values(rows)
    last = max(1, min(_LAST, len(values) // 4))
    return statistics.fmean(values[-last:]) if values else math.nan


def _values(rows: Sequence[Row]) -> list[float]:
    metric = metric_of(rows)
    return [value for row in rows if (value := number(row, metric)) is not None]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where one more value falls with 95 %: mean +- t * s * sqrt(1 + 1/n), and no less than 2 % of the largest value.

    Seeds that all solve a task end equal, which does not say that the next one ends so to the digit.
    """
    half = half_width(values)
    if half is None:
        raise ConfigError(
            f"a band needs the runs of {MIN_SEEDS} seeds or more; there are {len(values)}"
        )
    middle, reach = (
        statistics.fmean(values),
        max(half * math.sqrt(len(values) + 1), _NO_DIFFERENCE * max(map(abs, values))),
    )
    return middle - reach, middle + reach


def stages_in(folder: Path) -> dict[str, Sequence[Row]]:
    """What is compared of a finished run, by stage; a recipe of one stage has one without a name."""
    report = folder / "pipeline.json"
    if not report.is_file():
        return {"": read_metrics(RunFolder(folder).metrics)}
    stages = read_json(report)["stages"]
    rows: dict[str, Sequence[Row]] = {one["name"]: [one["figures"]] for one in stages}
    trained = [one["name"] for one in stages if one["command"] in ALGORITHMS]
    return rows | {name: read_metrics(RunFolder(folder / name).metrics) for name in trained}


def last_trained(folder: Path) -> Path:
    """The folder of the run that a report shows: of a pipeline, its last stage that trained."""
    stages = (
        read_json(folder / "pipeline.json")["stages"]
        if (folder / "pipeline.json").is_file()
        else []
    )
    return next(
        (folder / one["name"] for one in reversed(stages) if one["command"] in ALGORITHMS), folder
    )


def band_of(runs: Mapping[int, Sequence[Row]]) -> dict[str, Any]:
    """The band of one stage by seed, as JSON values."""
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


def name_of(seed: int, stage: str) -> str:
    """`2`, or `2/sft` of a pipeline's stage."""
    return f"{seed}/{stage}" if stage else str(seed)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one run against a band."""

    seed: int
    final: float
    share_inside: float
    is_inside: bool
    stage: str = ""

    @property
    def in_words(self) -> str:
        where = "inside" if self.is_inside else "OUTSIDE"
        steps = f"{self.share_inside:.0%} of its steps, final {self.final:.3f}"
        return f"seed {name_of(self.seed, self.stage)} is {where} the band: {steps}"

    @property
    def in_cells(self) -> tuple[str, ...]:
        where = "inside" if self.is_inside else "OUTSIDE"
        return (
            f"seed {name_of(self.seed, self.stage)}",
            where,
            f"{self.share_inside:.0%}",
            f"{self.final:.3f}",
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(band: Mapping[str, Any], seed: int, rows: Sequence[Row]) -> Verdict:
    """Inside: the final value is in its interval, and four of five steps are in theirs."""
    curve, final = curve_of(rows), final_of(rows)
    inside = [
        low <= value <= high for value, (low, high) in zip(curve, band["steps"], strict=False)
    ]
    share, (low, high) = sum(inside) / max(1, len(inside)), band["final"]
    is_whole = len(curve) >= len(band["steps"])
    return Verdict(seed, final, share, is_whole and low <= final <= high and share >= _SHARE_INSIDE)


def bands_of(runs: Mapping[int, Stages], **about: Any) -> dict[str, Any]:
    """What `band.json` holds of finished runs by seed; `about` says where and how they were made."""
    bands = {
        stage: band_of({seed: own[stage] for seed, own in runs.items()})
        for stage in next(iter(runs.values()))
    }
    return about | bands[""] if list(bands) == [""] else {**about, "stages": bands}


def judge_stages(known: Mapping[str, Any] | None, seed: int, stages: Stages) -> list[Verdict]:
    """Of each stage that the band knows; none where no band is known."""
    bands = {} if known is None else known.get("stages", {"": known})
    return [
        replace(judge(band, seed, stages.get(stage, [])), stage=stage)
        for stage, band in bands.items()
    ]


def banded(
    known: Mapping[str, Any], runs: Mapping[int, Stages], verdicts: Sequence[Verdict]
) -> list[BandCurves]:
    """Each band with the curves of the runs by seed and their verdicts, for a page."""
    return [
        BandCurves(
            stage,
            band["metric"],
            steps=band["steps"],
            final=band["final"],
            curves={
                f"seed {seed}": curve_of(stages.get(stage, [])) for seed, stages in runs.items()
            },
            verdicts=[one.in_cells for one in verdicts if one.stage == stage],
        )
        for stage, band in known.get("stages", {"": known}).items()
    ]


def about_runs(recipe: str, sets: Sequence[str], folder: Path) -> dict[str, Any]:
    """Where and how runs were made, for their band; `folder` is that of one of them."""
    config = stored_config(RunFolder(last_trained(folder)))
    return {
        "recipe": recipe,
        "sets": list(sets),
        "command": shlex.join(["ycore", *redact_command(sys.argv)[1:]]),
        "machine": describe_machine() | {"dtype": config["dtype"]},
        "versions": installed_versions(),
    }


def machine_in_words(told: Mapping[str, Any] | str) -> str:
    """Of a band's `machine`: `2 cores of AMD EPYC (avx2), 24 GiB, bfloat16`; early bands have a text."""
    if isinstance(told, str):
        return told
    flags = f" ({', '.join(told['flags'])})" if told.get("flags") else ""
    devices = [
        f"{told['devices'].count(name)} x {name}" for name in dict.fromkeys(told.get("devices", ()))
    ]
    cores = f"{told['cores']} cores of {told['processor']}{flags}"
    return ", ".join([*devices, cores, f"{told['memory_gib']} GiB", told["dtype"]])


def notes_on(known: Mapping[str, Any], sets: Sequence[str]) -> list[str]:
    """How a band was made, and where its settings are not those of the runs beside it. Early bands say less."""
    seeds = len(known.get("finals") or next(iter(known["stages"].values()))["finals"])
    made = f"the band is of {seeds} seeds, on {machine_in_words(known.get('machine', 'an unknown machine'))}"
    notes = [made + (f", by `{known['command']}`" if "command" in known else "")]
    settings = list(known.get("sets", []))
    if settings != list(sets):
        notes.append(
            f"the band was made with {_as_sets(settings)}, these runs with {_as_sets(sets)}"
        )
    return notes


def _as_sets(words: Sequence[str]) -> str:
    return " ".join(f"--set {word}" for word in words) or "the recipe alone"


def stored_band(recipe: str) -> dict[str, Any] | None:
    """The band that ycore brings for a recipe; None where none was measured."""
    file = Path(str(files("ycore_recipes"))) / "bands" / f"{recipe}.json"
    return dict(read_json(file)) if file.is_file() else None
