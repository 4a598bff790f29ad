"""Speculative decoding on a CPU, with and without: seconds of the same work by two engines, in turn, on one core.

    python docs/benchmarks/drafts.py --output runs/drafts

Tables: greedy completions that go on with a table of the prompt, one at a time, as where an evaluation repeats itself.
Sums: greedy answers of the quickstart's prompts, sixteen at once. Stories: sampled at temperature 1, one at a time and
sixteen at once. A first pass over the work is not counted.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from machine import describe_machine
from placement_engines import served
from transformers import AutoTokenizer

from ycore.engine import SamplingParams
from ycore.engine.commands import EngineSpec
from ycore.engine.vllm_engine import VllmEngine
from ycore.models.fetch import fetch_model
from ycore.models.names import resolve_model
from ycore.run.paths import RunFolder

_CITIES = ("Paris", "Lima", "Oslo", "Cairo", "Quito", "Hanoi", "Accra", "Sofia")


@dataclass(frozen=True, slots=True)
class Work:
    name: str
    prompts: Sequence[str]
    tokens: int
    at_once: int
    greedy: bool


def works() -> list[Work]:
    row = "{{'name': 'person {}', 'city': '{}', 'is_member': True, 'visits': 0}}\n"
    tables = ["".join(row.format(number, city) for number in range(4)) for city in _CITIES]
    sums = [f"{a} + {b} =" for a in range(8) for b in range(8)]
    stories = [f"Once upon a time in {city}, a child found" for city in _CITIES]
    return [
        Work("tables, greedy, one at a time", tables, 96, 1, greedy=True),
        Work("sums, greedy, sixteen at once", sums, 16, 16, greedy=True),
        Work("stories, sampled, one at a time", stories, 64, 1, greedy=False),
        Work("stories, sampled, sixteen at once", stories * 4, 64, 16, greedy=False),
    ]


async def seconds_of(engine: VllmEngine, work: Work, prompts: Sequence[Sequence[int]]) -> float:
    """Return the seconds of one pass over the prompts."""
    seats = asyncio.Semaphore(work.at_once)

    async def complete(seed: int, prompt: Sequence[int]) -> None:
        async with seats:
            await engine.complete(prompt, seed, greedy=work.greedy, max_tokens=work.tokens)

    began = time.perf_counter()
    await asyncio.gather(*(complete(seed, prompt) for seed, prompt in enumerate(prompts)))
    return time.perf_counter() - began


async def compare(
    engines: Sequence[VllmEngine], tokenizer: object, repeats: int
) -> dict[str, object]:
    """Do each work with the engine without drafts and the one with them, in turn."""
    results: dict[str, object] = {}
    for work in works():
        prompts = [tokenizer.encode(text) for text in work.prompts]  # type: ignore[attr-defined]
        seconds: list[list[float]] = []
        for number in range(1 + repeats):
            if number == 1:
                await engines[1].take_drafts()
            seconds.append([await seconds_of(engine, work, prompts) for engine in engines])
        drafted, accepted = await engines[1].take_drafts()
        ratios = [plain / with_drafts for plain, with_drafts in seconds[1:]]
        results[work.name] = {
            "without_s": [round(plain, 2) for plain, _ in seconds[1:]],
            "with_s": [round(with_drafts, 2) for _, with_drafts in seconds[1:]],
            "times": round(statistics.median(ratios), 3),
            "drafted": drafted,
            "accepted": accepted,
        }
    for engine in engines:
        await engine.close()
    return results


@contextmanager
def running(model: Path, drafts: Sequence[int], output: Path) -> Iterator[list[VllmEngine]]:
    """An engine for each, all on the same core, since only one works at a time."""
    folder = RunFolder(Path(tempfile.mkdtemp(prefix="ycore-drafts-")))
    specs = [
        EngineSpec(
            name=f"rollout-{number}", model=model, socket=folder.socket(f"rollout-{number}"),
            temporary=folder.temporary, run_id=folder.run_id, dtype="bfloat16", max_model_len=512, max_num_seqs=16,
            seed=0, cores=(max(os.sched_getaffinity(0)),), drafts=num_drafts,
        )
        for number, num_drafts in enumerate(drafts)
    ]  # fmt: skip
    with served(folder, specs, output):
        sampling = SamplingParams(max_tokens=96)
        yield [
            VllmEngine(
                spec.name, spec.socket, sampling, request_timeout_s=600, drafts=spec.drafts > 0
            )
            for spec in specs
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafts", type=int, default=4, help="tokens that a pass checks")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("runs/drafts"))
    job = parser.parse_args()
    job.output.mkdir(parents=True, exist_ok=True)
    model = fetch_model(
        resolve_model(job.model, trust_remote_code=False), log=job.output / "model.log"
    )
    with running(model, (0, job.drafts), job.output) as engines:
        results = asyncio.run(
            compare(engines, AutoTokenizer.from_pretrained(model), job.repeats)
        )
    results = {"machine": describe_machine(), "drafts": job.drafts, **results}
    (job.output / "results.json").write_text(json.dumps(results, indent=2))
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
