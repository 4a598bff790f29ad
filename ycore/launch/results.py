"""Write what a run has come to: the sandbox of its code, its summary and its curve."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ycore.config.schema import BaseConfig, RunConfig, ScoredConfig, TuneConfig
from ycore.launch.layout import Site
from ycore.run.files import read_json, write_json_atomic
from ycore.run.metrics import Status, read_metrics, summarise
from ycore.run.paths import RunFolder
from ycore.run.secrets import redact
from ycore.run.text import Say, as_duration, topic
from ycore.sandbox.level import choose_level
from ycore.scoring.scorers import runs_unknown_code
from ycore.view.pictures import draw_curve, finish_trace_and_draw
from ycore.view.record import advice

Metrics = list[dict[str, Any]]


def note_sandbox(folder: RunFolder, config: BaseConfig) -> None:
    """Add to run.json what confines the user's own code, where the run has any."""
    if not isinstance(config, ScoredConfig):
        return
    if runs_unknown_code(config) or (isinstance(config, RunConfig) and config.has_turns):
        level = choose_level(config.sandbox.level)
        write_json_atomic(folder.config, read_json(folder.config) | {"sandbox": level.line})


def write_results(
    config: BaseConfig,
    site: Site,
    status: Status,
    *,
    wall_s: float,
    result_file: str | None,
    error: BaseException | None,
    say: Say,
) -> dict[str, Any]:
    """Write summary.json and draw the curve. Only the first machine has the metrics of a run.

    Args:
        result_file: the file with the results of a run that trains nothing; None for one that trains.
        error: why the run ended, unless it finished.
    """
    folder = site.folder
    has_steps = result_file is None and site.layout.machine_rank == 0
    measure: Literal["reward", "loss"] = "loss" if isinstance(config, TuneConfig) else "reward"
    metrics = read_metrics(folder.metrics, say=say)
    message = None if error is None else redact(str(error) or type(error).__name__)
    summary = summarise(metrics, status, wall_s, measure=measure, error=message)
    if not has_steps:
        summary = {key: summary[key] for key in ("status", "wall_s", "error") if key in summary}
    if status == "finished" and result_file is not None:
        summary |= read_json(folder.root / result_file)
    elif status == "finished" and has_steps:
        summary |= _training_results(config, folder, metrics)
    write_json_atomic(folder.summary, summary)
    if has_steps:
        _draw(config, folder, metrics, say)
        say(_closing_line(summary, measure, folder))
    return summary


def _training_results(
    config: BaseConfig, folder: RunFolder, metrics: Metrics
) -> dict[str, Any]:
    """Return what the summary of a finished training has besides its steps."""
    results = dict(read_json(folder.held_out)) if folder.held_out.is_file() else {}
    if isinstance(config, RunConfig) and (sentence := advice(metrics, config)):
        results["advice"] = sentence
    return results


def _closing_line(summary: Mapping[str, Any], measure: str, folder: RunFolder) -> str:
    means = [summary[f"{measure}_first"], summary[f"{measure}_last"]]
    change = " -> ".join("?" if mean is None else f"{mean:.3f}" for mean in means)
    line = (
        f"{summary['status']} after {summary['steps']} steps, {as_duration(summary['wall_s'])}: "
        f"{measure} {change} (means of up to five steps at either end)"
    )
    if summary["status"] == "finished":
        line += f"; model in {folder.model}, curve in {folder.curve}"
    return line


def _draw(config: BaseConfig, folder: RunFolder, metrics: Metrics, say: Say) -> None:
    """Draw the curve and the timeline; a picture that cannot be drawn costs a line, not the run's result."""
    try:
        if isinstance(config, RunConfig):
            finish_trace_and_draw(folder, f"placement {config.placement}, the last rounds")
        data = Path(topic(vars(config))).name or folder.root.name
        draw_curve(metrics, folder.curve, f"{config.algorithm}: {config.model} on {data}")
    except (OSError, RuntimeError, ValueError) as problem:
        say(f"no curve was drawn: {problem}")
