"""What a run's trace tells of its requests, round by round.

Not here: the trace's file (`telemetry.trace`), and what follows from the requests (`recorded`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ycore.telemetry.trace import ROUND, SWAP, Span


@dataclass(frozen=True, slots=True)
class Request:
    """A turn as it was recorded; `tokens` 0 where nobody counted them."""

    number: int
    role: str
    slot: int
    asked: float
    began: float
    ended: float
    tokens: float = 0.0


def requests_of(spans: Sequence[Span]) -> list[list[Request]]:
    """The turns of each round, from one rank's spans."""
    rounds = [(span.began, span.began + span.seconds) for span in spans if span.name == ROUND]
    requests = [_request(span) for span in spans if span.name not in (ROUND, SWAP)]
    return [[one for one in requests if begin <= one.began <= end] for begin, end in rounds]


def _request(span: Span) -> Request:
    return Request(
        number=span.told["request"],
        role=span.name,
        slot=span.slot,
        asked=span.began - span.told["waited_s"],
        began=span.began,
        ended=span.began + span.seconds,
        tokens=span.told["tokens"],
    )
