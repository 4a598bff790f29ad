"""What judges, reward models and reward workers did in a step, added up over sources and ranks, as the step's metrics.

Not here: who counts (`judge_scorer`, `reward_model_scorer`, `rewards.pool`), and a round's other metrics (`source`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Protocol

from ycore.controller.peers import AddUp


class Meter(Protocol):
    """Counts that can be added to those of other ranks."""

    def take(self) -> Sequence[float]:
        """The counts since this was last asked; as many numbers on every rank."""

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        """The step's metrics, of the sums over all ranks."""


@dataclass(slots=True)
class JudgeMeter:
    """All judges of a run; `seconds` are those of the calls, from a slot's turn on."""

    calls: float = 0
    parse_failures: float = 0
    seconds: float = 0
    tokens: float = 0
    pairs: float = 0
    pairs_by_position: float = 0

    def take(self) -> Sequence[float]:
        return _taken(self)

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        all_ranks = JudgeMeter(*sums)
        told = {
            "ycore/judge/calls": all_ranks.calls,
            "ycore/judge/parse_failures": all_ranks.parse_failures,
            "ycore/judge/latency_s": _ratio(all_ranks.seconds, all_ranks.calls),
            "ycore/judge/tokens": all_ranks.tokens,
        }
        if all_ranks.pairs:
            told["ycore/judge/position_bias"] = all_ranks.pairs_by_position / all_ranks.pairs
        return told


@dataclass(slots=True)
class RewardModelMeter:
    """All reward models of a run."""

    calls: float = 0
    seconds: float = 0
    tokens: float = 0

    def take(self) -> Sequence[float]:
        return _taken(self)

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        all_ranks = RewardModelMeter(*sums)
        return {
            "ycore/reward_model/calls": all_ranks.calls,
            "ycore/reward_model/latency_s": _ratio(all_ranks.seconds, all_ranks.calls),
            "ycore/reward_model/tokens": all_ranks.tokens,
        }


@dataclass(slots=True)
class WorkerMeter:
    """The processes of plain functions; `restarts` tells how many were started again so far."""

    restarts: Callable[[], int]
    told: int = 0

    def take(self) -> Sequence[float]:
        now = self.restarts()
        new, self.told = now - self.told, now
        return [float(new)]

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        return {"ycore/reward_restarts": sums[0]}


def collect(meters: Sequence[Meter], add_up: AddUp) -> dict[str, float]:
    """The metrics of all meters, over all ranks, by one sum."""
    taken = [meter.take() for meter in meters]
    flat = [value for counts in taken for value in counts]
    sums = add_up(flat) if flat else []
    told: dict[str, float] = {}
    for meter, counts in zip(meters, taken, strict=True):
        told |= meter.metrics(sums[: len(counts)])
        sums = sums[len(counts) :]
    return told


def _taken(meter: JudgeMeter | RewardModelMeter) -> tuple[float, ...]:
    counts = astuple(meter)
    for field in fields(meter):
        setattr(meter, field.name, 0)
    return counts


def _ratio(amount: float, count: float) -> float:
    return amount / count if count else 0.0
