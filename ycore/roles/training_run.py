"""One training run inside the trainer's process: its trainer, its rounds, what it saves.

Not here: the process and its signals (`trainer`).
"""

import os
import random
from pathlib import Path
from typing import Any

from peft.helpers import disable_input_dtype_casting
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ycore.algorithms.grpo import build_trainer, compute_dtype
from ycore.algorithms.weights import write_weights
from ycore.controller.assemble import Assembly
from ycore.controller.draws import Shard
from ycore.controller.peers import Alone, Peers
from ycore.controller.source import Rounds
from ycore.controller.torch_peers import TorchPeers
from ycore.errors import Interrupted
from ycore.roles.checkpoints import ControllerState, newest_checkpoint, step_of
from ycore.roles.engine import Engine
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
            callbacks=[StepMetrics(self._metrics, lambda: self._rounds.problems), self._stopping],
        )
        self._peers: Peers = TorchPeers() if self._trainer.accelerator.num_processes > 1 else Alone()
        self._rounds = self._make_rounds()
        self._trainer.rounds = self._rounds
        self._controller = ControllerState(self._rounds, rank=self._peers.rank)
        self._trainer.add_callback(self._controller)

    def _make_rounds(self) -> Rounds:
        parts = self._parts
        rounds = Rounds(
            engines=self._engines(),
            rewards=parts.reward_pool(),
            draws=parts.draws(Shard(self._peers.rank, self._peers.world)),
            rules=parts.rules(),
            peers=self._peers,
            share_weights=self._share_weights if parts.config.sync_weights else None,
            max_surplus_age=parts.config.sampling.max_age,
        )
        rounds.record = self._trainer.record
        return rounds

    def _engines(self) -> list[Engine]:
        """This rank's: the node's engines in turn, so that every rank has as many as any other."""
        if self._parts.started.kind != "vllm":
            return [self._own_engine()]
        state = self._trainer.accelerator
        return self._parts.vllm_engines()[state.local_process_index :: max(1, _local_world())]

    def _share_weights(self, version: int) -> Path:
        """The first rank of each node writes; nobody reads before it has."""
        folder = self._parts.folder.shared_memory
        accelerator = self._trainer.accelerator
        num_bytes = write_weights(
            self._trainer.bare_model,
            folder,
            dtype=compute_dtype(self._parts.config),
            writes=accelerator.is_local_main_process,
        )
        accelerator.wait_for_everyone()
        if version > 0:  # the first weights are sent before the first step begins
            self._trainer.record("ycore/sync_mb", num_bytes / 1e6)
        return folder

    def _own_engine(self) -> TransformersEngine:
        return TransformersEngine(self._trainer.bare_model, self._parts.tokenizer, self._parts.sampling())

    def ask_to_stop(self) -> None:
        """At once while generating, else after the step that is being computed."""
        self._stopping.asked = True
        self._rounds.stop.set()

    def train(self) -> None:
        """All steps, from the newest checkpoint where there is one; Interrupted when asked to stop before the last."""
        resume_from = newest_checkpoint(self._parts.folder.checkpoints)
        if resume_from is not None:
            self._controller.restore(resume_from)
            self._metrics.forget_after(step_of(resume_from))
        self._rounds.start(timeout_s=self._parts.config.engine.start_timeout_s)
        before = self._sample(version=0)
        with disable_input_dtype_casting(self._trainer.bare_model):
            self._trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
        if self._trainer.state.global_step < self._parts.config.steps:
            raise Interrupted(f"stopped after step {self._trainer.state.global_step}")
        after = self._sample(version=self._trainer.state.global_step)
        if self._peers.rank == 0:
            write_json_atomic(self._parts.folder.samples, {"before": before, "after": after})

    def _sample(self, *, version: int) -> list[dict[str, Any]]:
        """One completion to each of the same few prompts, with the same seeds whenever it is asked."""
        prompts = self._parts.prompts.prompts
        rows = random.Random(self._parts.config.seed).sample(range(len(prompts)), min(NUM_SAMPLES, len(prompts)))
        return self._rounds.sample([(prompts[row], self._parts.encode(prompts[row])) for row in rows], version=version)

    def save(self) -> None:
        """The model under `model/`: whole, or the adapter and, where asked, the merged model."""
        folder = self._parts.folder.model
        self._trainer.save_model(str(folder))
        if self._peers.rank > 0:
            return
        self._parts.tokenizer.save_pretrained(folder)
        if self._parts.config.merge and self._parts.config.lora is not None:
            merged = self._trainer.bare_model.merge_and_unload()
            merged.save_pretrained(folder / "merged")
            self._parts.tokenizer.save_pretrained(folder / "merged")

    def save_checkpoint(self) -> None:
        """A checkpoint of the last finished step, unless it has one."""
        step = self._trainer.state.global_step
        newest = newest_checkpoint(self._parts.folder.checkpoints)
        if step > 0 and (newest is None or step_of(newest) < step):
            self._trainer.save_checkpoint()
            self._controller.write(self._parts.folder.checkpoints / f"checkpoint-{step}")

    def tell_others(self, error: BaseException) -> None:
        """The other ranks stop too, at once rather than at a collective's timeout."""
        self._peers.fail(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        self._rounds.close()
        self._metrics.close()


def _local_world() -> int:
    """Ranks on this node, as torchrun tells them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class StopBetweenSteps(TrainerCallback):
    """Ends training after the step in which it was asked to."""

    def __init__(self) -> None:
        self.asked = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        control.should_training_stop = control.should_training_stop or self.asked
        return control
