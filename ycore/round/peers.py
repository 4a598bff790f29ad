"""What one controller exchanges with those of other ranks: counts while a round runs, whole groups when it is dealt.

A rank sees no prompt or completion of another rank but those that are dealt to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ycore.round.balance import Offer
from ycore.types import Group

AddUp = Callable[[Sequence[float]], list[float]]
"""Sums over all ranks, which call it together: `Peers.add_up`."""


@dataclass(frozen=True, slots=True)
class Counts:
    """A round over all ranks: groups that count towards the need, groups in flight, groups drawn so far."""

    kept: int
    in_flight: int
    drawn: int

    @property
    def finished(self) -> int:
        return self.drawn - self.in_flight


class Tally(Protocol):
    """One round's counts over all ranks."""

    need: int

    def counts(self) -> Counts:
        """All three counts at one moment."""

    def start(self, amount: int) -> Counts:
        """Count `amount` groups of this rank as started, or not started if negative; returns the counts after it."""

    def finish(self, *, counts_as_kept: bool) -> None:
        """Count a group of this rank as finished."""


class Peers(Protocol):
    """The exchange with other ranks. All ranks call these methods in the same order."""

    rank: int
    world: int
    bytes_sent: int

    def open_tally(self, *, need: int, ready: int, starts: int) -> Tally:
        """Begin a round in which every rank needs `need` groups; this one has `ready` of them and starts `starts`."""

    async def meet(self, *, stopping: bool) -> bool:
        """Wait until every rank calls this; returns whether any of them is stopping, the same on all ranks.

        Unlike a collective it does not block the event loop, and it raises RunError when a rank has failed.
        """

    def gather_offers(self, offers: Sequence[Offer]) -> list[Offer]:
        """Every rank's offers; all ranks get the same list."""

    def exchange(self, moves: Sequence[tuple[Offer, int]], own: Sequence[Group]) -> dict[tuple[int, int], Group]:
        """Send and receive the groups that change ranks; returns those received, by the key of their offer."""

    def add_up(self, values: Sequence[float]) -> list[float]:
        """Each value's sum over all ranks."""

    def ask_to_stop(self) -> None:
        """Make `stop_asked` true on every rank."""

    def stop_asked(self) -> bool:
        """Whether any rank called `ask_to_stop`; raises RunError when a rank has failed."""

    def fail(self, message: str) -> None:
        """Make the other ranks raise RunError with this message."""


class LocalTally:
    """Plain counters, for a run with one rank."""

    def __init__(self, *, need: int, ready: int, starts: int) -> None:
        self.need = need
        self._kept, self._in_flight, self._drawn = ready, starts, starts

    def counts(self) -> Counts:
        return Counts(self._kept, self._in_flight, self._drawn)

    def start(self, amount: int) -> Counts:
        self._in_flight += amount
        self._drawn += amount
        return self.counts()

    def finish(self, *, counts_as_kept: bool) -> None:
        self._in_flight -= 1
        self._kept += counts_as_kept


class Alone:
    """The exchange of a run with one rank."""

    rank, world, bytes_sent = 0, 1, 0

    def open_tally(self, *, need: int, ready: int, starts: int) -> LocalTally:
        return LocalTally(need=need, ready=ready, starts=starts)

    async def meet(self, *, stopping: bool) -> bool:
        return stopping

    def gather_offers(self, offers: Sequence[Offer]) -> list[Offer]:
        return list(offers)

    def exchange(self, moves: Sequence[tuple[Offer, int]], own: Sequence[Group]) -> dict[tuple[int, int], Group]:
        assert not moves, "a single rank has nobody to give groups to"
        return {}

    def add_up(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def ask_to_stop(self) -> None:
        """There is no other rank."""

    def stop_asked(self) -> bool:
        return False

    def fail(self, message: str) -> None:
        """There is no other rank."""
