"""The controller of a run of `ycore flow`: each condition of the dataset is a prompt, each picture a completion."""

from collections.abc import Sequence

from ycore.flow.denoising import Sampling
from ycore.flow.flow_settings import FlowConfig
from ycore.flow.picture_scoring import picture_scoring
from ycore.flow.sampler import OnePicture, PictureEngine
from ycore.placement.slots import Slots
from ycore.round.journal import Journal
from ycore.round.peers import Peers
from ycore.round.sampling import DrawSource, Rules
from ycore.round.step import Controller
from ycore.run.images import ImageStore
from ycore.run.paths import RunFolder
from ycore.run.trace import TraceWriter
from ycore.scoring.group_rewards import min_stds
from ycore.types import Prompt


def picture_controller(
    config: FlowConfig,
    folder: RunFolder,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    engine: PictureEngine,
    journal: Journal,
) -> Controller:
    """The controller of the one rank, with the one engine that shares the trainer's process."""
    rules = Rules(
        group_size=config.group_size,
        seed=config.seed,
        reward_weights=tuple(reward.weight for reward in config.rewards),
        dynamic=config.sampling.dynamic,
        max_tries=config.sampling.max_tries,
        in_order=True,  # all pictures take as long, so that it costs nothing
        min_stds_R=min_stds(config.rewards, config.sampling.dust, default_range=1.0),
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
        scoring=picture_scoring(config, config.rewards, folder, ImageStore(folder.images)),
        draws=draws,
        rules=rules,
        peers=Peers(),
        journal=journal,
        max_surplus_age=config.sampling.max_age,
        slots=Slots(1, trace=TraceWriter(folder.trace)),
        turns=OnePicture(sampling),
    )
