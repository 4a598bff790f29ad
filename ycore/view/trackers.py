"""Give wandb what it shows of a run beside the numbers that transformers' callbacks send to all trackers.

At a run's start: its settings, without secrets; during it: completions with their rewards; once its model is saved:
completions before and after. `ycore eval` sends figures and completions.
"""

import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import (
    WandbCallback,
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)
from transformers.trainer_callback import CallbackHandler

from ycore.config.schema import AnyConfig, BaseConfig
from ycore.run.files import RunFolder, read_json
from ycore.run.metrics import EVALUATION
from ycore.types import JsonObject, Record
from ycore.view.report import content_text

Rows = Sequence[Record]
"""The rows of a table, all with the same columns."""

_MAX_COMPLETIONS = 1000  # of an evaluation, in a table
_MAX_LOGGED = 16  # completions of a round, in a table
_MAX_LETTERS = 4000  # of a prompt or a completion of a round
_MAX_TAG = 64  # letters, by wandb's rule
_STEP = "train/global_step"  # as transformers names it, and the numbers beside it


class TrackerPage(TrainerCallback):
    """The page of a run with a transformers Trainer.

    Add it after the trackers' own callbacks, which open their runs when training begins.
    """

    _rounds: Any = None
    _log_every = 0

    def __init__(self, folder: RunFolder, handler: CallbackHandler, config: AnyConfig) -> None:
        self._folder = folder
        self._config = config
        names = _tracker_names(config)
        self._wandb = _wandb(names)
        callbacks = tuple(get_reporting_integration_callbacks(names))
        for callback in handler.callbacks:
            if isinstance(callback, callbacks):
                callback.__dict__["on_log"] = partial(_log_evaluations_apart, callback.on_log)
            if isinstance(callback, WandbCallback):
                _set_wandb_variables(config, folder)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._wandb and state.is_world_process_zero:
            self._wandb.config.update(_settings(self._folder), allow_val_change=True)

    def show_rounds(self, trainer: Any, *, every: int) -> None:
        """From now on send a table of the trainer's completions of the first step, of every `every` steps, and of the last.

        TRL sends its own of all completions with `log_completions`, under the same name.
        """
        if not self._wandb or self._config.trl.get("log_completions"):
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
        with _tolerate_failure():
            self._wandb.log({"completions": _as_table(self._wandb, rows), _STEP: step})

    def close(self) -> None:
        """Send completions before and after training, to the same prompts. On the first rank only."""
        if self._wandb and self._folder.samples.is_file():
            with _tolerate_failure():
                _open(self._wandb, self._config, self._folder)
                self._wandb.log(
                    {"ycore/before_and_after": _as_table(self._wandb, _samples(self._folder))}
                )
                self._wandb.finish()


def tell_evaluation(config: AnyConfig, folder: RunFolder, figures: Mapping[str, float]) -> None:
    """Open a page for an evaluation in wandb, with its settings, its figures and its completions.

    The figures are named as those of evaluations in a run.
    """
    if wandb := _wandb(_tracker_names(config)):
        rows = _evaluated_completions(folder)
        with _tolerate_failure():
            _open(wandb, config, folder)
            numbers = {f"eval/{name}": value for name, value in figures.items()}
            wandb.log(numbers | {"eval/completions": _as_table(wandb, rows)})
            wandb.finish()


def _tracker_names(config: BaseConfig) -> Sequence[str]:
    names = config.trl.get("report_to") or []
    names = [names] if isinstance(names, str) else names
    if "all" in names:
        names = get_available_reporting_integrations()
    return [name for name in names if name != "none"]


def _wandb(names: Sequence[str]) -> Any:
    """Return the module; None where the run is not sent there."""
    return importlib.import_module("wandb") if "wandb" in names else None


def _open(wandb: Any, config: BaseConfig, folder: RunFolder) -> None:
    """Open the folder's page, or go on with it."""
    _set_wandb_variables(config, folder)
    name = config.trl.get("run_name") or folder.root.resolve().name
    wandb.init(name=name, config=_settings(folder))
    wandb.define_metric("*", step_metric=_STEP, step_sync=True)


def _set_wandb_variables(config: BaseConfig, folder: RunFolder) -> None:
    """Set wandb's own variables where the user has not: by the folder's id, a resumed run goes on with its page."""
    os.environ.setdefault("WANDB_PROJECT", config.trl.get("project") or "huggingface")
    os.environ.setdefault("WANDB_RUN_ID", folder.run_id)
    os.environ.setdefault("WANDB_RESUME", "allow")
    os.environ.setdefault("WANDB_JOB_TYPE", "eval" if config.algorithm == "eval" else "train")
    os.environ["WANDB_TAGS"] = ",".join(_tags(config))


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


def _tags(config: BaseConfig) -> list[str]:
    """Return the user's own tags, algorithm and model."""
    own_tags = os.environ.get("WANDB_TAGS", "").split(",")
    tags = [*own_tags, config.algorithm, Path(config.model).name]
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


def _as_table(wandb: Any, rows: Rows) -> Any:
    return wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])


@contextmanager
def _tolerate_failure() -> Iterator[None]:
    """Print wandb's failure: the run is finished and saved, so it costs the page, and no more."""
    try:
        yield
    except Exception as problem:  # noqa: BLE001 (whatever a tracker or its network raises)
        name = type(problem).__name__
        print(f"wandb did not take what came last: {name}: {problem}", flush=True)


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
