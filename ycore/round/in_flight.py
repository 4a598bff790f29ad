"""Groups that newer weights go on with: from one round to the next, or in the middle of a completion.

An engine gives back what it has written, takes the new weights, and a new request goes on after those tokens. Their keys
and values are computed anew. Each token's recorded log-probability is of the version that wrote it, so that all of them
together are one behavior policy (arXiv 2505.24298, proposition 1).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from ycore.rollout.turns import ABORTED, Generate, completion_seed, joined
from ycore.run.metrics import CountMeter
from ycore.run.tasks import ending
from ycore.types import (
    Completion,
    Draw,
    Finished,
    Group,
    JsonObject,
    Record,
    from_json,
    number_from,
    to_json,
)

NOTHING = Completion((), (), "", ABORTED, 0)
"""The answer to a request that no engine got."""


@dataclass
class CarryMeter(CountMeter):
    """`tokens` are those that the carried `completions` had when they were interrupted."""

    groups: float = 0
    completions: float = 0
    tokens: float = 0
    dropped: float = 0

    def summary(self) -> Mapping[str, float]:
        return {
            "ycore/carried/groups": self.groups,
            "ycore/carried/completions": self.completions,
            "ycore/carried/tokens": self.tokens,
            "ycore/carried/dropped": self.dropped,
        }


@dataclass(eq=False)
class InFlight:
    """The groups of a rank that are begun and not whole, and what their completions have so far.

    With `streams`, engines write on from round to round, and pause only while they take weights (PipelineRL, arXiv
    2509.19128). Otherwise a round that has enough groups ends, and its others go on in the next (APRIL, arXiv
    2509.18521): a checkpoint has what was written of them.

    Args:
        decode: returns the text of a completion's token ids.
        max_tokens: limit of what is written between two prompts.
        max_age: versions by which a completion's first token may lag behind. An older completion begins anew, and a
            group with one is not trained on.
        seed: the run's.
        group_size: completions of a group.
    """

    decode: Callable[[Sequence[int]], str]
    _: KW_ONLY
    max_tokens: int
    max_age: int
    seed: int
    group_size: int
    streams: bool = False

    def __post_init__(self) -> None:
        self.groups: dict[asyncio.Task[Finished], Draw] = {}
        self.again: list[Draw] = []  # groups to be started again, the oldest first
        self.meter = CarryMeter()
        self._begun: dict[int, Completion] = {}  # by seed
        self._version = 0
        self.open = asyncio.Event()
        """Set while requests may begin."""

    def go_on(self, version: int) -> None:
        """Let requests begin: engines have this version's weights."""
        self._version = version
        self.open.set()

    async def write(
        self,
        generate: Generate,
        token_ids: Sequence[int],
        seed: int,
        *,
        max_tokens: int | None = None,
    ) -> Completion:
        """Write a completion, or the rest of one, by as many requests as weights come meanwhile.

        A later request has a seed of its own: the same would draw the same numbers again.
        """
        limit = max_tokens or self.max_tokens
        completion = self._begun.get(seed, NOTHING)
        while True:
            await self.open.wait()
            if completion.token_ids and completion.first_version < self._version - self.max_age:
                self.meter.dropped += 1
                completion = NOTHING
            if completion.finish_reason != ABORTED:
                return completion
            num_before = len(completion.token_ids)
            rest = await generate(
                (*token_ids, *completion.token_ids),
                number_from(f"{seed}/{num_before}") if num_before else seed,
                max_tokens=limit - num_before,
            )
            completion = joined(completion, rest, self.decode)
            num_tokens = len(completion.token_ids)
            if completion.finish_reason == ABORTED and num_tokens >= limit:
                completion = replace(completion, finish_reason="length")
            if completion.finish_reason == ABORTED and num_tokens:
                self.meter.completions += 1
                self.meter.tokens += num_tokens
            if not self.streams:
                self._begun[seed] = completion

    def begin_round(self, step: int) -> None:
        """Let the requests of a step's round begin, where the one before has ended."""
        if not self.streams:
            self.go_on(step)

    def finish(self, group: Group, step: int) -> bool:
        """Forget what was kept of a group that is whole; return whether it is young enough for this step."""
        for seed in self._seeds(group.draw):
            self._begun.pop(seed, None)
        return group.first_version >= step - self.max_age

    async def end_round(self) -> None:
        """End the groups that are not whole, which the next round starts again; a stream's go on."""
        self.meter.groups = len(self.groups)
        if not self.streams:
            self.again = self.unfinished
            await self.close()

    async def close(self) -> None:
        async with ending(list(self.groups)):
            self.groups.clear()

    @property
    def unfinished(self) -> list[Draw]:
        """The draws of the groups that are not whole, the oldest first."""
        return sorted([*self.again, *self.groups.values()], key=lambda draw: draw.position)

    def state_dict(self) -> list[JsonObject]:
        return [
            {
                "draw": to_json(draw),
                "begun": {
                    str(seed): to_json(self._begun[seed])
                    for seed in self._seeds(draw)
                    if seed in self._begun
                },
            }
            for draw in self.unfinished
        ]

    def load_state_dict(self, state: Sequence[Record]) -> None:
        self.again = [from_json(Draw, group["draw"]) for group in state]
        self._begun = {
            int(seed): from_json(Completion, completion)
            for group in state
            for seed, completion in group["begun"].items()
        }

    def _seeds(self, draw: Draw) -> list[int]:
        return [
            completion_seed(self.seed, draw.position, index) for index in range(self.group_size)
        ]
