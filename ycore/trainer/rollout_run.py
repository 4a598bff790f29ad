"""A run that learns from rollouts: rounds by its engines, or read from another run's journal."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ycore.config.schema import RunConfig
from ycore.engine import WeightSource
from ycore.engine.weights import engine_weights, note_weights, write_adapters, write_weights
from ycore.errors import ConfigError
from ycore.evaluation.during_training import RolloutEvaluation
from ycore.rollout.agents import AgentWriter
from ycore.round.assemble import Assembly
from ycore.round.journal import Journal, ReplayedRounds
from ycore.round.peers import Peers
from ycore.round.step import Controller
from ycore.run.files import RunFolder, write_json_atomic
from ycore.run.work import working
from ycore.trainer.training_run import Checkpoints, RoundState, TrainingRun
from ycore.trl.build import compute_dtype

NUM_SAMPLES = 4
_NUM_CHECKED_FOR_TRUNCATION = 16
_MIN_CHECKED_MAX_TOKENS = 64
"""A shorter `max_tokens` is for a number or a label."""


class RolloutRun(TrainingRun):
    """Example: `run = RolloutRun(assemble(root)); run.train(); run.save(); run.close()`."""

    def __init__(self, parts: Assembly) -> None:
        self._parts = parts
        super().__init__(
            parts.config,
            parts.folder,
            parts.home,
            model=parts.started.model,
            tokenizer=parts.tokenizer if parts.sight is None else parts.sight.processor,
            identity=parts.prompts.identity,
        )
        if parts.sight is not None:
            self.trainer.open_image = parts.sight.store.open
        self.controller: Controller = self._make_controller()
        self.stop = self.controller.stop  # which also ends a round that is being generated
        self.checkpoints = self._take_rounds()
        self._page.show_rounds(self.trainer, every=parts.config.log_every)
        held_out = parts.evaluation(self.controller)
        self._evaluation = RolloutEvaluation(self, parts.config, self.controller, held_out)
        self.trainer.add_callback(self._evaluation)

    def _make_controller(self) -> Controller:
        parts = self._parts
        peers = Peers(timeout_s=parts.config.collective_timeout_s)
        model = self.trainer.bare_model  # which writes itself where there are no servers
        source = None
        if parts.config.engine.sync == "ipc":
            walk = partial(engine_weights, model, dtype=compute_dtype(self.config))
            source = WeightSource(walk, self.trainer.accelerator.device)
        engines = parts.engines(model, source=source)
        self._journal = Journal(
            parts.home.journal, rank=peers.rank, world=peers.world, seed=parts.config.seed
        )
        controller = parts.controller(
            engines,
            peers=peers,
            share_weights=self._share_weights if parts.kind.has_servers else None,
            journal=self._journal,
            slots=parts.slots(engines),
        )
        controller.record = self.trainer.record
        if isinstance(controller.writer, AgentWriter):
            controller.writer.several_sequences = self.trainer.packed_by is not None
        self.trainer.shares_device = parts.started.sleeps
        self.trainer.offload = parts.started.offload
        return controller

    def _take_rounds(self) -> Checkpoints:
        """Let the trainer learn from the controller's rounds, or from those in another run's journal."""
        config = self._parts.config
        trainer = self.trainer
        if config.replay is None:
            trainer.rounds = self.controller
            prune = None if config.keep_journal else self._journal.prune
            return Checkpoints(self.home, trainer, RoundState(trainer, self.controller), prune)
        journal = replace(
            self._journal, folder=RunFolder(Path(config.replay).expanduser()).journal
        )
        rounds = ReplayedRounds(journal, group_size=config.group_size, record=trainer.record)
        rounds.check(steps=config.steps, steps_per_round=trainer.steps_per_round)
        trainer.rounds = rounds
        return Checkpoints(self.home, trainer, RoundState(trainer, None))

    def _share_weights(self, version: int) -> Path:
        """Write the policy's weights for the engines: the first rank of a machine does, and the others wait."""
        folder = self._parts.folder.shared_memory
        if self._parts.config.engine.hosts:  # one that comes back may still read the last
            folder /= str(version % 2)
        accelerator = self.trainer.accelerator
        model = self.trainer.bare_model
        dtype = compute_dtype(self.config)
        writes = accelerator.is_local_main_process
        sync = self._parts.config.engine.sync
        if sync in ("auto", "merged"):
            num_bytes = write_weights(
                model, folder, dtype=dtype, writes=writes, version=version
            )
        else:
            write = note_weights if sync == "ipc" else write_adapters
            num_bytes = write(model, folder, dtype=dtype, version=version) if writes else 0
        accelerator.wait_for_everyone()
        if version > 0:  # the first weights are sent before the first step begins
            self.trainer.record("ycore/sync_mb", num_bytes / 1e6)
            if (devices := self._parts.config.engine.devices) != "shared":
                self.trainer.record("ycore/engine_devices", devices)
        return folder

    def should_stop(self) -> bool:
        return self.controller.should_stop()

    def begin(self, *, resumes: bool) -> None:
        """Wait for the engines, and take the first samples."""
        self.checkpoints.check_room()
        config = self._parts.config
        if self.leads:
            print(_FORWARD[self.trainer.packed_by], flush=True)
            if self._parts.sight is not None and not self.trainer.packs_pictures:
                print("forward of prompts with pictures: padded rows, TRL's own", flush=True)
        self._samples: dict[str, list[dict[str, Any]]] = {}
        if config.replay is None:
            with working("waiting for the engines"):
                self.controller.start(timeout_s=config.engine.start_timeout_s)
            with working("sampling before training"):
                if not resumes:
                    self._check_truncation()
                self._samples["before"] = self._sample(version=0)

    def finish(self) -> None:
        """Take the same samples again, and write both down; write down what evaluations found."""
        if self._parts.config.replay is not None:
            return
        self._evaluation.finish()
        with working("sampling after training"):
            self._samples["after"] = self._sample(version=self.trainer.state.global_step)
        if self.leads:
            write_json_atomic(self.home.samples, self._samples)

    def _check_truncation(self) -> None:
        """ConfigError if `max_tokens` truncates too many of a few completions; turns end in other ways too."""
        config = self._parts.config
        if config.max_tokens < _MIN_CHECKED_MAX_TOKENS or config.has_turns:
            return
        samples = self._sample(version=0, count=_NUM_CHECKED_FOR_TRUNCATION)
        if self.leads:
            reasons = [sample["finish_reason"] for sample in samples]
            print(truncation(reasons, config), flush=True)

    def _sample(self, *, version: int, count: int = NUM_SAMPLES) -> list[dict[str, Any]]:
        """One completion of each of the same few prompts, always with the same seeds, on the first rank."""
        prompts = self._parts.prompts.prompts
        generator = random.Random(self._parts.config.seed)
        rows = generator.sample(range(len(prompts)), min(count, len(prompts)))
        requests = [
            (prompts[row], self._parts.encode(prompts[row])) for row in rows if self.leads
        ]
        with self.trainer.room_for_engines():
            return self.controller.sample(requests, version=version)

    def close(self) -> None:
        self.controller.close()
        super().close()


_FORWARD = {
    "segments": "forward: packed rows, shared prompts once, attention by segments",
    "varlen": "forward: packed rows, flash attention with variable lengths",
    None: "forward: padded rows, because this model's attention cannot be packed",
}


def truncation(finish_reasons: Sequence[str], config: RunConfig) -> str:
    """A line on the share of truncated completions; ConfigError if it is above `max_truncated`."""
    share = sum(reason == "length" for reason in finish_reasons) / len(finish_reasons)
    line = f"{share:.0%} of {len(finish_reasons)} sampled completions are cut off at {config.max_tokens} tokens"
    if share > config.max_truncated:
        raise ConfigError(
            f"{line}, and max_truncated is {config.max_truncated:g}; say --max-tokens {4 * config.max_tokens} (with "
            "another --output), or go on with --resume --set max_truncated=1"
        )
    return line
