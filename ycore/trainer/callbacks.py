"""What a tracker's page must hold for somebody to do the run again: the whole run as resolved, and its curve.

The numbers of every step reach trackers through TRL's `report_to`. Here each of them also gets run.json (settings,
command, versions; secrets are hidden in it already) when training begins, and curve.png when it ends.

Tells the launcher that a step begins: it counts the trainer's start by one limit, and its steps by another.

Where a step's time went, and its row in metrics.jsonl: TRL's own numbers and ours.

Not here: which trackers there are (`report_to`), and the curve (`telemetry.curve`).
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback

from ycore.round.step import Controller
from ycore.run.files import read_json
from ycore.run.metrics import MetricsWriter, read_metrics
from ycore.run.paths import RunFolder
from ycore.view.pictures import draw_curve


class StepMark(TrainerCallback):
    """Touches `RunFolder.step_began` of this machine; any rank may."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._file.touch()


PROBLEMS = "ycore/reward_problems"


class StepMetrics(TrainerCallback):
    """Times are told to TRL at a step's end, before it logs, so that trackers and metrics.jsonl have them alike."""

    def __init__(self, writer: MetricsWriter) -> None:
        self._writer = writer
        self._rounds: Controller | None = None
        self._began = 0.0

    def watch(self, rounds: Controller) -> None:
        """The rounds of this run: they tell what of a step was not training, and what kept rewards from being given."""
        self._rounds = rounds

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        assert self._rounds is not None
        took = time.perf_counter() - self._began
        self._rounds.record("ycore/time/step", took)
        self._rounds.record("ycore/time/train", took - self._rounds.take_seconds())

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if "loss" not in logs or not state.is_world_process_zero:
            return  # the totals at the end of training, or another rank
        assert self._rounds is not None
        problems = dict(self._rounds.problems)
        self._writer.write({"step": state.global_step, **logs, **({PROBLEMS: problems} if problems else {})})


Callbacks = Callable[[], Sequence[TrainerCallback]]


class TrackerPage(TrainerCallback):
    """Comes after the trackers' own callbacks, which open their runs when training begins."""

    def __init__(self, folder: RunFolder, callbacks: Callbacks, *, project: str | None) -> None:
        if project is not None:  # transformers has a field of that name, which it tells every tracker but this
            os.environ.setdefault("WANDB_PROJECT", project)
        self._folder = folder
        self._callbacks = callbacks
        self._events: str | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        told = read_json(self._folder.config)
        if "wandb" in args.report_to:
            import wandb

            wandb.config.update(_flat(told), allow_val_change=True)
        if "trackio" in args.report_to:
            import trackio

            trackio.config.update(_flat(told), allow_val_change=True)
        for callback in self._callbacks():
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                callback.tb_writer.add_text("ycore", f"```\n{json.dumps(told, indent=2)}\n```")
                self._events = callback.tb_writer.log_dir

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not set(args.report_to) & {"wandb", "trackio", "tensorboard"}:
            return
        curve = self._folder.root / ".curve-for-trackers.png"
        if draw_curve(read_metrics(self._folder.metrics), curve, str(self._folder.root.name)):
            self._show(curve, args.report_to, state.global_step)
            curve.unlink()

    def _show(self, curve: Path, trackers: Sequence[str], step: int) -> None:
        if "wandb" in trackers:
            import wandb

            wandb.log({"ycore/curve": wandb.Image(str(curve))})
        if "trackio" in trackers:
            import trackio

            trackio.log({"ycore/curve": trackio.Image(str(curve))})
        if self._events is not None:
            from matplotlib.image import imread
            from torch.utils.tensorboard import SummaryWriter

            with SummaryWriter(self._events, filename_suffix=".curve") as writer:  # the tracker's own is closed by now
                writer.add_image("ycore/curve", imread(curve), step, dataformats="HWC")


def _flat(told: Mapping[str, Any]) -> dict[str, Any]:
    """Under a name of our own, beside what the trackers take from TRL's arguments and the model's config."""
    return {f"ycore/{key}": value for key, value in told.items()}
