"""From comparisons to one number a completion, between 0 (always worse) and 1 (always better). Pure.

Not here: the questions (`prompt`) and their verdicts (`verdict`).
"""

import random
from collections.abc import Sequence


def ring_pairs(size: int, opponents: int) -> list[tuple[int, int]]:
    """Who meets whom when everybody meets the next `opponents` of a ring; no pair twice, as many meetings for each.

    Example: `ring_pairs(4, 1)` is `[(0, 1), (1, 2), (2, 3), (0, 3)]`.
    """
    met: dict[tuple[int, int], None] = {}
    for distance in range(1, min(opponents, size // 2) + 1):
        for index in range(size):
            pair = (index, (index + distance) % size)
            met[min(pair), max(pair)] = None
    return list(met)


def win_share(first_shown: float, second_shown: float) -> float:
    """How far one answer beats another, from both orders: each value says how much better the answer shown first is."""
    return (first_shown + 1.0 - second_shown) / 2


def follows_position(first_shown: float, second_shown: float) -> bool:
    """Whether the same place won both times, whoever stood there."""
    return (first_shown > 0.5 and second_shown > 0.5) or (first_shown < 0.5 and second_shown < 0.5)


def shares_of_rank(order: Sequence[int]) -> list[float]:
    """For each answer, the share of the others that it is ranked before; `order` has the answers best first."""
    size = len(order)
    shares = [0.0] * size
    for rank, answer in enumerate(order):
        shares[answer] = (size - 1 - rank) / (size - 1) if size > 1 else 1.0
    return shares


def shuffled_orders(size: int, count: int, *, seed: int) -> list[list[int]]:
    """Orders in which to show a group, the same for the same seed; the second is the first backwards, and so on."""
    orders: list[list[int]] = []
    generator = random.Random(seed)
    while len(orders) < count:
        order = list(range(size))
        generator.shuffle(order)
        orders += [order, order[::-1]]
    return orders[:count]


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
