"""The other controllers, as one of them sees them: counts while a round runs, whole groups when it is dealt out.

Only numbers cross during a round; no rank sees another's prompts or completions but those dealt to it.

Not here: what the counts decide (`sampling`), and the collectives of training (accelerate, DeepSpeed).
"""

from collections.abc import Sequence
from typing import Protocol

from ycore.sampling.balance import Offer
from ycore.types import Group


class Tally(Protocol):
    """One round's counts over all ranks."""

    need: int

    def start(self) -> None:
        """This rank has started a group."""

    def finish(self, *, teaches: bool) -> None:
        """A group of this rank has ended."""

    def kept(self) -> int: ...

    def in_flight(self) -> int: ...

    def drawn(self) -> int: ...


class Peers(Protocol):
    """What a controller asks of the others."""

    rank: int
    world: int

    def open_tally(self, *, need: int, ready: int) -> Tally:
        """Begin a round in which every rank needs `need` groups and this one has `ready` already."""

    def my_part(self, wanted: int) -> int:
        """How many of the groups that all ranks should start now are this rank's to start."""

    def gather_offers(self, offers: Sequence[Offer]) -> list[Offer]:
        """Every rank's offers; all ranks get the same list."""

    def exchange(self, moves: Sequence[tuple[Offer, int]], own: Sequence[Group]) -> dict[tuple[int, int], Group]:
        """Carry out the moves; the groups that came here by (rank, index) of their offer."""

    def check(self) -> None:
        """RunError when another rank has failed."""

    def fail(self, message: str) -> None:
        """Tell the others that this rank cannot go on."""


class LocalTally:
    """Plain counters, for a controller without others."""

    def __init__(self, *, need: int, ready: int) -> None:
        self.need = need
        self._kept, self._in_flight, self._drawn = ready, 0, 0

    def start(self) -> None:
        self._in_flight += 1
        self._drawn += 1

    def finish(self, *, teaches: bool) -> None:
        self._in_flight -= 1
        self._kept += teaches

    def kept(self) -> int:
        return self._kept

    def in_flight(self) -> int:
        return self._in_flight

    def drawn(self) -> int:
        return self._drawn


class Alone:
    """The peers of a run with one rank."""

    rank, world = 0, 1

    def open_tally(self, *, need: int, ready: int) -> LocalTally:
        return LocalTally(need=need, ready=ready)

    def my_part(self, wanted: int) -> int:
        return wanted

    def gather_offers(self, offers: Sequence[Offer]) -> list[Offer]:
        return list(offers)

    def exchange(self, moves: Sequence[tuple[Offer, int]], own: Sequence[Group]) -> dict[tuple[int, int], Group]:
        assert not moves, "a single rank has nobody to give groups to"
        return {}

    def check(self) -> None:
        """Nobody else can fail."""

    def fail(self, message: str) -> None:
        """Nobody to tell."""
