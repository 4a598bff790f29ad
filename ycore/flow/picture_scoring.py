"""The rewards of drawn pictures: functions of images, and judges that see, at an address."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ycore.config.schema import EngineSettings, RewardConfig
from ycore.engine.judge_engine import RemoteJudge
from ycore.flow.flow_settings import IMAGES, FlowConfig
from ycore.flow.picture_rounds import Picture
from ycore.judge.declaration import JUDGE_PREFIX, judge_of
from ycore.judge.question import Questioner
from ycore.rewards.loading import reward_names
from ycore.run.files import ImageStore, RunFolder
from ycore.scoring.judge_scorer import JudgeMeter, JudgeScorer
from ycore.scoring.scoring import PendingGroup, RuleScorer, Scorer, Scoring, rule_scorers
from ycore.types import Completion, Prompt, Score


class PictureScorer(RuleScorer):
    """Reward functions of pictures: in `images` they get the one that each completion is."""

    def extra_columns(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> dict[str, list[Any]]:
        pictures = [Picture.of(completion.text).image for completion in completions]
        return {IMAGES: [str(self.images.path(picture.sha256)) for picture in pictures]}


class PictureJudge(JudgeScorer):
    """A judge that sees: a question shows it the drawn picture, and names it where a completion's text would stand."""

    async def score_one(self, group: PendingGroup, index: int) -> Score:
        completion = await group.tasks_G[index]
        prompt = replace(group.draw.prompt, images=(Picture.of(completion.text).image,))
        draw = replace(group.draw, prompt=prompt)
        return await super().score_one(replace(group, draw=draw), index)


def picture_scoring(
    config: FlowConfig, specs: Sequence[RewardConfig], folder: RunFolder
) -> Scoring:
    """Return the scoring by the run's rewards, or by its held-out judges."""
    judge_meter = JudgeMeter()
    images = ImageStore(folder.images)
    functions = {source: spec for source, spec in enumerate(specs) if spec.kind != JUDGE_PREFIX}
    rules = rule_scorers(config, folder, functions, PictureScorer)
    scorers: list[Scorer] = []
    for source, name in enumerate(reward_names(specs)):
        if source in rules:
            scorers.append(rules[source])
            continue
        judge = judge_of(specs[source])
        timeout_s = EngineSettings().request_timeout_s
        scorer = PictureJudge(
            name,
            Questioner(judge),
            [RemoteJudge(name, judge, request_timeout_s=timeout_s)],
            meter=judge_meter,
            seed=config.seed,
            text_of=lambda completion: "[picture 1]",
            images=images,
        )
        scorers.append(scorer)
    judge_meters = [judge_meter] if len(rules) < len(specs) else []
    return Scoring(scorers, [*judge_meters, *(rule.pool for rule in rules.values())])
