"""Which sequences of a micro-batch share a row of the forward pass, so that nothing is computed twice or for padding.

Completions of one group have the same prompt. A row holds that prompt once and several completions after it, each
seeing the prompt and itself only. Longer rows save prompt tokens and cost attention; `plan_rows` finds the cheapest.

Not here: tensors (`forward`) and the loss (TRL).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """What one row costs, in units of one token through the linear layers."""

    attention_per_pair: float
    """Cost of one query-key pair over all layers."""

    def of_rows(self, num_rows: int, length: int) -> float:
        """`num_rows` rows padded to `length` tokens."""
        return num_rows * length * (1.0 + self.attention_per_pair * length)


@dataclass(frozen=True, slots=True)
class Row:
    """`members`: indices of the sequences in it, all with the same prompt; `length`: its tokens."""

    members: tuple[int, ...]
    length: int


def plan_rows(
    prompts: Sequence[tuple[int, ...]], completion_lengths: Sequence[int], *, cost: Cost, share: bool = True
) -> list[Row]:
    """The cheapest rows for a micro-batch.

    Args:
        prompts: token ids of each sequence's prompt; equal prompts may share a row.
        completion_lengths: tokens of each sequence's completion.
        share: False gives every sequence its own row.
    """
    groups = group_by_prompt(prompts) if share else [[index] for index in range(len(prompts))]
    plans = [
        [row for members in groups for row in _split(members, num_parts, prompts, completion_lengths)]
        for num_parts in _part_counts(max(len(members) for members in groups))
    ]
    return min(plans, key=lambda rows: cost.of_rows(len(rows), max(row.length for row in rows)))


def group_by_prompt(prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Indices with equal prompts, in order of first appearance."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(index)
    return list(groups.values())


def _part_counts(largest_group: int) -> list[int]:
    counts = []
    while largest_group > 1:
        counts.append(largest_group)
        largest_group = (largest_group + 1) // 2
    return [*counts, 1]


def _split(
    members: Sequence[int], num_parts: int, prompts: Sequence[tuple[int, ...]], completion_lengths: Sequence[int]
) -> list[Row]:
    """One group over at most `num_parts` rows of about equal length: longest first, each to the shortest row."""
    # A completion's row holds the prompt but for its last token, which every completion repeats as its own first
    # input: each completion predicts its first token from it.
    shared = len(prompts[members[0]]) - 1
    parts: list[list[int]] = [[] for _ in range(min(num_parts, len(members)))]
    lengths = [shared] * len(parts)
    for index in sorted(members, key=lambda member: -completion_lengths[member]):
        shortest = lengths.index(min(lengths))
        parts[shortest].append(index)
        lengths[shortest] += completion_lengths[index]
    # Completions that are masked out have no tokens, and can leave a part with nothing in it.
    return [Row(tuple(sorted(part)), length) for part, length in zip(parts, lengths, strict=True) if part]
