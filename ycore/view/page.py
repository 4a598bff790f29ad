"""The report of one run or several: a page that holds everything it shows, the same as JSON, and its curves as PNG."""

import base64
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from ycore.run.files import write_json_atomic
from ycore.run.metrics import Row, number
from ycore.run.paths import RunFolder
from ycore.run.text import as_duration, printable, topic
from ycore.view.pictures import points, save_png
from ycore.view.record import (
    PARTS,
    RecordedRun,
    ScoredCompletion,
    at_equal_seconds,
    content_text,
)
from ycore.view.report_figures import (
    RUN_COLOURS,
    BandCurves,
    as_svg,
    draw_bands,
    draw_device_seconds,
    draw_measures,
    draw_reward_over_seconds,
)

_MAX_PICTURE_BYTES = 1 << 20
_NUM_CHOSEN = 4  # completions at either end of the last round, and in its middle


def make_report(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Give the runs different names; where there are several, add what each had reached at equal device seconds."""
    names = [run.name for run in runs]
    report = []
    for place, run in enumerate(runs, 1):
        if names.count(run.name) > 1:
            run = replace(run, name=f"{run.name} ({place})")
        report.append(run)
    if len(runs) == 1:
        return report
    curves = [run.reward_curve for run in runs]
    return [
        replace(run, reached=reached)
        for run, reached in zip(report, at_equal_seconds(curves), strict=True)
    ]


def write_report(
    runs: Sequence[RecordedRun],
    page: Path,
    *,
    bands: Sequence[BandCurves] = (),
    notes: Sequence[str] = (),
) -> list[Path]:
    """Write the page, and beside it the same as `.json` and the curves as `.png`; return the files written.

    `bands` are laid behind the runs' curves, and `notes` say of which runs they are.
    """
    page.parent.mkdir(parents=True, exist_ok=True)
    partial = page.with_name(f".{page.name}")
    partial.write_text(render_page(runs, bands, notes), encoding="utf-8")
    partial.replace(page)
    written = [page, page.with_suffix(".json")]
    write_json_atomic(written[-1], report_json(runs))
    figure = draw_measures(runs, bands)
    if figure is not None:
        written.append(page.with_suffix(".png"))
        save_png(figure, written[-1])
    return written


def report_json(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Return the report's numbers, as JSON values."""
    return {
        "runs": [
            {
                "name": run.name,
                "folder": str(run.root),
                "status": run.summary.get("status", "running"),
                "summary": dict(run.summary),
                "slots": run.spent.num_slots,
                "device_seconds": dict(run.spent.seconds),
                "device_seconds_per_informative_group": run.spent.per_informative_group,
                "at_equal_seconds": [asdict(reached) for reached in run.reached],
                "problems": list(run.problems),
                "command": list(run.command),
                "versions": dict(run.versions),
                "config": dict(run.config),
            }
            for run in runs
        ]
    }


def render_page(
    runs: Sequence[RecordedRun], bands: Sequence[BandCurves] = (), notes: Sequence[str] = ()
) -> str:
    """Return HTML that needs no network and no other file; whatever a model wrote is shown as text."""
    from jinja2 import Environment

    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_as_data
    )
    environment.filters |= {
        "short": _short,
        "last_step": _last_step,
        "duration": as_duration,
        "shell": shlex.join,
        "prompt": content_text,
        "beside": zip,
        "chosen": chosen,
        "judges": _judge_rows,
        "seen": _pictures_of,
        "base64": _as_base64,
    }
    source = files("ycore.view").joinpath("page.html.j2").read_text(encoding="utf-8")
    measures = draw_measures(runs)
    over_seconds = draw_reward_over_seconds(runs) if len(runs) > 1 else None
    return environment.from_string(source).render(
        runs=runs,
        bands=bands,
        notes=notes,
        over_bands=as_svg(draw_bands(bands)) if bands else None,
        colours=RUN_COLOURS,
        same_question=len({(run.config.get("model"), topic(run.config)) for run in runs}) == 1,
        curves=None if measures is None else as_svg(measures),
        over_seconds=None if over_seconds is None else as_svg(over_seconds),
        # Runs may reach fewer marks than others: only those that all have are shown.
        reached=list(zip(*(run.reached for run in runs), strict=False)),
        spent_picture=as_svg(draw_device_seconds(runs)),
        parts=[part for part in PARTS if any(run.spent.seconds[part] for run in runs)],
    )


def chosen(completions: Sequence[ScoredCompletion]) -> list[ScoredCompletion]:
    """Choose the lowest rewards, the middle ones and the highest, in this order, and one without a reward."""
    scored = [completion for completion in completions if completion.reward is not None]
    masked = [completion for completion in completions if completion.reward is None]
    scored.sort(key=lambda completion: completion.reward or 0.0)
    places = range(len(scored))
    middle, half = len(scored) // 2, _NUM_CHOSEN // 2
    kept = {
        *places[:_NUM_CHOSEN],
        *places[max(0, middle - half) : middle + half],
        *places[-_NUM_CHOSEN:],
    }
    return [scored[place] for place in sorted(kept)] + masked[:1]


def _pictures_of(sample: Mapping[str, Any], run: RecordedRun) -> list[Path]:
    """Return the files of the pictures that a prompt shows, of those that are small enough for a page."""
    images = [RunFolder(run.root).images / name for name in sample.get("images", ())]
    return [file for file in images if file.is_file() and file.stat().st_size <= _MAX_PICTURE_BYTES]


def _judge_rows(metrics: Sequence[Row]) -> list[tuple[str, str]]:
    prefix = "ycore/judge/"
    rows = []
    for name in sorted({name for row in metrics for name in row if name.startswith(prefix)}):
        _, values = points(metrics, name)
        if values:
            rows.append((name.removeprefix(prefix), f"{fmean(values):.4g} a step"))
    return rows


def _as_data(value: Any) -> Any:
    """Make text printable; the pictures, which are markup, are ours."""
    return printable(value) if type(value) is str else value


def _as_base64(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def _last_step(metrics: Sequence[Row]) -> int:
    return int(max((number(row, "step") or 0 for row in metrics), default=0))


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "?" if value is None else str(value)
