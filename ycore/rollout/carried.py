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

from ycore.rollout.turns import Generate, GroupStart, SingleTurnWriter, completion_seed
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

    def summary(self) -> Mapping[str, float]:
        return {
            "ycore/carried/groups": self.groups,
            "ycore/carried/completions": self.carried,
            "ycore/carried/tokens": self.tokens,
            "ycore/carried/dropped": self.dropped,
            "ycore/carried/mean_length": self.written / max(1.0, self.completions),
        }


@dataclass
class _UnfinishedGroup:
    """A group with its completions so far, whole or aborted, by their index."""

    draw: Draw
    completions: dict[int, Completion] = field(default_factory=dict)


class CarryWriter(SingleTurnWriter):
    """One turn, which may take several rounds.

    Args:
        decode: returns the text of a completion's token ids.
        max_tokens: limit of a whole completion.
        max_age: versions by which a completion's first token may lag behind. An older one begins anew.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], *, max_tokens: int, max_age: int
    ) -> None:
        self._decode = decode
        self._max_tokens = max_tokens
        self._max_age = max_age
        self._groups: dict[int, _UnfinishedGroup] = {}  # by position
        self._meter = CarryMeter()
        self.meters: Sequence[Meter] = (self._meter,)

    @property
    def unfinished(self) -> list[Draw]:
        """The draws of the groups that are not whole, the oldest first."""
        return [group.draw for _, group in sorted(self._groups.items())]

    async def start(self, draw: Draw) -> GroupStart:
        self._groups.setdefault(draw.position, _UnfinishedGroup(draw))
        return await super().start(draw)

    async def write(
        self, start: GroupStart, index: int, generate: Generate, *, seed: int
    ) -> Completion:
        """Write the completion, or the rest of it; never returns where the engine was told to stop."""
        position = start.draw.position
        completions = self._groups[position].completions
        begun = completions.get(index)
        if begun is None or begun.finish_reason == ABORTED:
            token_ids = () if begun is None else begun.token_ids
            rest = await generate(
                (*start.draw.token_ids, *token_ids),
                completion_seed(seed, position, index, len(token_ids)),
                max_tokens=self._max_tokens - len(token_ids),
            )
            is_full = len(token_ids) + len(rest.token_ids) >= self._max_tokens
            if is_full and rest.finish_reason == ABORTED:
                rest = replace(rest, finish_reason="length")
            completions[index] = rest if begun is None else joined(begun, rest, self._decode)
        if completions[index].finish_reason == ABORTED:
            await asyncio.Event().wait()  # until its group is cancelled
        return completions[index]

    def finish_group(self, draw: Draw) -> None:
        """Forget a group whose completions are all written and scored."""
        for completion in self._groups.pop(draw.position).completions.values():
            self._count(completion)

    def end_round(self, version: int) -> None:
        """End the round that this version wrote: drop what is too old for the next version to go on with."""
        meter = self._meter
        for group in self._groups.values():
            for index, completion in list(group.completions.items()):
                self._count(completion)
                num_tokens = len(completion.token_ids)
                if not num_tokens or completion.first_version < version + 1 - self._max_age:
                    meter.dropped += num_tokens > 0
                    del group.completions[index]
                elif completion.finish_reason == ABORTED:
                    meter.carried += 1
                    meter.tokens += num_tokens
        meter.groups += len(self._groups)

    def _count(self, completion: Completion) -> None:
        self._meter.completions += 1
        self._meter.written += len(completion.token_ids)

    def state_dict(self) -> list[dict[str, Any]]:
        """The unfinished groups as plain JSON values, for a checkpoint."""
        return [
            {
                "draw": to_json(group.draw),
                "begun": {
                    str(index): to_json(completion)
                    for index, completion in group.completions.items()
                },
            }
            for _, group in sorted(self._groups.items())
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        self._groups = {}
        for group in state:
            draw = draw_from_json(group["draw"])
            completions = {
                int(index): completion_from_json(completion)
                for index, completion in group["begun"].items()
            }
            self._groups[draw.position] = _UnfinishedGroup(draw, completions)


def joined(
    begun: Completion, rest: Completion, decode: Callable[[Sequence[int]], str]
) -> Completion:
    """Return the completion that earlier versions began and `rest` continues."""
    if not rest.token_ids:
        return begun
    token_ids = (*begun.token_ids, *rest.token_ids)
    segments = begun.segments
    if begun.policy_version != rest.policy_version:
        segments = (*segments, (len(begun.token_ids), begun.policy_version))
    return replace(
        rest,
        token_ids=token_ids,
        logprobs=(*(begun.logprobs or ()), *(rest.logprobs or ())),
        text=decode(token_ids),
        segments=segments,
    )
