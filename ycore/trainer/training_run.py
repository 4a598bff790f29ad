"""One training run inside the trainer's process: its trainer, its rounds, what it saves.

Not here: the process and its signals (`trainer`).
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peft.helpers import disable_input_dtype_casting
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ycore.engine import Engine
from ycore.engine.transformers_engine import TransformersEngine
from ycore.engine.weights import save_merged, write_weights
from ycore.errors import Interrupted
from ycore.round.assemble import Assembly
from ycore.round.journal import Journal, ReplayedRounds
from ycore.round.peers import Peers
from ycore.round.step import Controller
from ycore.round.torch_peers import TorchPeers
from ycore.run.checkpoints import checkpoint_of, step_of
from ycore.run.files import write_json_atomic
from ycore.run.metrics import MetricsWriter
from ycore.run.reports import this_rank
from ycore.trainer.callbacks import StepMark, StepMetrics, TrackerPage
from ycore.trainer.saved_state import NOTHING, Checkpoints, Memory, accept_numbered_cpus, check_identity
from ycore.trl.grpo import build_trainer, compute_dtype

NUM_SAMPLES = 4


class TrainingRun:
    """Example: `run = TrainingRun(assemble(root)); run.train(); run.save(); run.close()`."""

    def __init__(self, parts: Assembly) -> None:
        self._parts = parts
        self._rank = this_rank()
        if self._rank.number == 0:
            check_identity(parts)
        self._stopping = StopBetweenSteps(self._any_rank_stops)
        self._metrics = MetricsWriter(parts.home.metrics)
        step_metrics = StepMetrics(self._metrics)
        self._trainer = build_trainer(
            parts.config,
            parts.home,
            model=parts.started.model,
            tokenizer=parts.tokenizer,
            callbacks=[StepMark(parts.folder.step_began), step_metrics, self._stopping],
            world_size=self._rank.world,
        )
        self._peers: Peers = (
            TorchPeers(timeout_s=parts.config.collective_timeout_s)
            if self._trainer.accelerator.num_processes > 1
            else Peers()
        )
        self._rounds = self._make_rounds()
        step_metrics.watch(self._rounds)
        self._checkpoints = self._make_checkpoints()
        self._trainer.writer = self._checkpoints
        self._trainer.add_callback(self._checkpoints)
        self._trainer.add_callback(self._tracker_page())

    def _tracker_page(self) -> TrackerPage:
        parts = self._parts
        project = parts.config.trl.get("project")
        return TrackerPage(parts.home, lambda: self._trainer.callback_handler.callbacks, project=project)

    def _make_checkpoints(self) -> Checkpoints:
        """And the trainer's rounds: generated and journaled, or read from another run's journal."""
        parts, config, peers = self._parts, self._parts.config, self._peers
        if config.replay is not None:
            replayed = ReplayedRounds(
                Path(config.replay),
                rank=peers.rank,
                world=peers.world,
                group_size=config.group_size,
                record=self._trainer.record,
            )
            replayed.check(steps=config.steps, steps_per_round=self._trainer.steps_per_round)
            self._trainer.rounds = replayed
            return Checkpoints(parts.home.checkpoints, self._trainer, NOTHING, journal=None)
        self._trainer.rounds = self._rounds
        memory = Memory(tell=self._rounds.state, restore=self._rounds.restore)
        pruned = None if config.keep_journal else self._journal
        return Checkpoints(parts.home.checkpoints, self._trainer, memory, journal=pruned)

    def _make_rounds(self) -> Controller:
        parts, peers, engines = self._parts, self._peers, self._engines()
        self._journal = Journal(parts.home.journal, rank=peers.rank, world=peers.world, seed=parts.config.seed)
        rounds = parts.controller(
            engines,
            peers=peers,
            share_weights=self._share_weights if self._sends_weights else None,
            journal=self._journal,
            slots=parts.slots(engines, rank=peers.rank),
        )
        rounds.record = self._trainer.record
        self._trainer.shares_device = parts.started.sleeps
        return rounds

    @property
    def _sends_weights(self) -> bool:
        """Not where the engine is the trainer's own model, nor where a control wants it frozen."""
        return self._parts.started.kind == "vllm" and self._parts.config.sync_weights

    def _engines(self) -> list[Engine]:
        """This rank's: the node's engines in turn, so that every rank has as many as any other."""
        if self._parts.started.kind != "vllm":
            return [self._own_engine()]
        return self._parts.vllm_engines()[self._rank.local :: self._rank.local_world]

    def _share_weights(self, version: int) -> Path:
        """The first rank of each node writes; nobody reads before it has."""
        folder = self._parts.folder.shared_memory
        accelerator = self._trainer.accelerator
        num_bytes = write_weights(
            self._trainer.bare_model,
            folder,
            dtype=compute_dtype(self._parts.config),
            writes=accelerator.is_local_main_process,
            version=version,
        )
        accelerator.wait_for_everyone()
        if version > 0:  # the first weights are sent before the first step begins
            self._trainer.record("ycore/sync_mb", num_bytes / 1e6)
        return folder

    def _own_engine(self) -> TransformersEngine:
        return TransformersEngine(self._trainer.bare_model, self._parts.tokenizer, self._parts.sampling())

    def ask_to_stop(self) -> None:
        """At once while generating, else after the step that is being computed."""
        self._rounds.stop.set()

    def _any_rank_stops(self) -> bool:
        return self._rounds.should_stop()

    def train(self) -> None:
        """All steps, from the newest checkpoint where there is one; Interrupted when asked to stop before the last."""
        resume_from = self._checkpoint_to_go_on_from()
        accept_numbered_cpus()
        self._checkpoints.check_room()
        if resume_from is not None:
            self._checkpoints.restore(resume_from)
        if self._peers.rank == 0:
            self._metrics.forget_after(0 if resume_from is None else step_of(resume_from))
        replays = self._parts.config.replay is not None
        if not replays:
            self._rounds.start(timeout_s=self._parts.config.engine.start_timeout_s)
        before = None if replays else self._sample(version=0)
        with disable_input_dtype_casting(self._trainer.bare_model):
            self._trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
        if self._trainer.state.global_step < self._parts.config.steps:
            raise Interrupted(f"stopped after step {self._trainer.state.global_step}")
        if before is not None:
            after = self._sample(version=self._trainer.state.global_step)
            if self._peers.rank == 0:
                write_json_atomic(self._parts.home.samples, {"before": before, "after": after})

    def _checkpoint_to_go_on_from(self) -> Path | None:
        """The first rank looks, so that all take the same one."""
        newest = self._checkpoints.find() if self._peers.rank == 0 else None
        (step,) = self._peers.add_up([0 if newest is None else step_of(newest)])
        return None if step == 0 else checkpoint_of(self._parts.home.checkpoints, int(step))

    def _sample(self, *, version: int) -> list[dict[str, Any]]:
        """One completion to each of the same few prompts, with the same seeds whenever it is asked."""
        prompts = self._parts.prompts.prompts
        rows = random.Random(self._parts.config.seed).sample(range(len(prompts)), min(NUM_SAMPLES, len(prompts)))
        asked = [(prompts[row], self._parts.encode(prompts[row])) for row in rows]
        with self._trainer.room_for_engines():
            return self._rounds.sample(asked, version=version)

    def save(self) -> None:
        """The model under `model/`: whole, or the adapter and, where asked, the merged model."""
        self._trainer.refuse_broken_weights()
        folder, writes = self._parts.home.model, self._peers.rank == 0
        self._trainer.save_model(str(folder))
        if self._parts.config.merge and self._parts.config.lora is not None:
            dtype = compute_dtype(self._parts.config)
            save_merged(self._trainer.bare_model, folder / "merged", dtype=dtype, writes=writes)
            if writes:
                self._parts.tokenizer.save_pretrained(folder / "merged")
        if writes:
            self._parts.tokenizer.save_pretrained(folder)
        self._trainer.accelerator.wait_for_everyone()

    def save_checkpoint(self) -> None:
        """A checkpoint of the last finished step, unless it has one."""
        if self._trainer.state.global_step > self._checkpoints.saved_step:
            self._trainer.save_checkpoint()
        self._trainer.accelerator.wait_for_everyone()  # a rank that ends early would take the others with it

    def tell_others(self, error: BaseException) -> None:
        """The other ranks stop too, at once rather than at a collective's timeout."""
        self._peers.fail(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        self._rounds.close()
        self._metrics.close()


class StopBetweenSteps(TrainerCallback):
    """Ends training after the step in which any rank was asked to, on all ranks."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        self._asked = asked

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        control.should_training_stop = self._asked() or control.should_training_stop
        return control
