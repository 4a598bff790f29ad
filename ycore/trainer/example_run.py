"""A run that learns from given examples, and measures the model on held-out ones."""

import copy
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from ycore.config.resolve import read_config
from ycore.config.schema import TuneConfig
from ycore.data.examples import ExampleSet, load_examples
from ycore.engine.sight import load_sight
from ycore.errors import DataError, Interrupted
from ycore.evaluation.during_training import Evaluation
from ycore.evaluation.held_out import as_metrics
from ycore.round.assemble import load_tokenizer
from ycore.run.files import ImageStore, RunFolder, read_json
from ycore.trainer.training_run import Checkpoints, TrainingRun
from ycore.trl.build import load_trainer_class


class ExampleRun(TrainingRun):
    """The run of a folder as the launcher left it."""

    def __init__(self, root: Path) -> None:
        folder = RunFolder(root)
        config: Any = read_config(folder)
        started = read_json(folder.engines)
        model = Path(started["model"])
        tokenizer = load_tokenizer(model, trust_remote_code=config.trust_remote_code)
        tokenizer.padding_side = "right"
        load_trainer_class(config).prepare_tokenizer(tokenizer)
        store = ImageStore(folder.images)
        examples = load_examples(
            config, as_chat=tokenizer.chat_template is not None, store=store
        )
        trusts = config.trust_remote_code
        sight = (
            load_sight(model, store, tokenizer, trust_remote_code=trusts)
            if examples.shows
            else None
        )
        super().__init__(
            config,
            folder,
            RunFolder(Path(started["home"])),
            model=model,
            tokenizer=tokenizer if sight is None else sight.processor,
            identity=examples.identity,
            examples=examples,
        )
        self.stop = threading.Event()
        self.checkpoints = Checkpoints(self.home, self.trainer)
        self._num_too_long = self._check_lengths(examples)
        self._evaluation = HeldOutRows(self, config, measures=bool(self.trainer.eval_dataset))
        self.trainer.add_callback(self._evaluation)

    def _check_lengths(self, examples: ExampleSet) -> int:
        """How many rows TRL dropped because they are longer than `max_length`; it does not report them itself."""
        num_rows = len(self.trainer.train_dataset)
        longest = getattr(self.trainer.args, "max_length", None)
        too_long = len(examples.train) - num_rows
        if self.config.trl.get("packing"):
            if num_rows < self.trainer.args.per_device_train_batch_size:
                raise DataError(
                    f"{len(examples.train)} rows are packed into {num_rows} sequences of max_length, {longest} tokens, "
                    "fewer than a micro-batch; lower --max-length, or leave --packing out"
                )
            return 0
        if num_rows < self.trainer.args.per_device_train_batch_size:
            raise DataError(
                f"{too_long} rows do not fit into max_length, {longest} tokens, and {num_rows} are left, fewer "
                "than a micro-batch; raise --max-length"
            )
        num_held_out = len(examples.held_out)
        num_measured = len(self.trainer.eval_dataset or ())
        if num_measured < num_held_out:
            line = f"{num_measured} of {num_held_out} held-out rows fit into max_length, {longest} tokens"
            if not num_measured:
                raise DataError(f"{line}; raise --max-length, or say --held-out 0")
            print(line, flush=True)
        if too_long > 0:
            print(
                f"{too_long} rows do not fit into max_length, {longest} tokens, and are left out",
                flush=True,
            )
        return max(0, too_long)

    def should_stop(self) -> bool:
        return self.sum_over_ranks(int(self.stop.is_set())) > 0

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        if self.should_stop():
            raise Interrupted("stopped while the held-out rows were measured")

    def begin(self, *, resumes: bool) -> None:
        """Nothing: it is measured once the trainer is set up. Earlier, DeepSpeed measures only under ZeRO-3."""

    def finish(self) -> None:
        self._evaluation.finish(
            rows=len(self.trainer.train_dataset), rows_too_long=self._num_too_long
        )


class HeldOutRows(Evaluation):
    """Measures on the trainer's held-out rows."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        logs = control.should_log
        super().on_step_end(args, state, control)
        control.should_log = logs  # figures were logged, and the step was not
        self._run.trainer.model.train()  # TRL logs a step's numbers in this mode only

    def _is_due(self, step: int) -> bool:
        between = isinstance(self._config, TuneConfig) and self._config.measures_between
        return (between or step in (0, self._run.trainer.args.max_steps)) and super()._is_due(
            step
        )

    def _figures(self, step: int) -> dict[str, float]:
        trainer = self._run.trainer
        began = time.perf_counter()
        device = trainer.accelerator.device
        devices = [device] if device.type == "cuda" else []
        # A loader draws a seed, and training goes on with the numbers that it would have without.
        with torch.random.fork_rng(devices=devices):
            measured = trainer.measure()
        if ends := measured.pop("accuracy_95", None):
            measured |= {"accuracy/low": ends[0], "accuracy/high": ends[1]}
        return as_metrics(measured) | {"ycore/time/eval": time.perf_counter() - began}

    def _save(self, folder: Path) -> None:
        """A reward model is merged where it is saved: a copy in host memory is, for training goes on."""
        trainer = self._run.trainer
        model = trainer.model
        if self._config.algorithm_row.trains_reward_model and self._run.leads:
            trainer.model = _copy_on_host(trainer.bare_model)
        try:
            super()._save(folder)
        finally:
            trainer.model = model


def _copy_on_host(model: torch.nn.Module) -> torch.nn.Module:
    copies: dict[int, Any] = {}
    for buffer in model.buffers():
        copies[id(buffer)] = buffer.detach().to("cpu", copy=True)
    for parameter in model.parameters():
        tensor = parameter.detach().to("cpu", copy=True)
        copies[id(parameter)] = torch.nn.Parameter(tensor, parameter.requires_grad)
    return copy.deepcopy(model, copies)
