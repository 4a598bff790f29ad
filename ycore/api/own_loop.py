"""A run whose loop is yours: ask for completions, score them, train on them, and decide in between.

    with Round(model="smollm2-135m", dataset="task:addition?digits=1", reward="exact_answer", steps=20) as run:
        while run.step < 20:
            groups = run.score(run.ask())
            print(run.train(groups)["loss"])
        run.save()

TRL's trainer owns its loop: `train` runs until the last step, and fetches each round from a `RoundSource`. Here it runs
in a thread that waits at that place. `ask` and `score` are done there, and `train` lets it go on with the groups that
it is given, until it asks for the next. So a step is TRL's own, and so are its checkpoints and metrics.
"""

import asyncio
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ycore.api.run_settings import (
    Rewards,
    Rows,
    outside_event_loop,
    rollout_settings,
    settings_config,
    tell_warnings,
)
from ycore.api.running import checked_plan
from ycore.config.resolve import require_rollouts
from ycore.errors import ConfigError, Interrupted, RunError
from ycore.launch.guardian import guarded
from ycore.launch.launcher import TRAINER, LocalRun
from ycore.launch.layout import site_of
from ycore.run.claim import claim
from ycore.run.metrics import read_metrics
from ycore.run.secrets import secrets_environment
from ycore.run.tasks import together
from ycore.scoring.group_rewards import compared_rewards, rewards_differ
from ycore.scoring.scoring import PendingGroup
from ycore.types import Content, Group, JsonObject, Record, Score
from ycore.view.progress import PlainProgress

if TYPE_CHECKING:
    from ycore.trainer.rollout_run import RolloutRun


@dataclass
class RoundGroup:
    """The completions of one prompt.

    Attributes:
        rewards: one a completion, None where it has none. `Round.score` sets them; you may, too.
    """

    prompt: Content
    columns: Record
    completions: tuple[str, ...]
    rewards: list[float | None]
    group: Group

    @property
    def can_teach(self) -> bool:
        """Whether the rewards differ: a group whose rewards are all equal has no advantage, and no gradient."""
        return rewards_differ(self.rewards)


class Round:
    """A run like that of `grpo`, one round at a time. Use it as a context: afterwards nothing of it is left running.

    Attributes:
        num_prompts: how many prompts `ask` draws and `train` needs.
        folder: the run's folder, with its metrics, checkpoints and, after `save`, its model.
    """

    def __init__(self, *, model: str, dataset: Rows, reward: Rewards, **settings: Any) -> None:
        """The arguments are those of `grpo`; `steps` is what the schedule of the learning rate runs to.

        Raises:
            YcoreError: what the command says in one line.
        """
        run_settings = rollout_settings(model, dataset, reward, {"processes": 1, **settings})
        config = require_rollouts(settings_config("grpo", run_settings))
        if config.replay is not None or config.for_evaluation():
            raise ConfigError(
                "a Round draws its own rounds and measures nothing; leave out replay and eval_dataset"
            )
        if config.sampling.max_staleness or config.sampling.oversample > 1:
            raise ConfigError(
                "a Round's groups are written when they are asked for; leave out max_staleness, oversample"
            )
        plan = outside_event_loop(lambda: checked_plan(config))
        tell_warnings(plan, depth=3)
        if plan["ranks"]["world"] > 1:
            raise ConfigError(
                f"a Round trains in this process alone; {plan['ranks']['world']} ranks need `grpo`"
            )
        self.config = config
        self.folder = Path(config.output)
        self.step = 0
        self._weights = config.reward_weights
        self.num_prompts = int(plan["batch"]["groups_per_rank"])
        self._requests: queue.Queue[Any] = queue.Queue()
        self._answers: queue.Queue[Any] = queue.Queue()
        self._context = ExitStack()
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        """Start the engines, load the model, and wait until the first round may be asked for."""
        site = site_of(self.config)
        self._local = LocalRun(
            TRAINER,
            self.config,
            site,
            PlainProgress(self.config.steps, "step", sys.stderr),
            time.monotonic(),
        )
        with ExitStack() as context:
            run_claim = claim(site.folder, self.config, resume=False)
            context.callback(run_claim.release)
            context.callback(self._sum_up)
            context.enter_context(guarded(site.folder, run_claim))
            os.environ.update(secrets_environment(self.config.model_dump(mode="json")))
            self._engines = self._local.start_engines()
            self._thread = threading.Thread(
                target=self._train_all, name="ycore-trainer", daemon=True
            )
            context.callback(self._end)
            self._thread.start()
            self._answer()
            self._context = context.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        self._error = error
        self._context.close()

    # -- what you call -------------------------------------------------------------------------------------------------

    def ask(self, num_prompts: int | None = None) -> list[RoundGroup]:
        """Draw prompts and have the policy of this step write `group_size` completions of each; none is scored yet."""
        groups = self._call(lambda run: self._ask(run, num_prompts or self.num_prompts))
        return [_unscored(group) for group in groups]

    def score(self, groups: Sequence[RoundGroup]) -> list[RoundGroup]:
        """Set the rewards to the weighted sums of the run's reward sources, and return the same objects."""
        scored = self._call(lambda run: self._score(run, [item.group for item in groups]))
        for item, group in zip(groups, scored, strict=True):
            item.group = group
            item.rewards = compared_rewards(group, self._weights)
        return list(groups)

    def train(self, groups: Sequence[RoundGroup]) -> JsonObject:
        """Take one round of TRL's training on these groups, and return the step's row of `metrics.jsonl`.

        Raises:
            ConfigError: not `num_prompts` groups; or a group without any reward; or no step is left.
        """
        if self.step >= self.config.steps:
            raise ConfigError(
                f"the run has taken its {self.config.steps} steps; give Round more, as steps="
            )
        if len(groups) != self.num_prompts:
            raise ConfigError(
                f"train takes {self.num_prompts} groups, as prompts_per_step says; it got {len(groups)}"
            )
        if any(set(group.rewards) <= {None} for group in groups):
            raise ConfigError(
                "a group has no reward at all; call score, or set its rewards yourself"
            )
        if self.config.has_constraints and not all(group.group.scores_GR for group in groups):
            raise ConfigError(
                "a completion whose constraint is not scored teaches nothing; call score, and then set rewards of your own"
            )
        self._ask_thread([_with_rewards(group, self._weights) for group in groups])
        self.step = self._run.trainer.state.global_step
        return dict(read_metrics(self._run.home.metrics)[-1])

    def save(self) -> Path:
        """Save the model as it is now, and return the folder, which `model=` takes."""
        self._call(lambda run: run.save())
        return self._run.home.model

    # -- the trainer's thread ------------------------------------------------------------------------------------------

    def _train_all(self) -> None:
        from ycore.round.assemble import assemble
        from ycore.trainer.rollout_run import RolloutRun

        try:
            self._run = RolloutRun(assemble(self.folder))
            try:
                self._run.trainer.rounds = self
                self._run.train()
                self._answers.put(None)
                while request := self._requests.get():  # save, after the last step
                    self._serve(request)
            except Interrupted:
                self._run.save_checkpoint()
                raise
            finally:
                self._run.close()
        except BaseException as error:  # noqa: BLE001 (raised in the thread that waits)
            self._answers.put(error)

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        """Give TRL's thread a round: the last request is done, and more are served until one trains."""
        self._answers.put(None)
        while not isinstance(request := self._requests.get(), list):
            if request is None:
                raise Interrupted("the loop ended before the last step")
            self._serve(request)
        for group in request:
            self._run.controller.meter.count(group, self._weights)
        controller = self._run.controller
        return controller.hand_over(controller.commit(step, request))

    def _serve(self, request: "Callable[[RolloutRun], Any]") -> None:
        try:
            self._answers.put(request(self._run))
        except Exception as error:  # noqa: BLE001 (raised in the thread that waits)
            self._answers.put(error)

    def _ask(self, run: "RolloutRun", num_prompts: int) -> list[Group]:
        controller = run.controller
        step = run.trainer.state.global_step
        with controller.phase("sync"):
            controller.sync(step)

        async def write_group(draw: Any) -> Group:
            start = await controller.writer.start(draw)
            size = range(controller.rules.group_size)
            written = await together([controller.complete(start, index) for index in size])
            return Group(start.draw, tuple(written), ())

        draws = [controller.draws.draw() for _ in range(num_prompts)]
        controller.meter.drawn += num_prompts
        with controller.phase("round"):
            return controller.run_round(
                together([write_group(draw) for draw in draws]), step=step
            )

    def _score(self, run: "RolloutRun", groups: Sequence[Group]) -> list[Group]:
        controller = run.controller
        step = run.trainer.state.global_step

        async def score_group(group: Group) -> Group:
            tasks = [
                asyncio.create_task(asyncio.sleep(0, completion))
                for completion in group.completions
            ]
            scores_GR = await controller.scoring.score(
                PendingGroup(group.draw, tasks, step, controller.slots)
            )
            return replace(group, scores_GR=tuple(map(tuple, scores_GR)))

        return controller.run_round(
            together([score_group(group) for group in groups]), step=step, trains=False
        )

    # -- between the threads -------------------------------------------------------------------------------------------

    def _call(self, request: "Callable[[RolloutRun], Any]") -> Any:
        self._engines.look()  # starts again what died
        return self._ask_thread(request)

    def _ask_thread(self, request: Any) -> Any:
        if not self._thread.is_alive():
            raise RunError(
                f"the run in {self.folder} is over; open another Round with another output"
            )
        self._requests.put(request)
        return self._answer()

    def _answer(self) -> Any:
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _end(self) -> None:
        if (run := getattr(self, "_run", None)) is not None and self._thread.is_alive():
            run.stop.set()
        self._requests.put(None)
        self._thread.join()

    def _sum_up(self) -> None:
        self._local.sum_up(
            "finished" if self.step >= self.config.steps else "interrupted", error=self._error
        )


def _unscored(group: Group) -> RoundGroup:
    prompt = group.draw.prompt
    completions = tuple(completion.transcript for completion in group.completions)
    return RoundGroup(
        prompt.content, prompt.columns, completions, [None] * len(completions), group
    )


def _with_rewards(item: RoundGroup, weights: Sequence[float]) -> Group:
    """Return the group with its scores; the user's rewards stand for the first source that has a weight.

    Sources without a weight, as constraints are, keep their scores.
    """
    if item.group.scores_GR and compared_rewards(item.group, weights) == item.rewards:
        return item.group
    if len(item.rewards) != len(item.completions):
        raise ConfigError(
            f"a group of {len(item.completions)} completions has {len(item.rewards)} rewards; give one each"
        )
    source = next((index for index, weight in enumerate(weights) if weight), None)
    if source is None:
        raise ConfigError(
            "every reward has the weight 0, so yours cannot stand for one; give one a weight"
        )
    scores_GR = []
    nothing = [Score(None)] * len(weights)
    for reward, known in zip(
        item.rewards, item.group.scores_GR or [nothing] * len(item.rewards), strict=True
    ):
        scores = [
            Score(None) if weight else score
            for weight, score in zip(weights, known, strict=True)
        ]
        if reward is not None:
            scores[source] = Score(reward / weights[source])
        scores_GR.append(tuple(scores))
    return replace(item.group, scores_GR=tuple(scores_GR))
