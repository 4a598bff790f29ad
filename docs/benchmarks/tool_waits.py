"""Measure what slow tools cost a round: its seconds over those that its longest completion, or its engines, need anyway.

    python docs/benchmarks/tool_waits.py --seconds 0 0.5 5

A run of `ycore grpo` with a calculator that sleeps. 8 prompts with 8 completions, of which most call it (two worked
examples), all at once. A completion needs the seconds of its requests, from the trace, and those that its calls sleep.
An engine needs the seconds in which it has a request. The larger of the two longest is what the round needs. The first
step is not counted. The memory is that of all processes with tools together, at its largest (PSS).
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml
from machine import describe_machine
from simulator.recording import read_trace

from ycore.rollout.turns import completion_seed
from ycore.run.files import RunFolder
from ycore.run.metrics import read_metrics
from ycore.run.trace import Span

_TOOL = '''
import time


def add(x: int, y: int) -> int:
    """Add two numbers.

    Args:
        x: The first number.
        y: The second number.
    """
    time.sleep({seconds})
    return x + y
'''
_EXAMPLES = [
    {"role": role, "content": text}
    for a, b in ((120, 307), (514, 232))
    for role, text in (
        ("user", f"What is {a} + {b}?"),
        ("assistant", f"add({a}, {b})"),
        ("user", str(a + b)),
        ("assistant", str(a + b)),
    )
]


def recipe(tool: Path, output: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": arguments.model,
        "dataset": "task:addition?digits=3",
        "rewards": [{"reward": "exact_answer"}],
        "tools": [f"{tool}:add"],
        "turns": {"actions": "calls", "at_once": arguments.at_once, "call_s": 60},
        "max_turns": 2,
        "few_shot": _EXAMPLES,
        "output": str(output),
        "prompts_per_step": arguments.prompts,
        "group_size": 8,
        "max_tokens": 64,
        "steps": arguments.steps,
        "sampling": {"dynamic": False},
        "trl": {"learning_rate": 1e-6, "beta": 0.0},
    }


def needed_s(
    spans: Iterable[Span], turns: Mapping[int, tuple[int, int, int]], call_s: float
) -> tuple[float, float]:
    """Return the seconds that the longest completion and the busiest engine need.

    `turns`: place, index and turn of each seed.
    """
    chains: dict[tuple[int, int], float] = defaultdict(float)
    busy: dict[int, float] = defaultdict(float)
    until: dict[int, float] = defaultdict(float)
    for span in sorted(spans, key=lambda span: span.began):
        place, index, turn = turns[span.details["seed"]]
        chains[place, index] += span.seconds + (call_s if turn else 0.0)
        end = span.began + span.seconds
        busy[span.slot] += max(0.0, end - max(span.began, until[span.slot]))
        until[span.slot] = max(until[span.slot], end)
    return max(chains.values()), max(busy.values())


def tools_mib(run: psutil.Process) -> tuple[int, float]:
    """Count the processes with tools, and add up their memory."""
    memory_bytes = []
    for process in run.children(recursive=True):
        try:
            if any("tool_host" in word for word in process.cmdline()):
                memory_bytes.append(process.memory_full_info().pss)
        except psutil.Error:
            continue
    return len(memory_bytes), sum(memory_bytes) / 2**20


def measure(seconds: float, arguments: argparse.Namespace) -> None:
    place = arguments.output / f"{seconds:g}s"
    place.mkdir(parents=True)
    (place / "tools.py").write_text(_TOOL.format(seconds=seconds))
    (place / "recipe.yaml").write_text(
        yaml.safe_dump(recipe(place / "tools.py", place / "run", arguments))
    )
    command = [sys.executable, "-c", "from ycore_cli.main import main; main()", "grpo"]
    command += ["--recipe", str(place / "recipe.yaml"), "--engine", arguments.engine]
    most = (0, 0.0)
    with (
        (place / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as run,
    ):
        while run.poll() is None:
            most = max(most, tools_mib(psutil.Process(run.pid)))
            time.sleep(1.0)
    if run.returncode:
        raise SystemExit(f"the run failed: {(place / 'log').read_text()[-500:]}")
    folder = RunFolder(place / "run")
    positions = range(arguments.prompts * arguments.steps)
    turns = {
        completion_seed(0, at, index, turn): (at, index, turn)
        for at in positions
        for index in range(8)
        for turn in range(2)
    }
    spans = [span for span in read_trace(folder.trace) if span.details.get("seed") in turns]
    rows = []
    for step, row in list(enumerate(read_metrics(folder.metrics)))[1:]:
        step_spans, called = [], set[tuple[int, int]]()
        for span in spans:
            position, index, turn = turns[span.details["seed"]]
            if position // arguments.prompts == step:
                step_spans.append(span)
                if turn:
                    called.add((position, index))
        chain_s, engines_s = needed_s(step_spans, turns, seconds)
        rows.append((row["ycore/time/round"], chain_s, engines_s, len(called)))
    round_s, chain_s, engines_s, num_called = (
        statistics.median(values) for values in zip(*rows, strict=True)
    )
    ratio = statistics.median(row[0] / max(row[1:3]) for row in rows)
    print(
        f"| {seconds:g} | {num_called:.0f} of {arguments.prompts * 8} | {round_s:.2f} | {chain_s:.2f} | {engines_s:.2f} "
        f"| {ratio:.2f} | {most[0]}, {most[1]:.0f} MiB |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, nargs="+", default=[0.0, 0.5, 5.0], help="that a call sleeps"
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--engine", default="auto")
    parser.add_argument(
        "--prompts", type=int, default=8, help="a step, with 8 completions each"
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=64, help="processes with tools")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    machine = describe_machine()
    print(
        f"Machine: {machine['cores']} cores of {machine['processor']}. Medians of {arguments.steps - 1} steps.\n"
    )
    print(
        "| tool, s | call | round, s | longest completion, s | busiest engine, s | round over need | tools |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for seconds in arguments.seconds:
        measure(seconds, arguments)


if __name__ == "__main__":
    main()
