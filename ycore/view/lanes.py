"""A lane a slot: the last minute or more as cells, coloured by the role that had work, swaps marked. Pure drawing.

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

Stretch = tuple[float, float]
"""(began, seconds); began is in seconds since the epoch."""

Place = tuple[int, int]
"""(rank, slot)"""


@dataclass(slots=True)
class Lane:
    """What one slot did: by role the stretches with requests in flight; its swaps, with the role then awake."""

    busy: dict[str, list[Stretch]] = field(default_factory=dict)
    swaps: list[tuple[float, float, str]] = field(default_factory=list)

    def add(self, role: str, stretches: Sequence[Stretch]) -> None:
        """Stretches may come in any order; only the old ones that they reach into are joined anew."""
        there, touched = self.busy.setdefault(role, []), list(stretches)
        first = min((began for began, _ in stretches), default=math.inf)
        while there and sum(there[-1]) >= first:
            touched.append(there.pop())
        there += merge_intervals(touched)


@dataclass(frozen=True, slots=True)
class Window:
    """The time that the cells show; the last cell contains `until` and may have only begun."""

    until: float
    cell_s: float
    num_cells: int

    @property
    def since(self) -> float:
        return (math.floor(self.until / self.cell_s) + 1 - self.num_cells) * self.cell_s

    def shares(self, stretches: Sequence[Stretch]) -> list[float]:
        """The share of each cell that the stretches cover; `stretches` are in order and do not overlap."""
        covered, since = [0.0] * self.num_cells, self.since
        for began, seconds in reversed(stretches):
            if began + seconds < since:
                break
            left, right = max(0.0, began - since), min(self.until, began + seconds) - since
            for cell in range(
                int(left // self.cell_s), min(self.num_cells, int(right // self.cell_s) + 1)
            ):
                covered[cell] += max(
                    0.0, min(right, (cell + 1) * self.cell_s) - max(left, cell * self.cell_s)
                )
        lengths = [self.cell_s] * (self.num_cells - 1) + [
            self.until - since - self.cell_s * (self.num_cells - 1)
        ]
        return [
            min(1.0, part / length) if length > 0 else 0.0
            for part, length in zip(covered, lengths, strict=True)
        ]


def cell_seconds(at_least_s: float) -> float:
    """How long a cell is, so that MAX_CELLS of them show a minute, and no less than `at_least_s`."""
    wanted = max(at_least_s, 60.0) / MAX_CELLS
    return float(next((one for one in (1, 2, 5, 10, 20, 30, 60, 120, 300) if one >= wanted), 600))


def draw_lane(lane: Lane, window: Window, *, open_since: Mapping[str, float] | None = None) -> Text:
    """One character a cell. `open_since`: by role, when its oldest request in flight began."""
    shares, open_since = {}, open_since or {}
    for role in sorted({*lane.busy, *open_since}):  # where roles share a slot, the judge shows
        in_flight = [(open_since[role], math.inf)] if role in open_since else []
        shares[role] = window.shares(merge_intervals([*lane.busy.get(role, []), *in_flight]))
    swapped, cells = (
        dict[int, str](),
        [],
    )  # the cells with a swap under way, and the role awake after the last one
    for began, seconds, awake in lane.swaps:
        first = math.floor((began - window.since) / window.cell_s)
        last = math.floor((began + seconds - window.since) / window.cell_s)
        swapped |= dict.fromkeys(range(max(0, first), min(window.num_cells, last + 1)), awake)
    for cell in range(window.num_cells):
        role, share = max(
            ((role, own[cell]) for role, own in shares.items()),
            key=lambda one: one[1],
            default=("", 0),
        )
        if cell in swapped:
            cells.append((_SWAP, colour(swapped[cell])))
        elif share > 0:
            cells.append(
                (_HEIGHTS[min(len(_HEIGHTS) - 1, int(share * len(_HEIGHTS)))], colour(role))
            )
        else:
            cells.append((_IDLE, "bright_black"))
    alike = groupby(cells, key=lambda cell: cell[1])  # one change of colour where one is enough
    return Text.assemble(*(("".join(sign for sign, _ in own), style) for style, own in alike))


def draw_legend(roles: Iterable[str], window: Window, *, swaps: bool) -> Text:
    """`the last 60 s: ▇ rollout  ▇ judge  · idle  ┃ swap`."""
    seconds = window.cell_s * window.num_cells
    drawn = Text(
        f"the last {seconds:.0f} s: " if seconds <= 120 else f"the last {seconds / 60:.0f} min: "
    )
    for role in in_order(roles):
        drawn.append(_HEIGHTS[-1], colour(role)).append(f" {role.replace('_', ' ')}  ")
    drawn.append(_IDLE, "bright_black").append(" idle")
    return drawn.append(f"  {_SWAP} swap") if swaps else drawn


def lane_names(places: Sequence[Place]) -> list[str]:
    """`slot 3`, or with several ranks `rank 1, 3`."""
    ranks = {rank for rank, _ in places}
    return [f"slot {slot}" if len(ranks) < 2 else f"rank {rank}, {slot}" for rank, slot in places]


def in_order(roles: Iterable[str]) -> list[str]:
    """The roles that have their own colour first."""
    known = list(_COLOURS)
    return sorted(
        set(roles), key=lambda role: (known.index(role) if role in known else len(known), role)
    )


def colour(role: str) -> str:
    return _COLOURS.get(role, "magenta")
