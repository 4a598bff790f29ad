"""Three settings of engines on a CPU, each with and without: a core that is forked, blocks of 32 tokens, a short spin.

    python docs/benchmarks/engine_settings.py --output runs/settings
    python docs/benchmarks/engine_settings.py --output runs/settings --only starts --repeats 3

Starts: four engines, two on each of two cores, until all of them answer; vLLM's engine cores are spawned and forked in
turn.

Blocks: eight prompts of 40, 70 and 140 tokens, eight completions of 24 tokens each, on one core, with vLLM's blocks of
128 tokens and with ycore's. A prompt is read once for all of its completions, as far as it fills blocks.

Spin: two engines with two threads each on the same two cores, eight completions of 24 tokens from each, one engine
after the other and both at the same time, with libgomp's default spin and with ycore's setting when engines share
cores.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import placement_engines
from machine import describe_machine
from placement_engines import Engines, SeededEngine, clients, engines_running

from ycore.engine.commands import EngineSpec
from ycore.engine.vllm_plugin import FORKED

_TOKENS, _GROUPS, _GROUP_SIZE = 24, 8, 8
_PROMPTS = (40, 70, 140)


@contextmanager
def changed(
    job: argparse.Namespace,
    output: Path,
    *,
    words: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
    cores: tuple[int, ...] | None = None,
) -> Iterator[Engines]:
    """Run the engines of `placement` with other options, other variables or more cores than ycore gives them."""
    command, environment, plan = (
        placement_engines.engine_command, placement_engines.engine_environment, placement_engines._engine,
    )  # fmt: skip

    def with_words(engine: EngineSpec) -> list[str]:
        return [*command(engine), *(word for item in (words or {}).items() for word in item)]

    def with_cores(*arguments: object) -> EngineSpec:
        engine = plan(*arguments)  # type: ignore[arg-type]
        return replace(engine, cores=cores or engine.cores)

    try:
        placement_engines.engine_command = with_words
        placement_engines.engine_environment = lambda engine: {
            **environment(engine),
            **(variables or {}),
        }
        placement_engines._engine = with_cores
        with engines_running(job, output) as sockets:
            yield clients(sockets, length_of=lambda seed: _TOKENS)
    finally:
        placement_engines.engine_command = command
        placement_engines.engine_environment = environment
        placement_engines._engine = plan


async def seconds_of(work: Callable[[], Awaitable[object]], *, repeats: int) -> list[float]:
    """Time `repeats` calls, after one that warms up."""
    seconds = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        await work()
        seconds.append(round(time.perf_counter() - began, 3))
    return seconds[1:]


async def write_groups(
    engine: SeededEngine, prompt_tokens: int, *, groups: int = _GROUPS
) -> None:
    """Write `_GROUP_SIZE` completions of each of so many prompts that nobody has read before."""
    prompts = [[random.randrange(3, 9000) for _ in range(prompt_tokens)] for _ in range(groups)]
    requests = [(prompt, seed) for prompt in prompts for seed in range(_GROUP_SIZE)]
    await asyncio.gather(*(engine.write(prompt, seed, _TOKENS) for prompt, seed in requests))


async def blocks(engine: SeededEngine, repeats: int) -> dict[str, list[float]]:
    return {
        str(tokens): await seconds_of(
            lambda tokens=tokens: write_groups(engine, tokens), repeats=repeats
        )  # type: ignore[misc]
        for tokens in _PROMPTS
    }


async def spin(engines: Sequence[SeededEngine], repeats: int) -> dict[str, list[float]]:
    async def in_turn() -> None:
        for engine in engines:
            await write_groups(engine, _TOKENS, groups=1)

    async def at_once() -> None:
        await asyncio.gather(*(write_groups(engine, _TOKENS, groups=1) for engine in engines))

    return {
        "in turn": await seconds_of(in_turn, repeats=repeats),
        "at once": await seconds_of(at_once, repeats=repeats),
    }


def time_starts(job: argparse.Namespace) -> Iterator[tuple[str, object]]:
    seconds: dict[str, list[float]] = {"spawned": [], "forked": []}
    for _ in range(job.repeats):
        for start_method, value in zip(seconds, ("0", "1"), strict=True):
            began = time.perf_counter()
            with changed(job, job.output, variables={FORKED: value}):
                seconds[start_method].append(round(time.perf_counter() - began, 1))
    yield from seconds.items()


def time_blocks(job: argparse.Namespace) -> Iterator[tuple[str, object]]:
    for size in ("128", "32"):
        with changed(job, job.output, words={"--block-size": size}) as engines:
            yield f"blocks of {size}", asyncio.run(blocks(engines.rollouts[0], job.repeats))


def time_spin(job: argparse.Namespace) -> Iterator[tuple[str, object]]:
    for name, variables in (("libgomp's spin", {}), ("short spin", {"GOMP_SPINCOUNT": "1000"})):
        with changed(job, job.output, variables=variables, cores=(0, 1)) as engines:
            yield name, asyncio.run(spin([engines.rollouts[0], engines.judges[0]], job.repeats))


PARTS = {"starts": time_starts, "blocks": time_blocks, "spin": time_spin}


def main() -> None:
    job = parse_arguments()
    job.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, object] = {"machine": describe_machine()}
    for part in job.only:
        results |= PARTS[part](job)
    (job.output / "results.json").write_text(json.dumps(results, indent=2))
    print(json.dumps(results, indent=2))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/settings"))
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    sizes = {
        "longest": 256,
        "prompt_tokens": 140,
        "judge_reads": 140,
        "judge_tokens": _TOKENS,
        "max_num_seqs": 64,
    }
    return argparse.Namespace(**sizes, **vars(parser.parse_args()))


if __name__ == "__main__":
    main()
