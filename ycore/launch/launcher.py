"""One run on this node, from a RunConfig to its summary: claim, fetch, start, watch, clear away, sum up.

Not here: watching (`supervise`), which engines (`engines`), clearing away (`guarding`). The trainer and the engines
are started by module name, never imported.
"""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml

from ycore.config.run import RunConfig
from ycore.errors import Interrupted
from ycore.launch.engines import EnginePlan, is_vllm_installed, plan_engines
from ycore.launch.guarding import guarded
from ycore.launch.processes import ManagedProcess
from ycore.launch.ranks import RankedTrainer
from ycore.launch.site import Site, rank_cores, site_of
from ycore.launch.stopping import StopRequests
from ycore.launch.supervise import Supervisor
from ycore.roles import RUN_MARKER
from ycore.roles.rollout import engine_command, engine_environment
from ycore.run_folder.files import read_json, write_json_atomic
from ycore.run_folder.paths import RunFolder
from ycore.run_folder.prepare import claim
from ycore.run_folder.secrets import redact
from ycore.run_folder.summary import Status, summarise
from ycore.telemetry.curve import draw_curve
from ycore.telemetry.follow import MetricsFollower
from ycore.telemetry.metrics import read_metrics
from ycore.telemetry.progress import RunProgress, as_duration, open_progress


@dataclass(frozen=True, slots=True)
class Worker:
    """The process that drives the run; `result` is the file of its figures where it trains nothing."""

    name: str
    module: str
    result: str | None = None

    @property
    def trains(self) -> bool:
        return self.result is None


TRAINER = Worker("trainer", "ycore.roles.trainer")
EVALUATOR = Worker("evaluator", "ycore.roles.evaluator", result="eval.json")


def run_training(config: RunConfig, *, resume: bool = False, stream: TextIO | None = None) -> dict[str, Any]:
    """Train, in the foreground; the summary, or the error that ended the run."""
    return run_worker(TRAINER, config, resume=resume, stream=stream)


def run_evaluation(config: RunConfig, *, stream: TextIO | None = None) -> dict[str, Any]:
    """Evaluate, in the foreground; the evaluator's eval.json is part of the summary."""
    return run_worker(EVALUATOR, config, resume=False, stream=stream)


def run_worker(worker: Worker, config: RunConfig, *, resume: bool, stream: TextIO | None) -> dict[str, Any]:
    """Run one worker with its engines; however it ends, nothing is left running and summary.json says how."""
    began = time.monotonic()
    site = site_of(config, trains=worker.trains)
    folder = site.folder
    held = claim(folder, config, resume=resume)
    progress = open_progress(config.steps, stream=stream) if worker.trains else _count_prompts(stream)
    try:
        with StopRequests() as stops, guarded(folder, held):
            _work(worker, config, site, progress=progress, stops=stops)
    except BaseException as error:
        status: Status = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        _sum_up(worker, config, site, progress, status=status, began=began, error=error)
        raise
    else:
        return _sum_up(worker, config, site, progress, status="finished", began=began)
    finally:
        progress.close()
        held.release()


def _work(worker: Worker, config: RunConfig, site: Site, *, progress: RunProgress, stops: StopRequests) -> None:
    folder, layout = site.folder, site.layout
    with stops.at_once():
        model = _fetch(config, folder, progress)
        plan = plan_engines(
            config,
            folder,
            model,
            model_config=read_json(model / "config.json"),
            machine=site.machine,
            vllm_installed=is_vllm_installed(),
            layout=layout,
        )
        progress.say(plan.note + (", starting ..." if plan.engines else ""))
        _write_engines(site, plan, model, home=Path(config.output))
    engines = [_start_engine(plan, number, folder) for number in range(len(plan.engines))]
    Supervisor(
        _start_worker(worker, folder) if layout.accelerate is None else _start_ranks(worker, site),
        [(process, engine.socket) for process, engine in zip(engines, plan.engines, strict=True)],
        follower=MetricsFollower(folder.metrics),
        progress=progress,
        stops=stops,
        start_timeout_s=config.engine.start_timeout_s,
    ).watch()


def _fetch(config: RunConfig, folder: RunFolder, progress: RunProgress) -> Path:
    """The model's folder; what is started on the way carries the run's marker, so that it never outlives the run."""
    from ycore.models.fetch import fetch_model
    from ycore.models.plan import resolve_model

    model = resolve_model(config.model, trust_remote_code=config.trust_remote_code)
    progress.say(f"model {config.model}: {model.note}")
    os.environ[RUN_MARKER] = folder.run_id
    try:
        return fetch_model(model, log=folder.log("model"))
    finally:
        os.environ.pop(RUN_MARKER, None)


def _write_engines(site: Site, plan: EnginePlan, model: Path, *, home: Path) -> None:
    """What the trainer must know of how it was started."""
    told = {
        "kind": plan.kind,
        "engines": [engine.name for engine in plan.engines],
        "model": str(model.resolve()),
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.engines[0].max_num_seqs if plan.engines else None,
        "home": str(home.resolve()),
        "cores": rank_cores(site.machine, site.layout),
    }
    write_json_atomic(site.folder.root / "engines.json", told)


def _start_engine(plan: EnginePlan, number: int, folder: RunFolder) -> ManagedProcess:
    engine = plan.engines[number]
    return ManagedProcess.start(
        engine.name,
        engine_command(engine),
        environment=engine_environment(engine),
        run_id=folder.run_id,
        log=folder.log(engine.name),
        cores=engine.cores,
    )


def _start_ranks(worker: Worker, site: Site) -> RankedTrainer:
    """accelerate's own launcher, with the worker as its module; every rank has its share of the threads."""
    folder = site.folder
    settings = folder.root / "accelerate.yaml"
    settings.write_text(yaml.safe_dump(dict(site.layout.accelerate or {})), encoding="utf-8")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(settings.resolve())]
    threads = max(1, len(site.machine.cores) // site.layout.local)
    process = ManagedProcess.start(
        worker.name,
        [*launch, "-m", worker.module, str(folder.root.resolve())],
        environment={**_worker_environment(), "OMP_NUM_THREADS": str(threads)},
        run_id=folder.run_id,
        log=folder.log(worker.name),
    )
    return RankedTrainer(process, folder, num_ranks=site.layout.local)


def _worker_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", "SPT_NOENV": "1"}


def _start_worker(worker: Worker, folder: RunFolder) -> ManagedProcess:
    return ManagedProcess.start(
        worker.name,
        [sys.executable, "-m", worker.module, str(folder.root.resolve())],
        environment=_worker_environment(),
        run_id=folder.run_id,
        log=folder.log(worker.name),
    )


def _sum_up(
    worker: Worker,
    config: RunConfig,
    site: Site,
    progress: RunProgress,
    *,
    status: Status,
    began: float,
    error: BaseException | None = None,
) -> dict[str, Any]:
    """Write summary.json and curve.png, and tell the end in a line; the figures of a run are the first machine's."""
    folder, has_steps = site.folder, worker.trains and site.layout.machine_rank == 0
    metrics = read_metrics(folder.metrics)
    what = None if error is None else redact(str(error) or type(error).__name__)
    summary = summarise(metrics, status, time.monotonic() - began, error=what)
    if not has_steps:
        summary = {key: summary[key] for key in ("status", "wall_s", "error") if key in summary}
    if worker.result is not None and status == "finished":
        summary |= read_json(folder.root / worker.result)
    write_json_atomic(folder.summary, summary)
    if has_steps:
        _draw(folder, metrics, f"{config.algorithm}: {config.model} on {config.dataset}", progress)
        progress.say(_closing(summary, folder))
    return summary


def _count_prompts(stream: TextIO | None) -> RunProgress:
    """An evaluation's rows count prompts, and only its process knows how many there are."""
    return open_progress(None, unit="prompts", stream=stream)


def _draw(folder: RunFolder, metrics: list[dict[str, Any]], title: str, progress: RunProgress) -> None:
    try:
        draw_curve(metrics, folder.curve, title)
    except (OSError, RuntimeError, ValueError) as problem:
        progress.say(f"no curve was drawn: {problem}")  # a picture is not worth a run's result


def _closing(summary: Mapping[str, Any], folder: RunFolder) -> str:
    rewards = [summary["reward_first"], summary["reward_last"]]
    change = " -> ".join("?" if reward is None else f"{reward:.3f}" for reward in rewards)
    told = f"{summary['status']} after {summary['steps']} steps, {as_duration(summary['wall_s'])}: reward {change} "
    where = f"; model in {folder.model}, curve in {folder.curve}" if summary["status"] == "finished" else ""
    return f"{told}(means of the first and last five steps){where}"
