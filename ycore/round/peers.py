"""What one controller exchanges with those of other ranks: counts while a round runs, whole groups when it is dealt.

`Peers` is the exchange of a run with one rank; `TorchPeers` extends it to many.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ycore.round.balance import Offer
from ycore.types import Group

AddUp = Callable[[Sequence[float]], list[float]]  # `Peers.add_up`


@dataclass(frozen=True, slots=True)
class Counts:
    """A round over all ranks: groups that count towards the need, groups in flight, groups drawn so far."""

    kept: int
    in_flight: int
    drawn: int

    @property
    def finished(self) -> int:
        return self.drawn - self.in_flight


class Tally:
    """One round's counts over all ranks. `need`: groups that all ranks need together."""

    def __init__(self, *, need: int, ready: int, starts: int) -> None:
        self.need = need
        self._counts = Counts(ready, starts, starts)

    def add(self, *, kept: int = 0, in_flight: int = 0, drawn: int = 0) -> Counts:
        """Add what this rank has done; returns all three counts at that moment."""
        now = self._counts
        self._counts = Counts(now.kept + kept, now.in_flight + in_flight, now.drawn + drawn)
        return self._counts


class Peers:
    """The exchange with other ranks; this class has none. All ranks call these methods in the same order."""

    rank, world, bytes_sent = 0, 1, 0

    def open_tally(self, *, need: int, ready: int, starts: int) -> Tally:
        """Begin a round in which every rank needs `need` groups; this one has `ready` of them and starts `starts`."""
        return Tally(need=need, ready=ready, starts=starts)

    async def meet(self, *, stopping: bool) -> bool:
        """Wait until every rank calls this; returns whether any of them is stopping, the same on all ranks.

        Unlike a collective it does not block the event loop, and it raises RunError when a rank has failed.
        """
        return stopping

    def gather_offers(self, offers: Sequence[Offer]) -> list[Offer]:
        """Every rank's offers; all ranks get the same list."""
        return list(offers)

    def exchange(self, moves: Sequence[tuple[Offer, int]], own: Sequence[Group]) -> dict[tuple[int, int], Group]:
        """Send and receive the groups that change ranks; returns those received, by the key of their offer.

        `moves` are offers and the ranks that receive them, in an order that all ranks share. An offer's `index` counts
        in `own`, its rank's groups.
        """
        assert not moves, "a single rank has no other to give groups to"
        return {}

    def add_up(self, values: Sequence[float]) -> list[float]:
        """Each value's sum over all ranks."""
        return list(values)

    def ask_to_stop(self) -> None:
        """Make `stop_asked` true on every rank."""

    def stop_asked(self) -> bool:
        """Whether any rank called `ask_to_stop`; raises RunError when a rank has failed."""
        return False

    def fail(self, message: str) -> None:
        """Make the other ranks raise RunError with this message."""
