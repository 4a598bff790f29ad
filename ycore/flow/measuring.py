"""Measuring a flow model: the same noise at every measurement, the run's rewards beside a held-out judge, diversity.

A policy that has learned the mistakes of its reward shows here: the judge falls while the reward stays.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ycore.evaluation.held_out import RIGHT_FROM, as_metrics, with_interval
from ycore.flow.flow_settings import FlowConfig
from ycore.flow.sampler import NOWHERE, Picture, PictureEngine
from ycore.placement.slots import Slots
from ycore.rewards.loading import reward_names
from ycore.rollout.turns import completion_seed
from ycore.run.images import ImageStore
from ycore.run.metrics import EVALUATION, Row, number
from ycore.run.tasks import together
from ycore.scoring.group_rewards import total_reward
from ycore.scoring.scoring import PendingGroup, Scoring
from ycore.types import Completion, Draw, Prompt, Score

TRAINED, JUDGED = f"{EVALUATION}trained_reward", f"{EVALUATION}reward"
"""What the run learns from, and what judges it, on the pictures that are measured."""

FELL = f"{EVALUATION}judge_fell"


def conditions(prompts: Sequence[Prompt], column: str) -> list[Prompt]:
    """The first row of each class."""
    found: dict[int, Prompt] = {}
    for prompt in prompts:
        found.setdefault(prompt.columns[column], prompt)
    return [found[label] for label in sorted(found)]


async def measure(
    engine: PictureEngine, trained: Scoring, judge: Scoring | None, asked: Sequence[Prompt], *, step: int,
    config: FlowConfig, slots: Slots, images: ImageStore,
) -> dict[str, float]:  # fmt: skip
    """The figures of the policy as it is, each with its interval over pictures; `judge` None measures the rewards.

    `diversity_of_right` is that of the pictures to which the judge gives 1 or more: a model that draws what it was not
    asked for is diverse within a class for that alone.
    """
    column = config.condition_column

    async def one(prompt: Prompt) -> tuple[list[Completion], list[list[Score]], list[list[Score]]]:
        label = prompt.columns[column]
        seeds = [
            completion_seed(config.seed, -1 - label, index) for index in range(config.num_samples)
        ]
        tasks = [
            asyncio.create_task(engine.complete((label, NOWHERE), seed, greedy=True))
            for seed in seeds
        ]
        writing = PendingGroup(Draw(prompt.row, prompt, (label,)), tasks, step, slots)
        scores = await together(
            [scoring.score(writing) for scoring in (trained, judge) if scoring is not None]
        )
        return [await task for task in tasks], scores[0], scores[-1]

    groups = await together([one(prompt) for prompt in asked])
    specs = config.eval_rewards or config.rewards
    figures = _means("reward", [scores for _, _, judged in groups for scores in judged], specs)
    if judge is not None:
        figures |= _means(
            "trained_reward", [scores for _, own, _ in groups for scores in own], config.rewards
        )
    drawn = [
        Picture.of(one.text).image.sha256 for completions, _, _ in groups for one in completions
    ]
    values = (
        np.array([np.asarray(images.open(name), dtype=np.float64) for name in drawn]) / 127.5 - 1
    )
    if bool((values[..., :1] == values).all()):
        values = values[..., :1]  # grey, which the store opens in colours
    labels = np.repeat([prompt.columns[column] for prompt in asked], config.num_samples)
    totals = [
        total_reward(scores, [spec.weight for spec in specs])
        for _, _, judged in groups
        for scores in judged
    ]
    right = np.array([total is not None and total >= RIGHT_FROM for total in totals])
    figures |= {
        "diversity": diversity(values, labels),
        "diversity_of_right": diversity(values[right], labels[right]),
    }
    return as_metrics(figures)


def _means(name: str, scores: Sequence[Sequence[Score]], specs: Sequence[Any]) -> dict[str, float]:
    """Of the weighted sum, and of each of several sources."""
    totals = [total_reward(one, [spec.weight for spec in specs]) for one in scores]
    columns: dict[str, list[float | None]] = {name: totals}
    if len(specs) > 1:
        names = reward_names(specs)
        columns |= {
            f"{name}s/{one}": [row[place].value for row in scores]
            for place, one in enumerate(names)
        }
    found: dict[str, float] = {}
    for key, values in columns.items():
        known = np.array([value for value in values if value is not None])
        found |= with_interval(key, known, np.ones(len(known)))
    return found


def diversity(values: Any, classes: Any) -> float:
    """The mean distance of two pictures of one class: the root of summed squares, of values in [-1, 1]."""
    means = []
    for one in np.unique(classes):
        flat = values[classes == one].reshape(int((classes == one).sum()), -1)
        if len(flat) > 1:
            squares = (flat**2).sum(1)
            distances = np.sqrt(
                np.clip(squares[:, None] + squares[None] - 2 * flat @ flat.T, 0, None)
            )
            means.append(distances.sum() / (len(flat) * (len(flat) - 1)))
    return float(np.mean(means)) if means else 0.0


def judge_fell(rows: Sequence[Row]) -> float | None:
    """By how much the held-out judge lies below its best, where that is sure (the intervals do not meet) and the reward
    that is trained on has not fallen with it; None where the policy is not over-optimised.

    Args:
        rows: of the run's metrics, the last of them measured now.
    """
    measured = [
        row for row in rows if number(row, TRAINED) is not None and number(row, JUDGED) is not None
    ]
    if len(measured) < 2:
        return None
    *before, now = measured
    best = max(before, key=lambda row: number(row, JUDGED) or 0.0)
    is_below = _of(now, "reward/high") < _of(best, "reward/low")
    stays = _of(now, "trained_reward/high") >= _of(best, "trained_reward/low")
    return _of(best, "reward") - _of(now, "reward") if is_below and stays else None


def _of(row: Mapping[str, Any], name: str) -> float:
    return number(row, EVALUATION + name) or 0.0
