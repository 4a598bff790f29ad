"""Run a training, an evaluation or a preflight on this machine, from its config to its summary and curve.

The trainer and the engines are started by module name, never imported.
"""

import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from ycore.config.schema import BaseConfig, RunConfig, TuneConfig
from ycore.errors import Interrupted, MachineLost, RunError, YcoreError
from ycore.launch.engine_watch import EngineWatch, start_engines
from ycore.launch.engines import fetch_for_run, plan_engines
from ycore.launch.guardian import guarded
from ycore.launch.layout import WAITS, Site, on_machine, site_of
from ycore.launch.machine_checks import check_run
from ycore.launch.machines import Machines, meeting
from ycore.launch.supervise import Rebalanced, RunKind, Supervisor, limits_of
from ycore.run.claim import Claim, claim, run_facts
from ycore.run.files import RunFolder, as_run_error, read_json, write_json_atomic
from ycore.run.interrupt import StopRequests
from ycore.run.metrics import read_metrics, summarise
from ycore.run.resuming import last_step
from ycore.run.secrets import redact
from ycore.run.text import Say, as_duration, topic
from ycore.view.activity import RunActivity
from ycore.view.pictures import draw_curve
from ycore.view.progress import RunProgress, open_progress
from ycore.view.report import advice

_say = partial(print, flush=True)

TRAINER = RunKind("trainer", "ycore.trainer")
EVALUATOR = RunKind("evaluator", "ycore.evaluation.evaluator", result_file="eval.json")
PREFLIGHT = RunKind("preflight", "ycore.evaluation.preflight", result_file="preflight.json")


Status = Literal["finished", "interrupted", "failed"]
Summary = dict[str, Any]
"""Results by their names, as in summary.json and in a row of metrics.jsonl."""


def run_worker(
    kind: RunKind,
    config: BaseConfig,
    *,
    resume: bool = False,
    num_steps: int | None = None,
    contents: Mapping[str, str] | None = None,
) -> Summary:
    """Run a trainer or its like, with the engines of its run, in the foreground.

    However that ends, nothing is left running, and summary.json says how it ended.

    Args:
        kind: TRAINER trains, EVALUATOR evaluates, PREFLIGHT runs one small round before any training.
        num_steps: what the progress bar counts to, where the config does not say it.
        contents: fingerprints of what the run learns from, which must be the same on all its machines.

    Returns:
        The content of summary.json; with `stop_asked` when the run finished although it was asked to stop.

    Raises:
        YcoreError: why the run failed, or Interrupted.
    """
    began = time.monotonic()
    config = on_machine(config)
    restarts = limits_of(config).restarts
    num_lost = 0
    while True:
        site = site_of(config, trains=kind.trains)
        facts = run_facts(config, contents or {})
        try:
            with meeting(site.layout, facts, say=_say) as machines:
                if isinstance(config, RunConfig):
                    check_run(config, site)
                folder_claim = claim(site.folder, config, resume=resume)
                resume = True
                progress = _open_progress(kind, config, site.folder, num_steps)
                run = LocalRun(kind, config, site, progress, began)
                return run.to_its_end(machines, folder_claim)
        except MachineLost as error:
            num_lost += 1
            if num_lost > restarts:
                raise
            _say(f"{error}; this machine {WAITS} ({num_lost} of {restarts})")
        except Rebalanced as moved:
            (config,) = moved.args


def _open_progress(
    kind: RunKind, config: BaseConfig, folder: RunFolder, num_steps: int | None
) -> RunProgress:
    for of_last_run in (folder.step_began, folder.work):
        of_last_run.unlink(missing_ok=True)
    activity = RunActivity(folder.root)
    if not kind.trains:
        return open_progress(None, unit="prompts", look=activity.look)
    return open_progress(
        config.steps or num_steps,
        look=activity.look,
        first_step=last_step(folder.checkpoints),
    )


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A run on this machine: starts its processes, watches them, and sums it up."""

    kind: RunKind
    config: BaseConfig
    site: Site
    progress: RunProgress
    began: float

    def to_its_end(self, machines: Machines, folder_claim: Claim) -> Summary:
        """Return the summary of a run that finishes; sum up every other end, and raise its error."""
        # Ctrl-C makes no other end of one that has come, while it is summed up.
        with StopRequests() as stops:
            try:
                with guarded(self.site.folder, folder_claim):
                    self.work(stops, machines)
                summary = self.sum_up("finished")
                return summary | {"stop_asked": True} if stops.count else summary
            except YcoreError as error:
                self.end(error)
                if isinstance(error, MachineLost) and stops.count:
                    raise Interrupted(str(error)) from None
                raise
            except Exception as error:  # noqa: BLE001 -- a defect ends in one line too
                known = self.known_error(error)
                self.end(known)
                raise known from None
            finally:
                self.progress.close()
                folder_claim.release()

    def work(self, stops: StopRequests, machines: Machines) -> None:
        """Fetch the models, start engines and trainer, and return when the trainer has finished."""
        machines.on_end = stops.wake
        with stops.at_once():
            try:
                engines = self.start_engines()
            except Interrupted:
                machines.check()
                raise
        Supervisor(
            kind=self.kind,
            config=self.config,
            site=self.site,
            machines=machines,
            engines=engines,
            progress=self.progress,
            stops=stops,
        ).watch()

    def start_engines(self) -> EngineWatch:
        """Fetch the models and start the engines; engines.json describes both to the trainer."""
        config = self.config
        folder = self.site.folder
        say = self.progress.say
        fetch = cache(partial(fetch_for_run, config=config, folder=folder, say=say))
        facts = {
            "model": str(fetch(config.model).resolve()),
            "home": str(Path(config.output).resolve()),
            "cores": self.site.rank_cores,
        }
        if not isinstance(config, RunConfig):
            write_json_atomic(folder.engines, {"kind": "none", "engines": [], **facts})
            return EngineWatch()
        plan = plan_engines(config, self.site, fetch=fetch)
        say(plan.note + (", starting ..." if plan.engines else ""))
        write_json_atomic(folder.engines, {**plan.as_json(), **facts})
        to_start = plan.all_engines(with_policy=not config.given_pairs)
        return start_engines(to_start, folder, config.engine, say=say)

    def known_error(self, error: Exception) -> RunError:
        """Return what the command says of an error in a line; the traceback of a defect goes to logs/launcher.log."""
        if isinstance(error, OSError):
            return as_run_error(error)
        log = self.site.folder.log("launcher")
        with suppress(OSError), log.open("a", encoding="utf-8") as file:
            file.writelines(traceback.format_exception(error))
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        return RunError(f"the launcher failed, which it never should: {message} (see {log})")

    def end(self, error: BaseException) -> None:
        """Sum up a run that did not finish, as well as its folder still lets it; nothing here hides the `error`."""
        was_stopped = isinstance(error, Interrupted)
        status: Status = "interrupted" if was_stopped else "failed"
        summary = self.site.folder.summary
        try:
            self.sum_up(status, error=error)
        except Exception:  # noqa: BLE001 -- whatever it is, the summary is tried once more
            try:
                write_json_atomic(summary, self._ending(status, error))
            except OSError as problem:
                self.progress.say(f"{summary} could not be written: {problem.strerror}")

    def _ending(self, status: Status, error: BaseException | None) -> Summary:
        ending: Summary = {"status": status, "wall_s": round(time.monotonic() - self.began, 1)}
        if error is not None:
            ending["error"] = redact(str(error) or type(error).__name__)
        return ending

    def sum_up(self, status: Status, *, error: BaseException | None = None) -> Summary:
        """Write summary.json, draw the curve, and return the summary."""
        config = self.config
        folder = self.site.folder
        # The first machine alone has the metrics of a run.
        has_steps = self.kind.trains and self.site.layout.machine_rank == 0
        measure: Literal["reward", "loss"] = (
            "loss" if isinstance(config, TuneConfig) else "reward"
        )
        metrics = read_metrics(folder.metrics, say=self.progress.say) if has_steps else []
        summary = self._ending(status, error)
        if has_steps:
            summary |= summarise(metrics, measure=measure)
        if status == "finished" and self.kind.result_file is not None:
            summary |= read_json(folder.root / self.kind.result_file)
        elif status == "finished" and has_steps:
            summary |= _training_results(config, folder, metrics)
        write_json_atomic(folder.summary, summary)
        if has_steps:
            _draw(config, folder, metrics, self.progress.say)
            self.progress.say(_closing_line(summary, measure))
        return summary


def _training_results(config: BaseConfig, folder: RunFolder, metrics: list[Summary]) -> Summary:
    """Return what the summary of a finished training has besides its steps."""
    results = dict(read_json(folder.held_out)) if folder.held_out.is_file() else {}
    if isinstance(config, RunConfig) and (sentence := advice(metrics, config)):
        results["advice"] = sentence
    return results


def _closing_line(summary: Summary, measure: str) -> str:
    means = [summary[f"{measure}_first"], summary[f"{measure}_last"]]
    change = " -> ".join("?" if mean is None else f"{mean:.3f}" for mean in means)
    steps = "1 step" if summary["steps"] == 1 else f"{summary['steps']} steps"
    return (
        f"{summary['status']} after {steps}, {as_duration(summary['wall_s'])}: "
        f"{measure} {change} (means of up to five steps at either end)"
    )


def _draw(config: BaseConfig, folder: RunFolder, metrics: list[Summary], say: Say) -> None:
    """Draw the curve; a picture that cannot be drawn costs a line, not the run's result."""
    try:
        data = Path(topic(vars(config))).name or folder.root.name
        draw_curve(metrics, folder.curve, f"{config.algorithm}: {config.model} on {data}")
    except (OSError, RuntimeError, ValueError) as problem:
        say(f"no curve was drawn: {problem}")
