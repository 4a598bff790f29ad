"""One run on this node, from a RunConfig to its summary: claim, fetch, start, watch, clear away, sum up.

One run without rollouts on this node, from a TuneConfig to its summary: claim, fetch, start, watch, sum up.

Not here: watching (`supervise`), which engines (`engines`), clearing away (`guarding`). The trainer and the engines
are started by module name, never imported.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

import yaml

from ycore.config.algorithms import AnyConfig
from ycore.config.schema import RunConfig, TuneConfig
from ycore.errors import Interrupted
from ycore.launch.engine_watch import EngineWatch, LiveEngine, start_in_turn
from ycore.launch.engines import EnginePlan, Site, is_vllm_installed, plan_engines, rank_cores, site_of
from ycore.launch.guardian import guarded
from ycore.launch.peaks import MemoryPeaks, plan_and_measured
from ycore.launch.processes import ManagedProcess, RankedTrainer
from ycore.launch.scoring_models import ScorerPlan, check_run_placement, engine_processes, placing_notes, plan_scorers
from ycore.launch.supervise import Limits, StopRequests, Supervisor
from ycore.run.claim import claim
from ycore.run.files import read_json, write_json_atomic
from ycore.run.metrics import Status, read_metrics, summarise
from ycore.run.paths import RunFolder
from ycore.run.reports import RUN_MARKER
from ycore.run.secrets import redact, secrets_environment
from ycore.view.activity import RunActivity
from ycore.view.pictures import draw_curve, draw_loss_curve, finish_trace_and_draw
from ycore.view.progress import RunProgress, as_duration, open_progress


@dataclass(frozen=True, slots=True)
class Worker:
    """The process that drives the run; `result` is the file of its figures where it trains nothing."""

    name: str
    module: str
    result: str | None = None

    @property
    def trains(self) -> bool:
        return self.result is None


class SumUp(Protocol):
    """Writes down how a run ended, and returns its summary; `began` is a reading of `time.monotonic`."""

    def __call__(
        self, progress: RunProgress, *, status: Status, began: float, error: BaseException | None = None
    ) -> dict[str, Any]: ...


TRAINER = Worker("trainer", "ycore.trainer")
EVALUATOR = Worker("evaluator", "ycore.trainer.evaluator", result="eval.json")
PREFLIGHT = Worker("preflight", "ycore.trainer.preflight_round", result="preflight.json")


def run_training(config: RunConfig, *, resume: bool = False, stream: TextIO | None = None) -> dict[str, Any]:
    """Train, in the foreground; the summary, or the error that ended the run."""
    return run_worker(TRAINER, config, resume=resume, stream=stream)


def run_evaluation(config: RunConfig, *, stream: TextIO | None = None) -> dict[str, Any]:
    """Evaluate, in the foreground; the evaluator's eval.json is part of the summary."""
    return run_worker(EVALUATOR, config, resume=False, stream=stream)


def run_worker(worker: Worker, config: RunConfig, *, resume: bool, stream: TextIO | None) -> dict[str, Any]:
    """Run one worker with its engines; however it ends, nothing is left running and summary.json says how."""
    site = site_of(config, trains=worker.trains)
    return run_to_its_end(
        config,
        site,
        resume=resume,
        show=lambda: show_training(config.steps, site.folder, stream) if worker.trains else _count_prompts(stream),
        work=partial(_work, worker, config, site),
        sum_up=partial(_sum_up, worker, config, site),
    )


def run_to_its_end(
    config: AnyConfig,
    site: Site,
    *,
    resume: bool,
    show: Callable[[], RunProgress],
    work: Callable[[RunProgress, StopRequests], None],
    sum_up: SumUp,
) -> dict[str, Any]:
    """Claim the folder, guard what `work` starts in it, and sum up however that ends; the summary, or its error."""
    began = time.monotonic()
    held = claim(site.folder, config, resume=resume)
    progress = show()
    try:
        with StopRequests() as stops, guarded(site.folder, held):
            work(progress, stops)
    except BaseException as error:
        status: Status = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        sum_up(progress, status=status, began=began, error=error)
        raise
    else:
        summary = sum_up(progress, status="finished", began=began)
        return summary | ({"stop_asked": True} if stops.count else {})  # whoever runs several runs wants to know
    finally:
        progress.close()
        held.release()


def _work(worker: Worker, config: RunConfig, site: Site, progress: RunProgress, stops: StopRequests) -> None:
    folder, layout = site.folder, site.layout
    with stops.at_once():
        fetch = partial(fetch_named, config=config, folder=folder, progress=progress)
        model = fetch(config.model)
        plan = plan_engines(
            config,
            folder,
            model,
            model_config=read_json(model / "config.json"),
            machine=site.machine,
            vllm_installed=is_vllm_installed(),
            layout=layout,
            sleeps=worker.trains and config.engine.sleep,
        )
        scorers = plan_scorers(
            config, folder, plan.engines, fetch=lambda name: model if name == config.model else fetch(name)
        )
        if plan.engines:
            check_run_placement(config, num_slots=len(plan.engines) // layout.local)
        told = [plan.note, *(scorer.note for scorer in scorers), *placing_notes(plan.engines, scorers)]
        progress.say(", ".join(told) + (", starting ..." if plan.engines else ""))
        _write_engines(site, plan, scorers, model, home=Path(config.output))
    settings = config.engine
    with stops.at_once() if plan.sleeps else nullcontext():  # in turn they take a while, and nobody looks at `count`
        live = start_in_turn(
            engine_processes(plan.engines, scorers),
            partial(LiveEngine, folder=folder, health_timeout_s=settings.health_timeout_s),
            start_timeout_s=settings.start_timeout_s,
            say=progress.say,
        )
    engines = EngineWatch(
        live,
        budget=settings.restarts,
        start_timeout_s=settings.start_timeout_s,
        say=progress.say,
    )
    supervisor = Supervisor(
        lambda: start_worker(worker, config, site),
        engines,
        folder=folder,
        home=RunFolder(Path(config.output)),
        progress=progress,
        stops=stops,
        limits=Limits(
            settings.start_timeout_s, config.step_timeout_s, settings.health_timeout_s, restarts=config.restarts
        ),
        hint=f"; `ycore resume {config.output}` continues" if worker.trains else "",
    )
    with MemoryPeaks(folder.run_id, folder.memory):
        supervisor.watch()


def fetch_named(name: str, config: AnyConfig, folder: RunFolder, progress: RunProgress) -> Path:
    """A model's folder; what is started on the way carries the run's marker, so that it never outlives the run."""
    from ycore.models.fetch import fetch_model
    from ycore.models.names import resolve_model

    model = resolve_model(name, trust_remote_code=config.trust_remote_code)
    progress.say(f"model {name}: {model.note}")
    os.environ[RUN_MARKER] = folder.run_id
    try:
        return fetch_model(model, log=folder.log("model"))
    finally:
        os.environ.pop(RUN_MARKER, None)


def _write_engines(site: Site, plan: EnginePlan, scorers: Sequence[ScorerPlan], model: Path, *, home: Path) -> None:
    """What the trainer must know of how it was started."""
    told = {
        "kind": plan.kind,
        "engines": [engine.name for engine in plan.engines],
        "model": str(model.resolve()),
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.engines[0].max_num_seqs if plan.engines else None,
        "scorers": [scorer.told() for scorer in scorers],
        "home": str(home.resolve()),
        "cores": rank_cores(site.machine, site.layout),
        **({"sleeps": True} if plan.sleeps else {}),
    }
    write_json_atomic(site.folder.root / "engines.json", told)


def start_worker(worker: Worker, config: AnyConfig, site: Site) -> ManagedProcess | RankedTrainer:
    """One process, or as many ranks as the site has."""
    environment = worker_environment(config)
    if site.layout.accelerate is not None:
        return _start_ranks(worker, site, environment)
    return _start_worker(worker, site.folder, environment)


def _start_ranks(worker: Worker, site: Site, environment: Mapping[str, str]) -> RankedTrainer:
    """accelerate's own launcher, with the worker as its module; every rank has its share of the threads."""
    folder = site.folder
    settings = folder.root / "accelerate.yaml"
    settings.write_text(yaml.safe_dump(dict(site.layout.accelerate or {})), encoding="utf-8")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(settings.resolve())]
    threads = max(1, len(site.machine.cores) // site.layout.local)
    process = ManagedProcess.start(
        worker.name,
        [*launch, "-m", worker.module, str(folder.root.resolve())],
        environment={**environment, "OMP_NUM_THREADS": str(threads)},
        run_id=folder.run_id,
        log=folder.log(worker.name),
    )
    return RankedTrainer(process, folder, num_ranks=site.layout.local)


def worker_environment(config: AnyConfig) -> dict[str, str]:
    """The launcher's own, and what only the worker may know: the secrets that run.json hides."""
    secrets = secrets_environment(config.model_dump(mode="json"))
    # Threads that wait for each other by spinning take ten times as long where another process wants a core too.
    return {"GOMP_SPINCOUNT": "10000", **os.environ, "PYTHONUNBUFFERED": "1", "SPT_NOENV": "1", **secrets}


def _start_worker(worker: Worker, folder: RunFolder, environment: Mapping[str, str]) -> ManagedProcess:
    return ManagedProcess.start(
        worker.name,
        [sys.executable, "-m", worker.module, str(folder.root.resolve())],
        environment=environment,
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
    metrics = read_metrics(folder.metrics, say=progress.say)
    what = None if error is None else redact(str(error) or type(error).__name__)
    summary = summarise(metrics, status, time.monotonic() - began, error=what)
    if not has_steps:
        summary = {key: summary[key] for key in ("status", "wall_s", "error") if key in summary}
    if worker.result is not None and status == "finished":
        summary |= read_json(folder.root / worker.result)
    if has_steps and status == "finished" and (compared := plan_and_measured(config, site, metrics)):
        summary["plan_and_measured"] = compared
    write_json_atomic(folder.summary, summary)
    if has_steps:
        finish_trace_and_draw(folder.root, f"placement {config.placement}, the last rounds")
        draw_or_say(folder, metrics, f"{config.algorithm}: {config.model} on {config.dataset}", progress)
        progress.say(_closing(summary, folder))
    return summary


def show_training(num_steps: int | None, folder: RunFolder, stream: TextIO | None) -> RunProgress:
    """A training run's steps, and what it is at."""
    return open_progress(num_steps, stream=stream, look=RunActivity(folder.root).look)


def _count_prompts(stream: TextIO | None) -> RunProgress:
    """An evaluation's rows count prompts, and only its process knows how many there are."""
    return open_progress(None, unit="prompts", stream=stream)


def draw_or_say(
    folder: RunFolder,
    metrics: list[dict[str, Any]],
    title: str,
    progress: RunProgress,
    *,
    draw: Callable[[list[dict[str, Any]], Path, str], bool] = draw_curve,
) -> None:
    """curve.png, or a line that says why there is none."""
    try:
        draw(metrics, folder.curve, title)
    except (OSError, RuntimeError, ValueError) as problem:
        progress.say(f"no curve was drawn: {problem}")  # a picture is not worth a run's result


def _closing(summary: Mapping[str, Any], folder: RunFolder) -> str:
    rewards = [summary["reward_first"], summary["reward_last"]]
    change = " -> ".join("?" if reward is None else f"{reward:.3f}" for reward in rewards)
    told = f"{summary['status']} after {summary['steps']} steps, {as_duration(summary['wall_s'])}: reward {change} "
    where = f"; model in {folder.model}, curve in {folder.curve}" if summary["status"] == "finished" else ""
    return f"{told}(means of the first and last five steps){where}"


def run_tuning(
    config: TuneConfig, *, num_steps: int | None = None, resume: bool = False, stream: TextIO | None = None
) -> dict[str, Any]:
    """Train, in the foreground; the summary, or the error that ended the run. `num_steps` is for the bar alone."""
    site = site_of(config)
    return run_to_its_end(
        config,
        site,
        resume=resume,
        show=lambda: show_training(num_steps or config.steps, site.folder, stream),
        work=partial(_tuning_work, config, site),
        sum_up=partial(_tuning_sum_up, config, site),
    )


def _tuning_work(config: TuneConfig, site: Site, progress: RunProgress, stops: StopRequests) -> None:
    folder = site.folder
    with stops.at_once():
        model = fetch_named(config.model, config=config, folder=folder, progress=progress)
        told = {
            "kind": "none",
            "engines": [],
            "model": str(model.resolve()),
            "home": str(Path(config.output).resolve()),
            "cores": rank_cores(site.machine, site.layout),
        }
        write_json_atomic(folder.root / "engines.json", told)
    supervisor = Supervisor(
        lambda: start_worker(TRAINER, config, site),
        EngineWatch(),
        folder=folder,
        home=RunFolder(Path(config.output)),
        progress=progress,
        stops=stops,
        hint=f"; `ycore resume {config.output}` continues",
    )
    with MemoryPeaks(folder.run_id, folder.memory):
        supervisor.watch()


def _tuning_sum_up(
    config: TuneConfig,
    site: Site,
    progress: RunProgress,
    *,
    status: Status,
    began: float,
    error: BaseException | None = None,
) -> dict[str, Any]:
    """Write summary.json and curve.png, and tell the end in a line; the figures are the first machine's."""
    folder = site.folder
    metrics = read_metrics(folder.metrics, say=progress.say)
    what = None if error is None else redact(str(error) or type(error).__name__)
    summary = summarise(metrics, status, time.monotonic() - began, measure="loss", error=what)
    if status == "finished" and folder.held_out.is_file():
        summary |= read_json(folder.held_out)
    write_json_atomic(folder.summary, summary)
    if site.layout.machine_rank == 0:
        title = f"{config.algorithm}: {config.model} on {Path(config.dataset).name}"
        draw_or_say(folder, metrics, title, progress, draw=draw_loss_curve)
        progress.say(_tuning_closing(summary, folder))
    return summary


def _tuning_closing(summary: Mapping[str, Any], folder: RunFolder) -> str:
    losses = [summary["loss_first"], summary["loss_last"]]
    change = " -> ".join("?" if loss is None else f"{loss:.3f}" for loss in losses)
    told = f"{summary['status']} after {summary['steps']} steps, {as_duration(summary['wall_s'])}: loss {change} "
    where = f"; model in {folder.model}, curve in {folder.curve}" if summary["status"] == "finished" else ""
    return f"{told}(means of the first and last five steps){where}"
