"""The rounds of `ycore flow`: conditions are prompts, pictures are completions, scored as images."""

import os
from collections.abc import Sequence
from typing import Any

from ycore.config.schema import RewardConfig
from ycore.flow.flow_settings import IMAGES, FlowConfig
from ycore.flow.sampler import OnePicture, Picture, PictureEngine
from ycore.placement.slots import Slots
from ycore.round.journal import Journal
from ycore.round.sampling import DrawSource, Rules
from ycore.round.step import Controller
from ycore.run.images import ImageStore
from ycore.run.paths import RunFolder
from ycore.run.trace import TraceWriter
from ycore.scoring.group_rewards import min_stds
from ycore.scoring.reward_pool import RuleScorer, reward_pool
from ycore.scoring.scoring import Scoring
from ycore.types import Completion, Prompt


class PictureScorer(RuleScorer):
    """Reward functions of pictures: in `images` they get the one that each completion is."""

    def extra_columns(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> dict[str, list[Any]]:
        pictures = [Picture.of(completion.text).image for completion in completions]
        return {IMAGES: [str(self.images.path(picture.sha256)) for picture in pictures]}


def picture_scoring(
    config: FlowConfig, specs: Sequence[RewardConfig], folder: RunFolder
) -> Scoring:
    """Return the scoring by the run's rewards, or by its held-out judges, which are functions too."""
    pool = reward_pool(config, folder, specs)
    scorer = PictureScorer(pool, ImageStore(folder.images))
    return Scoring([(range(len(specs)), scorer)], [pool])


def picture_controller(
    config: FlowConfig,
    folder: RunFolder,
    prompts: Sequence[Prompt],
    engine: PictureEngine,
    writer: OnePicture,
    journal: Journal,
) -> Controller:
    """Return the controller of the one rank, with the one engine that shares the trainer's process."""
    rules = Rules(
        group_size=config.group_size,
        seed=config.seed,
        reward_weights=tuple(reward.weight for reward in config.rewards),
        dynamic=config.sampling.dynamic,
        max_tries=config.sampling.max_tries,
        in_order=True,  # all pictures take as long, so that it costs nothing
        min_stds_R=min_stds(config.rewards, config.sampling.std_threshold, default_range=1.0),
    )
    column = config.condition_column
    draws = DrawSource(
        prompts,
        seed=config.seed,
        encode=lambda prompt: (prompt.columns[column],),
        max_prompt_tokens=1,
    )
    return Controller(
        engines=[engine],
        scoring=picture_scoring(config, config.rewards, folder),
        draws=draws,
        rules=rules,
        journal=journal,
        max_surplus_age=config.sampling.max_age,
        slots=Slots(1, trace=TraceWriter(folder.trace)),
        writer=writer,
    )


def drop_pictures(folder: RunFolder) -> int:
    """Delete pictures and trajectories that no round of the journal and no checkpoint refers to.

    Return how many went.
    """
    rounds = folder.journal.glob("round-*.json")
    states = folder.checkpoints.glob("*/controller-*.json")
    references = b"".join(path.read_bytes() for path in (*rounds, *states))
    num_deleted = 0
    for place in (folder.images, folder.trajectories):
        for path in place.iterdir() if place.is_dir() else ():
            if os.fsencode(path.name) not in references:
                path.unlink(missing_ok=True)
                num_deleted += 1
    return num_deleted
