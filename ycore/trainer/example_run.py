"""A run that learns from given examples, and measures the model on held-out ones before and after."""

import os
import threading
from pathlib import Path
from typing import Any

from peft.helpers import disable_input_dtype_casting
from transformers import TrainerControl, TrainerState, TrainingArguments

from ycore.config.schema import TuneConfig
from ycore.data.examples import ExampleSet, load_examples
from ycore.engine.sight import load_sight
from ycore.errors import DataError, Interrupted
from ycore.round.assemble import load_tokenizer
from ycore.run.claim import model_fingerprint
from ycore.run.files import read_json, write_json_atomic
from ycore.run.images import ImageStore
from ycore.run.paths import RunFolder
from ycore.run.secrets import load_config
from ycore.trainer.saved_state import Checkpoints
from ycore.trainer.training_run import TrainingRun
from ycore.trl.build import load_trainer_class


class ExampleRun(TrainingRun):
    """The run of a folder as the launcher left it."""

    def __init__(self, root: Path) -> None:
        folder = RunFolder(root)
        config = TuneConfig.model_validate(load_config(folder))
        started = read_json(folder.engines)
        model = Path(started["model"])
        tokenizer = load_tokenizer(model, trust_remote_code=config.trust_remote_code)
        tokenizer.padding_side = "right"
        load_trainer_class(config).prepare_tokenizer(tokenizer)
        store = ImageStore(folder.images)
        examples = load_examples(config, as_chat=tokenizer.chat_template is not None, store=store)
        trusts = config.trust_remote_code
        sight = load_sight(model, store, tokenizer, trust_remote_code=trusts) if examples.shows else None
        rows = f"{len(examples.train)} + {len(examples.held_out)} rows, sha256 {examples.fingerprint[:16]}"
        super().__init__(
            config,
            folder,
            RunFolder(Path(started["home"])),
            model=model,
            tokenizer=tokenizer if sight is None else sight.processor,
            contents={"dataset": rows, "model": model_fingerprint(model)},
            examples=examples,
        )
        self.stop = threading.Event()
        self.save_with(Checkpoints(self.home, self.trainer))
        self._num_too_long = self._check_lengths(examples)

    def _check_lengths(self, examples: ExampleSet) -> int:
        """How many rows TRL dropped because they are longer than `max_length`; it does not report them itself."""
        num_rows, longest = len(self.trainer.train_dataset), self.trainer.args.max_length
        too_long = len(examples.train) - num_rows
        if num_rows < self.trainer.args.per_device_train_batch_size:
            raise DataError(
                f"{too_long} rows do not fit into max_length, {longest} tokens, and {num_rows} are left, fewer "
                "than a micro-batch; raise --max-length"
            )
        if too_long > 0 and not self.config.trl.get("packing"):
            print(f"{too_long} rows do not fit into max_length, {longest} tokens, and are left out", flush=True)
        return max(0, too_long)

    def should_stop(self) -> bool:
        return self.sum_over_ranks(int(self.stop.is_set())) > 0

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.should_stop():
            raise Interrupted("stopped while the held-out rows were measured")

    def fail_others(self, error: BaseException) -> None:
        """The others wait in a collective: torchrun ends them, or the collective's timeout does."""
        if self.trainer.accelerator.num_processes > 1:
            print(f"rank {os.environ.get('RANK')} failed: {type(error).__name__}: {error}", flush=True)

    def begin(self, *, resumes: bool) -> None:
        self._has_measured = resumes

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Measure once the trainer is set up: earlier, DeepSpeed measures only under ZeRO-3."""
        before = None if self._has_measured else self._measure()
        if self.leads and before is not None:
            write_json_atomic(self.home.held_out, {"held_out": {"before": before}})

    def finish(self) -> None:
        """Measure again, and write both down."""
        after = self._measure()
        if not self.leads:
            return
        figures: dict[str, Any] = {"rows": len(self.trainer.train_dataset), "rows_too_long": self._num_too_long}
        if after is not None:
            first = read_json(self.home.held_out) if self.home.held_out.is_file() else {}
            figures["held_out"] = {"before": first.get("held_out", {}).get("before"), "after": after}
        write_json_atomic(self.home.held_out, figures)

    def _measure(self) -> dict[str, Any] | None:
        """The model as it is now on the held-out rows; None if there are none."""
        if not self.trainer.eval_dataset:
            return None
        with disable_input_dtype_casting(self.trainer.model):
            measured: dict[str, Any] = self.trainer.measure()
        return measured
