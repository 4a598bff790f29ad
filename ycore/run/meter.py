"""Counts of one rank that are added up over all ranks and become metrics of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Protocol


class Meter(Protocol):
    """Counts of one rank that can be added to those of other ranks."""

    def take(self) -> Sequence[float]:
        """Return the counts since the last call; as many numbers on every rank."""

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        """Return the step's metrics from each count's sum over all ranks."""


@dataclass
class CountMeter:
    """A meter whose fields are its counts."""

    def take(self) -> Sequence[float]:
        counts: tuple[float, ...] = astuple(self)
        for field in fields(self):
            setattr(self, field.name, 0)
        return counts

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        return type(self)(*sums).summary()

    def summary(self) -> Mapping[str, float]:
        """Return the metrics of these counts."""
        raise NotImplementedError
