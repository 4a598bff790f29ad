"""One training run inside the trainer's process: its trainer, its rounds, what it saves.

Not here: the process and its signals (`trainer`).
"""

import random
from typing import Any

from peft.helpers import disable_input_dtype_casting
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ycore.algorithms.grpo import build_trainer, compute_dtype
from ycore.algorithms.weights import write_weights
from ycore.controller.assemble import Assembly
from ycore.controller.source import Rounds
from ycore.errors import Interrupted
from ycore.roles.step_metrics import StepMetrics
from ycore.roles.transformers_engine import TransformersEngine
from ycore.run_folder.files import write_json_atomic
from ycore.telemetry.metrics import MetricsWriter

NUM_SAMPLES = 4


class TrainingRun:
    """Example: `run = TrainingRun(assemble(root)); run.train(); run.save(); run.close()`."""

    def __init__(self, parts: Assembly) -> None:
        self._parts = parts
        self._stopping = StopBetweenSteps()
        self._metrics = MetricsWriter(parts.folder.metrics)
        self._trainer = build_trainer(
            parts.config,
            parts.folder,
            model=parts.started.model,
            tokenizer=parts.tokenizer,
            callbacks=[StepMetrics(self._metrics), self._stopping],
        )
        self._rounds = self._make_rounds()
        self._trainer.rounds = self._rounds
        self._samples: dict[str, Any] = {}

    def _make_rounds(self) -> Rounds:
        parts, trainer = self._parts, self._trainer
        is_server = parts.started.kind == "vllm"
        engines = parts.vllm_engines() if is_server else [self._own_engine()]
        dtype = compute_dtype(parts.config)
        rounds = Rounds(
            engines=engines,
            rewards=parts.reward_pool(),
            draws=parts.draws(),
            group_size=parts.config.group_size,
            seed=parts.config.seed,
            weights_folder=parts.folder.shared_memory,
            write_weights=lambda folder: write_weights(trainer.bare_model, folder, dtype=dtype),
            freezes_weights=not parts.config.sync_weights,
        )
        rounds.record = trainer.record
        return rounds

    def _own_engine(self) -> TransformersEngine:
        return TransformersEngine(self._trainer.bare_model, self._parts.tokenizer, self._parts.sampling())

    def ask_to_stop(self) -> None:
        """At once while generating, else after the step that is being computed."""
        self._stopping.asked = True
        self._rounds.stop.set()

    def train(self) -> None:
        """All steps; Interrupted when asked to stop before the last."""
        self._rounds.start(timeout_s=self._parts.config.engine.start_timeout_s)
        self._samples["before"] = self._sample(version=0)
        with disable_input_dtype_casting(self._trainer.bare_model):
            self._trainer.train()
        if self._trainer.state.global_step < self._parts.config.steps:
            raise Interrupted(f"stopped after step {self._trainer.state.global_step}")
        self._samples["after"] = self._sample(version=self._trainer.state.global_step)
        write_json_atomic(self._parts.folder.samples, self._samples)

    def _sample(self, *, version: int) -> list[dict[str, Any]]:
        """One completion to each of the same few prompts, with the same seeds whenever it is asked."""
        prompts = self._parts.prompts.prompts
        rows = random.Random(self._parts.config.seed).sample(range(len(prompts)), min(NUM_SAMPLES, len(prompts)))
        return self._rounds.sample([(prompts[row], self._parts.encode(prompts[row])) for row in rows], version=version)

    def save(self) -> None:
        """The model under `model/`: whole, or the adapter and, where asked, the merged model."""
        folder = self._parts.folder.model
        self._trainer.save_model(str(folder))
        self._parts.tokenizer.save_pretrained(folder)
        if self._parts.config.merge and self._parts.config.lora is not None:
            merged = self._trainer.bare_model.merge_and_unload()
            merged.save_pretrained(folder / "merged")
            self._parts.tokenizer.save_pretrained(folder / "merged")

    def save_checkpoint(self) -> None:
        self._trainer.save_checkpoint()

    def close(self) -> None:
        self._rounds.close()
        self._metrics.close()


class StopBetweenSteps(TrainerCallback):
    """Ends training after the step in which it was asked to."""

    def __init__(self) -> None:
        self.asked = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        control.should_training_stop = control.should_training_stop or self.asked
        return control
