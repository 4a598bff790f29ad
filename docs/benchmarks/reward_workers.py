"""Measure what confinement costs a reward worker: seconds to start, and microseconds a call, at each level.

    python docs/benchmarks/reward_workers.py namespaces landlock none

A call has 8 completions of 2 kB. Every round takes the levels in turn, so that other work on the machine meets all.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from ycore.config.schema import RewardConfig, RewardSettings, RunConfig, SandboxSettings
from ycore.run.files import RunFolder
from ycore.sandbox.level import choose_level
from ycore.scoring.scoring import RewardPool

REWARD = "def length(completions, **columns):\n    return [float(len(text)) for text in completions]\n"
NUM_CALLS = 500


async def measure(level: str, folder: Path) -> tuple[float, list[float]]:
    """Return the seconds until one worker is ready, and those of each call."""
    config = RunConfig(
        model="none",
        dataset="none",
        output=str(folder / "run"),
        rewards=[RewardConfig(reward=f"{folder / 'length.py'}:length")],
        reward_workers=RewardSettings(workers=1),
        sandbox=SandboxSettings.model_validate({"level": level}),
    )
    pool = RewardPool(config, RunFolder(Path(config.output)), config.rewards)
    offered = {
        "prompts": ["?"] * 8,
        "completions": ["x" * 2000] * 8,
        "completion_ids": [[1] * 500] * 8,
        "answer": ["1"] * 8,
    }
    calls = []
    began = time.perf_counter()
    try:
        await pool.start()
        started_s = time.perf_counter() - began
        for _ in range(NUM_CALLS):
            began = time.perf_counter()
            await pool.score(0, offered, step=1)
            calls.append(time.perf_counter() - began)
    finally:
        await pool.close()
    return started_s, calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("levels", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    starts: dict[str, list[float]] = {level: [] for level in arguments.levels}
    calls: dict[str, list[float]] = {level: [] for level in arguments.levels}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "length.py").write_text(REWARD, encoding="utf-8")
        for level in arguments.levels:
            choose_level(level)  # its self-test is not part of a start
        for _ in range(arguments.rounds):
            for level in arguments.levels:
                started_s, took = asyncio.run(measure(level, Path(folder)))
                starts[level].append(started_s)
                calls[level] += took
    for level in arguments.levels:
        least, middle = min(starts[level]), statistics.median(starts[level])
        print(f"{level:<11} start {least:.2f} s (median {middle:.2f} s)", end=", ")
        print(
            f"call {min(calls[level]) * 1e6:.0f} us (median {statistics.median(calls[level]) * 1e6:.0f} us)"
        )


if __name__ == "__main__":
    main()
