"""A run of `ycore flow` inside the trainer's process: rounds of pictures, updates, measurements, checkpoints.

The controller, its journal, dynamic sampling and the reward workers are those of every run with rollouts. TRL has no
trainer for these models, so that the loop is here. The sampler shares the process and its weights.
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from ycore.config.schema import EngineSettings, RewardConfig, a_fifth
from ycore.data.prompts import PromptSet
from ycore.engine.judge_engine import RemoteJudge
from ycore.errors import Interrupted, RunError
from ycore.evaluation.held_out import is_due, row_figures
from ycore.flow.conditions import IMAGES, load_conditions
from ycore.flow.flow_folder import FlowFolder
from ycore.flow.flow_settings import FlowConfig
from ycore.flow.learner import Learner, sampling_of
from ycore.flow.measuring import FELL, TRAINED, conditions, judge_fell, measure
from ycore.flow.policy import Policy
from ycore.flow.sampler import (
    OnePicture,
    Picture,
    PictureEngine,
    Trajectories,
    contact_sheet,
    drop_pictures,
)
from ycore.judge.question import Questioner
from ycore.judge.sources import is_judge, judge_of
from ycore.placement.slots import Slots
from ycore.rewards.loading import reward_names
from ycore.round.journal import Journal
from ycore.round.peers import Peers
from ycore.round.sampling import DrawSource, Rules
from ycore.round.step import Controller
from ycore.run.checkpoints import (
    checkpoint_of,
    checkpoints_in,
    controller_file,
    drop_oldest,
    newest_for,
    publish,
    staging,
    step_of,
)
from ycore.run.claim import files_fingerprint, model_fingerprint
from ycore.run.files import is_disk_full, make_folder, read_json, sync, sync_tree, write_json_atomic
from ycore.run.images import ImageStore
from ycore.run.meter import Meter
from ycore.run.metrics import MetricsWriter, is_evaluation, read_metrics
from ycore.run.paths import RunFolder
from ycore.run.secrets import load_config
from ycore.run.trace import TraceWriter
from ycore.scoring.group_rewards import min_stds
from ycore.scoring.judge_scorer import JudgeMeter, JudgeScorer
from ycore.scoring.reward_pool import RuleScorer, WorkerMeter, reward_pool
from ycore.scoring.scoring import PendingGroup, Scorer, Scoring
from ycore.trainer.saved_state import check_contents
from ycore.types import Completion, Prompt, Score

if TYPE_CHECKING:
    from ycore.view.trackers import OwnPage

_KEPT = 2  # checkpoints


class PictureScorer(RuleScorer):
    """Reward functions of pictures: in `images` they get the one that each completion is."""

    def extra_columns(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> dict[str, list[Any]]:
        return {
            IMAGES: [
                str(self.images.path(Picture.of(completion.text).image.sha256))
                for completion in completions
            ]
        }


class PictureJudge(JudgeScorer):
    """A judge that sees: a question shows it the drawn picture, and names it where a completion's text would stand."""

    async def score_one(self, group: PendingGroup, index: int) -> Score:
        drawn = Picture.of((await group.tasks_G[index]).text).image
        prompt = replace(group.draw.prompt, images=(drawn,))
        return await super().score_one(
            replace(group, draw=replace(group.draw, prompt=prompt)), index
        )


class FlowRun:
    """Example: `run = FlowRun(root); run.train(); run.save(); run.close()`."""

    def __init__(self, root: Path) -> None:
        self.home = RunFolder(root)
        self.config = config = FlowConfig.model_validate(load_config(self.home))
        self._folder = FlowFolder(Path(read_json(self.home.engines)["model"]))
        prompts = load_conditions(config, num_classes=self._folder.num_classes)
        check_contents(self.home, _contents(config, self._folder, prompts))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        flow = config.flow
        policy = Policy(
            self._folder, lora=config.lora, guidance=flow.guidance, seed=config.seed, device=device
        )
        how, self._plain = sampling_of(config, shift=self._folder.shift)
        kept = Trajectories(self.home.trajectories)
        self.learner = Learner(policy, config, how, kept)
        self._engine = PictureEngine(policy, how, self._plain, self.home, batch=flow.batch)
        self._images = ImageStore(self.home.images)
        for place in (self.home.images, self.home.trajectories, self.home.checkpoints):
            make_folder(place)
        self._journal = Journal(self.home.journal, rank=0, seed=config.seed)
        self.controller = self._make_controller(prompts, how)
        self.stop = self.controller.stop
        self._judge = (
            _scoring(config, config.eval_rewards, self.home, self._images)
            if config.eval_rewards
            else None
        )
        self._asked = conditions(prompts.prompts, config.condition_column)
        self._metrics, self._page = MetricsWriter(self.home.metrics), _page(config, self.home)
        self._rows: list[dict[str, Any]] = []
        self._done = self._saved = 0
        self._state = self.controller.state()

    def _make_controller(self, prompts: PromptSet, how: Any) -> Controller:
        config, column = self.config, self.config.condition_column
        rules = Rules(
            group_size=config.group_size,
            seed=config.seed,
            reward_weights=tuple(reward.weight for reward in config.rewards),
            dynamic=config.sampling.dynamic,
            max_tries=config.sampling.max_tries,
            in_order=True,  # all pictures take as long, so that it costs nothing
            min_stds_R=min_stds(config.rewards, config.sampling.dust, default_range=1.0),
        )
        return Controller(
            engines=[self._engine],
            scoring=_scoring(config, config.rewards, self.home, self._images),
            draws=DrawSource(
                prompts.prompts,
                seed=config.seed,
                encode=lambda one: (one.columns[column],),
                max_prompt_tokens=1,
            ),
            rules=rules,
            peers=Peers(),
            journal=self._journal,
            max_surplus_age=config.sampling.max_age,
            slots=Slots(1, trace=TraceWriter(self.home.trace)),
            writer=OnePicture(how),
        )

    def train(self) -> None:
        """Take all steps, from the newest checkpoint if there is one; Interrupted where it is asked to stop."""
        config = self.config
        newest = newest_for(self.home.checkpoints, world=1, say=partial(print, flush=True))
        if newest is not None:
            self._restore(newest)
        self._metrics.forget_after(self._done)
        drop_pictures(
            self.home
        )  # those of a round that was cut short may be damaged after a loss of power
        self._rows = read_metrics(self.home.metrics)
        self.controller.start(timeout_s=config.step_timeout_s)
        if self._judge is not None:
            self.controller.run(self._judge.start(timeout_s=config.step_timeout_s))
        if self._is_due(self._done) and not any(
            row["step"] == self._done and is_evaluation(row) for row in self._rows
        ):
            self._write({"step": self._done, **self._measured(self._done)})
        while self._done < config.steps:
            if self.stop.is_set():
                raise Interrupted(f"stopped after step {self._done}")
            self._take_step()
            if (
                self._done % (config.checkpoint_every or a_fifth(config.steps)) == 0
                or self._done == config.steps
            ):
                self.save_checkpoint()
        self._finish()

    def _take_step(self) -> None:
        began, step, row = time.perf_counter(), self._done, dict[str, Any]()
        self.home.step_began.touch()
        self.controller.record = row.__setitem__
        self._engine.weights, self._engine.version, self._engine.num_drawn = (
            self.learner.drawing,
            step,
            0,
        )
        groups = self.controller.next_round(step=step, num_groups=self.config.prompts_per_step)
        row |= self.learner.learn(groups, step=step)
        if not all(torch.isfinite(weight).all() for weight in self.learner.policy.trained.values()):
            raise RunError(
                f"the weights are no longer finite after step {step + 1}; lower --learning-rate, and resume"
            )
        self._done, self._state = step + 1, self.controller.state()
        row.pop("ycore/tokens_per_s", None)  # pictures have none
        seconds = time.perf_counter() - began
        row |= {
            "ycore/time/step": seconds,
            "ycore/time/train": seconds - self.controller.take_seconds(),
        }
        row["ycore/flow/pictures_per_s"] = self._engine.num_drawn / seconds
        if problems := dict(self.controller.meter.problems):
            row["ycore/reward_problems"] = problems
        try:
            row |= self._measured(self._done) if self._is_due(self._done) else {}
        finally:  # a step that is whole is written, also where its measurement was stopped
            self._write({"step": self._done, **row})

    def _is_due(self, step: int) -> bool:
        return is_due(step, self.config.eval_every, self.config.steps)

    def _measured(self, step: int) -> dict[str, Any]:
        """The figures of the policy, and a warning where the judge says that it is over-optimised."""
        began = time.perf_counter()
        self.home.step_began.touch()
        self._engine.weights = None
        figures = self.controller.run(
            measure(
                self._engine, self.controller.scoring, self._judge, self._asked, step=step, config=self.config,
                slots=self.controller.slots, images=self._images,
            )
        )  # fmt: skip
        for meter in self.controller.scoring.meters:
            meter.take()  # not the next step's
        figures["ycore/time/eval"] = time.perf_counter() - began
        fell = judge_fell([*self._rows, {"step": step, **figures}])
        return figures | ({} if fell is None else {FELL: fell})

    def _write(self, row: Mapping[str, Any]) -> None:
        self._metrics.write(row)
        if self._page is not None:
            self._page.log(row)
        self._rows.append(dict(row))

    def _finish(self) -> None:
        """Draw from the same noise before and after, and write down what was measured."""
        asked, policy = self._asked[:12], self.learner.policy
        contact_sheet(policy, self._plain, self._asked_classes(asked), self.home.pictures)
        measured = [row for row in self._rows if is_evaluation(row)]
        ends = {
            name: row_figures(row)
            for name, row in (("before", measured[0]), ("after", measured[-1]))
        }
        found: dict[str, Any] = {"held_out": ends}
        if fallen := [row for row in measured if FELL in row]:
            found["over_optimised"] = (
                f"from step {fallen[0]['step']} on the held-out judge falls while the reward stays: "
                f"{fallen[0][FELL]:.3f} below its best, at a reward of {fallen[0][TRAINED]:.3f}; take fewer steps, or "
                "say --set flow.kl=0.2"
            )
            print(found["over_optimised"], flush=True)
        write_json_atomic(self.home.held_out, found)

    def _asked_classes(self, asked: Sequence[Any]) -> list[int]:
        return [prompt.columns[self.config.condition_column] for prompt in asked]

    def save(self) -> None:
        """Save the model under `model/`, whole, as diffusers saves one; it is on the disk on return."""
        self.learner.policy.save(self.home.model)
        sync_tree(self.home.model)
        sync(self.home.metrics)
        if self._page is not None:
            self._page.send()

    def save_checkpoint(self) -> None:
        """Save a checkpoint of the last finished step, unless it has one."""
        step, folder = self._done, self.home.checkpoints
        if step <= self._saved:
            return
        staged = staging(folder, step)
        shutil.rmtree(staged, ignore_errors=True)
        inner = staged / checkpoint_of(folder, step).name
        inner.mkdir(parents=True, mode=0o700)
        try:
            own = {f"policy/{name}": weight for name, weight in self.learner.policy.copy().items()}
            old = {f"old/{name}": weight for name, weight in self.learner.old.items()}
            save_file({name: weight.cpu().contiguous() for name, weight in (own | old).items()},
                      inner / "model.safetensors")  # fmt: skip
            torch.save(self.learner.optimizer.state_dict(), inner / "optimizer.pt")
            torch.save(torch.get_rng_state(), inner / "rng_state.pth")
            write_json_atomic(inner / "trainer_state.json", {"global_step": step})
            write_json_atomic(
                inner / controller_file(0), {"policy_version": step, "controller": self._state}
            )
            sync(self.home.metrics)
            publish(folder, step, world=1)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(staged, ignore_errors=True)
            if is_disk_full(error):
                raise RunError(
                    f"no room for the checkpoint of step {step} in {folder}; make room, and resume"
                ) from error
            raise
        self._saved = step
        drop_oldest(folder, keep=_KEPT)
        if not self.config.keep_journal:
            self._journal.prune(before=step_of(checkpoints_in(folder)[0]))
            drop_pictures(self.home)

    def _restore(self, checkpoint: Path) -> None:
        weights = load_file(checkpoint / "model.safetensors")
        learner = self.learner
        own, old = (
            {
                name.removeprefix(f"{kind}/"): value
                for name, value in weights.items()
                if name.startswith(f"{kind}/")
            }
            for kind in ("policy", "old")
        )
        learner.policy.put(own)
        learner.old = {name: value.to(learner.policy.device) for name, value in old.items()}
        state = torch.load(
            checkpoint / "optimizer.pt", map_location=learner.policy.device, weights_only=True
        )
        learner.optimizer.load_state_dict(state)
        self._done = self._saved = step_of(checkpoint)
        self._state = read_json(checkpoint / controller_file(0))["controller"]
        self.controller.restore(self._state)

    def fail_others(self, error: BaseException) -> None:
        """There are none."""

    def close(self) -> None:
        if self._judge is not None:
            self.controller.run(self._judge.close())
        self.controller.close()
        self._metrics.close()
        if self._page is not None:
            self._page.close()


def _page(config: FlowConfig, home: RunFolder) -> "OwnPage | None":
    """Of the run in the trackers that it names; they need transformers, which nothing else here does."""
    if config.trl.get("report_to") in (None, "none", ["none"]):
        return None
    from ycore.view.trackers import OwnPage

    return OwnPage(config, home)


def _scoring(
    config: FlowConfig, specs: Sequence[RewardConfig], home: RunFolder, images: ImageStore
) -> Scoring:
    """Of the run's rewards, or of its held-out judges."""
    names, judges = reward_names(specs), JudgeMeter()
    rules = [source for source, spec in enumerate(specs) if not is_judge(spec)]
    scorers: list[tuple[Sequence[int], Scorer]] = []
    meters: list[Meter] = [judges] if len(rules) < len(specs) else []
    if rules:
        pool = reward_pool(config, home, [specs[source] for source in rules])
        scorers.append((rules, PictureScorer(pool, images)))
        meters.append(WorkerMeter(pool))
    for source, spec in enumerate(specs):
        if is_judge(spec):
            judge = judge_of(spec)
            engine = RemoteJudge(
                names[source], judge, request_timeout_s=EngineSettings().request_timeout_s
            )
            how: Any = {
                "meter": judges,
                "seed": config.seed,
                "text_of": lambda completion: "[picture 1]",
                "images": images,
            }
            scorers.append(
                ((source,), PictureJudge(names[source], Questioner(judge), [engine], **how))
            )
    return Scoring(scorers, meters)


def _contents(config: FlowConfig, folder: FlowFolder, prompts: PromptSet) -> dict[str, str]:
    """Fingerprints of what the run learns from."""
    contents = {
        "dataset": f"{len(prompts.prompts)} rows, sha256 {prompts.fingerprint[:16]}",
        "model": model_fingerprint(folder.root / folder.part),
    }
    for reward in config.rewards:
        file = Path(reward.reward.rpartition(":")[0]).expanduser()
        if file.suffix == ".py" and file.is_file():
            contents[f"reward {reward.reward}"] = files_fingerprint([file])
    return contents
