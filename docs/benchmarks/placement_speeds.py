"""How fast the engines of `placement` are before a round is played: a step at three depths, and reading a prompt.

All engines of a role are asked at once, one on each slot, as in a round: two cores share the memory's bandwidth.

Not here: the engines (`placement_engines`), and what is predicted from this (`placement`).
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from placement_engines import SeededEngine

from ycore.placement.load import Speed

_DEPTHS = (1, 4, 12, 32)
_FEW, _MANY = 4, 28


@dataclass(frozen=True, slots=True)
class Measured:
    """One role's engines. `steps_s[depth]`: a decoding step; `reading_s`: one prompt, while others wait."""

    steps_s: dict[int, float]
    speed: Speed
    reading_s: float


async def measure(engines: Sequence[SeededEngine], prompt_tokens: int) -> Measured:
    """A few seconds a depth; the first requests only warm up."""
    await _seconds(engines, 2, _FEW, prompt_tokens)
    steps, reads = {}, {}
    for depth in _DEPTHS:
        few = await _seconds(engines, depth, _FEW, prompt_tokens)
        many = await _seconds(engines, depth, _MANY, prompt_tokens)
        steps[depth] = (many - few) / (_MANY - _FEW)
        reads[depth] = (few - _FEW * steps[depth]) / depth
    each, base = np.polyfit(list(steps), list(steps.values()), 1)
    return Measured(steps, Speed(max(0.0, float(base)), float(each)), max(0.0, float(np.median(list(reads.values())))))


async def _seconds(engines: Sequence[SeededEngine], depth: int, length: int, prompt_tokens: int) -> float:
    """Until the slower slot has written so many tokens for each of `depth` prompts that nobody has read before."""
    began = time.perf_counter()
    await asyncio.gather(
        *(
            engine.write([3 + (time.perf_counter_ns() + place) % 9000 for place in range(prompt_tokens)], 0, length)
            for engine in engines
            for _ in range(depth)
        )
    )
    return time.perf_counter() - began
