"""A round as TRL sees it: flat sequences and their micro-batches."""

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ycore.types import Group, Image, Prompt, Score, in_blocks

MicroBatches = list[dict[str, torch.Tensor | list[Any] | None]]
"""What TRL splits a round into: tensors by name, lists for images, and None for what the model does not take."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where training stands between two steps."""

    micro_step: int  # micro-batches taken since the run began
    corrects: bool  # whether the round came with the engine's log-probabilities: TRL's `use_vllm`
    micro_batches: MicroBatches | None = (
        None  # those of the round, if later steps still learn from it
    )


@dataclass(frozen=True, slots=True)
class FlatSequence:
    """One completion with its row."""

    row: dict[str, Any]
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float] | None
    mask: (
        list[int] | None
    )  # 1 at the policy's tokens, 0 at its environment's; None where all are the policy's
    begins: list[
        tuple[int, int]
    ]  # where the prompt of another sequence than the first begins, and its length
    turns: list[
        tuple[int, int, float]
    ]  # the policy's but its last: their tokens, and rewards; NaN where none was paid
    rewards: list[float]  # one per source; NaN where a source gave none
    taught: list[
        tuple[float, ...] | None
    ]  # one per source: a teacher's log-probabilities of the tokens
    greedy_rewards: list[float]
    policy_version: int  # which wrote its first token
    is_cut: bool  # at `max_tokens`, before it ended
    shown: int = 0  # other pictures, another number; 0 without any


def flatten(
    groups: Sequence[Group], open_image: Callable[[str], Any] | None = None
) -> list[FlatSequence]:
    """One sequence per completion, group by group: the order TRL sees.

    With `open_image`, which gives the picture of a sha256, every row has its `images`, and a prompt in blocks.
    """
    rows = [_row(group.draw.prompt, open_image) for group in groups]
    return [
        FlatSequence(
            row=row,
            prompt_ids=list(group.prompt_ids(completion)),
            completion_ids=list(completion.token_ids),
            logprobs=None if completion.logprobs is None else list(completion.logprobs),
            mask=list(completion.mask) if completion.turns else None,
            begins=[
                (one.start - len(one.prompt_ids), len(one.prompt_ids))
                for one in completion.sequences(())[1:]
            ],
            turns=[
                (start, end, math.nan if paid is None else paid)
                for start, end, paid in completion.paid_turns
            ],
            rewards=_values(scores),
            taught=[score.logprobs for score in scores],
            greedy_rewards=_values(group.greedy_scores_R or ()),
            policy_version=completion.first_version,
            is_cut=completion.finish_reason == "length",
            shown=_number_of(group.draw.prompt.images),
        )
        for group, row in zip(groups, rows, strict=True)
        for completion, scores in zip(group.completions, group.scores_GR, strict=True)
    ]


def _row(prompt: Prompt, open_image: Callable[[str], Any] | None) -> dict[str, Any]:
    row = {**prompt.columns, "prompt": prompt.content}
    if open_image is None:
        return row
    pictures = [open_image(image.sha256) for image in prompt.images]
    return {
        **row,
        "prompt": in_blocks(prompt.content) if pictures else prompt.content,
        "images": pictures,
    }


def _number_of(images: Sequence[Image]) -> int:
    """Below 2**63, so that a tensor can hold it."""
    told = "".join(image.sha256 for image in images)
    return int.from_bytes(hashlib.sha256(told.encode()).digest()[:8]) >> 1 if images else 0


def begins_of(sequences: Sequence[FlatSequence], width: int) -> torch.Tensor | None:
    """(B, `width`), n at the first of n tokens that are the prompt of another sequence; None where there is none."""
    if not any(sequence.begins for sequence in sequences):
        return None
    found = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in zip(found, sequences, strict=True):
        for at, length in sequence.begins:
            row[at] = length
    return found


def loss_mask(inputs: dict[str, Any]) -> torch.Tensor:
    """(B, T), 1 at the tokens that are learned from, as in TRL's loss: neither padding nor the environment's."""
    mask: torch.Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def _values(scores: Sequence[Score]) -> list[float]:
    return [float("nan") if score.value is None else score.value for score in scores]


def deal(
    group_tokens: Sequence[int], *, group_size: int, per_batch: int, num_windows: int, seed: int
) -> list[list[int]]:
    """Indices of the sequences of each micro-batch: whole groups together, similar lengths together.

    The micro-batches of one optimizer step (a window) add up to one gradient, so their order is free: the longest
    groups come first, so that a shortage of memory shows at once. The window of a group is drawn at random, so that no
    step sees only short or only long groups.

    Args:
        group_tokens: tokens of each group, in the round's order; group g is sequences g * group_size and on.
        per_batch: sequences in a micro-batch.
        num_windows: optimizer steps in the round.
    """
    order = list(range(len(group_tokens)))
    random.Random(seed).shuffle(order)
    per_window = len(order) // num_windows
    sequences: list[int] = []
    for start in range(0, len(order), per_window):
        window = sorted(order[start : start + per_window], key=lambda group: -group_tokens[group])
        sequences += [
            group * group_size + member for group in window for member in range(group_size)
        ]
    return [sequences[start : start + per_batch] for start in range(0, len(sequences), per_batch)]
