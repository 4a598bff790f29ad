"""The slots of a machine, shared by all of its ranks: their messages in, the allocator's decisions out.

Messages are JSON lists, since ranks are other processes. They name roles, request numbers, sizes and slots, and never a
prompt or a completion. A rank sends

    begin STATE     it comes to a round; what a checkpoint knows of the placement, or null
    awake           its engines are awake, so that the round's requests may start
    ask N ROLE L    a request of this role; how long its answer likely is, 0 or left out where nothing is known. N
                    modulo the number of ranks is the rank
    ended N SIZE    request N has its answer, of so many tokens
    withdraw N      request N is given up
    swapped SLOT    a swap is done
    end             it has nothing more to ask in this round
    learn SUMS      the numbers of all machines, added up

and receives

    begun AWAKE GATHERS              all ranks have come: the role of every slot; `Allocator.gathers`
    start N SLOT                     send request N to the slot's engine
    swap SLOT ASLEEP AWAKE           to the slot's home rank: change the slot's role
    over NUMBERS SPENT               all ranks have ended: `Allocator.numbers`; busy and swap seconds, see `spent`
    learned STATE                    for the next checkpoint
    depths WAITING IN_FLIGHT OLDEST  to the first rank, for the trace

Slot k's home is rank k modulo the number of ranks: it alone wakes the slot's engines, puts them to sleep and sends them
weights. No clock, no socket: `placement.line` brings the messages.
"""

from collections import defaultdict
from typing import Any

from ycore.placement.allocator import Allocator
from ycore.placement.load import Usage
from ycore.placement.placement import Start

ALLOCATOR = "allocator"
"""The name of its process, log and socket, on a machine with several ranks."""

Message = list[Any]
Letter = tuple[int, Message]
"""The rank that receives it, and the message."""


class Pool:
    """Example: `pool.receive(1, ["ask", 7, "judge"], now)`, then deliver the letters of `pool.decide(now)`."""

    def __init__(self, allocator: Allocator, num_ranks: int = 1) -> None:
        self.allocator = allocator
        self.num_ranks = num_ranks
        self._roles: dict[int, str] = {}  # of every request that was asked and has not ended
        self._come = defaultdict[str, set[int]](set)
        self._is_waking = False

    def receive(self, rank: int, message: Message, now: float) -> list[Letter]:
        """Take a rank's message; call `decide` after it, or after several of the same moment."""
        allocator = self.allocator
        match message:
            case ["ask", request, role, *length]:
                self._roles[request] = role
                allocator.ask(request, role, rank, length=length[0] if length else 0.0)
            case ["ended", request, size]:
                del self._roles[request]
                allocator.ended(request, now, size=size)
            case ["withdraw", request]:
                allocator.withdraw(request, self._roles.pop(request), now, rank)
            case ["swapped", slot]:
                allocator.swapped(slot, now)
            case ["begin", state]:
                if state is not None:
                    allocator.restore(state)
                if self._all_have_come(rank, "begin"):
                    return self._begin(now)
            case ["awake"]:
                self._is_waking = not self._all_have_come(rank, "awake")
            case ["end"]:
                if self._all_have_come(rank, "end"):
                    usage = allocator.end_round(now)
                    return [
                        (0, self.depths(now)),
                        *self._to_all(["over", allocator.numbers(), spent(usage)]),
                    ]
            case ["learn", sums]:
                allocator.learn(sums)
                return [(rank, ["learned", allocator.state()])]
            case _:
                raise ValueError(f"the allocator does not know the message {message!r}")
        return []

    def decide(self, now: float) -> list[Letter]:
        """What is to be done now. While engines wake for a round, its requests wait."""
        if self._is_waking:
            return []
        letters: list[Letter] = []
        for action in self.allocator.decide(now):
            if isinstance(action, Start):
                letters.append(
                    (action.request % self.num_ranks, ["start", action.request, action.slot])
                )
            else:
                home = home_of(action.slot, self.num_ranks)
                letters.append((home, ["swap", action.slot, action.asleep, action.awake]))
        return letters

    def lost(self, rank: int, now: float) -> None:
        """A rank is gone: its turns are given back."""
        for request in [request for request in self._roles if request % self.num_ranks == rank]:
            self.receive(rank, ["withdraw", request], now)

    def depths(self, now: float) -> Message:
        """Requests waiting by role; in flight by role and slot, as `judge 3`; the age of the oldest of these."""
        pool, running = self.allocator.pool, self.allocator.in_flight()
        in_flight = {f"{role} {slot}": 0 for role in pool.roles for slot in range(pool.num_slots)}
        in_flight |= {f"{role} {slot}": count for (role, slot), (count, _) in running.items()}
        oldest_s = {
            f"{role} {slot}": round(now - began, 3) for (role, slot), (_, began) in running.items()
        }
        return ["depths", self.allocator.waiting(), in_flight, oldest_s]

    def _begin(self, now: float) -> list[Letter]:
        """Apply the starting division. Requests of an earlier round that are still in flight keep their places."""
        self._is_waking = True
        if self.allocator.is_idle:
            self.allocator.begin_round(now)
        return self._to_all(["begun", list(self.allocator.awake), self.allocator.gathers])

    def _all_have_come(self, rank: int, where: str) -> bool:
        self._come[where].add(rank)
        if len(self._come[where]) < self.num_ranks:
            return False
        del self._come[where]
        return True

    def _to_all(self, message: Message) -> list[Letter]:
        return [(rank, message) for rank in range(self.num_ranks)]


def home_of(slot: int, num_ranks: int) -> int:
    return slot % num_ranks


def spent(usage: Usage) -> list[float]:
    """A round's slot seconds, busy seconds, swap seconds, and number of swaps, to be added to other machines'."""
    slot_s = usage.seconds * len(usage.busy_s)
    return [slot_s, sum(usage.busy_s), sum(usage.swap_s), float(usage.swaps)]
