"""Streams in virtual time beside published ones: what `--max-staleness K` gives where half of the GPUs write.

    python docs/benchmarks/published_stream.py

The published steps are verl's (docs/advance/fully_async.md): Qwen2.5-Math-7B on H20, DAPO, 512 prompts of 16 completions
with up to 28,000 tokens, in turns on all GPUs, and fully asynchronous on two halves with a staleness threshold of 0.5.
Lengths are lognormal; their mean is what makes a round in turns as long as the published one. A quarter of the prompts
is played on a quarter of the GPUs.
"""

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.speeds import Speed
from simulator.tails import LengthsAt, Steps, Stream, round_seconds

_PART = 4
_NUM_PROMPTS = 512 // _PART
_GROUP_SIZE = 16
_MAX_TOKENS = 28_000
_SIGMA = 0.8
_SPEED = Speed(
    0.010, 0.00004
)  # of a 7B model: its weights, and its keys and values, at H20's bandwidth


@dataclass(frozen=True, slots=True)
class Published:
    """Seconds of a step and its parts."""

    num_gpus: int
    in_turns: float
    generate: float  # in turns, on all GPUs
    asynchronous: float
    update: float  # on half of the GPUs


PUBLISHED = (
    Published(32, in_turns=790.1, generate=357.41, asynchronous=294.77, update=269.8),
    Published(64, in_turns=365.28, generate=150.72, asynchronous=189.26, update=156.98),
    Published(128, in_turns=356.3, generate=177.85, asynchronous=150.63, update=113.16),
)


def lognormal(mean: float) -> LengthsAt:
    center = math.log(mean) - _SIGMA**2 / 2

    def at(position: int) -> list[float]:
        source = random.Random(position)
        drawn = [math.exp(source.gauss(center, _SIGMA)) for _ in range(_GROUP_SIZE)]
        return [max(1.0, min(_MAX_TOKENS, length)) for length in drawn]

    return at


def steps_of(published: Published, num_steps: int) -> Steps:
    # All slots would train in half of the time of one half of them.
    return Steps(
        _SPEED,
        num_slots=published.num_gpus // _PART,
        need=_NUM_PROMPTS,
        train_s=published.update / 2,
        swap_s=0.0,
        num_steps=num_steps,
    )


def mean_length(published: Published) -> float:
    """Return the mean length with which a round on all GPUs takes as long as the published one."""
    low, high = 50.0, 20_000.0
    for _ in range(12):
        mean = math.sqrt(low * high)
        if round_seconds(steps_of(published, 2), lognormal(mean)) < published.generate:
            low = mean
        else:
            high = mean
    return math.sqrt(low * high)


def played(published: Published, limits: Sequence[int], num_steps: int) -> list[float]:
    """Return the seconds of a step for each bound of staleness."""
    lengths_at = lognormal(mean_length(published))
    steps = steps_of(published, num_steps)
    half = steps.num_slots // 2
    return [Stream(steps, lengths_at, limit, half).play().seconds for limit in limits]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-staleness", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    for published in PUBLISHED:
        seconds = played(published, arguments.max_staleness, arguments.steps)
        limits = [
            f"K = {limit} {step_s:.0f} s ({published.in_turns / step_s:.2f} times as fast)"
            for limit, step_s in zip(arguments.max_staleness, seconds, strict=True)
        ]
        print(
            f"{published.num_gpus} GPUs: in turns {published.in_turns:.0f} s, published "
            f"{published.asynchronous:.0f} s ({published.in_turns / published.asynchronous:.2f} times); played "
            f"{', '.join(limits)}"
        )


if __name__ == "__main__":
    main()
