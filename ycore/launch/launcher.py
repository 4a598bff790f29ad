"""One run on this machine, from its config to its summary: claim, fetch, start, watch, clear away, sum up.

The trainer and the engines are started by module name, never imported.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TextIO

import yaml

from ycore.config.schema import AnyConfig, RunConfig
from ycore.errors import Interrupted
from ycore.launch.diagnostics import plan_and_measured
from ycore.launch.engine_watch import EngineWatch, start_engines
from ycore.launch.engines import plan_engines
from ycore.launch.guardian import guarded
from ycore.launch.layout import Site, site_of
from ycore.launch.processes import ManagedProcess, RankedTrainer
from ycore.launch.supervise import Limits, StopRequests, Supervisor
from ycore.models.fetch import fetch_model
from ycore.models.names import resolve_model
from ycore.run.claim import claim
from ycore.run.files import read_json, write_json_atomic
from ycore.run.metrics import Status, read_metrics, summarise
from ycore.run.paths import RunFolder
from ycore.run.reports import RUN_MARKER
from ycore.run.secrets import redact, secrets_environment
from ycore.run.text import as_duration
from ycore.view.activity import RunActivity
from ycore.view.pictures import draw_curve, finish_trace_and_draw
from ycore.view.progress import RunProgress, open_progress


@dataclass(frozen=True, slots=True)
class Worker:
    """The process that does a run's work. `result` is the file of its results, for one that trains nothing."""

    name: str
    module: str
    result: str | None = None

    @property
    def trains(self) -> bool:
        return self.result is None


TRAINER = Worker("trainer", "ycore.trainer")
EVALUATOR = Worker("evaluator", "ycore.trainer.evaluator", result="eval.json")
PREFLIGHT = Worker("preflight", "ycore.trainer.preflight_round", result="preflight.json")


def run_worker(
    worker: Worker,
    config: AnyConfig,
    *,
    resume: bool = False,
    num_steps: int | None = None,
    stream: TextIO | None = None,
) -> dict[str, Any]:
    """Run a worker, with the engines of its run, in the foreground.

    However that ends, nothing is left running, and summary.json says how it ended.

    Args:
        resume: continue the run in the folder instead of beginning a new one.
        num_steps: steps that the progress bar counts to, where the config does not say it.
        stream: where progress is shown; standard output by default.

    Returns:
        The content of summary.json; with `stop_asked` when the run finished although it was asked to stop.
    """
    began = time.monotonic()
    site = site_of(config, trains=worker.trains)
    held = claim(site.folder, config, resume=resume)
    if worker.trains:
        progress = open_progress(config.steps or num_steps, stream=stream, look=RunActivity(site.folder.root).look)
    else:
        progress = open_progress(None, unit="prompts", stream=stream)
    sum_up = partial(_sum_up, worker, config, site, progress, began=began)
    try:
        with StopRequests() as stops, guarded(site.folder, held):
            _work(worker, config, site, progress, stops)
    except BaseException as error:
        sum_up("interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed", error=error)
        raise
    else:
        return sum_up("finished") | ({"stop_asked": True} if stops.count else {})
    finally:
        progress.close()
        held.release()


def _work(worker: Worker, config: AnyConfig, site: Site, progress: RunProgress, stops: StopRequests) -> None:
    """Fetch the models, start engines and worker, and return when the worker has finished."""
    with stops.at_once():
        engines = _start_engines(worker, config, site, progress)
    limits = Limits()
    if isinstance(config, RunConfig):
        engine = config.engine
        limits = Limits(engine.start_timeout_s, config.step_timeout_s, engine.health_timeout_s, config.restarts)
    supervisor = Supervisor(
        lambda: _start_worker(worker, config, site),
        engines,
        folder=site.folder,
        home=RunFolder(Path(config.output)),
        progress=progress,
        stops=stops,
        limits=limits,
        saves=worker.trains,
    )
    supervisor.watch()


def _start_engines(worker: Worker, config: AnyConfig, site: Site, progress: RunProgress) -> EngineWatch:
    """Fetch the models and start the engines; engines.json describes both to the worker."""

    @cache
    def fetch(name: str) -> Path:
        return _fetch(name, config, site.folder, progress)

    facts = {
        "model": str(fetch(config.model).resolve()),
        "home": str(Path(config.output).resolve()),
        "cores": site.rank_cores,
    }
    if not isinstance(config, RunConfig):
        write_json_atomic(site.folder.engines, {"kind": "none", "engines": [], **facts})
        return EngineWatch()
    settings = config.engine
    plan = plan_engines(config, site, fetch=fetch, sleeps=worker.trains and settings.sleep)
    progress.say(plan.note + (", starting ..." if plan.engines else ""))
    write_json_atomic(site.folder.engines, {**plan.as_json(), **facts})
    live = start_engines(
        [engine for model in plan.served for engine in model.engines],
        site.folder,
        health_timeout_s=settings.health_timeout_s,
        start_timeout_s=settings.start_timeout_s,
        say=progress.say,
    )
    return EngineWatch(live, max_restarts=settings.restarts, start_timeout_s=settings.start_timeout_s, say=progress.say)


def _fetch(name: str, config: AnyConfig, folder: RunFolder, progress: RunProgress) -> Path:
    """A model's folder. A process that converts it carries the run's marker, so that it never outlives the run."""
    model = resolve_model(name, trust_remote_code=config.trust_remote_code)
    progress.say(f"model {name}: {model.note}")
    os.environ[RUN_MARKER] = folder.run_id
    try:
        return fetch_model(model, log=folder.log("model"))
    finally:
        os.environ.pop(RUN_MARKER, None)


def _start_worker(worker: Worker, config: AnyConfig, site: Site) -> ManagedProcess | RankedTrainer:
    """One process, or accelerate's launcher with the worker as its module."""
    folder, layout = site.folder, site.layout
    environment = worker_environment(config)
    launch: list[str] = []
    if layout.accelerate is not None:
        settings = folder.root / "accelerate.yaml"
        settings.write_text(yaml.safe_dump(dict(layout.accelerate)), encoding="utf-8")
        launch = ["-m", "accelerate.commands.launch", "--config_file", str(settings.resolve())]
        environment["OMP_NUM_THREADS"] = str(max(1, len(site.machine.cores) // layout.local))
    process = ManagedProcess.start(
        worker.name,
        [sys.executable, *launch, "-m", worker.module, str(folder.root.resolve())],
        environment=environment,
        run_id=folder.run_id,
        log=folder.log(worker.name),
    )
    return process if layout.accelerate is None else RankedTrainer(process, folder, num_ranks=layout.local)


def worker_environment(config: AnyConfig) -> dict[str, str]:
    """The launcher's environment, and the secrets that run.json hides."""
    return {
        # Threads that wait for each other by spinning take ten times as long where another process wants a core too.
        "GOMP_SPINCOUNT": "10000",
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "SPT_NOENV": "1",
        **secrets_environment(config.model_dump(mode="json")),
    }


def _sum_up(
    worker: Worker,
    config: AnyConfig,
    site: Site,
    progress: RunProgress,
    status: Status,
    *,
    began: float,
    error: BaseException | None = None,
) -> dict[str, Any]:
    """Write summary.json and draw the curve. Only the first machine has the metrics of a run."""
    folder, has_steps = site.folder, worker.trains and site.layout.machine_rank == 0
    measure: Literal["reward", "loss"] = "reward" if isinstance(config, RunConfig) else "loss"
    metrics = read_metrics(folder.metrics, say=progress.say)
    message = None if error is None else redact(str(error) or type(error).__name__)
    summary = summarise(metrics, status, time.monotonic() - began, measure=measure, error=message)
    if not has_steps:
        summary = {key: summary[key] for key in ("status", "wall_s", "error") if key in summary}
    if status == "finished":
        summary |= _results(worker, config, site, metrics)
    write_json_atomic(folder.summary, summary)
    if has_steps:
        _draw(config, folder, metrics, progress)
        progress.say(_closing_line(summary, measure, folder))
    return summary


def _results(worker: Worker, config: AnyConfig, site: Site, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the summary of a finished run has besides its steps."""
    if worker.result is not None:
        return dict(read_json(site.folder.root / worker.result))
    if site.layout.machine_rank > 0:
        return {}
    if not isinstance(config, RunConfig):
        return dict(read_json(site.folder.held_out)) if site.folder.held_out.is_file() else {}
    compared = plan_and_measured(config, site, metrics)
    return {"plan_and_measured": compared} if compared else {}


def _draw(config: AnyConfig, folder: RunFolder, metrics: list[dict[str, Any]], progress: RunProgress) -> None:
    """The curve and the timeline; a picture that cannot be drawn costs a line, not the run's result."""
    try:
        if isinstance(config, RunConfig):
            finish_trace_and_draw(folder, f"placement {config.placement}, the last rounds")
        draw_curve(metrics, folder.curve, f"{config.algorithm}: {config.model} on {Path(config.dataset).name}")
    except (OSError, RuntimeError, ValueError) as problem:
        progress.say(f"no curve was drawn: {problem}")


def _closing_line(summary: Mapping[str, Any], measure: str, folder: RunFolder) -> str:
    means = [summary[f"{measure}_first"], summary[f"{measure}_last"]]
    change = " -> ".join("?" if mean is None else f"{mean:.3f}" for mean in means)
    ended = f"{summary['status']} after {summary['steps']} steps, {as_duration(summary['wall_s'])}"
    where = f"; model in {folder.model}, curve in {folder.curve}" if summary["status"] == "finished" else ""
    return f"{ended}: {measure} {change} (means of the first and last five steps){where}"
