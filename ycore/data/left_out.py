"""How many rows are left out, and why: real preference files have pairs that say nothing, and a run tells so.

Not here: rows that are wrong, which end the command (`contents`).
"""

from collections import Counter

LeftOut = Counter[str]
"""Reason -> rows."""


def in_words(left_out: LeftOut) -> str:
    """`3 left out (2 no answer, 1 answers equal)`, or nothing."""
    if not left_out:
        return ""
    listed = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
    return f"{left_out.total()} left out ({listed})"
