"""The speed of one core and of all cores of this machine, with torch, in a few seconds: the calibration of a plan.

    python docs/benchmarks/processor_speed.py

It times matrix products of the widths that small models have, and a copy. The plan's formulas need no more.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

ROWS, WIDTHS = 512, ((576, 1536), (960, 2560))
_COPY_BYTES = 128 * 2**20
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Speed:
    """Operations and bytes a second."""

    threads: int
    bfloat16: float
    float32: float
    copy: float


def measure(threads: int) -> Speed:
    """Measure the speed of so many threads, now; take the median of a few tries."""
    import torch

    torch.set_num_threads(threads)
    products = {
        dtype: statistics.mean(_product(dtype, *width, threads=threads) for width in WIDTHS)
        for dtype in ("bfloat16", "float32")
    }
    source = torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    copy = 2.0 * _COPY_BYTES / _median_s(lambda: target.copy_(source), threads)
    return Speed(threads, products["bfloat16"], products["float32"], copy)


def _product(dtype: str, inner: int, outer: int, *, threads: int) -> float:
    import torch

    left = torch.rand(ROWS, inner).to(getattr(torch, dtype))
    right = torch.rand(outer, inner).to(getattr(torch, dtype))
    return (
        2.0
        * ROWS
        * inner
        * outer
        / _median_s(lambda: torch.nn.functional.linear(left, right), threads)
    )


def _median_s(work: Callable[[], Any], threads: int) -> float:
    """Return processor seconds a thread, which others at work on the machine disturb little."""
    work()
    seconds = []
    for _ in range(_REPEATS):
        began = time.process_time()
        work()
        seconds.append((time.process_time() - began) / threads)
    return statistics.median(seconds)


if __name__ == "__main__":
    import os

    for count in sorted({1, len(os.sched_getaffinity(0))}):
        print(json.dumps(asdict(measure(count))))
