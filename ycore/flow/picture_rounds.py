"""The rounds of `ycore flow`: conditions are prompts, pictures are completions, scored as images.

Between them the model is measured: the same noise each time, the run's rewards beside a held-out judge, diversity. A
policy that has learned the mistakes of its reward shows there: the judge falls while the reward stays.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ycore.evaluation.held_out import RIGHT_FROM, as_metrics, with_interval
from ycore.flow.flow_math import SamplingPath
from ycore.flow.flow_settings import FlowConfig
from ycore.flow.sampler import (
    NOWHERE,
    FlowPolicy,
    OnePicture,
    Picture,
    PictureEngine,
    as_pil,
    draw_pictures,
)
from ycore.placement.slots import Slots
from ycore.rewards.loading import reward_names
from ycore.rollout.turns import completion_seed
from ycore.round.journal import Journal
from ycore.round.sampling import DrawSource, Rules
from ycore.round.step import Controller
from ycore.run.files import RunFolder
from ycore.run.images import ImageStore
from ycore.run.tasks import together
from ycore.run.trace import TraceWriter
from ycore.scoring.group_rewards import min_stds, total_reward
from ycore.scoring.scoring import PendingGroup, Scoring
from ycore.types import Completion, Draw, Prompt, Score


def picture_controller(
    config: FlowConfig,
    folder: RunFolder,
    prompts: Sequence[Prompt],
    engine: PictureEngine,
    writer: OnePicture,
    scoring: Scoring,
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
        scoring=scoring,
        draws=draws,
        rules=rules,
        journal=journal,
        max_surplus_age=config.sampling.max_age,
        slots=Slots(1, trace=TraceWriter(folder.trace)),
        writer=writer,
    )


def drop_pictures(folder: RunFolder) -> None:
    """Delete pictures and trajectories that no round of the journal and no checkpoint refers to."""
    rounds = folder.journal.glob("round-*.json")
    states = folder.checkpoints.glob("*/controller-*.json")
    references = b"".join(path.read_bytes() for path in (*rounds, *states))
    for place in (folder.images, folder.trajectories):
        for path in place.iterdir() if place.is_dir() else ():
            if os.fsencode(path.name) not in references:
                path.unlink(missing_ok=True)


# -- measuring ---------------------------------------------------------------------------------------------------------


_NUM_EACH = 8  # pictures of a class on the contact sheet, before and after
_SCALE = 4  # pixels of the sheet for one of a picture


def conditions(prompts: Sequence[Prompt], column: str) -> list[Prompt]:
    """Return the first row of each class."""
    by_class: dict[int, Prompt] = {}
    for prompt in prompts:
        by_class.setdefault(prompt.columns[column], prompt)
    return [by_class[label] for label in sorted(by_class)]


async def measure(
    engine: PictureEngine,
    trained: Scoring,
    judge: Scoring | None,
    prompts: Sequence[Prompt],
    *,
    step: int,
    config: FlowConfig,
    slots: Slots,
    images: ImageStore,
) -> dict[str, float]:
    """Draw and score pictures of every class, and return their figures; `judge` None measures the rewards."""
    scorings = [trained] if judge is None else [trained, judge]

    async def measure_class(prompt: Prompt) -> tuple[list[Completion], list[list[list[Score]]]]:
        label = prompt.columns[config.condition_column]
        tasks = []
        for index in range(config.num_samples):
            seed = completion_seed(config.seed, -1 - label, index)
            tasks.append(
                asyncio.create_task(engine.complete((label, NOWHERE), seed, greedy=True))
            )
        writing = PendingGroup(Draw(prompt.row, prompt, (label,)), tasks, step, slots)
        scores = await together([scoring.score(writing) for scoring in scorings])
        return [await task for task in tasks], scores

    groups = await together([measure_class(prompt) for prompt in prompts])
    pictures = [Picture.of(drawn.text) for completions, _ in groups for drawn in completions]
    classes = [prompt.columns[config.condition_column] for prompt in prompts]
    return as_metrics(
        _figures(
            _values(pictures, images),
            np.repeat(classes, config.num_samples),
            judged=[scores for _, by_scoring in groups for scores in by_scoring[-1]],
            learned_from=[scores for _, by_scoring in groups for scores in by_scoring[0]],
            config=config,
        )
    )


def _figures(
    values: Any,
    labels: Any,
    *,
    judged: Sequence[Sequence[Score]],
    learned_from: Sequence[Sequence[Score]],
    config: FlowConfig,
) -> dict[str, float]:
    """Return figures of pictures with these values and classes, each with its interval over pictures.

    `diversity_of_right` is that of the pictures to which the judge gives 1 or more: a model that draws what it was not
    asked for is diverse within a class for that alone.
    """
    specs = config.eval_rewards or config.rewards
    figures = _means("reward", judged, specs)
    if config.eval_rewards:
        figures |= _means("trained_reward", learned_from, config.rewards)
    weights = [spec.weight for spec in specs]
    totals = [total_reward(scores, weights) for scores in judged]
    right = np.array([total is not None and total >= RIGHT_FROM for total in totals])
    figures["diversity"] = diversity(values, labels)
    figures["diversity_of_right"] = diversity(values[right], labels[right])
    return figures


def _values(pictures: Sequence[Picture], images: ImageStore) -> Any:
    """Return values in [-1, 1], (N, H, W, C); one channel of grey pictures, which the store opens in colours."""
    opened = [
        np.asarray(images.open(picture.image.sha256), dtype=np.float64) for picture in pictures
    ]
    values = np.array(opened) / 127.5 - 1
    is_grey = bool((values[..., :1] == values).all())
    return values[..., :1] if is_grey else values


def _means(
    name: str, scores: Sequence[Sequence[Score]], specs: Sequence[Any]
) -> dict[str, float]:
    """Return the mean of the weighted sum, and of each of several sources, with their intervals."""
    weights = [spec.weight for spec in specs]
    columns: dict[str, list[float | None]] = {
        name: [total_reward(row, weights) for row in scores]
    }
    if len(specs) > 1:
        for source, source_name in enumerate(reward_names(specs)):
            columns[f"{name}s/{source_name}"] = [row[source].value for row in scores]
    means: dict[str, float] = {}
    for key, values in columns.items():
        known = np.array([value for value in values if value is not None])
        means |= with_interval(key, known, np.ones(len(known)))
    return means


def diversity(values: Any, classes: Any) -> float:
    """Return the mean distance of two pictures of one class: the root of summed squares, of values in [-1, 1]."""
    means = []
    for label in np.unique(classes):
        of_class = values[classes == label]
        flat = of_class.reshape(len(of_class), -1)
        if len(flat) > 1:
            squares = (flat**2).sum(1)
            squared_distances = squares[:, None] + squares[None] - 2 * flat @ flat.T
            distances = np.sqrt(np.clip(squared_distances, 0, None))
            means.append(distances.sum() / (len(flat) * (len(flat) - 1)))
    return float(np.mean(means)) if means else 0.0


def contact_sheet(
    policy: FlowPolicy, path: SamplingPath, classes: Sequence[int], file: Path
) -> None:
    """Draw pictures of every class to a PNG, a row each: by the first model at the left, by the policy at the right.

    Both begin from the same noise.
    """
    labels = torch.tensor(classes).repeat_interleave(_NUM_EACH)
    seeds = [completion_seed(0, NOWHERE, number) for number in range(len(labels))]
    halves = []
    for weights in (policy.reference, None):
        pictures = draw_pictures(policy, path, labels, seeds, weights=weights).pictures
        framed = torch.nn.functional.pad(pictures, (1, 1, 1, 1), value=-1.0)
        rows = framed.unflatten(0, (len(classes), _NUM_EACH))
        # Rows of pictures beneath each other: [C, rows * height, columns * width].
        halves.append(rows.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2))
    gap = torch.ones(*halves[0].shape[:2], 2)
    sheet = as_pil(torch.cat([halves[0], gap, halves[1]], dim=2))
    sheet.resize((sheet.width * _SCALE, sheet.height * _SCALE), resample=0).save(file)
