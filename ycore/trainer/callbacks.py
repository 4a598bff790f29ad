"""What a run reports of its steps: rows of metrics, and the trackers' pages."""

import importlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback, WandbCallback
from transformers.trainer_callback import CallbackHandler

from ycore.round.held_out import PREFIX
from ycore.round.step import Controller
from ycore.run.files import read_json
from ycore.run.metrics import MetricsWriter, read_metrics
from ycore.run.paths import RunFolder
from ycore.view.pictures import draw_curve


class StepMetrics(TrainerCallback):
    """A row of metrics.jsonl for each step: TRL's numbers and, with a `controller`, what its rounds recorded.

    A round's times are recorded at the step's end, before TRL logs, so that trackers get them too.
    `seconds` are those of the last step.
    """

    def __init__(self, writer: MetricsWriter) -> None:
        self.controller: Controller | None = None
        self._writer = writer
        self._began = self.seconds = 0.0

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.controller is not None:
            self.controller.settle()
        self.seconds = time.perf_counter() - self._began
        if self.controller is not None:
            self.controller.record("ycore/time/step", self.seconds)
            self.controller.record("ycore/time/train", self.seconds - self.controller.take_seconds())

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        row: dict[str, Any] = {"step": state.global_step}
        if "loss" in logs:
            row |= {"ycore/time/step": self.seconds, **logs}
        elif f"{PREFIX}reward" in logs:  # an evaluation before the first step, or after a run that ended early
            row |= {name: value for name, value in logs.items() if name.startswith("ycore/")}
        else:
            return  # the totals at the end of training
        if self.controller is not None and (problems := self.controller.problems):
            row["ycore/reward_problems"] = problems
        self._writer.write(row)


class TrackerPage(TrainerCallback):
    """Gives trackers what their page needs besides numbers: run.json, without secrets, and at the end the curve.

    Add it after the trackers' own callbacks, which open their runs when training begins.
    """

    def __init__(self, folder: RunFolder, handler: CallbackHandler, *, project: str | None) -> None:
        if project is not None:  # transformers passes `project` on to every tracker but wandb
            os.environ.setdefault("WANDB_PROJECT", project)
        if any(isinstance(callback, WandbCallback) for callback in handler.callbacks):
            os.environ.setdefault("WANDB_RUN_ID", folder.run_id)  # the folder's: a resumed run goes on with its page
            os.environ.setdefault("WANDB_RESUME", "allow")
        self._folder = folder
        self._handler = handler
        self._events: str | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        description = read_json(self._folder.config)
        for tracker in _trackers(args):  # prefixed, since TRL's arguments and the model's config are there too
            tracker.config.update({f"ycore/{key}": description[key] for key in description}, allow_val_change=True)
        for callback in self._handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                callback.tb_writer.add_text("ycore", f"```\n{json.dumps(description, indent=2)}\n```")
                self._events = callback.tb_writer.log_dir

    def show_samples(self, samples: Mapping[str, Sequence[Mapping[str, Any]]], args: TrainingArguments) -> None:
        """The completions before and after training, to the same prompts, as a table."""
        columns = ["prompt", "before", "after"]
        rows = [
            [_as_text(before["prompt"]), before["completion"], after["completion"]]
            for before, after in zip(samples["before"], samples["after"], strict=True)
        ]
        if "wandb" in args.report_to:
            import wandb

            wandb.log({"ycore/completions": wandb.Table(columns=columns, data=rows)})
        if self._events is not None:
            from torch.utils.tensorboard import SummaryWriter

            lines = ["|".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows]
            with SummaryWriter(self._events, filename_suffix=".completions") as writer:
                writer.add_text("ycore/completions", "\n".join(["|".join(columns), "---|---|---", *lines]))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not state.is_world_process_zero or not set(args.report_to) & {"wandb", "trackio", "tensorboard"}:
            return
        curve = self._folder.root / ".curve-for-trackers.png"
        if draw_curve(read_metrics(self._folder.metrics), curve, self._folder.root.name):
            for tracker in _trackers(args):
                tracker.log({"ycore/curve": tracker.Image(str(curve))})
            if self._events is not None:
                from matplotlib.image import imread
                from torch.utils.tensorboard import SummaryWriter

                with SummaryWriter(self._events, filename_suffix=".curve") as writer:  # TRL has closed its own
                    writer.add_image("ycore/curve", imread(curve), state.global_step, dataformats="HWC")
            curve.unlink()


def _as_text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def _trackers(args: TrainingArguments) -> list[Any]:
    """The modules of the run's trackers that share wandb's interface."""
    return [importlib.import_module(name) for name in ("wandb", "trackio") if name in args.report_to]
