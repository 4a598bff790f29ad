"""The report: one page that holds everything it shows, the same as JSON, and its first picture as PNG.

Not here: the numbers (`spent`, `compare`) and pictures (`figures`) that it puts together.
"""

import base64
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ycore.run.files import write_json_atomic
from ycore.run.text import printable
from ycore.view.figures import COLOURS, as_png, as_svg, curves, over_seconds, seconds_went
from ycore.view.progress import as_duration
from ycore.view.record import PARTS, Reached, RunRecord, Spent, Written, as_text, at_equal_seconds, reward_curve, spent

_SHOWN = 4  # completions at either end of the last round, and in its middle


@dataclass(frozen=True, slots=True)
class Report:
    """What is said of one run or several."""

    runs: Sequence[RunRecord]
    spent: Mapping[str, Spent]
    reached: Sequence[Sequence[Reached]]


def make_report(runs: Sequence[RunRecord]) -> Report:
    """Everything that is computed, once, for the page and for the JSON alike."""
    names = _distinct([run.name for run in runs])
    seconds = {
        name: spent(
            run.metrics,
            prompts_per_step=int(run.config.get("prompts_per_step", 1)),
            num_slots=run.num_slots,
            judging=run.judging,
        )
        for name, run in zip(names, runs, strict=True)
    }
    equal = at_equal_seconds([reward_curve(run.metrics, num_slots=run.num_slots) for run in runs])
    return Report(runs, seconds, equal if len(runs) > 1 else [])


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, numbered where two are alike."""
    return [name if names.count(name) == 1 else f"{name} ({place + 1})" for place, name in enumerate(names)]


def write_report(report: Report, page: Path) -> list[Path]:
    """The page, and beside it the same as `.json` and the curves as `.png`; the files written."""
    page.parent.mkdir(parents=True, exist_ok=True)
    partial = page.with_name(f".{page.name}")
    partial.write_text(as_page(report), encoding="utf-8")
    partial.replace(page)
    write_json_atomic(page.with_suffix(".json"), as_json(report))
    drawn = curves(report.runs)
    if drawn is None:
        return [page, page.with_suffix(".json")]
    as_png(drawn, page.with_suffix(".png"))
    return [page, page.with_suffix(".json"), page.with_suffix(".png")]


def as_json(report: Report) -> dict[str, Any]:
    """The report's numbers."""
    runs = []
    for place, ((name, seconds), run) in enumerate(zip(report.spent.items(), report.runs, strict=True)):
        runs.append(
            {
                "name": name,
                "folder": str(run.root),
                "status": run.summary.get("status", "running"),
                "summary": dict(run.summary),
                "slots": run.num_slots,
                "device_seconds": dict(seconds.seconds),
                "device_seconds_per_informative_group": seconds.per_informative_group,
                "at_equal_seconds": [asdict(one) for one in report.reached[place]] if report.reached else [],
                "problems": list(run.problems),
                "command": list(run.command),
                "versions": dict(run.versions),
                "config": dict(run.config),
            }
        )
    return {"runs": runs}


def as_page(report: Report) -> str:
    """HTML that needs no network and no other file; whatever a model wrote is shown as text."""
    from jinja2 import Environment

    source = files("ycore.view").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_shown)
    drawn, compared = curves(report.runs), over_seconds(report.runs) if len(report.runs) > 1 else None
    return environment.from_string(source).render(
        title=" and ".join(report.spent),
        lead=_lead(report.runs),
        runs=[_run(*item) for item in zip(report.spent, report.runs, report.spent.values(), COLOURS * 9, strict=False)],
        curves=None if drawn is None else as_svg(drawn),
        over_seconds=None if compared is None else as_svg(compared),
        reached=_reached_rows(report.reached),
        spent_picture=as_svg(seconds_went(report.spent)),
        spent_rows=[
            {"part": part, "cells": [_spent_cell(one, part) for one in report.spent.values()]}
            for part in PARTS
            if any(one.seconds[part] for one in report.spent.values())
        ],
    )


def _shown(value: Any) -> Any:
    """Text as data; the pictures, which are markup, are ours."""
    return printable(value) if type(value) is str else value


def _lead(runs: Sequence[RunRecord]) -> str:
    first = runs[0].config
    same = all(
        (run.config.get("model"), run.config.get("dataset")) == (first.get("model"), first.get("dataset"))
        for run in runs
    )
    about = f"{first.get('algorithm', '')}: {first.get('model', '?')} on {first.get('dataset', '?')}"
    return about if same else f"{len(runs)} runs of different models or datasets"


def _run(name: str, run: RunRecord, seconds: Spent, colour: str) -> dict[str, Any]:
    summary, per_group = run.summary, seconds.per_informative_group
    return {
        "name": name,
        "colour": colour,
        "status": summary.get("status", "still running"),
        "steps": max(int(row.get("step", 0)) for row in run.metrics),
        "wall": as_duration(summary["wall_s"]) if "wall_s" in summary else "",
        "change": f"{_short(summary.get('reward_first'))} → {_short(summary.get('reward_last'))}",
        "device_s": f"{seconds.total:.0f}",
        "per_group": "none taught" if per_group is None else f"{per_group:.2f}",
        "timeline": None if run.timeline is None else base64.b64encode(run.timeline.read_bytes()).decode(),
        "judge": _judge_rows(run.metrics),
        "plan": _plan_rows(summary.get("plan_and_measured", [])),
        "samples": _sample_rows(run.samples),
        "written": [_written_row(one) for one in chosen(run.written)],
        "problems": run.problems,
        "started": run.started,
        "command": shlex.join(["ycore", *_without_program(run.command)]),
        "versions": ", ".join(f"{name} {version}" for name, version in run.versions.items() if version),
    }


def _without_program(command: Sequence[str]) -> Sequence[str]:
    return command[1:] if command else command


def chosen(written: Sequence[Written]) -> list[Written]:
    """A few completions: the lowest rewards, the middle ones, the highest, in this order; then one without a reward."""
    ranked = sorted((one for one in written if one.reward is not None), key=lambda one: one.reward or 0.0)
    middle = len(ranked) // 2
    places = [*range(_SHOWN), *range(middle - _SHOWN // 2, middle + _SHOWN // 2), *range(-_SHOWN, 0)]
    kept = sorted({place % len(ranked) for place in places if -len(ranked) <= place < len(ranked)}) if ranked else []
    masked = [one for one in written if one.reward is None][:1]
    return [ranked[place] for place in kept] + masked


def _written_row(one: Written) -> dict[str, str]:
    reward = "masked" if one.reward is None else f"{one.reward:.3g}"
    return {"reward": reward, "prompt": one.prompt, "completion": one.completion}


def _judge_rows(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    names = sorted({name for row in metrics for name in row if name.startswith("ycore/judge/")})
    rows = []
    for name in names:
        values = [row[name] for row in metrics if isinstance(row.get(name), int | float)]
        if values:
            rows.append((name.removeprefix("ycore/judge/"), f"{sum(values) / len(values):.4g} a step"))
    return rows


def _plan_rows(compared: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Rows of the summary's own table, where the run could be compared with its plan."""
    return [
        {
            "what": f"{row['what']}, {row['unit']}",
            "planned": _short(row["planned"]),
            "measured": _short(row["measured"]),
            "error": f"{row['error']:+.0%}",
        }
        for row in compared
    ]


def _sample_rows(samples: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {"prompt": as_text(before["prompt"]), "before": before["completion"], "after": after["completion"]}
        for before, after in zip(samples.get("before", []), samples.get("after", []), strict=False)
    ]


def _reached_rows(reached: Sequence[Sequence[Reached]]) -> list[dict[str, Any]]:
    if not reached or not all(reached):
        return []
    return [{"at": f"{row[0].device_s:.0f}", "cells": [_reached(one) for one in row]} for row in zip(*reached)]  # noqa: B905 - runs may reach fewer marks


def _reached(one: Reached) -> str:
    spread = "" if one.half_width is None else f" ± {one.half_width:.3f}"
    return f"{one.reward:.3f}{spread} (step {one.step})"


def _spent_cell(one: Spent, part: str) -> str:
    share = 100 * one.seconds[part] / one.total if one.total else 0.0
    return f"{one.seconds[part]:.1f} ({share:.0f} %)"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "?" if value is None else value if isinstance(value, str) else json.dumps(value)
