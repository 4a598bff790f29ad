"""Send trackers what they show of a run beside the numbers that transformers' callbacks send them.

At a run's start: run.json, without secrets; once its model is saved: completions before and after, and the report.
A run without such callbacks (`ycore flow`) sends its numbers too (`OwnPage`), and `ycore eval` figures and completions.
wandb and trackio share an interface; tensorboard keeps the settings and the numbers only.
"""

import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Literal

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import (
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
    get_available_reporting_integrations,
)
from transformers.trainer_callback import CallbackHandler

from ycore.config.schema import AnyConfig, BaseConfig, TuneConfig
from ycore.run.files import read_json
from ycore.run.metrics import STEP_SECONDS, Row, number, summarise
from ycore.run.paths import RunFolder
from ycore.run.reports import TRACKER_GROUP
from ycore.view.report import content_text, make_report, read_run, render_page

Table = tuple[Sequence[str], Sequence[Sequence[Any]]]
"""Names of the columns, and the rows."""

_DEFAULT_PROJECT = "huggingface"  # transformers' own
_MAX_COMPLETIONS = 1000  # of an evaluation, in a table
_SAMPLES, _REPORT = "ycore/completions", "ycore/report"
_PICTURES = "ycore/pictures"
_STEP = "train/global_step"  # as transformers names it, and the numbers beside it


class TrackerPage(TrainerCallback):
    """The page of a run with a transformers Trainer.

    Add it after the trackers' own callbacks, which open their runs when training begins.
    """

    def __init__(self, folder: RunFolder, handler: CallbackHandler, config: AnyConfig) -> None:
        self._folder = folder
        self._handler = handler
        self._config = config
        if project := config.trl.get("project"):
            # transformers passes it on to every tracker but wandb.
            os.environ.setdefault("WANDB_PROJECT", project)
        for callback in handler.callbacks:
            if isinstance(callback, WandbCallback):
                # The folder's id: a resumed run goes on with its page.
                os.environ.setdefault("WANDB_RUN_ID", folder.run_id)
                os.environ.setdefault("WANDB_RESUME", "allow")
            if isinstance(callback, TrackioCallback):  # wandb reads the variable itself
                group = os.environ.get(TRACKER_GROUP)
                callback._trackio.init = partial(callback._trackio.init, group=group)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        for tracker in _modules(args.report_to):
            tracker.config.update(_prefixed_settings(self._folder), allow_val_change=True)
        for callback in self._handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                _add_settings(callback.tb_writer, self._folder)

    def close(self, args: TrainingArguments) -> None:
        """Send what a finished run has; its model, metrics and samples are on the disk. On the first rank only."""
        reopen = partial(_reopen, args=args)
        _send_results(self._folder, self._config, _modules(args.report_to), reopen)


class OwnPage:
    """The page of a run without a transformers Trainer: `page.log(row); page.send(); page.close()`."""

    def __init__(self, config: BaseConfig, folder: RunFolder) -> None:
        names = _tracker_names(config)
        self._config = config
        self._folder = folder
        self._trackers = _modules(names)
        self._writer: Any = None
        for tracker in self._trackers:
            _open(tracker, config, folder)
            if tracker.__name__ == "wandb":
                tracker.define_metric("*", step_metric=_STEP, step_sync=True)
        if "tensorboard" in names:
            self._writer = _new_writer(folder)
            _add_settings(self._writer, folder)

    def log(self, row: Row) -> None:
        """Send the numbers of a row of metrics.jsonl, which may be of an evaluation."""
        step = int(row["step"])
        numbers = {}
        for name in row:
            if name != "step" and (value := number(row, name)) is not None:
                numbers[f"train/{name}"] = value
        for tracker in self._trackers:
            tracker.log(numbers | {_STEP: step})
        if self._writer is not None:
            _add_numbers(self._writer, numbers, step=step)

    def send(self) -> None:
        """Send what a finished run has; its model, metrics and pictures are on the disk."""
        _send_results(self._folder, self._config, self._trackers, nullcontext)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        for tracker in self._trackers:
            with _tolerate_failure(tracker.__name__):
                tracker.finish()


def tell_evaluation(config: AnyConfig, folder: RunFolder, figures: Mapping[str, float]) -> None:
    """Open a page for an evaluation in the run's trackers, with its settings, its figures and its completions."""
    names, table = _tracker_names(config), _evaluated_completions(folder)
    numbers = {f"ycore/eval/{name}": value for name, value in figures.items()}
    for tracker in _modules(names):
        with _tolerate_failure(tracker.__name__):
            _open(tracker, config, folder, job_type="eval")
            tracker.log(numbers | {_SAMPLES: _as_table(tracker, table)})
            tracker.finish()
    if "tensorboard" in names:
        with _tolerate_failure("tensorboard"), _new_writer(folder) as writer:
            _add_numbers(writer, numbers, step=0)


# -- wandb and trackio -------------------------------------------------------------------------------------------------


def _tracker_names(config: BaseConfig) -> Sequence[str]:
    names = config.trl.get("report_to") or "none"
    names = [names] if isinstance(names, str) else names
    return get_available_reporting_integrations() if "all" in names else names


def _modules(names: Sequence[str]) -> list[Any]:
    return [importlib.import_module(name) for name in ("wandb", "trackio") if name in names]


def _open(
    tracker: Any, config: BaseConfig, folder: RunFolder, job_type: str | None = None
) -> None:
    """Open the folder's page, or go on with it."""
    wandb_only: dict[str, Any] = {}
    if tracker.__name__ == "wandb":
        wandb_only = {"id": folder.run_id, "job_type": job_type}
    tracker.init(
        project=config.trl.get("project")
        or os.environ.get("WANDB_PROJECT")
        or _DEFAULT_PROJECT,
        name=folder.root.name,
        resume="allow",
        group=os.environ.get(TRACKER_GROUP),
        config=_prefixed_settings(folder),
        **wandb_only,
    )


def _prefixed_settings(folder: RunFolder) -> dict[str, Any]:
    """Return run.json; prefixed, since TRL's arguments and the model's config are there too."""
    return {f"ycore/{key}": value for key, value in read_json(folder.config).items()}


def _as_table(tracker: Any, table: Table) -> Any:
    columns, rows = table
    return tracker.Table(columns=list(columns), data=list(rows))


@contextmanager
def _tolerate_failure(tracker: str) -> Iterator[None]:
    """Print a tracker's failure: the run is finished and saved, so it costs the page, and no more."""
    try:
        yield
    except Exception as problem:  # noqa: BLE001 (whatever a tracker or its network raises)
        print(
            f"{tracker} did not take what came last: {type(problem).__name__}: {problem}",
            flush=True,
        )


@contextmanager
def _reopen(tracker: Any, args: TrainingArguments) -> Iterator[None]:
    """Open trackio's page again, which transformers closes with the last step; wandb's is open until the end."""
    if tracker.__name__ == "wandb":
        yield
        return
    tracker.init(
        project=args.project, name=args.run_name, space_id=args.trackio_space_id, resume="allow"
    )
    try:
        yield
    finally:
        tracker.finish()


# -- results -----------------------------------------------------------------------------------------------------------


def _send_results(
    folder: RunFolder,
    config: BaseConfig,
    trackers: Sequence[Any],
    reopen: Callable[[Any], AbstractContextManager[None]],
) -> None:
    """Send what a finished run has to trackers that show tables and pages."""
    table = _samples(folder)
    for tracker in trackers:
        with _tolerate_failure(tracker.__name__), reopen(tracker):
            results = {_REPORT: tracker.Html(_render_report(folder, config))}
            if folder.pictures.is_file():
                results[_PICTURES] = tracker.Image(str(folder.pictures))
            if table[1]:
                results[_SAMPLES] = _as_table(tracker, table)
            tracker.log(results)


def _render_report(folder: RunFolder, config: BaseConfig) -> str:
    """Return the page of `ycore report`, with the seconds of steps alone.

    The launcher writes the summary after its trainer has ended.
    """
    run = read_run(folder.root)
    seconds = sum(number(row, *STEP_SECONDS) or 0.0 for row in run.metrics)
    measure: Literal["reward", "loss"] = "loss" if isinstance(config, TuneConfig) else "reward"
    summary = summarise(run.metrics, "finished", seconds, measure=measure)
    return render_page(make_report([replace(run, summary=summary)]))


def _samples(folder: RunFolder) -> Table:
    """Return completions before and after training, to the same prompts."""
    rows = []
    if folder.samples.is_file():
        samples = read_json(folder.samples)
        for before, after in zip(samples["before"], samples["after"], strict=True):
            prompt = content_text(before["prompt"])
            rows.append([prompt, before["completion"], after["completion"]])
    return ("prompt", "before", "after"), rows


def _evaluated_completions(folder: RunFolder) -> Table:
    """Return the first completions of an evaluation, with their rewards."""
    rows = []
    with (folder.root / "completions.jsonl").open(encoding="utf-8") as lines:
        for row in map(json.loads, islice(lines, _MAX_COMPLETIONS)):
            texts = [content_text(row["prompt"]), content_text(row["completion"])]
            rows.append([*texts, json.dumps(row["rewards"]), row["finish_reason"]])
    return ("prompt", "completion", "rewards", "finish_reason"), rows


# -- tensorboard -------------------------------------------------------------------------------------------------------


def _new_writer(folder: RunFolder) -> Any:
    """Open TensorBoard's events of a run without a transformers Trainer."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder.root / "events"))


def _add_settings(writer: Any, folder: RunFolder) -> None:
    writer.add_text("ycore", f"```\n{json.dumps(read_json(folder.config), indent=2)}\n```")


def _add_numbers(writer: Any, numbers: Mapping[str, float], *, step: int) -> None:
    for name, value in numbers.items():
        writer.add_scalar(name, value, step)
