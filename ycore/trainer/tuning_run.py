"""One run without rollouts inside the trainer's process: its rows, its trainer, what it measures and saves.

Not here: the process and its signals (`trainer`), and the trainer itself (`algorithms.tune`).
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft.helpers import disable_input_dtype_casting
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ycore.config.schema import TuneConfig
from ycore.data.examples import ExampleSet, load_examples
from ycore.engine.weights import save_merged
from ycore.errors import DataError, Interrupted
from ycore.round.assemble import load_tokenizer
from ycore.run.checkpoints import checkpoint_of, step_of
from ycore.run.claim import model_fingerprint
from ycore.run.files import read_json, write_json_atomic
from ycore.run.metrics import MetricsWriter, wilson_95
from ycore.run.paths import RunFolder
from ycore.run.reports import this_rank
from ycore.run.secrets import load_config
from ycore.trainer.callbacks import StepMark
from ycore.trainer.saved_state import TuningCheckpoints, accept_numbered_cpus, check_contents
from ycore.trainer.training_run import StopBetweenSteps
from ycore.trl.from_examples import build_tuner, compute_dtype
from ycore.trl.reward import give_padding_its_own_token, measure_pairs, save_whole


def open_tuning(root: Path) -> "TuningRun":
    """The run of a folder, as the launcher wrote it down."""
    folder = RunFolder(root)
    config = TuneConfig.model_validate(load_config(folder))
    started = read_json(folder.root / "engines.json")
    model, home = Path(started["model"]), RunFolder(Path(started["home"]))
    tokenizer = load_tokenizer(model, trust_remote_code=config.trust_remote_code)
    tokenizer.padding_side = "right"
    if config.algorithm == "reward":
        give_padding_its_own_token(tokenizer)
    examples = load_examples(config, as_chat=tokenizer.chat_template is not None)
    if this_rank().number == 0:
        rows = f"{len(examples.train)} + {len(examples.held_out)} rows, sha256 {examples.fingerprint[:16]}"
        check_contents(home, {"dataset": rows, "model": model_fingerprint(model)})
    return TuningRun(config, folder, home, model=model, tokenizer=tokenizer, examples=examples)


class TuningRun:
    """Example: `run = open_tuning(root); run.train(); run.save(); run.close()`."""

    def __init__(
        self,
        config: TuneConfig,
        folder: RunFolder,
        home: RunFolder,
        *,
        model: Path,
        tokenizer: PreTrainedTokenizerBase,
        examples: ExampleSet,
    ) -> None:
        self._config, self._home, self._tokenizer = config, home, tokenizer
        self._asked = threading.Event()
        self._metrics = MetricsWriter(home.metrics)
        self._trainer = build_tuner(
            config,
            home,
            model=model,
            tokenizer=tokenizer,
            examples=examples,
            callbacks=[
                StepMark(folder.step_began),
                TuningMetrics(self._metrics),
                StopBetweenSteps(self._any_rank_stops),
            ],
            world_size=this_rank().world,
        )
        self._leads = bool(self._trainer.accelerator.is_main_process)
        self._checkpoints = TuningCheckpoints(home.checkpoints, self._trainer)
        self._trainer.writer = self._checkpoints
        self._too_long = len(examples.train) - len(self._trainer.train_dataset)
        self._check_rows(len(self._trainer.train_dataset))

    def _check_rows(self, num_rows: int) -> None:
        """TRL drops what does not fit into `max_length` without a word that reaches anybody."""
        longest = self._trainer.args.max_length
        if num_rows < self._trainer.args.per_device_train_batch_size:
            raise DataError(
                f"{self._too_long} rows do not fit into max_length, {longest} tokens, and {num_rows} are left, fewer "
                "than a micro-batch; raise --max-length"
            )
        if self._too_long > 0 and not self._config.trl.get("packing"):
            print(f"{self._too_long} rows do not fit into max_length, {longest} tokens, and are left out", flush=True)

    def ask_to_stop(self) -> None:
        """After the step that is being computed."""
        self._asked.set()

    def _any_rank_stops(self) -> bool:
        return self._sum(int(self._asked.is_set())) > 0

    def train(self) -> None:
        """All steps, from the newest checkpoint where there is one; Interrupted when asked to stop before the last."""
        newest = self._checkpoints.find() if self._leads else None
        step = self._sum(0 if newest is None else step_of(newest))
        resume_from = checkpoint_of(self._home.checkpoints, step) if step else None
        accept_numbered_cpus()
        if self._leads:
            self._metrics.forget_after(step)
        self._checkpoints.saved_step = step
        if resume_from is None:
            self._trainer.add_callback(AtTheStart(self._measure_first))
        with disable_input_dtype_casting(self._trainer.model):
            self._trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
        if self._trainer.state.global_step < self._trainer.args.max_steps:
            raise Interrupted(f"stopped after step {self._trainer.state.global_step}")
        self._write_measured(self._measured_before(), self._measure())

    def _measure_first(self) -> None:
        before = self._measure()
        if self._leads and before is not None:
            write_json_atomic(self._home.held_out, {"held_out": {"before": before}})

    def _measured_before(self) -> dict[str, Any] | None:
        if not self._home.held_out.is_file():
            return None
        told: dict[str, Any] | None = read_json(self._home.held_out).get("held_out", {}).get("before")
        return told

    def _measure(self) -> dict[str, Any] | None:
        """The model as it is now on the held-out rows: TRL's figures, and for a reward model its accuracy."""
        rows = self._trainer.eval_dataset
        if rows is None or len(rows) == 0:
            return None
        with disable_input_dtype_casting(self._trainer.model):
            if self._config.algorithm == "reward":
                return _with_accuracy(measure_pairs(self._trainer))
            figures = self._trainer.evaluate()
        kept = {name.removeprefix("eval_"): value for name, value in figures.items() if name not in _OF_SPEED}
        return {"n": len(rows), **kept}

    def _write_measured(self, before: dict[str, Any] | None, after: dict[str, Any] | None) -> None:
        if not self._leads:
            return
        told: dict[str, Any] = {"rows": len(self._trainer.train_dataset), "rows_too_long": max(0, self._too_long)}
        if after is not None:
            told["held_out"] = {"before": before, "after": after}
        write_json_atomic(self._home.held_out, told)

    def save(self) -> None:
        """The model under `model/`: whole, or the adapter and, where asked, the merged model too."""
        self._trainer.refuse_broken_weights()
        folder, dtype = self._home.model, compute_dtype(self._config)
        if self._config.algorithm == "reward":
            if self._leads:
                save_whole(self._trainer, folder, dtype=dtype)
        else:
            self._trainer.save_model(str(folder))
            if self._config.merge and self._config.lora is not None:
                bare = self._trainer.accelerator.unwrap_model(self._trainer.model)
                save_merged(bare, folder / "merged", dtype=dtype, writes=self._leads)
                if self._leads:
                    self._tokenizer.save_pretrained(folder / "merged")
        if self._leads:
            self._tokenizer.save_pretrained(folder)
        self._trainer.accelerator.wait_for_everyone()

    def save_checkpoint(self) -> None:
        """A checkpoint of the last finished step, unless it has one."""
        if self._trainer.state.global_step > self._checkpoints.saved_step:
            self._trainer.save_checkpoint()
        self._trainer.accelerator.wait_for_everyone()  # a rank that ends early would take the others with it

    def tell_others(self, error: BaseException) -> None:
        """The other ranks wait in a collective; without this one they end by torchrun, or by its timeout."""
        if self._trainer.accelerator.num_processes > 1:
            print(f"rank {os.environ.get('RANK')} failed: {type(error).__name__}: {error}", flush=True)

    def _sum(self, number: int) -> int:
        """Over all ranks; only one of them need have something to say."""
        tensor = torch.tensor(number, device=self._trainer.accelerator.device)
        return int(self._trainer.accelerator.reduce(tensor, reduction="sum").item())

    def close(self) -> None:
        self._metrics.close()


def _with_accuracy(measured: dict[str, Any]) -> dict[str, Any]:
    right, total = measured["right"], measured["n"]
    interval = [round(end, 4) for end in wilson_95(right, total)]
    return {**measured, "accuracy": right / total, "accuracy_95": interval}


_OF_SPEED = (
    "eval_runtime",
    "eval_samples_per_second",
    "eval_steps_per_second",
    "epoch",
    "eval_num_tokens",
    "eval_model_preparation_time",
)


class AtTheStart(TrainerCallback):
    """Does something once the trainer has set itself up: before, DeepSpeed refuses to measure unless it is ZeRO-3."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._action()


class TuningMetrics(TrainerCallback):
    """A row in metrics.jsonl for each step: TRL's own numbers, and the step's seconds."""

    def __init__(self, writer: MetricsWriter) -> None:
        self._writer = writer
        self._began = time.perf_counter()
        self._took = 0.0

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._took = time.perf_counter() - self._began

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if state.is_world_process_zero and "loss" in logs:
            self._writer.write({"step": state.global_step, **logs, "ycore/time/step": self._took})
