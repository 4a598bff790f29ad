"""One run on this machine, from its config to its summary: claim, fetch, start, watch, clear away, sum up.

The trainer and the engines are started by module name, never imported.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TextIO

import yaml

from ycore.config.algorithms import families, load
from ycore.config.schema import BaseConfig, RunConfig, ScoredConfig, TuneConfig
from ycore.engine.kinds import KINDS
from ycore.errors import Interrupted
from ycore.judge.sources import is_rule
from ycore.launch.diagnostics import plan_and_measured
from ycore.launch.engine_watch import EngineWatch, start_engines
from ycore.launch.engines import plan_engines
from ycore.launch.guardian import guarded
from ycore.launch.layout import Site, on_machine, site_of
from ycore.launch.machine_checks import check_run
from ycore.launch.processes import ManagedProcess, RankedTrainer
from ycore.launch.supervise import Limits, Supervisor
from ycore.models.fetch import fetch_model
from ycore.models.names import resolve_model
from ycore.placement.placement import ALLOCATOR, ROLLOUT
from ycore.rewards.builtin import is_code
from ycore.run.claim import claim
from ycore.run.files import read_json, write_json_atomic
from ycore.run.interrupt import StopRequests
from ycore.run.metrics import Status, read_metrics, summarise
from ycore.run.paths import RunFolder
from ycore.run.reports import RUN_MARKER
from ycore.run.secrets import redact, secrets_environment
from ycore.run.text import as_duration, topic
from ycore.sandbox.level import choose_level
from ycore.view.activity import RunActivity
from ycore.view.live import FirstSteps
from ycore.view.pictures import draw_curve, finish_trace_and_draw
from ycore.view.progress import RunProgress, open_progress
from ycore.view.record import advice


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
EVALUATOR = Worker("evaluator", "ycore.evaluation.evaluator", result="eval.json")
PREFLIGHT = Worker("preflight", "ycore.evaluation.preflight_round", result="preflight.json")


def run_worker(
    worker: Worker,
    config: BaseConfig,
    *,
    resume: bool = False,
    num_steps: int | None = None,
    planned: Mapping[str, Any] | None = None,
    stream: TextIO | None = None,
) -> dict[str, Any]:
    """Run a worker, with the engines of its run, in the foreground.

    However that ends, nothing is left running, and summary.json says how it ended.

    Args:
        worker: TRAINER trains, EVALUATOR evaluates, PREFLIGHT runs one small round before any training.
        num_steps: what the progress bar counts to, where the config does not say it.
        planned: what its steps were planned to take (`plan_steps`), where that is known.

    Returns:
        The content of summary.json; with `stop_asked` when the run finished although it was asked to stop.

    Raises:
        YcoreError: why the run failed, or Interrupted.
    """
    began = time.monotonic()
    config = on_machine(config)
    site = site_of(config, trains=worker.trains)
    if isinstance(config, RunConfig):
        check_run(config, site)
    held = claim(site.folder, config, resume=resume)
    _note_sandbox(site.folder, config)
    if worker.trains:
        progress = open_progress(
            config.steps or num_steps, stream=stream, look=RunActivity(site.folder.root).look
        )
    else:
        progress = open_progress(None, unit="prompts", stream=stream)
    run = LocalRun(worker, config, site, progress, began, planned)
    try:
        with StopRequests() as stops, guarded(site.folder, held):
            run.work(stops)
    except BaseException as error:
        run.sum_up(
            "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed",
            error=error,
        )
        raise
    else:
        return run.sum_up("finished") | ({"stop_asked": True} if stops.count else {})
    finally:
        progress.close()
        held.release()


def _note_sandbox(folder: RunFolder, config: BaseConfig) -> None:
    """Add to run.json what confines the code that ycore did not bring, where the run has any."""
    if not isinstance(config, ScoredConfig):
        return
    own = any(is_code(one) or (is_rule(one) and ":" in one.reward) for one in config.rewards)
    if own or (isinstance(config, RunConfig) and config.has_turns):
        description = read_json(folder.config) | {
            "sandbox": choose_level(config.sandbox.level).line
        }
        write_json_atomic(folder.config, description)


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A run on this machine: what is started for it, and how it is summed up."""

    worker: Worker
    config: BaseConfig
    site: Site
    progress: RunProgress
    began: float
    planned: Mapping[str, Any] | None = None

    def work(self, stops: StopRequests) -> None:
        """Fetch the models, start engines and worker, and return when the worker has finished."""
        with stops.at_once():
            engines = self.start_engines()
        limits = Limits()
        if isinstance(self.config, RunConfig):
            engine = self.config.engine
            times = (engine.start_timeout_s, self.config.step_timeout_s, engine.health_timeout_s)
            limits = Limits(*times, restarts=self.config.restarts)
        elif isinstance(self.config, ScoredConfig):
            limits = Limits(step_s=self.config.step_timeout_s, restarts=self.config.restarts)
        Supervisor(
            start=self._start_worker,
            engines=engines,
            folder=self.site.folder,
            home=RunFolder(Path(self.config.output)),
            progress=self.progress,
            stops=stops,
            limits=limits,
            saves=self.worker.trains,
            first_steps=FirstSteps(self.config.steps, self.planned) if self.planned else None,
        ).watch()

    def start_engines(self) -> EngineWatch:
        """Fetch the models and start the engines; engines.json describes both to the worker."""
        config, folder, say = self.config, self.site.folder, self.progress.say
        fetch = cache(self._fetch)
        facts = {
            "model": str(fetch(config.model).resolve()),
            "home": str(Path(config.output).resolve()),
            "cores": self.site.rank_cores,
        }
        if not isinstance(config, RunConfig):
            write_json_atomic(folder.engines, {"kind": "none", "engines": [], **facts})
            return EngineWatch()
        settings = config.engine
        plan = plan_engines(config, self.site, fetch=fetch)
        say(plan.note + (", starting ..." if plan.engines else ""))
        write_json_atomic(folder.engines, {**plan.as_json(), **facts})
        live = start_engines(
            [
                engine
                for model in plan.served
                if not (config.pairs and model.role == ROLLOUT)
                for engine in model.engines
            ],
            folder,
            health_timeout_s=settings.health_timeout_s,
            start_timeout_s=settings.start_timeout_s,
            say=say,
        )
        return EngineWatch(
            live, max_restarts=settings.restarts, start_timeout_s=settings.start_timeout_s, say=say
        )

    def _fetch(self, name: str) -> Path:
        """A model's folder. A process that makes or converts it carries the run's marker, and ends with the run."""
        family = families().get(self.config.algorithm)
        if family is not None:
            source: tuple[str, Callable[..., Path]] = load(family.model_source)(name)
            note, fetch = source
        else:
            model = resolve_model(name, trust_remote_code=self.config.trust_remote_code)
            note, fetch = model.note, partial(fetch_model, model)
        self.progress.say(f"model {name}: {note}")
        os.environ[RUN_MARKER] = self.site.folder.run_id
        try:
            return fetch(log=self.site.folder.log("model"))
        finally:
            os.environ.pop(RUN_MARKER, None)

    def _start_worker(self) -> ManagedProcess | RankedTrainer:
        """One process, or accelerate's launcher with the worker as its module."""
        worker, folder, layout = self.worker, self.site.folder, self.site.layout
        environment = worker_environment(self.config, on_cpu=not self.site.machine.devices)
        environment |= self.site.trainer_environment
        launch: list[str] = []
        if layout.accelerate is not None:
            settings = folder.root / "accelerate.yaml"
            settings.write_text(yaml.safe_dump(dict(layout.accelerate)), encoding="utf-8")
            launch = ["-m", "accelerate.commands.launch", "--config_file", str(settings.resolve())]
            environment["OMP_NUM_THREADS"] = str(
                max(1, len(self.site.machine.cores) // layout.local)
            )
        process = ManagedProcess(
            worker.name,
            [sys.executable, *launch, "-m", worker.module, str(folder.root.resolve())],
            environment=environment,
            run_id=folder.run_id,
            log=folder.log(worker.name),
        )
        if layout.accelerate is None:
            return process
        return RankedTrainer(
            process, folder, num_ranks=layout.local, allocator=self._start_allocator(environment)
        )

    def _start_allocator(self, environment: Mapping[str, str]) -> ManagedProcess | None:
        """Of the slots that several ranks share. It lives as long as they do."""
        folder, num_ranks = self.site.folder, self.site.layout.local
        if num_ranks == 1 or not KINDS[read_json(folder.engines)["kind"]].has_servers:
            return None
        socket = folder.socket(ALLOCATOR)
        socket.unlink(missing_ok=True)  # of an earlier one, which was killed
        return ManagedProcess(
            ALLOCATOR,
            [sys.executable, "-m", "ycore.placement.service", str(socket), str(num_ranks)],
            environment=environment,
            run_id=folder.run_id,
            log=folder.log(ALLOCATOR),
        )

    def sum_up(self, status: Status, *, error: BaseException | None = None) -> dict[str, Any]:
        """Write summary.json and draw the curve. Only the first machine has the metrics of a run."""
        folder, say = self.site.folder, self.progress.say
        has_steps = self.worker.trains and self.site.layout.machine_rank == 0
        measure: Literal["reward", "loss"] = (
            "loss" if isinstance(self.config, TuneConfig) else "reward"
        )
        metrics = read_metrics(folder.metrics, say=say)
        message = None if error is None else redact(str(error) or type(error).__name__)
        summary = summarise(
            metrics, status, time.monotonic() - self.began, measure=measure, error=message
        )
        if not has_steps:
            summary = {key: summary[key] for key in ("status", "wall_s", "error") if key in summary}
        if status == "finished":
            summary |= self._results(metrics)
        write_json_atomic(folder.summary, summary)
        if has_steps:
            self._draw(metrics)
            means = [summary[f"{measure}_first"], summary[f"{measure}_last"]]
            change = " -> ".join("?" if mean is None else f"{mean:.3f}" for mean in means)
            where = (
                f"; model in {folder.model}, curve in {folder.curve}"
                if status == "finished"
                else ""
            )
            say(
                f"{status} after {summary['steps']} steps, {as_duration(summary['wall_s'])}: "
                f"{measure} {change} (means of up to five steps at either end){where}"
            )
        return summary

    def _results(self, metrics: list[dict[str, Any]]) -> dict[str, Any]:
        """What the summary of a finished run has besides its steps."""
        folder = self.site.folder
        if self.worker.result is not None:
            return dict(read_json(folder.root / self.worker.result))
        if self.site.layout.machine_rank > 0:
            return {}
        held_out = dict(read_json(folder.held_out)) if folder.held_out.is_file() else {}
        config = self.config
        before = self.planned and self.planned["figures"]
        compared = isinstance(config, RunConfig) and plan_and_measured(
            config, self.site, metrics, before=before
        )
        advised = advice(metrics, config) if isinstance(config, RunConfig) else None
        found = {"plan_and_measured": compared, "advice": advised}
        return held_out | {name: value for name, value in found.items() if value}

    def _draw(self, metrics: list[dict[str, Any]]) -> None:
        """The curve and the timeline; a picture that cannot be drawn costs a line, not the run's result."""
        config, folder = self.config, self.site.folder
        try:
            if isinstance(config, RunConfig):
                finish_trace_and_draw(folder, f"placement {config.placement}, the last rounds")
            on = Path(topic(vars(config))).name or folder.root.name
            draw_curve(metrics, folder.curve, f"{config.algorithm}: {config.model} on {on}")
        except (OSError, RuntimeError, ValueError) as problem:
            self.progress.say(f"no curve was drawn: {problem}")


_KEEP_FREED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "67108864",
}
"""glibc keeps the large blocks that a step frees. By default the kernel takes them, and clears them for the next."""


def worker_environment(config: BaseConfig, *, on_cpu: bool = False) -> dict[str, str]:
    """The launcher's environment with defaults for what it leaves unset, and the secrets that run.json hides."""
    return {
        # Threads that wait for each other by spinning take ten times as long where another process wants a core too.
        "GOMP_SPINCOUNT": "10000",
        **(_KEEP_FREED if on_cpu and isinstance(config, TuneConfig) else {}),
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "SPT_NOENV": "1",
        **secrets_environment(config.model_dump(mode="json")),
    }
