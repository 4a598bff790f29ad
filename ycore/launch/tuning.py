"""One run without rollouts on this node, from a TuneConfig to its summary: claim, fetch, start, watch, sum up.

Not here: runs with engines (`launcher`), whose processes are started and watched by the same means.
"""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ycore.config.tune import TuneConfig
from ycore.launch.engine_watch import EngineWatch
from ycore.launch.launcher import Worker, draw_or_say, fetch_named, run_to_its_end, show_training, start_worker
from ycore.launch.peaks import MemoryPeaks
from ycore.launch.site import Site, rank_cores, site_of
from ycore.launch.stopping import StopRequests
from ycore.launch.supervise import Supervisor
from ycore.run_folder.files import read_json, write_json_atomic
from ycore.run_folder.paths import RunFolder
from ycore.run_folder.secrets import redact
from ycore.run_folder.summary import Status, summarise_losses
from ycore.telemetry.follow import MetricsFollower
from ycore.telemetry.loss_curve import draw_loss_curve
from ycore.telemetry.metrics import read_metrics
from ycore.telemetry.progress import RunProgress, as_duration

TUNER = Worker("trainer", "ycore.roles.tuner")


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
        work=partial(_work, config, site),
        sum_up=partial(_sum_up, config, site),
    )


def _work(config: TuneConfig, site: Site, progress: RunProgress, stops: StopRequests) -> None:
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
        lambda: start_worker(TUNER, site),
        EngineWatch(),
        folder=folder,
        follower=MetricsFollower(folder.metrics),
        progress=progress,
        stops=stops,
        way_on=f"; `ycore resume {config.output}` goes on",
    )
    with MemoryPeaks(folder.run_id, folder.memory):
        supervisor.watch()


def _sum_up(
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
    metrics = read_metrics(folder.metrics)
    what = None if error is None else redact(str(error) or type(error).__name__)
    summary = summarise_losses(metrics, status, time.monotonic() - began, error=what)
    if status == "finished" and folder.held_out.is_file():
        summary |= read_json(folder.held_out)
    write_json_atomic(folder.summary, summary)
    if site.layout.machine_rank == 0:
        title = f"{config.algorithm}: {config.model} on {Path(config.dataset).name}"
        draw_or_say(folder, metrics, title, progress, draw=draw_loss_curve)
        progress.say(_closing(summary, folder))
    return summary


def _closing(summary: Mapping[str, Any], folder: RunFolder) -> str:
    losses = [summary["loss_first"], summary["loss_last"]]
    change = " -> ".join("?" if loss is None else f"{loss:.3f}" for loss in losses)
    told = f"{summary['status']} after {summary['steps']} steps, {as_duration(summary['wall_s'])}: loss {change} "
    where = f"; model in {folder.model}, curve in {folder.curve}" if summary["status"] == "finished" else ""
    return f"{told}(means of the first and last five steps){where}"
