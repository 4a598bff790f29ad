"""Which prompt comes next on this rank: the run's order, cut into shards, with a cursor that a checkpoint can hold.

Not here: the order itself (`data.order`) and what is done with a prompt (`round`).
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ycore.data.order import PromptOrder
from ycore.errors import DataError
from ycore.types import Draw, Prompt

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
