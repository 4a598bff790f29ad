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
from ycore.run.metrics import number
from ycore.run.paths import RunFolder
from ycore.run.text import as_duration, printable, topic
from ycore.view.pictures import (
    RUN_COLOURS,
    Banded,
    as_svg,
    curves,
    over_bands,
    over_seconds,
    points,
    save_png,
    seconds_went,
)
from ycore.view.record import PARTS, RecordedRun, ScoredCompletion, at_equal_seconds, content_text

_LARGEST = 1 << 20  # bytes of a picture on the page
_SHOWN = 4  # completions at either end of the last round, and in its middle


def make_report(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """The runs by different names; where there are several, with what each had reached at equal device seconds."""
    names = [run.name for run in runs]
    numbered = [
        name if names.count(name) == 1 else f"{name} ({place})"
        for place, name in enumerate(names, 1)
    ]
    reached = at_equal_seconds([run.reward_curve for run in runs]) if len(runs) > 1 else [()]
    return [
        replace(run, name=name, reached=own)
        for run, name, own in zip(runs, numbered, reached, strict=True)
    ]


def write_report(
    runs: Sequence[RecordedRun],
    page: Path,
    *,
    bands: Sequence[Banded] = (),
    notes: Sequence[str] = (),
) -> list[Path]:
    """Write the page, and beside it the same as `.json` and the curves as `.png`; return the files written.

    `bands` are laid behind the runs' curves, and `notes` say of which runs they are.
    """
    page.parent.mkdir(parents=True, exist_ok=True)
    partial = page.with_name(f".{page.name}")
    partial.write_text(render_page(runs, bands, notes), encoding="utf-8")
    partial.replace(page)
    write_json_atomic(page.with_suffix(".json"), report_json(runs))
    written = [page, page.with_suffix(".json")]
    if (drawn := curves(runs, bands)) is not None:
        written.append(page.with_suffix(".png"))
        save_png(drawn, written[-1])
    return written


def report_json(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """The report's numbers, as JSON values."""
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
                "at_equal_seconds": [asdict(one) for one in run.reached],
                "problems": list(run.problems),
                "command": list(run.command),
                "versions": dict(run.versions),
                "config": dict(run.config),
            }
            for run in runs
        ]
    }


def render_page(
    runs: Sequence[RecordedRun], bands: Sequence[Banded] = (), notes: Sequence[str] = ()
) -> str:
    """HTML that needs no network and no other file; whatever a model wrote is shown as text."""
    from jinja2 import Environment

    def shown(value: Any) -> Any:
        """Text as data; the pictures, which are markup, are ours."""
        return printable(value) if type(value) is str else value

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=shown)
    environment.filters |= {
        "short": _short,
        "last_step": lambda rows: int(max((number(row, "step") or 0 for row in rows), default=0)),
        "duration": as_duration,
        "shell": shlex.join,
        "prompt": content_text,
        "beside": zip,
        "chosen": chosen,
        "judges": _judge_rows,
        "seen": _seen,
        "base64": lambda file: base64.b64encode(file.read_bytes()).decode(),
    }
    source = files("ycore.view").joinpath("page.html.j2").read_text(encoding="utf-8")
    drawn, compared = curves(runs), over_seconds(runs) if len(runs) > 1 else None
    return environment.from_string(source).render(
        runs=runs,
        bands=bands,
        notes=notes,
        over_bands=as_svg(over_bands(bands)) if bands else None,
        colours=RUN_COLOURS,
        same_question=len({(run.config.get("model"), topic(run.config)) for run in runs}) == 1,
        curves=None if drawn is None else as_svg(drawn),
        over_seconds=None if compared is None else as_svg(compared),
        # Runs may reach fewer marks than others: only those that all have are shown.
        reached=list(zip(*(run.reached for run in runs), strict=False)),
        spent_picture=as_svg(seconds_went(runs)),
        parts=[part for part in PARTS if any(run.spent.seconds[part] for run in runs)],
    )


def chosen(completions: Sequence[ScoredCompletion]) -> list[ScoredCompletion]:
    """A few of them: the lowest rewards, the middle ones, the highest, in this order; then one without a reward."""
    ranked = sorted(
        (one for one in completions if one.reward is not None), key=lambda one: one.reward or 0.0
    )
    middle = len(ranked) // 2
    places = [
        *range(_SHOWN),
        *range(middle - _SHOWN // 2, middle + _SHOWN // 2),
        *range(-_SHOWN, 0),
    ]
    kept = (
        sorted({place % len(ranked) for place in places if -len(ranked) <= place < len(ranked)})
        if ranked
        else []
    )
    masked = [one for one in completions if one.reward is None][:1]
    return [ranked[place] for place in kept] + masked


def _seen(sample: Mapping[str, Any], run: RecordedRun) -> list[Path]:
    """The files of the pictures that a prompt shows, of those that are small enough for a page."""
    found = [RunFolder(run.root).images / name for name in sample.get("images", ())]
    return [file for file in found if file.is_file() and file.stat().st_size <= _LARGEST]


def _judge_rows(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    names = sorted({name for row in metrics for name in row if name.startswith("ycore/judge/")})
    series = {name.removeprefix("ycore/judge/"): points(metrics, name)[1] for name in names}
    return [(name, f"{fmean(values):.4g} a step") for name, values in series.items() if values]


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "?" if value is None else str(value)
