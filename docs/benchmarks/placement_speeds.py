"""The speeds of the engines of `placement` without a round: a decoding step at several depths, and reading a prompt.

All engines of a role get requests at once, one on each slot, as in a round, because two cores share the memory's
bandwidth. The speeds are measured before, between and after the rounds, because such a machine is not equally fast all
the time.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from placement_engines import SeededEngine
from simulator.recording import Steps

DEPTHS = (1, 4, 8, 16, 32, 64, 96)
_FEW, _MANY = 4, 24
_MOST_READ = 16_000  # prompt tokens of a slot at one time: deeper than that takes minutes, and a round is seldom there


@dataclass(frozen=True, slots=True)
class Measured:
    """One role's engines; `reading_s`: reading one prompt, during which the others of its engine wait."""

    speed: Steps
    reading_s: float

    def as_json(self) -> dict[str, Any]:
        speed = {
            "base": self.speed.base,
            "each": self.speed.per_request,
            "depths": self.speed.depths,
            "seconds": self.speed.seconds,
        }
        return {"speed": speed, "reading_s": self.reading_s}


def mean_of(several: Sequence[Measured]) -> Measured:
    depths = several[0].speed.depths
    by_depth = zip(*(measured.speed.seconds for measured in several), strict=True)
    seconds = tuple(map(statistics.fmean, by_depth))
    reading_s = statistics.fmean(measured.reading_s for measured in several)
    return Measured(_steps(depths, seconds), reading_s)


def _steps(depths: Sequence[int], seconds: Sequence[float]) -> Steps:
    per_request, base = np.polyfit(depths, seconds, 1)
    return Steps(float(base), float(per_request), tuple(depths), tuple(seconds))


async def measure(
    engines: Sequence[SeededEngine], prompt_tokens: int, depths: Sequence[int] = DEPTHS
) -> Measured:
    """Measure for a few seconds at each depth; the first requests only warm up."""
    await _seconds(engines, 2, _FEW, prompt_tokens)
    depths, steps, reads = (
        [depth for depth in depths if depth * prompt_tokens <= _MOST_READ or depth <= 8],
        [],
        [],
    )
    for depth in depths:
        few = await _seconds(engines, depth, _FEW, prompt_tokens)
        many = await _seconds(engines, depth, _MANY, prompt_tokens)
        steps.append((many - few) / (_MANY - _FEW))
        reads.append((few - (_FEW - 1) * steps[-1]) / depth)  # reading gives the first token
    return Measured(_steps(depths, steps), max(0.0, statistics.median(reads)))


async def _seconds(
    engines: Sequence[SeededEngine], depth: int, length: int, prompt_tokens: int
) -> float:
    """Return the mean seconds until a slot has written so many tokens for each of `depth` prompts that are new to it."""

    async def seconds_on(engine: SeededEngine) -> float:
        prompts = [
            [random.randrange(3, 9000) for _ in range(prompt_tokens)] for _ in range(depth)
        ]
        began = time.perf_counter()
        await asyncio.gather(*(engine.write(prompt, 0, length) for prompt in prompts))
        return time.perf_counter() - began

    return statistics.fmean(await asyncio.gather(*(seconds_on(engine) for engine in engines)))
