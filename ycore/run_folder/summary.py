"""summary.json: how a run ended and what it reached, from its metrics.

Not here: reading the metrics (`telemetry.metrics`), and writing the file (`files`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeGuard

Status = Literal["finished", "interrupted", "failed"]

_WINDOW = 5  # steps at either end; one step's reward says little


def summarise(
    metrics: Sequence[Mapping[str, Any]], status: Status, wall_s: float, *, error: str | None = None
) -> dict[str, Any]:
    """The summary of a run; rewards are means over the first and the last five steps.

    They are of every completion that was drawn, where a run tells that: dynamic sampling trains on some of them, and
    those, neither all right nor all wrong, tell less and less of how good the policy has become.
    """
    told = [row.get("ycore/reward", row.get("reward")) for row in metrics]
    rewards = [float(reward) for reward in told if _is_finite(reward)]
    summary: dict[str, Any] = {
        "status": status,
        "steps": num_steps(metrics),
        "wall_s": round(wall_s, 1),
        "reward_first": _mean(rewards[:_WINDOW]),
        "reward_last": _mean(rewards[-_WINDOW:]),
    }
    return summary if error is None else {**summary, "error": error}


def summarise_losses(
    metrics: Sequence[Mapping[str, Any]], status: Status, wall_s: float, *, error: str | None = None
) -> dict[str, Any]:
    """The summary of a run without rollouts: its loss in place of its reward; short runs have shorter ends."""
    losses = [float(row["loss"]) for row in metrics if _is_finite(row.get("loss"))]
    window = min(_WINDOW, max(1, len(losses) // 2))
    summary: dict[str, Any] = {
        "status": status,
        "steps": num_steps(metrics),
        "wall_s": round(wall_s, 1),
        "loss_first": _mean(losses[:window]),
        "loss_last": _mean(losses[-window:]),
    }
    return summary if error is None else {**summary, "error": error}


def num_steps(metrics: Sequence[Mapping[str, Any]]) -> int:
    """The last step that the metrics tell of."""
    return max((int(row["step"]) for row in metrics if _is_finite(row.get("step"))), default=0)


def _mean(values: Sequence[float]) -> float | None:
    return round(math.fsum(values) / len(values), 6) if values else None


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)
