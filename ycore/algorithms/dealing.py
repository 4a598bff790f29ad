"""How a round's sequences are dealt into micro-batches: whole groups together, similar lengths together.

Not here: which micro-batch sizes are possible (`config.batch`), and rows within one (`packing`). Pure.
"""

import random
from collections.abc import Sequence


def deal(
    group_tokens: Sequence[int], *, group_size: int, per_batch: int, num_windows: int, seed: int
) -> list[list[int]]:
    """Indices of the sequences of each micro-batch.

    Micro-batches of one optimizer step add up to one gradient, so their order is free: groups are sorted by length
    inside a step's window, longest first, so that a shortage of memory shows at once. Which window a group falls in
    is drawn, so that no optimizer step sees only short or only long ones.

    Args:
        group_tokens: tokens of each group, in the round's order; group g is sequences g * group_size and on.
        per_batch: sequences in a micro-batch.
        num_windows: optimizer steps in the round.
        seed: of the draw.
    """
    order = list(range(len(group_tokens)))
    random.Random(seed).shuffle(order)
    per_window = len(order) // num_windows
    sequences: list[int] = []
    for start in range(0, len(order), per_window):
        window = sorted(order[start : start + per_window], key=lambda group: -group_tokens[group])
        sequences += [group * group_size + member for group in window for member in range(group_size)]
    return [sequences[start : start + per_batch] for start in range(0, len(sequences), per_batch)]
