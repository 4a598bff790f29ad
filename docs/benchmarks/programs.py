"""How long a fresh program takes in the sandbox: `python docs/benchmarks/programs.py [--repeats 100] [--levels ...]`.

The kinds take turns, so that other work on the machine meets all of them alike. Beside each median stands the processor
time of one program with all that its server did for it, which hardly depends on what else the machine does.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from ycore.rewards.code import CodeSettings, UnitTests
from ycore.sandbox import Level
from ycore.sandbox.program_pool import ProgramPool

PROGRAM = "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n"
EXAM = UnitTests(tests=("assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]"))
REQUEST = EXAM.request(CodeSettings(timeout_s=30.0))


async def bare() -> None:
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", PROGRAM], stdout=subprocess.DEVNULL, check=True
    )


def processor_s() -> float:
    """Add up the seconds of all processes below this one, those that ended included."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        own_s = 0.0 if process.pid == psutil.Process().pid else times.user + times.system
        total += own_s + times.children_user + times.children_system
    return total


async def measure(levels: list[str], repeats: int) -> None:
    kinds: dict[str, Callable[[], Awaitable[object]]] = {"python -I -S, no sandbox": bare}
    pools = []
    with tempfile.TemporaryDirectory() as folder:
        for level in levels:
            pool = ProgramPool(
                Level(level), at_once=1, log=Path(folder) / "log", run_id="benchmark"
            )
            await pool.start()
            pools.append(pool)
            kinds[f"{level}: a script"] = lambda pool=pool: pool.run(PROGRAM, deadline_s=30.0)
            kinds[f"{level}: two asserts"] = lambda pool=pool: pool.run_tests(
                PROGRAM, REQUEST, deadline_s=60.0
            )
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        processor: dict[str, float] = dict.fromkeys(kinds, 0.0)
        for _ in range(repeats):
            for name, work in kinds.items():
                before, began = processor_s(), time.perf_counter()
                await work()
                seconds[name].append(time.perf_counter() - began)
                processor[name] += processor_s() - before
        for pool in pools:
            await pool.close()
    print(f"{'':32}{'median':>10}{'least':>10}{'processor':>11}  (ms, {repeats} each)")
    for name, values in seconds.items():
        times = (statistics.median(values), min(values), processor[name] / repeats)
        print(f"{name:32}" + "".join(f"{1e3 * value:>10.1f}" for value in times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--levels", nargs="*", default=["namespaces"])
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.levels, arguments.repeats))


if __name__ == "__main__":
    main()
