"""Send trackers what they show of a run beside the numbers that transformers' callbacks send them.

At a run's start: its settings, without secrets; during it: completions with their rewards; once its model is saved:
completions before and after, and where the models are. `ycore eval` sends figures and completions. wandb and trackio
share an interface; tensorboard keeps numbers and text. `python -m ycore.view.trackers RUN_FOLDER` sends an alert on
why the run failed.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import (
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)
from transformers.trainer_callback import CallbackHandler

from ycore.config.resolve import read_config
from ycore.config.schema import AnyConfig, BaseConfig
from ycore.run.files import TRACKER_GROUP, RunFolder, read_json
from ycore.run.metrics import EVALUATION
from ycore.types import JsonObject, Record
from ycore.view.report import content_text

Rows = Sequence[Record]
"""The rows of a table, all with the same columns."""

_DEFAULT_PROJECT = "huggingface"  # transformers' own
_MAX_COMPLETIONS = 1000  # of an evaluation, in a table
_MAX_LOGGED = 16  # completions of a round, in a table
_MAX_LETTERS = 4000  # of a prompt or a completion of a round
_MAX_TAG = 64  # letters, by wandb's rule
_COMPLETIONS = "completions"  # TRL's name of its table
_EVALUATED = "eval/completions"
_SAMPLES = "ycore/before_and_after"
_STEP = "train/global_step"  # as transformers names it, and the numbers beside it


class RoundTrainer(Protocol):
    """A trainer of rounds, which keeps some rows of the last one for a table."""

    num_logged: int
    logged_completions: list[JsonObject]


class TrackerPage(TrainerCallback):
    """The page of a run with a transformers Trainer.

    Add it after the trackers' own callbacks, which open their runs when training begins.
    """

    _rounds: RoundTrainer | None = None
    _log_every = 0

    def __init__(self, folder: RunFolder, handler: CallbackHandler, config: AnyConfig) -> None:
        self._folder = folder
        self._handler = handler
        self._config = config
        names = _tracker_names(config)
        self._trackers = _modules(names)
        callbacks = tuple(get_reporting_integration_callbacks(names))
        for callback in handler.callbacks:
            if isinstance(callback, callbacks):
                callback.__dict__["on_log"] = partial(_log_evaluations_apart, callback.on_log)
            if isinstance(callback, WandbCallback):
                _set_wandb_variables(config, folder)
            if isinstance(callback, TrackioCallback):  # wandb reads the variable itself
                group = os.environ.get(TRACKER_GROUP)
                callback._trackio.init = partial(callback._trackio.init, group=group)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        for tracker in self._trackers:
            tracker.config.update(_settings(self._folder), allow_val_change=True)
            self._settings = dict(tracker.config)
        for writer in self._writers:
            _add_settings(writer, self._folder)

    def show_rounds(self, trainer: RoundTrainer, *, every: int) -> None:
        """From now on send a table of completions of the first step, of every `every` steps, and of the last.

        TRL sends its own of all completions with `log_completions`, under the same name.
        """
        if not self._config.has_trackers or self._config.trl.get("log_completions"):
            return
        trainer.num_logged = self._config.trl.get("num_completions_to_print") or _MAX_LOGGED
        self._rounds = trainer
        self._log_every = every

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        step = state.global_step
        is_an_end = step in (1, args.max_steps) or control.should_training_stop
        if self._rounds is None or not (is_an_end or step % self._log_every == 0):
            return
        rows = [
            {
                "step": step,
                **row,
                "prompt": _shortened(row["prompt"]),
                "completion": _shortened(row["completion"]),
            }
            for row in self._rounds.logged_completions
        ]
        if not rows or not state.is_world_process_zero:
            return
        for tracker in self._trackers:
            with _tolerate_failure(tracker.__name__):
                tracker.log({_COMPLETIONS: _as_table(tracker, rows), _STEP: step})
        for writer in self._writers:
            _add_completions(writer, rows, step=step)

    @property
    def _writers(self) -> list[Any]:
        """The writers of tensorboard's callbacks, open while the run trains."""
        writers = [
            callback.tb_writer
            for callback in self._handler.callbacks
            if isinstance(callback, TensorBoardCallback)
        ]
        return [writer for writer in writers if writer is not None]

    def close(self) -> None:
        """Send completions before and after training, to the same prompts, and the models. On the first rank only."""
        rows = _samples(self._folder) if self._folder.samples.is_file() else []
        for tracker in self._trackers:
            with _tolerate_failure(tracker.__name__):
                # transformers closes trackio's page with the last step; opened again, it has none of the settings.
                _open(tracker, self._config, self._folder)
                tracker.config.update(self._settings, allow_val_change=True)
                if rows:
                    tracker.log({_SAMPLES: _as_table(tracker, rows)})
                _refer_to_models(tracker, self._folder)
                tracker.finish()


def tell_evaluation(config: AnyConfig, folder: RunFolder, figures: Mapping[str, float]) -> None:
    """Open a page for an evaluation in the run's trackers, with its settings, its figures and its completions.

    The figures are named as those of evaluations in a run, and stand at the step of the model that was measured.
    """
    names = _tracker_names(config)
    rows = _evaluated_completions(folder)
    numbers = {f"eval/{name}": value for name, value in figures.items()}
    step = _step_of_model(Path(config.model).expanduser())
    for tracker in _modules(names):
        with _tolerate_failure(tracker.__name__):
            _open(tracker, config, folder)
            tracker.log(numbers | {_EVALUATED: _as_table(tracker, rows), _STEP: step})
            tracker.finish()
    if "tensorboard" in names:
        with _tolerate_failure("tensorboard"), _new_writer(folder) as writer:
            _add_settings(writer, folder)
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)


def tell_failure(config: BaseConfig, folder: RunFolder, error: str) -> None:
    """Send an alert on why the run failed, and end its page as a failed one."""
    names = _tracker_names(config)
    title = f"{folder.root.name} {'hangs' if '_timeout_s)' in error else 'failed'}"
    for tracker in _modules(names):
        with _tolerate_failure(tracker.__name__):
            _open(tracker, config, folder)
            tracker.alert(title=title, text=error, level=tracker.AlertLevel.ERROR)
            if tracker.__name__ == "wandb":
                tracker.finish(exit_code=1)
            else:
                tracker.finish()
    if "tensorboard" in names:
        with _tolerate_failure("tensorboard"), _new_writer(folder) as writer:
            writer.add_text("alert", f"{title}: {error}")


def _step_of_model(folder: Path) -> int:
    """Return the step of a run's model or checkpoint; 0 of every other model."""
    if folder.name.startswith("checkpoint-"):
        return int(folder.name.removeprefix("checkpoint-"))
    for file, key in (
        (folder / "evaluation.json", "step"),
        (folder / "summary.json", "steps"),
        (folder.parent / "summary.json", "steps"),
    ):
        if file.is_file():
            return int(read_json(file).get(key) or 0)
    return 0


# -- wandb and trackio -------------------------------------------------------------------------------------------------


def _tracker_names(config: BaseConfig) -> Sequence[str]:
    names = config.trl.get("report_to") or []
    names = [names] if isinstance(names, str) else names
    if "all" in names:
        names = get_available_reporting_integrations()
    return [name for name in names if name != "none"]


def _modules(names: Sequence[str]) -> list[Any]:
    return [importlib.import_module(name) for name in ("wandb", "trackio") if name in names]


def _open(tracker: Any, config: BaseConfig, folder: RunFolder) -> None:
    """Open the folder's page, or go on with it."""
    is_wandb = tracker.__name__ == "wandb"
    if is_wandb:
        _set_wandb_variables(config, folder)
    tracker.init(
        project=config.trl.get("project")
        or os.environ.get("WANDB_PROJECT")
        or _DEFAULT_PROJECT,
        name=config.trl.get("run_name") or folder.root.resolve().name,
        resume="allow",
        group=os.environ.get(TRACKER_GROUP),
        config=_settings(folder),
        **({} if is_wandb else {"space_id": config.trl.get("trackio_space_id")}),
    )
    if is_wandb:
        tracker.define_metric("*", step_metric=_STEP, step_sync=True)


def _set_wandb_variables(config: BaseConfig, folder: RunFolder) -> None:
    """Set wandb's own variables where the user has not: by the folder's id, a resumed run goes on with its page."""
    if project := config.trl.get("project"):
        os.environ.setdefault("WANDB_PROJECT", project)
    os.environ.setdefault("WANDB_RUN_ID", folder.run_id)
    os.environ.setdefault("WANDB_RESUME", "allow")
    os.environ.setdefault("WANDB_JOB_TYPE", "eval" if config.algorithm == "eval" else "train")
    os.environ["WANDB_TAGS"] = ",".join(_tags(folder))


def _settings(folder: RunFolder) -> JsonObject:
    """Return the main settings by their plain names, and all of run.json; prefixed, since TRL's arguments are there too."""
    record = read_json(folder.config)
    config = record.get("config", {})
    settings = {**config.get("trl", {}), **config}
    plain = {
        name: value
        for name, value in settings.items()
        if isinstance(value, str | int | float) and not isinstance(value, bool)
    }
    if rewards := config.get("rewards"):
        plain["rewards"] = ", ".join(reward["reward"] for reward in rewards)
    if lora := config.get("lora"):
        plain["lora_r"] = lora["r"]
    return plain | {f"ycore/{key}": value for key, value in record.items()}


def _tags(folder: RunFolder) -> list[str]:
    """Return the user's own tags, algorithm and model."""
    config = read_json(folder.config).get("config", {})
    model = Path(config.get("model", "")).name
    own_tags = os.environ.get("WANDB_TAGS", "").split(",")
    tags = [*own_tags, config.get("algorithm", ""), model]
    shortened = [tag.replace(",", " ").strip()[:_MAX_TAG] for tag in tags]
    return list(dict.fromkeys(filter(None, shortened)))


def _log_evaluations_apart(
    on_log: Callable[..., None], *states: Any, logs: Record, **rest: Any
) -> None:
    """Let a tracker of transformers have `eval_NAME`, its name for evaluations, which it shows as `eval/NAME`."""
    renamed = {
        f"eval_{name.removeprefix(EVALUATION)}" if name.startswith(EVALUATION) else name: value
        for name, value in logs.items()
    }
    on_log(*states, logs=renamed, **rest)


def _shortened(content: Any) -> str:
    text = content_text(content)
    return text if len(text) <= _MAX_LETTERS else f"{text[:_MAX_LETTERS]} ..."


def _samples(folder: RunFolder) -> Rows:
    samples = read_json(folder.samples)
    return [
        {
            "prompt": content_text(before["prompt"]),
            "before": before["completion"],
            "after": after["completion"],
        }
        for before, after in zip(samples["before"], samples["after"], strict=True)
    ]


def _refer_to_models(tracker: Any, folder: RunFolder) -> None:
    """Log where the run's models are, as `best` and `latest`; no weight leaves the machine."""
    for model, alias in ((folder.best, "best"), (folder.model, "latest")):
        if model.is_dir():
            artifact = tracker.Artifact(f"{folder.run_id}-model", type="model")
            artifact.add_reference(model.resolve().as_uri(), checksum=False)
            tracker.log_artifact(artifact, aliases=[alias])


def _as_table(tracker: Any, rows: Rows) -> Any:
    return tracker.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])


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


def _evaluated_completions(folder: RunFolder) -> Rows:
    """Return the first completions of an evaluation, with their rewards."""
    with (folder.root / "completions.jsonl").open(encoding="utf-8") as lines:
        return [
            {
                "prompt": content_text(row["prompt"]),
                "completion": content_text(row["completion"]),
                "rewards": json.dumps(row["rewards"]),
                "finish_reason": row["finish_reason"],
            }
            for row in map(json.loads, islice(lines, _MAX_COMPLETIONS))
        ]


# -- tensorboard -------------------------------------------------------------------------------------------------------


def _new_writer(folder: RunFolder) -> Any:
    """Open TensorBoard's events of an evaluation, or of a run that failed."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder.root / "events"))


def _add_settings(writer: Any, folder: RunFolder) -> None:
    writer.add_text("ycore", f"```\n{json.dumps(read_json(folder.config), indent=2)}\n```")


def _add_completions(writer: Any, rows: Rows, *, step: int) -> None:
    """Add the completions of a round as text."""
    texts = []
    for row in rows:
        facts = {
            name: row[name] for name in row if name not in ("step", "prompt", "completion")
        }
        texts.append(f"{json.dumps(facts)}\n\n```\n{row['prompt']}\n\n{row['completion']}\n```")
    writer.add_text(_COMPLETIONS, "\n\n---\n\n".join(texts), step)


def _main() -> None:
    folder = RunFolder(Path(sys.argv[1]))
    tell_failure(read_config(folder), folder, read_json(folder.summary)["error"])


if __name__ == "__main__":
    _main()
