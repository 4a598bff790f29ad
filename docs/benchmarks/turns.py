"""Measure what a turn on a slot costs: from asking for it to having it, and the work of the allocator's process.

    python docs/benchmarks/turns.py --ranks 1 8 64

These parts are real: the ranks' processes, their slots and lines (`ycore.round`), the socket, and the allocator's
process. The engines are waits of a second on the mean. There are as many slots as ranks, half of them for rollouts and
half for a judge, with room for 32 requests each. One rank has one role, and the allocator in its own process.

A turn's time is that between asking and getting it, where slots have room. `--at-once` repeats it without any wait, so
that the allocator has as much to do as it can; that shows how many turns a second it can give. Needs `fork`. On a busy
machine `chrt --rr 1 python ...` keeps other processes out of the figures.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from machine import describe_machine

from ycore.placement.placement import JUDGE, ROLLOUT, Placement, SlotPool
from ycore.placement.service import RemoteAllocator
from ycore.placement.slots import Slots

ROLES = (ROLLOUT, JUDGE)
CAPACITY = 32
FORK = multiprocessing.get_context("fork")


async def play(slots: Slots, *, workers: int, mean_s: float, seconds: float) -> list[float]:
    """Return the seconds of every turn that `workers` took side by side."""
    waited: list[float] = []

    async def work(number: int) -> None:
        dice = random.Random(number)
        await asyncio.sleep(dice.random() * mean_s)
        while time.perf_counter() < until:
            asked_at = time.perf_counter()
            async with slots.turn(ROLES[number % 2]) as slot:
                waited.append(time.perf_counter() - asked_at)
                await asyncio.sleep(mean_s * dice.uniform(0.5, 1.5) if mean_s else 0)
                slot.num_tokens = 100

    await slots.open(timeout_s=60)
    async with slots.round():
        until = time.perf_counter() + seconds
        await asyncio.gather(*(work(number) for number in range(workers)))
    slots.close()
    return waited


def run_rank(
    rank: int, num_ranks: int, socket: Path, job: dict[str, Any], answer: Path
) -> None:
    """Run one rank in its process."""
    remote = None
    if num_ranks > 1:
        half = Placement("split", (num_ranks // 2, num_ranks - num_ranks // 2))
        pool = SlotPool(num_ranks, ROLES, dict.fromkeys(ROLES, CAPACITY))
        remote = RemoteAllocator(socket, pool, half, rank=rank, num_ranks=num_ranks)
    answer.write_text(
        json.dumps(asyncio.run(play(Slots(num_ranks, allocator=remote, rank=rank), **job)))
    )


def measure(num_ranks: int, job: dict[str, Any]) -> dict[str, float]:
    """Run all ranks at once, and leave nothing of them."""
    with tempfile.TemporaryDirectory(prefix="yc-") as place:
        folder = Path(place)
        command = [
            sys.executable,
            "-m",
            "ycore.placement.service",
            str(folder / "allocator.sock"),
            str(num_ranks),
        ]
        service = subprocess.Popen(command)
        answers = [folder / f"rank-{rank}.json" for rank in range(num_ranks)]
        ranks = [
            FORK.Process(
                target=run_rank, args=(rank, num_ranks, folder / "allocator.sock", job, answer)
            )
            for rank, answer in enumerate(answers)
        ]
        try:
            allocator, used = psutil.Process(service.pid), 0.0
            for process in ranks:
                process.start()
            before, began = sum(allocator.cpu_times()[:2]), time.perf_counter()
            while any(process.is_alive() for process in ranks):
                if service.poll() is None:  # it ends with the last rank
                    used = sum(allocator.cpu_times()[:2]) - before
                time.sleep(0.01)
            took = time.perf_counter() - began
            if any(process.exitcode for process in ranks):
                raise RuntimeError("a rank failed")
            waited = list[float]()
            for answer in answers:
                waited += json.loads(answer.read_text())
            waited.sort()
        finally:
            for process in ranks:
                process.kill()
            service.kill()
            service.wait()
    return {
        "ranks": num_ranks,
        "turns": len(waited),
        "turns_per_s": len(waited) / took,
        "median_us": statistics.median(waited) * 1e6,
        "p95_us": waited[int(0.95 * (len(waited) - 1))] * 1e6,
        "allocator_cores": used / took if num_ranks > 1 else 0.0,
        "allocator_us_per_turn": used / len(waited) * 1e6 if num_ranks > 1 else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument(
        "--workers", type=int, default=8, help="requests that a rank has in flight"
    )
    parser.add_argument("--mean", type=float, default=1.0, help="mean seconds of a request")
    parser.add_argument("--at-once", action="store_true", help="measure without any wait too")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    arguments = parser.parse_args()
    machine = describe_machine()
    print(f"Machine: {machine['cores']} cores of {machine['processor']}.\n")
    print(
        "| ranks and slots | load | turns/s | median, us | 95 %, us | allocator: cores | us of it a turn |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    loads = [
        (f"{arguments.workers} a rank, {arguments.mean:g} s each", arguments.mean),
        ("at once", 0.0),
    ]
    for load, mean_s in loads if arguments.at_once else loads[:1]:
        for num_ranks in arguments.ranks:
            job = {"workers": arguments.workers, "mean_s": mean_s, "seconds": arguments.seconds}
            figures = measure(num_ranks, job)
            print(
                f"| {num_ranks} | {load} | {figures['turns_per_s']:.0f} | {figures['median_us']:.0f} | "
                f"{figures['p95_us']:.0f} | {figures['allocator_cores']:.2f} | {figures['allocator_us_per_turn']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
