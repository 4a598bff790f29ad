"""What `ycore simulate` shows: a table of placements, which to use, and lanes of the last round of each.

Not here: the figures (`ycore.simulate`).
"""

from pathlib import Path
from typing import Any

from ycore.simulate.compare import Result, recommend
from ycore.simulate.play import Played


def print_results(played: Played) -> None:
    """Shortest first."""
    from rich.console import Console
    from rich.table import Table

    print(played.note)
    table = Table("placement", "round", "idle", "over the bound", "swaps", "swapping")
    best = recommend(played.results)
    for result in sorted(played.results, key=lambda result: result.seconds):
        marked = "  <- use this" if result is best else ""
        table.add_row(
            f"{result.wanted}{marked}",
            f"{result.seconds:.1f} s",
            f"{result.idle_share:.0%}",
            f"{result.bound_ratio:.2f}",
            f"{result.swaps:.1f}",
            f"{result.swap_s:.1f} s",
        )
    Console().print(table)
    print(f"use --placement {best.wanted}: {_why(best, played)}")


def _why(best: Result, played: Played) -> str:
    others = [result for result in played.results if result is not best]
    if not others:
        return "there is no other role to place"
    near = min(others, key=lambda result: result.seconds)
    share = near.seconds / best.seconds - 1
    if share < 0:
        return f"{near.wanted} is {-share:.1%} shorter here, but must be chosen anew when lengths drift"
    return f"{near.wanted}, the next, takes {share:.1%} longer"


def as_json(played: Played) -> dict[str, Any]:
    """The same figures."""
    return {
        "note": played.note,
        "recorded_s": played.recorded_s,
        "use": str(recommend(played.results).wanted),
        "placements": [
            {
                "placement": str(result.wanted),
                "round_s": result.seconds,
                "idle_share": result.idle_share,
                "bound_ratio": result.bound_ratio,
                "swaps": result.swaps,
                "swap_s": result.swap_s,
            }
            for result in played.results
        ],
    }


def draw(played: Played, path: Path) -> None:
    """The last round of every placement, on one scale."""
    from ycore.telemetry.timeline import draw_panels
    from ycore.telemetry.trace import Span

    panels = [
        (
            f"{result.wanted}: {result.rounds[-1].usage.seconds:.1f} s",
            [Span(lane.name, 0, lane.slot, lane.began, lane.seconds) for lane in result.rounds[-1].lanes],
        )
        for result in sorted(played.results, key=lambda result: result.seconds)
    ]
    draw_panels(panels, path)
