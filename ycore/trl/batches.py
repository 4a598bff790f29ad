"""A round as TRL sees it: flat sequences and their micro-batches."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ycore.types import (
    Completion,
    Group,
    JsonObject,
    Score,
    TokenSequence,
    in_blocks,
    number_from,
)

Batch = dict[str, Any]
"""A batch of TRL's: tensors with a row for each sequence, and numbers, by TRL's names and ycore's."""
MicroBatches = list[Batch]
"""TRL's split of a round: tensors by name, lists for images, and None for what the model does not take."""


class RoundPosition(NamedTuple):
    """Where training stands between two steps."""

    micro_step: int  # micro-batches taken since the run began
    has_engine_logps: (
        bool  # TRL's `use_vllm`: the round came with the engine's log-probabilities
    )
    micro_batches: MicroBatches | None = None  # the round's, if later steps still learn from it


@dataclass(frozen=True)
class FlatSequence:
    """One completion of a group, with the row that TRL gets of it."""

    row: JsonObject
    group: Group
    completion: Completion
    scores: tuple[Score, ...]  # one per source

    @property
    def prompt_ids(self) -> list[int]:
        return list(self._parts[0].prompt_ids)

    @property
    def later_prompts(self) -> list[tuple[int, int]]:
        """(first token, length) of prompts within the completion."""
        return [
            (part.start - len(part.prompt_ids), len(part.prompt_ids))
            for part in self._parts[1:]
        ]

    @property
    def _parts(self) -> list[TokenSequence]:
        return self.completion.sequences(self.group.draw.token_ids)

    @property
    def images_hash(self) -> int:
        return number_from("".join(image.sha256 for image in self.group.draw.prompt.images))


def flatten(
    groups: Sequence[Group], open_image: Callable[[str], Any] | None = None
) -> list[FlatSequence]:
    """One sequence per completion, group by group: the order TRL sees.

    With `open_image`, which opens an image by its sha256, every row has its `images`, and a prompt in blocks.
    """
    sequences = []
    for group in groups:
        prompt = group.draw.prompt
        row: JsonObject = {"prompt": prompt.content}
        if open_image is not None:
            row["images"] = [open_image(image.sha256) for image in prompt.images]
            row["prompt"] = in_blocks(prompt.content) if prompt.images else prompt.content
        sequences += [FlatSequence(row, group, *scored) for scored in group.scored()]
    return sequences


def reward_values(scores: Sequence[Score]) -> list[float]:
    """The rewards, NaN where a source gave none."""
    return [math.nan if score.value is None else score.value for score in scores]


def later_prompt_lengths(sequences: Sequence[FlatSequence], width: int) -> Tensor | None:
    """(B, `width`): n at the first of n tokens that are the prompt of a later sequence; None where there is none."""
    if not any(sequence.later_prompts for sequence in sequences):
        return None
    lengths_BT = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in zip(lengths_BT, sequences, strict=True):
        for start, length in sequence.later_prompts:
            row[start] = length
    return lengths_BT


def token_lags(sequences: Sequence[FlatSequence], width: int, *, step: int) -> Tensor:
    """(B, `width`): the steps by which the version that wrote each token lags behind this one."""
    lags_BT = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in zip(lags_BT, sequences, strict=True):
        for end, version in reversed(sequence.completion.versions):
            row[:end] = step - version
    return lags_BT


def whole_sequences(batch: Batch) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of whole sequences, (B, P + T)."""
    return (
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
    )


def loss_mask(inputs: Batch) -> Tensor:
    """(B, T), 1 at the tokens that are learned from, as in TRL's loss: neither padding nor the environment's."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def deal(
    group_tokens: Sequence[int], *, group_size: int, num_windows: int, seed: int
) -> list[int]:
    """Indices of sequences, micro-batch after micro-batch: whole groups together, similar lengths together.

    The micro-batches of one optimizer step (a window) add up to one gradient, so their order is free: the longest
    groups come first, so that a shortage of memory shows at once. The window of a group is drawn at random, so that no
    step sees only short or only long groups.

    Args:
        group_tokens: tokens of each group, in the round's order; group g is sequences g * group_size and on.
        num_windows: optimizer steps in the round.
    """
    order = list(range(len(group_tokens)))
    random.Random(seed).shuffle(order)
    per_window = len(order) // num_windows
    sequences: list[int] = []
    for start in range(0, len(order), per_window):
        window = sorted(
            order[start : start + per_window], key=lambda group: -group_tokens[group]
        )
        for group in window:
            sequences += range(group * group_size, (group + 1) * group_size)
    return sequences
