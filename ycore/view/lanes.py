"""Draw a lane a slot: the last minute or more as cells, coloured by the role that had work, swaps marked.

Where a cell begins does not depend on when it is drawn, so the picture moves by whole cells and does not shimmer.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rich.text import Text

from ycore.run.trace import merge_intervals

MAX_LANES = 8
MAX_CELLS = 60

# Names of the terminal's own palette where it has a fit one: they are readable on a dark ground and on a light one.
_COLOURS: Mapping[str, str] = {
    "rollout": "bright_blue",
    "judge": "dark_orange",
    "reward_model": "green",
    "teacher": "magenta",
}
_HEIGHTS = "▁▂▃▄▅▆▇"
_IDLE, _SWAP = "·", "┃"

Interval = tuple[float, float]
"""(began, seconds); began is in seconds since the epoch."""

Place = tuple[int, int]
"""(rank, slot)"""


@dataclass(slots=True)
class Lane:
    """The history of one slot: by role the intervals with requests in flight; its swaps, with the role then awake."""

    busy: dict[str, list[Interval]] = field(default_factory=dict)
    swaps: list[tuple[float, float, str]] = field(default_factory=list)

    def add(self, role: str, intervals: Sequence[Interval]) -> None:
        """Add intervals in any order; only the old ones that they reach into are joined anew."""
        known = self.busy.setdefault(role, [])
        touched = list(intervals)
        first = min((began for began, _ in intervals), default=math.inf)
        while known and sum(known[-1]) >= first:
            touched.append(known.pop())
        known += merge_intervals(touched)


@dataclass(frozen=True, slots=True)
class Window:
    """The time that the cells show; the last cell contains `until` and may have only begun."""

    until: float
    cell_s: float
    num_cells: int

    @property
    def since(self) -> float:
        return (math.floor(self.until / self.cell_s) + 1 - self.num_cells) * self.cell_s

    def shares(self, intervals: Sequence[Interval]) -> list[float]:
        """Return the share of each cell that the intervals cover; they are in order and do not overlap."""
        covered = [0.0] * self.num_cells
        for began, seconds in reversed(intervals):
            if began + seconds < self.since:
                break
            left = max(0.0, began - self.since)
            right = min(self.until, began + seconds) - self.since
            last = min(self.num_cells - 1, int(right // self.cell_s))
            for cell in range(int(left // self.cell_s), last + 1):
                start, end = cell * self.cell_s, (cell + 1) * self.cell_s
                covered[cell] += max(0.0, min(right, end) - max(left, start))
        lengths = [self.cell_s] * self.num_cells
        lengths[-1] = self.until - self.since - self.cell_s * (self.num_cells - 1)
        return [
            min(1.0, part / length) if length > 0 else 0.0
            for part, length in zip(covered, lengths, strict=True)
        ]

    def cells(self, began: float, seconds: float) -> range:
        """Return the cells that an interval touches."""
        first = math.floor((began - self.since) / self.cell_s)
        last = math.floor((began + seconds - self.since) / self.cell_s)
        return range(max(0, first), min(self.num_cells, last + 1))


def cell_seconds(at_least_s: float) -> float:
    """Return how long a cell is, so that MAX_CELLS of them show a minute, and no less than `at_least_s`."""
    wanted = max(at_least_s, 60.0) / MAX_CELLS
    lengths = (1, 2, 5, 10, 20, 30, 60, 120, 300)
    return float(next((length for length in lengths if length >= wanted), 600))


def draw_lane(
    lane: Lane, window: Window, *, open_since: Mapping[str, float] | None = None
) -> Text:
    """Draw one character a cell. `open_since`: by role, when its oldest request in flight began."""
    open_since = open_since or {}
    shares: dict[str, list[float]] = {}
    for role in sorted({*lane.busy, *open_since}):  # where roles share a slot, the judge shows
        intervals = list(lane.busy.get(role, []))
        if role in open_since:
            intervals.append((open_since[role], math.inf))
        shares[role] = window.shares(merge_intervals(intervals))
    awake_after_swap: dict[int, str] = {}
    for began, seconds, awake in lane.swaps:
        awake_after_swap |= dict.fromkeys(window.cells(began, seconds), awake)
    cells = []
    for cell in range(window.num_cells):
        role = max(shares, key=lambda name: shares[name][cell], default="")
        share = shares[role][cell] if shares else 0.0
        if cell in awake_after_swap:
            cells.append((_SWAP, colour(awake_after_swap[cell])))
        elif share > 0:
            height = min(len(_HEIGHTS) - 1, int(share * len(_HEIGHTS)))
            cells.append((_HEIGHTS[height], colour(role)))
        else:
            cells.append((_IDLE, "bright_black"))
    text = Text()
    for style, alike in groupby(cells, key=lambda cell: cell[1]):
        text.append("".join(character for character, _ in alike), style)
    return text


def draw_legend(roles: Iterable[str], window: Window, *, swaps: bool) -> Text:
    """Draw `the last 60 s: ▇ rollout  ▇ judge  · idle  ┃ swap`."""
    seconds = window.cell_s * window.num_cells
    length = f"{seconds:.0f} s" if seconds <= 120 else f"{seconds / 60:.0f} min"
    drawn = Text(f"the last {length}: ")
    for role in sort_roles(roles):
        drawn.append(_HEIGHTS[-1], colour(role)).append(f" {role.replace('_', ' ')}  ")
    drawn.append(_IDLE, "bright_black").append(" idle")
    return drawn.append(f"  {_SWAP} swap") if swaps else drawn


def lane_names(places: Sequence[Place]) -> list[str]:
    """Return `slot 3`, or with several ranks `rank 1, 3`."""
    ranks = {rank for rank, _ in places}
    return [
        f"slot {slot}" if len(ranks) < 2 else f"rank {rank}, {slot}" for rank, slot in places
    ]


def sort_roles(roles: Iterable[str]) -> list[str]:
    """Return the roles, those that have a colour first."""
    known = list(_COLOURS)
    return sorted(
        set(roles), key=lambda role: (known.index(role) if role in known else len(known), role)
    )


def colour(role: str) -> str:
    return _COLOURS.get(role, "magenta")
