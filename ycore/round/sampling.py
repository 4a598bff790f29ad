"""Who trains on which group: the same number of groups and about the same number of tokens on every rank.

Every rank computes the same deal from the same gathered numbers, so no rank leads.

Which groups can teach: those whose rewards differ (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2).

How many groups to have in flight, from the share that could teach so far.

Groups finished beyond what a round needed: they start a later one, if they are not too old by then.

Which prompt comes next on this rank: the run's order, cut into shards, with a cursor that a checkpoint can hold.

Not here: how a group travels (`controller.exchange`).
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ycore.data.prompts import PromptOrder
from ycore.errors import DataError
from ycore.types import Draw, Finished, Group, Prompt, Score

TOLERANCE = 1e-6
"""Rewards nearer than this are equal: a reward of floats is seldom equal to the bit."""


def total_reward(scores: Sequence[Score], weights: Sequence[float]) -> float | None:
    """The weighted sum over the sources that answered; None when none did."""
    known = [weight * score.value for weight, score in zip(weights, scores, strict=True) if score.value is not None]
    return sum(known) if known else None


def can_teach(group: Group, weights: Sequence[float], *, tolerance: float = TOLERANCE) -> bool:
    """Whether any advantage of the group would be other than zero: two scored completions whose rewards differ.

    Where the prompt's greedy completion is the baseline, one completion that differs from it is enough.
    """
    totals = [total_reward(scores, weights) for scores in group.scores_GR]
    known = [total for total in totals if total is not None]
    if group.greedy_scores_R is not None:
        baseline = total_reward(group.greedy_scores_R, weights)
        return baseline is not None and any(abs(total - baseline) > tolerance for total in known)
    return len(known) > 1 and max(known) - min(known) > tolerance


MEMORY = 0.97
"""Weight that an observation keeps when the next one comes: about the last 33 groups count."""

LEAST = 0.05


@dataclass(slots=True)
class Yield:
    """A moving average of the share of groups that can teach; starts at all of them."""

    kept: float = 1.0
    finished: float = 1.0

    @property
    def rate(self) -> float:
        return max(LEAST, self.kept / self.finished)

    def observe(self, *, taught: bool) -> None:
        self.kept = self.kept * MEMORY + float(taught)
        self.finished = self.finished * MEMORY + 1.0


def num_to_draw(*, need: int, kept: int, in_flight: int, drawn: int, max_draws: int, rate: float) -> int:
    """Groups to start now, so that those in flight are expected to give just what is missing."""
    missing = need - kept
    if missing <= 0:
        return 0
    return max(0, min(math.ceil(missing / rate - 1e-9) - in_flight, max_draws - drawn))


EVEN_ENOUGH = 1.02
"""Imbalance from which on another swap is not worth moving a group."""

MAX_SWAPS = 1000


@dataclass(frozen=True, slots=True)
class Offer:
    """One finished group as the others hear of it: numbers only."""

    rank: int
    index: int
    position: int
    num_tokens: int
    teaches: bool


@dataclass(frozen=True, slots=True)
class Deal:
    """`chosen[rank]`: the offers that rank trains on. The rest stay where they are."""

    chosen: tuple[tuple[Offer, ...], ...]

    @property
    def moves(self) -> list[tuple[Offer, int]]:
        """(offer, rank it goes to) for every group that changes ranks, in an order all ranks share."""
        return [(offer, rank) for rank, offers in enumerate(self.chosen) for offer in offers if offer.rank != rank]


def imbalance(tokens: Sequence[int]) -> float:
    """The busiest rank's tokens over the mean: 1.0 is perfect."""
    return max(tokens) * len(tokens) / max(1, sum(tokens))


def choose(offers: Sequence[Offer], num_wanted: int) -> list[Offer]:
    """The groups to train on: those that teach in the order they were drawn, then, if short, those that do not.

    By draw and not by finish, so that short completions are not preferred to long ones.
    """
    return sorted(offers, key=lambda offer: (not offer.teaches, offer.position))[:num_wanted]


def deal_groups(offers: Sequence[Offer], *, world: int, per_rank: int) -> Deal:
    """Deal `world * per_rank` groups so that every rank has about the same number of tokens.

    Ranks keep what they have as far as they may, what is over goes to the lightest rank with room, longest first, and
    groups are swapped only until the loads are even enough: little travels.
    """
    hands: list[list[Offer]] = [[] for _ in range(world)]
    over: list[Offer] = []
    for offer in choose(offers, world * per_rank):
        (hands[offer.rank] if len(hands[offer.rank]) < per_rank else over).append(offer)
    loads = [sum(offer.num_tokens for offer in hand) for hand in hands]
    for offer in sorted(over, key=lambda offer: (-offer.num_tokens, offer.position)):
        rank = min((rank for rank in range(world) if len(hands[rank]) < per_rank), key=lambda r: (loads[r], r))
        hands[rank].append(offer)
        loads[rank] += offer.num_tokens
    _swap_while_it_helps(hands, loads)
    return Deal(tuple(tuple(sorted(hand, key=lambda offer: offer.position)) for hand in hands))


def _swap_while_it_helps(hands: list[list[Offer]], loads: list[int]) -> None:
    """Trade one group of the heaviest rank for a lighter one elsewhere, as long as the pair's peak falls."""
    for _ in range(MAX_SWAPS):
        if imbalance(loads) <= EVEN_ENOUGH:
            return
        heavy = loads.index(max(loads))
        trade = _best_trade(hands, loads, heavy)
        if trade is None:
            return
        ours, rank, theirs = trade
        delta = hands[heavy][ours].num_tokens - hands[rank][theirs].num_tokens
        hands[heavy][ours], hands[rank][theirs] = hands[rank][theirs], hands[heavy][ours]
        loads[heavy] -= delta
        loads[rank] += delta


def _best_trade(hands: list[list[Offer]], loads: list[int], heavy: int) -> tuple[int, int, int] | None:
    best, best_peak = None, loads[heavy]
    for rank in range(len(hands)):
        for ours, offer in enumerate(hands[heavy]):
            for theirs, other in enumerate(hands[rank]):
                delta = offer.num_tokens - other.num_tokens
                peak = max(loads[heavy] - delta, loads[rank] + delta)
                if delta > 0 and peak < best_peak:
                    best, best_peak = (ours, rank, theirs), peak
    return best


class Surplus:
    """Keeps what can teach, oldest first. `max_age`: policy versions a group may lag behind when it is trained on."""

    def __init__(self, *, max_age: int) -> None:
        self.waiting: list[Finished] = []
        self._max_age = max_age

    def __len__(self) -> int:
        return len(self.waiting)

    def put(self, finished: Sequence[Finished]) -> None:
        self.waiting += [item for item in finished if item.teaches]

    def take(self, version: int) -> list[Finished]:
        """All that are young enough for this version of the policy; the others are dropped."""
        young = [item for item in self.waiting if version - _oldest(item) <= self._max_age]
        self.waiting = []
        return young


def _oldest(item: Finished) -> int:
    return min(completion.policy_version for completion in item.group.completions)


Encode = Callable[[Prompt], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `world` owns the positions rank, rank + world, rank + 2 world, ..."""

    rank: int = 0
    world: int = 1

    def position(self, index: int) -> int:
        return index * self.world + self.rank


WHOLE = Shard()


class DrawSource:
    """Draws prompts in the order of `seed`, or of their rows; `cursor` counts the draws, and may be set."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int | None,
        encode: Encode,
        max_prompt_tokens: int,
        shard: Shard = WHOLE,
    ) -> None:
        self.cursor = 0
        self._prompts = prompts
        self._order = None if seed is None else PromptOrder(seed=seed, num_rows=len(prompts))
        self._encode = encode
        self._max_prompt_tokens = max_prompt_tokens
        self._shard = shard

    def draw(self) -> Draw:
        """The next prompt of this shard; DataError, naming its row, when it does not fit the engine's context."""
        position = self._shard.position(self.cursor)
        row = position % len(self._prompts) if self._order is None else self._order.row_at(position)
        prompt = self._prompts[row]
        token_ids = self._encode(prompt)
        if not 0 < len(token_ids) <= self._max_prompt_tokens:
            raise DataError(
                f"row {prompt.row}: the prompt has {len(token_ids)} tokens, "
                f"between 1 and {self._max_prompt_tokens} fit; "
                "shorten it, lower --max-tokens, or raise engine.max_model_len"
            )
        self.cursor += 1
        return Draw(position=position, prompt=prompt, token_ids=token_ids)


def completion_seed(run_seed: int, position: int, index: int) -> int:
    """The engine's seed for one completion: never shared, and the same whichever engine or attempt answers."""
    digest = hashlib.blake2b(f"{run_seed}/{position}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # engines take a signed 64-bit number
