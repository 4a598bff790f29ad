"""Completions that one round begins and a later one ends, under newer weights (APRIL, arXiv 2509.18521).

With `--oversample` a round starts more groups than it needs, and is over when enough of them are whole. Completions
that are still being written keep their tokens and log-probabilities. They go on in the next round after them, by the
next version, with a seed of their own: the same seed would draw the same numbers again. Each token's recorded
log-probability is of the version that wrote it, so that all of them together are one behavior policy (arXiv 2505.24298,
proposition 1).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ycore.rollout.turns import OneTurn, Start, Write, completion_seed
from ycore.run.group_json import completion_from_json, draw_from_json, to_json
from ycore.run.meter import CountMeter, Meter
from ycore.types import Completion, Draw

ABORTED = "abort"
"""The finish reason of a completion that an engine was told to give back as far as it was."""


@dataclass
class CarryMeter(CountMeter):
    """`tokens` are those of the `carried` completions so far; `written` are all tokens, of `completions` of a round."""

    groups: float = 0
    carried: float = 0
    tokens: float = 0
    dropped: float = 0
    completions: float = 0
    written: float = 0

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        total = CarryMeter(*sums)
        return {
            "ycore/carried/groups": total.groups,
            "ycore/carried/completions": total.carried,
            "ycore/carried/tokens": total.tokens,
            "ycore/carried/dropped": total.dropped,
            "ycore/carried/mean_length": total.written / max(1.0, total.completions),
        }


@dataclass
class _Unfinished:
    draw: Draw
    begun: dict[int, Completion] = field(
        default_factory=dict
    )  # whole, or as far as they are, by their index


class CarriedTurn(OneTurn):
    """One turn, which may take several rounds.

    Args:
        decode: the text of a completion's token ids.
        max_tokens: of a whole completion.
        max_age: versions by which a completion's first token may lag behind. An older one begins anew.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], *, max_tokens: int, max_age: int
    ) -> None:
        self._decode, self._max_tokens, self._max_age = decode, max_tokens, max_age
        self._groups: dict[int, _Unfinished] = {}  # by position
        self._meter = CarryMeter()
        self.meters: Sequence[Meter] = (self._meter,)

    def apart(self) -> OneTurn:
        return OneTurn()

    @property
    def waiting(self) -> list[Draw]:
        """The draws of the groups that are not whole, the oldest first."""
        return [group.draw for _, group in sorted(self._groups.items())]

    async def start(self, draw: Draw) -> Start:
        self._groups.setdefault(draw.position, _Unfinished(draw))
        return await super().start(draw)

    async def play(self, start: Start, index: int, write: Write, *, seed: int) -> Completion:
        """As far as it is, and the rest; never returns where the engine was told to stop."""
        position = start.draw.position
        begun = self._groups[position].begun
        so_far = begun.get(index)
        if so_far is None or so_far.finish_reason == ABORTED:
            tokens = () if so_far is None else so_far.token_ids
            own_seed = completion_seed(seed, position, index, len(tokens))
            rest = await write(
                (*start.draw.token_ids, *tokens),
                own_seed,
                max_tokens=self._max_tokens - len(tokens),
            )
            if len(tokens) + len(rest.token_ids) >= self._max_tokens:
                rest = replace(
                    rest,
                    finish_reason="length" if rest.finish_reason == ABORTED else rest.finish_reason,
                )
            begun[index] = rest if so_far is None else joined(so_far, rest, self._decode)
        if begun[index].finish_reason == ABORTED:
            await asyncio.Event().wait()  # until its group is cancelled
        return begun[index]

    def ended(self, draw: Draw) -> None:
        """The group is whole."""
        whole = self._groups.pop(draw.position).begun.values()
        self._meter.completions += len(whole)
        self._meter.written += sum(len(one.token_ids) for one in whole)

    def carry(self, version: int) -> None:
        """The round that this version wrote is over: keep what goes on, and drop what the next version may not."""
        meter = self._meter
        for group in self._groups.values():
            for index, one in list(group.begun.items()):
                meter.completions, meter.written = (
                    meter.completions + 1,
                    meter.written + len(one.token_ids),
                )
                if not one.token_ids or one.first_version < version + 1 - self._max_age:
                    meter.dropped += bool(one.token_ids)
                    del group.begun[index]
                elif one.finish_reason == ABORTED:
                    meter.carried, meter.tokens = (
                        meter.carried + 1,
                        meter.tokens + len(one.token_ids),
                    )
        meter.groups += len(self._groups)

    @property
    def state(self) -> list[dict[str, Any]]:
        """As plain JSON values."""
        return [
            {
                "draw": to_json(group.draw),
                "begun": {str(index): to_json(one) for index, one in group.begun.items()},
            }
            for _, group in sorted(self._groups.items())
        ]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        groups = [
            _Unfinished(
                draw_from_json(group["draw"]),
                {int(index): completion_from_json(one) for index, one in group["begun"].items()},
            )
            for group in state
        ]
        self._groups = {group.draw.position: group for group in groups}


def joined(
    begun: Completion, rest: Completion, decode: Callable[[Sequence[int]], str]
) -> Completion:
    """One completion of what earlier versions wrote and what came after it."""
    if not rest.token_ids:
        return begun
    token_ids = (*begun.token_ids, *rest.token_ids)
    stretches = begun.stretches
    if begun.policy_version != rest.policy_version:
        stretches = (*stretches, (len(begun.token_ids), begun.policy_version))
    return replace(
        rest,
        token_ids=token_ids,
        logprobs=(*(begun.logprobs or ()), *(rest.logprobs or ())),
        text=decode(token_ids),
        stretches=stretches,
    )
