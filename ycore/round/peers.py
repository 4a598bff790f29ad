"""The other controllers, as one of them sees them: counts while a round runs, whole groups when it is dealt out.

Only numbers cross during a round; no rank sees another's prompts or completions but those dealt to it.

Not here: what the counts decide (`sampling`), and the collectives of training (accelerate, DeepSpeed).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ycore.round.sampling import Offer
from ycore.types import Group

AddUp = Callable[[Sequence[float]], list[float]]
"""Sums over all ranks, which call it together: `Peers.add_up`."""


@dataclass(frozen=True, slots=True)
class Counts:
    """One round over all ranks: groups that count towards what is needed, groups in flight, groups drawn."""

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
        """As they are now, all three at one moment."""

    def start(self, amount: int) -> Counts:
        """This rank starts so many groups, or with a negative amount takes that back; the counts after it."""

    def finish(self, *, counts_as_kept: bool) -> None:
        """A group of this rank has ended."""


class Peers(Protocol):
    """What a controller asks of the others."""

    rank: int
    world: int
    bytes_sent: int

    def open_tally(self, *, need: int, ready: int, starts: int) -> Tally:
        """Begin a round in which every rank needs `need` groups; this one has `ready` already and `starts` so many."""

    async def meet(self, *, stopping: bool) -> bool:
        """Wait for every rank to come here; whether any of them came because it is stopping. The same on all ranks.

        Unlike a collective it can be waited for without blocking, and it ends with RunError when a rank has failed.
        """

    def gather_offers(self, offers: Sequence[Offer]) -> list[Offer]:
        """Every rank's offers; all ranks get the same list."""

    def exchange(self, moves: Sequence[tuple[Offer, int]], own: Sequence[Group]) -> dict[tuple[int, int], Group]:
        """Carry out the moves; the groups that came here by (rank, index) of their offer."""

    def add_up(self, values: Sequence[float]) -> list[float]:
        """Each value's sum over all ranks."""

    def ask_to_stop(self) -> None:
        """Ask every rank to give up what it is doing."""

    def stop_asked(self) -> bool:
        """Whether a rank has asked for that; RunError when one has failed."""

    def fail(self, message: str) -> None:
        """Tell the others that this rank cannot go on."""


class LocalTally:
    """Plain counters, for a controller without others."""

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
    """The peers of a run with one rank."""

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
        """Nobody else to ask."""

    def stop_asked(self) -> bool:
        return False

    def fail(self, message: str) -> None:
        """Nobody to tell."""
