"""What scores pictures: reward functions in confined workers, and judges that see, at an address."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ycore.config.flow_settings import FlowConfig
from ycore.config.schema import EngineSettings, RewardConfig
from ycore.engine.judge_engine import RemoteJudge
from ycore.errors import ConfigError
from ycore.flow.conditions import IMAGES
from ycore.flow.sampler import Picture
from ycore.judge.question import Questioner
from ycore.judge.sources import is_judge, judge_of, require_columns
from ycore.rewards.loading import reward_names
from ycore.rewards.pool import RewardPool
from ycore.round.judge_scorer import JudgeScorer
from ycore.round.meters import JudgeMeter, Meter, WorkerMeter
from ycore.round.scoring import RuleScorer, Scorer, Scoring, Writing
from ycore.run.images import ImageStore
from ycore.run.paths import RunFolder
from ycore.sandbox.level import NUMBERS
from ycore.types import Completion, Prompt, Score


class PictureScorer(RuleScorer):
    """Reward functions of pictures: in `images` they get the one that each completion is."""

    def beside(self, prompt: Prompt, completions: Sequence[Completion]) -> dict[str, list[Any]]:
        return {IMAGES: [self.file_of(Picture.of(completion.text).image) for completion in completions]}


class PictureJudge(JudgeScorer):
    """A judge that sees: a question shows it the drawn picture, and names it where a completion's text would stand."""

    async def score_one(self, writing: Writing, index: int) -> Score:
        drawn = Picture.of((await writing.tasks_G[index]).text).image
        prompt = replace(writing.draw.prompt, images=(drawn,))
        return await super().score_one(replace(writing, draw=replace(writing.draw, prompt=prompt)), index)


def picture_scoring(config: FlowConfig, specs: Sequence[RewardConfig], home: RunFolder, images: ImageStore) -> Scoring:
    """Of the run's rewards, or of its held-out judges. Workers see the run's pictures, and nothing else of it."""
    names, judges = reward_names(specs), JudgeMeter()
    rules = [source for source, spec in enumerate(specs) if not is_judge(spec)]
    scorers: list[tuple[Sequence[int], Scorer]] = []
    meters: list[Meter] = [judges] if len(rules) < len(specs) else []
    if rules:
        pool = RewardPool(
            [specs[source] for source in rules],
            settings=config.reward_workers,
            log=home.log("rewards"),
            run_id=home.run_id,
            sandbox=config.sandbox,
            run_folder=home.root,
        )
        scorers.append((rules, PictureScorer(pool, images)))
        meters.append(WorkerMeter(lambda: pool.restarts, NUMBERS[pool.level]))
    for source, spec in enumerate(specs):
        if is_judge(spec):
            judge = judge_of(spec)
            engine = RemoteJudge(names[source], judge, request_timeout_s=EngineSettings().request_timeout_s)
            how: Any = {
                "meter": judges,
                "seed": config.seed,
                "text_of": lambda completion: "[picture 1]",
                "images": images,
            }
            scorers.append(((source,), PictureJudge(names[source], Questioner(judge), [engine], **how)))
    return Scoring(scorers, meters)


def check_judges(config: FlowConfig, columns: Sequence[str]) -> None:
    """ConfigError where a judge cannot look at pictures; RewardError where it asks for a column that is missing."""
    for spec in filter(is_judge, (*config.rewards, *config.eval_rewards)):
        judge = judge_of(spec)
        if judge.base_url is None:
            raise ConfigError(f"{spec.reward} would be served here, where judges read text only; give it a base_url")
        if judge.mode != "pointwise":
            raise ConfigError(f"{spec.reward} is {judge.mode}, and pictures are judged one by one; say mode: pointwise")
        require_columns(spec.reward, judge, columns)
