"""What trackers show of a run beside the numbers that transformers' callbacks send them.

At its start run.json, without secrets; once its model is saved the curve, completions before and after, the report, and
the folders that `tracker_files` names. Of `ycore flow`, which has no such callbacks, the numbers too (`OwnPage`). Of
`ycore eval` the figures and the completions. wandb and trackio share an interface; tensorboard keeps numbers, texts and
pictures only.
"""

import importlib
import json
import os
import re
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
from ycore.run.metrics import STEP_SECONDS, Row, number, read_metrics, summarise
from ycore.run.paths import RunFolder
from ycore.run.reports import TRACKER_GROUP
from ycore.view.page import make_report, render_page
from ycore.view.pictures import draw_curve
from ycore.view.record import content_text, read_run

Table = tuple[Sequence[str], Sequence[Sequence[Any]]]
"""Names of the columns, and the rows."""

_KNOWN = ("wandb", "trackio", "tensorboard")
_PROJECT = "huggingface"  # transformers' own, where none is named
_MOST_COMPLETIONS = 1000  # of an evaluation, in a table
_SAMPLES, _REPORT, _CURVE, _PICTURES = (
    "ycore/completions",
    "ycore/report",
    "ycore/curve",
    "ycore/pictures",
)
_STEP = "train/global_step"  # as transformers names it, and the numbers beside it


class TrackerPage(TrainerCallback):
    """Add it after the trackers' own callbacks, which open their runs when training begins."""

    def __init__(self, folder: RunFolder, handler: CallbackHandler, config: AnyConfig) -> None:
        if (
            project := config.trl.get("project")
        ) is not None:  # transformers passes it on to every tracker but wandb
            os.environ.setdefault("WANDB_PROJECT", project)
        if any(isinstance(callback, WandbCallback) for callback in handler.callbacks):
            os.environ.setdefault(
                "WANDB_RUN_ID", folder.run_id
            )  # the folder's: a resumed run goes on with its page
            os.environ.setdefault("WANDB_RESUME", "allow")
        for callback in handler.callbacks:
            if isinstance(callback, TrackioCallback):  # wandb reads the variable itself
                callback._trackio.init = partial(
                    callback._trackio.init, group=os.environ.get(TRACKER_GROUP)
                )
        self._folder, self._handler, self._config = folder, handler, config
        self._events: str | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        description = read_json(self._folder.config)
        for tracker in _modules(
            args.report_to
        ):  # prefixed, since TRL's arguments and the model's config are there too
            tracker.config.update(
                {f"ycore/{key}": description[key] for key in description}, allow_val_change=True
            )
        for callback in self._handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                _describe(callback.tb_writer, description)
                self._events = callback.tb_writer.log_dir

    def close(self, args: TrainingArguments, *, step: int) -> None:
        """Send what a finished run has; its model, metrics and samples are on the disk. On the first rank only."""
        if not set(args.report_to) & set(_KNOWN):
            return
        _send_last(
            self._folder,
            self._config,
            partial(_opened, args=args),
            _modules(args.report_to),
            self._events,
            step,
        )


class OwnPage:
    """Of a run whose numbers no callback of transformers sends: `page.log(row); page.send(); page.close()`."""

    def __init__(self, config: BaseConfig, folder: RunFolder) -> None:
        self._config, self._folder, names = config, folder, _names(config)
        self._trackers = _modules(names)
        for tracker in self._trackers:
            _open(tracker, config, folder)
            if tracker.__name__ == "wandb":
                tracker.define_metric("*", step_metric=_STEP, step_sync=True)
        self._writer = _writer(folder) if "tensorboard" in names else None
        if self._writer is not None:
            _describe(self._writer, read_json(folder.config))
        self._step = 0

    def log(self, row: Row) -> None:
        """The numbers of a row of metrics.jsonl, which may be of an evaluation."""
        self._step = int(row["step"])
        told = {
            f"train/{name}": value
            for name in row
            if (value := number(row, name)) is not None and name != "step"
        }
        for tracker in self._trackers:
            tracker.log(told | {_STEP: self._step})
        if self._writer is not None:
            _add_numbers(self._writer, told, step=self._step)

    def send(self) -> None:
        """What a finished run has; its model, metrics and pictures are on the disk."""
        events = None if self._writer is None else self._writer.log_dir
        _send_last(self._folder, self._config, nullcontext, self._trackers, events, self._step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        for tracker in self._trackers:
            with _spared(tracker.__name__):
                tracker.finish()


def tell_evaluation(config: AnyConfig, folder: RunFolder, figures: Mapping[str, float]) -> None:
    """Open a page for an evaluation in the run's trackers, with its settings, its figures and its completions."""
    names, table = _names(config), _completions(folder)
    told = {f"ycore/eval/{name}": value for name, value in figures.items()}
    for tracker in _modules(names):
        with _spared(tracker.__name__):
            _open(
                tracker,
                config,
                folder,
                **({"job_type": "eval"} if tracker.__name__ == "wandb" else {}),
            )
            tracker.log(
                told | {_SAMPLES: tracker.Table(columns=list(table[0]), data=list(table[1]))}
            )
            tracker.finish()
    if "tensorboard" in names:
        with _spared("tensorboard"):
            with _writer(folder) as writer:
                _add_numbers(writer, told, step=0)
            _write_events(writer.log_dir, table, {}, step=0)


def _names(config: BaseConfig) -> Sequence[str]:
    """The trackers that the run names."""
    given = config.trl.get("report_to") or "none"
    names = [given] if isinstance(given, str) else given
    return get_available_reporting_integrations() if "all" in names else names


def _open(tracker: Any, config: BaseConfig, folder: RunFolder, **more: Any) -> None:
    """Open the folder's page, or go on with it."""
    project = config.trl.get("project") or os.environ.get("WANDB_PROJECT") or _PROJECT
    about = {
        "project": project,
        "name": folder.root.name,
        "resume": "allow",
        "group": os.environ.get(TRACKER_GROUP),
    }
    own = {"id": folder.run_id} if tracker.__name__ == "wandb" else {}
    described = {f"ycore/{key}": value for key, value in read_json(folder.config).items()}
    tracker.init(**about, **own, **more, config=described)


def _send_last(
    folder: RunFolder,
    config: BaseConfig,
    opened: Callable[[Any], AbstractContextManager[None]],
    trackers: Sequence[Any],
    events: str | None,
    step: int,
) -> None:
    """Send what a finished run has. `opened` opens a tracker's page again, where it is closed."""
    table, curve = _samples(folder), folder.root / ".curve-for-trackers.png"
    draw_curve(read_metrics(folder.metrics), curve, folder.root.name)
    drawn = {
        name: str(file)
        for name, file in ((_CURVE, curve), (_PICTURES, folder.pictures))
        if file.is_file()
    }
    for tracker in trackers:
        with _spared(tracker.__name__), opened(tracker):
            found = {_REPORT: tracker.Html(_report(folder, config))}
            found |= {name: tracker.Image(file) for name, file in drawn.items()}
            found |= (
                {_SAMPLES: tracker.Table(columns=list(table[0]), data=list(table[1]))}
                if table[1]
                else {}
            )
            tracker.log(found)
            for kind in config.tracker_files:
                _send(tracker, folder, kind)
    if events is not None:  # TRL has closed its own writer
        with _spared("tensorboard"):
            _write_events(events, table, drawn, step=step)
    curve.unlink(missing_ok=True)


def _modules(names: Sequence[str]) -> list[Any]:
    return [importlib.import_module(name) for name in ("wandb", "trackio") if name in names]


@contextmanager
def _spared(tracker: str) -> Iterator[None]:
    """The run is finished and saved: a tracker that fails now costs its page, and no more."""
    try:
        yield
    except Exception as problem:  # noqa: BLE001 (whatever a tracker or its network raises)
        print(
            f"{tracker} did not take what came last: {type(problem).__name__}: {problem}",
            flush=True,
        )


@contextmanager
def _opened(tracker: Any, args: TrainingArguments) -> Iterator[None]:
    """wandb's run is open until the process ends; transformers closes trackio's with the last step."""
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


def _send(tracker: Any, folder: RunFolder, kind: str) -> None:
    """The run's `model` or `journal` as an artifact."""
    artifact = tracker.Artifact(
        re.sub(r"[^\w.-]+", "-", f"{folder.root.resolve().name}-{kind}"), type=kind
    )
    artifact.add_dir(str(getattr(folder, kind)))
    tracker.log_artifact(artifact)


def _report(folder: RunFolder, config: BaseConfig) -> str:
    """The page of `ycore report`. The launcher writes the summary after its trainer has ended; this one has the seconds
    of steps alone."""
    run = read_run(folder.root)
    seconds = sum(number(row, *STEP_SECONDS) or 0.0 for row in run.metrics)
    measure: Literal["reward", "loss"] = "loss" if isinstance(config, TuneConfig) else "reward"
    return render_page(
        make_report(
            [replace(run, summary=summarise(run.metrics, "finished", seconds, measure=measure))]
        )
    )


def _samples(folder: RunFolder) -> Table:
    """Completions before and after training, to the same prompts."""
    told = read_json(folder.samples) if folder.samples.is_file() else {"before": [], "after": []}
    pairs = zip(told["before"], told["after"], strict=True)
    rows = [
        [content_text(before["prompt"]), before["completion"], after["completion"]]
        for before, after in pairs
    ]
    return ("prompt", "before", "after"), rows


def _completions(folder: RunFolder) -> Table:
    """The first completions of an evaluation, with their rewards."""
    rows = []
    with (folder.root / "completions.jsonl").open(encoding="utf-8") as lines:
        for line in map(json.loads, islice(lines, _MOST_COMPLETIONS)):
            rewards = json.dumps(line["rewards"])
            rows.append(
                [
                    content_text(line["prompt"]),
                    content_text(line["completion"]),
                    rewards,
                    line["finish_reason"],
                ]
            )
    return ("prompt", "completion", "rewards", "finish_reason"), rows


def _writer(folder: RunFolder) -> Any:
    """Of tensorboard's files of a run that transformers writes none of."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder.root / "events"))


def _describe(writer: Any, description: Mapping[str, Any]) -> None:
    writer.add_text("ycore", f"```\n{json.dumps(description, indent=2)}\n```")


def _add_numbers(writer: Any, told: Mapping[str, float], *, step: int) -> None:
    for name, value in told.items():
        writer.add_scalar(name, value, step)


def _write_events(events: str, table: Table, drawn: Mapping[str, str], *, step: int) -> None:
    from matplotlib.image import imread
    from torch.utils.tensorboard import SummaryWriter

    columns, rows = table
    lines = [
        "|".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows
    ]
    with SummaryWriter(events, filename_suffix=".ycore") as writer:
        if rows:
            writer.add_text(
                _SAMPLES, "\n".join(["|".join(columns), "|".join("---" for _ in columns), *lines])
            )
        for name, file in drawn.items():
            writer.add_image(name, imread(file), step, dataformats="HWC")
