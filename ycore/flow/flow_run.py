"""A run of `ycore flow` inside the trainer's process: rounds of pictures, updates, measurements, checkpoints.

The controller, its journal, dynamic sampling and the reward workers are those of every run with rollouts. TRL has no
trainer for these models, so that the loop is here. The sampler shares the process and its weights.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ycore.errors import Interrupted, RunError
from ycore.evaluation.held_out import first_and_last, is_due
from ycore.flow.flow_inputs import FlowFolder, load_conditions
from ycore.flow.flow_math import SamplingPath, time_grid
from ycore.flow.flow_settings import FlowConfig
from ycore.flow.learner import Learner
from ycore.flow.picture_rounds import (
    FlowPolicy,
    OnePicture,
    PictureEngine,
    Trajectories,
    conditions,
    contact_sheet,
    drop_pictures,
    measure,
)
from ycore.flow.picture_scoring import picture_scoring
from ycore.placement.slots import Slots
from ycore.round.journal import Journal
from ycore.round.sampling import DrawSource, Rules
from ycore.round.step import Controller
from ycore.run.claim import check_contents, contents_of
from ycore.run.files import (
    ImageStore,
    RunFolder,
    make_folder,
    read_json,
    sync,
    sync_tree,
    write_json_atomic,
)
from ycore.run.metrics import MetricsWriter, is_evaluation, read_metrics
from ycore.run.resuming import (
    CheckpointWriter,
    checkpoint_of,
    controller_file,
    newest_for,
)
from ycore.run.secrets import load_config
from ycore.run.trace import TraceWriter
from ycore.scoring.group_rewards import min_stds
from ycore.types import JsonObject, Prompt

_NUM_CHECKPOINTS = 2
_SHEET_CLASSES = 12


class FlowRun:
    """Example: `run = FlowRun(root); run.train(); run.save(); run.close()`."""

    def __init__(self, root: Path) -> None:
        self.home = RunFolder(root)
        self.config = config = FlowConfig.model_validate(load_config(self.home))
        folder = FlowFolder(Path(read_json(self.home.engines)["model"]))
        dataset = load_conditions(config, num_classes=folder.num_classes)
        model = folder.root / folder.part
        check_contents(self.home, contents_of(dataset.identity, model, config.code_files))
        for place in (self.home.images, self.home.trajectories):
            make_folder(place)
        policy = FlowPolicy(folder, device="cuda" if torch.cuda.is_available() else "cpu")
        shift = config.flow.shift or folder.shift
        path = path_of_rounds(config, shift=shift)
        self._plain = SamplingPath(time_grid(config.flow.eval_steps, shift=shift))
        trajectories = Trajectories(self.home.trajectories)
        images = ImageStore(self.home.images)
        self._engine = PictureEngine(
            policy, path, self._plain, images, trajectories, config.flow.batch
        )
        journal = Journal(self.home.journal, rank=0, seed=config.seed)
        self.controller = self._controller(dataset.prompts, OnePicture(path), journal)
        self.stop = self.controller.stop
        self.learner = Learner(policy, config, path, trajectories, self.controller.rules)
        self._judge = None
        if config.eval_rewards:
            self._judge = picture_scoring(config, config.eval_rewards, self.home)
            self.controller.scorings.append(self._judge)
        self._conditions = conditions(dataset.prompts, config.condition_column)
        self._metrics = MetricsWriter(self.home.metrics)
        self._step = 0
        self._state = self.controller.state()
        self._checkpoints = CheckpointWriter(
            self.home,
            expected_bytes=sum(16 * weight.numel() for weight in policy.trained.values()),
            keep=_NUM_CHECKPOINTS,
            prune=None if config.keep_journal else journal.prune,
        )

    def _controller(
        self, prompts: Sequence[Prompt], writer: OnePicture, journal: Journal
    ) -> Controller:
        """Return the controller of the one rank, with the one engine that shares the trainer's process."""
        config = self.config
        rules = Rules(
            group_size=config.group_size,
            seed=config.seed,
            reward_weights=tuple(config.reward_weights),
            dynamic=config.sampling.dynamic,
            max_tries=config.sampling.max_tries,
            in_order=True,  # all pictures take as long, so that it costs nothing
            min_stds_R=min_stds(config, default_range=1.0),
        )
        draws = DrawSource(
            prompts,
            seed=config.seed,
            encode=lambda prompt: (prompt.columns[config.condition_column],),
            max_prompt_tokens=1,
        )
        return Controller(
            engines=[self._engine],
            scoring=picture_scoring(config, config.rewards, self.home),
            draws=draws,
            rules=rules,
            journal=journal,
            max_surplus_age=config.sampling.max_age,
            slots=Slots(1, trace=TraceWriter(self.home.trace)),
            writer=writer,
        )

    def train(self) -> None:
        """Take all steps, from the newest checkpoint if there is one; Interrupted where it is asked to stop."""
        config = self.config
        if step := newest_for(self.home.checkpoints, world=1, say=partial(print, flush=True)):
            self._restore(step)
        self._metrics.forget_after(self._step)
        # Pictures of a round that was cut short may be damaged after a loss of power.
        drop_pictures(self.home)
        self.controller.start(timeout_s=config.step_timeout_s)
        if self._is_due() and not any(row["step"] == self._step for row in self._evaluations()):
            self._metrics.write({"step": self._step, **self._measured()})
        while self._step < config.steps:
            if self.stop.is_set():
                raise Interrupted(f"stopped after step {self._step}")
            self._take_step()
            if is_due(self._step, config.checkpoint_every, config.steps):
                self.save_checkpoint()
        self._finish()

    def _take_step(self) -> None:
        began = time.perf_counter()
        step = self._step
        row = JsonObject()
        self.home.step_began.touch()
        self.controller.record = row.__setitem__
        self._engine.weights = self.learner.drawing
        self._engine.version = step
        self._engine.num_drawn = 0
        groups = self.controller.next_round(step=step, num_groups=self.config.prompts_per_step)
        row |= self.learner.learn(groups, step=step)
        if not all(
            torch.isfinite(weight).all() for weight in self.learner.policy.trained.values()
        ):
            raise RunError(
                f"the weights are no longer finite after step {step + 1}; lower --learning-rate, and resume"
            )
        self._step = step + 1
        self._state = self.controller.state()
        row.pop("ycore/tokens_per_s", None)  # pictures have none
        step_s = time.perf_counter() - began
        row["ycore/time/step"] = step_s
        row["ycore/time/train"] = step_s - self.controller.take_seconds()
        row["ycore/flow/pictures_per_s"] = self._engine.num_drawn / step_s
        if self.controller.problems:
            row["ycore/reward_problems"] = self.controller.problems
        try:
            row |= self._measured() if self._is_due() else {}
        finally:  # a step that is whole is written, also where its measurement was stopped
            self._metrics.write({"step": self._step, **row})

    def _is_due(self) -> bool:
        return is_due(self._step, self.config.eval_every, self.config.steps)

    def _measured(self) -> JsonObject:
        """Return the figures of the policy."""
        began = time.perf_counter()
        self.home.step_began.touch()
        self._engine.weights = None
        figures = self.controller.run(
            measure(
                self._engine,
                self.controller,
                self._judge,
                self._conditions,
                step=self._step,
                config=self.config,
            )
        )
        for meter in self.controller.scoring.meters:
            meter.take()  # or the next step would count it
        figures["ycore/time/eval"] = time.perf_counter() - began
        return figures

    def _evaluations(self) -> list[JsonObject]:
        """Return the rows of measurements, in their order."""
        return [row for row in read_metrics(self.home.metrics) if is_evaluation(row)]

    def _finish(self) -> None:
        """Draw from the same noise before and after, and write down what was measured."""
        column = self.config.condition_column
        classes = [prompt.columns[column] for prompt in self._conditions[:_SHEET_CLASSES]]
        contact_sheet(self.learner.policy, self._plain, classes, self.home.pictures)
        write_json_atomic(self.home.held_out, first_and_last(self._evaluations()))

    def save(self) -> None:
        """Save the model under `model/`, whole, as diffusers saves one; it is on the disk on return."""
        self.learner.policy.save(self.home.model)
        sync_tree(self.home.model)
        sync(self.home.metrics)

    def save_checkpoint(self) -> None:
        """Save a checkpoint of the last finished step, unless it has one."""
        step = self._step
        learner = self.learner
        if step <= self._checkpoints.saved_step:
            return
        weights = {f"policy/{name}": weight for name, weight in learner.policy.copy().items()}
        weights |= {f"old/{name}": weight for name, weight in learner.old.items()}
        on_cpu = {name: weight.cpu().contiguous() for name, weight in weights.items()}
        with self._checkpoints.saving(step) as staged:
            checkpoint = checkpoint_of(staged, step)
            checkpoint.mkdir(mode=0o700)
            save_file(on_cpu, checkpoint / "model.safetensors")
            torch.save(learner.optimizer.state_dict(), checkpoint / "optimizer.pt")
            torch.save(torch.get_rng_state(), checkpoint / "rng_state.pth")
            write_json_atomic(checkpoint / "trainer_state.json", {"global_step": step})
            state = {"policy_version": step, "controller": self._state}
            write_json_atomic(checkpoint / controller_file(0), state)
        if not self.config.keep_journal:
            drop_pictures(self.home)

    def _restore(self, step: int) -> None:
        checkpoint = checkpoint_of(self.home.checkpoints, step)
        weights = load_file(checkpoint / "model.safetensors")
        learner = self.learner
        device = self.learner.policy.device
        learner.policy.put(_with_prefix(weights, "policy/"))
        old = _with_prefix(weights, "old/")
        learner.old = {name: weight.to(device) for name, weight in old.items()}
        state = torch.load(checkpoint / "optimizer.pt", map_location=device, weights_only=True)
        learner.optimizer.load_state_dict(state)
        self._step = self._checkpoints.saved_step = step
        self._state = read_json(checkpoint / controller_file(0))["controller"]
        self.controller.restore(self._state)

    def close(self) -> None:
        self.controller.close()
        self._metrics.close()


def path_of_rounds(config: FlowConfig, *, shift: float) -> SamplingPath:
    """Return how a round's pictures are drawn; `shift` moves the times towards the noise."""
    flow = config.flow
    length = 0
    if flow.rule == "sde":
        length = flow.window or flow.steps - 1  # the last step has no noise
    return SamplingPath(time_grid(flow.steps, shift=shift), flow.rule, flow.noise, length)


def _with_prefix(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): weight
        for name, weight in weights.items()
        if name.startswith(prefix)
    }
