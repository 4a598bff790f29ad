"""The report of one run or several: a page that holds everything it shows, the same as JSON, and its curves as PNG."""

import base64
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from ycore.run.files import write_json_atomic
from ycore.run.metrics import REWARD, STEP_SECONDS, Row, number
from ycore.run.paths import RunFolder
from ycore.run.text import as_duration, printable, topic
from ycore.view.pictures import (
    HELD_OUT,
    HELD_OUT_LOSS,
    Points,
    literal,
    new_figure,
    points,
    save_png,
    smooth,
    style,
)
from ycore.view.record import (
    PARTS,
    RecordedRun,
    ScoredCompletion,
    content_text,
)

RUN_COLOURS = (
    "#2456a6",
    "#c2571a",
    "#3f8f5f",
    "#8a4fa3",
    "#b03a48",
    "#4a9aa8",
    "#77622a",
    "#5c6470",
)
"""Colours of runs, in their order; more runs begin again."""

_PANELS = (
    ("reward", REWARD),
    ("reward on held-out prompts", (HELD_OUT,)),
    ("loss on held-out rows", (HELD_OUT_LOSS,)),
    ("completion length, tokens", ("completions/mean_length",)),
    ("share of groups without variance", ("frac_reward_zero_std",)),
    ("share cut off at the limit", ("completions/clipped_ratio",)),
    ("entropy, nats", ("entropy",)),
    ("gradient norm", ("grad_norm",)),
    ("KL to the reference", ("kl",)),
    ("logprob gap, engine to trainer", ("ycore/logprob_gap",)),
    ("tokens per second", ("ycore/tokens_per_s",)),
    ("seconds a step", STEP_SECONDS),
    ("idle share of the slots", ("ycore/idle_share",)),
    ("round over its bound", ("ycore/bound_ratio",)),
)


_MAX_PICTURE_BYTES = 1 << 20
_NUM_CHOSEN = 4  # completions at either end of the last round, and in its middle


def make_report(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Give the runs different names."""
    names = [run.name for run in runs]
    report = []
    for place, run in enumerate(runs, 1):
        if names.count(run.name) > 1:
            run = replace(run, name=f"{run.name} ({place})")
        report.append(run)
    return report


def write_report(runs: Sequence[RecordedRun], page: Path) -> list[Path]:
    """Write the page, and beside it the same as `.json` and the curves as `.png`; return the files written."""
    page.parent.mkdir(parents=True, exist_ok=True)
    partial = page.with_name(f".{page.name}")
    partial.write_text(render_page(runs), encoding="utf-8")
    partial.replace(page)
    written = [page, page.with_suffix(".json")]
    write_json_atomic(written[-1], report_json(runs))
    figure = draw_measures(runs)
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
                "problems": list(run.problems),
                "command": list(run.command),
                "versions": dict(run.versions),
                "config": dict(run.config),
            }
            for run in runs
        ]
    }


def render_page(runs: Sequence[RecordedRun]) -> str:
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
        colours=RUN_COLOURS,
        same_question=len({(run.config.get("model"), topic(run.config)) for run in runs}) == 1,
        curves=None if measures is None else as_svg(measures),
        over_seconds=None if over_seconds is None else as_svg(over_seconds),
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
    return [
        file for file in images if file.is_file() and file.stat().st_size <= _MAX_PICTURE_BYTES
    ]


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


# -- figures -----------------------------------------------------------------------------------------------------------


def draw_measures(runs: Sequence[RecordedRun]) -> Any | None:
    """Draw a panel for each measure that some run has, a colour a run; None without any."""
    panels = []
    for title, names in _PANELS:
        series = [points(run.metrics, *names) for run in runs]
        if any(steps for steps, _ in series):
            panels.append((title, series))
    if not panels:
        return None
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(4.2 * columns, 2.5 * rows)
    for place, (title, series) in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, place)
        for index, run_points in enumerate(series):
            _draw_smoothed(axes, run_points, index)
        axes.set_title(title, fontsize=10, loc="left")
        style(axes)
    return figure


def draw_reward_over_seconds(runs: Sequence[RecordedRun]) -> Any | None:
    """Draw reward over device seconds, which compares runs whose steps cost different time."""
    if not any(run.reward_curve for run in runs):
        return None
    figure = new_figure(11, 3.6)
    axes = figure.add_subplot()
    for index, run in enumerate(runs):
        seconds = [device_s for device_s, _, _ in run.reward_curve]
        rewards = [reward for _, _, reward in run.reward_curve]
        _draw_smoothed(axes, (seconds, rewards), index, label=literal(run.name))
    axes.set_ylabel("reward")
    axes.legend(frameon=False)
    style(axes, below="device seconds")
    return figure


def _draw_smoothed(axes: Any, series: Points, index: int, *, label: str = "") -> None:
    steps, values = series
    axes.plot(steps, values, color=_colour(index), linewidth=0.8, alpha=0.35)
    axes.plot(steps, smooth(values), color=_colour(index), linewidth=2, label=label)


def _colour(index: int) -> str:
    return RUN_COLOURS[index % len(RUN_COLOURS)]


def as_svg(figure: Any) -> str:
    """Return the picture as an `<svg>` element, which a page can hold without another file."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    whole = text.getvalue()
    return whole[whole.index("<svg") :]
