"""Weights that change in the middle of completions: keys and values computed anew, or kept. A real vLLM, on one core.

    python docs/benchmarks/swap.py

With each method the same requests are in flight when the weights come. `anew` is what ycore does: they are aborted,
and go on as new requests behind what was written. `kept` pauses vLLM (`mode=keep`), and they go on over the old keys
and values. `seconds` is from the first request to the last token, `swap_s` how much longer than without a swap. `gap` is
the mean distance, in nats, between the log-probability that was recorded for a token behind the swap and that of the new
weights.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from machine import describe_machine
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # for the tests' way to start an engine
from tests.engine.conftest import _serving
from ycore.engine import SamplingParams
from ycore.engine.commands import EngineSpec
from ycore.engine.vllm_engine import VllmEngine
from ycore.engine.weights import write_weights
from ycore.models.fetch import fetch_model
from ycore.models.names import resolve_model
from ycore.run.files import RunFolder

METHODS = ("none", "anew", "kept")
_PROMPT_TOKENS = 64


class KeepingEngine(VllmEngine):
    """Loads weights under requests that hold keys and values."""

    keeps = False

    async def _forget_prefixes(self) -> None:
        if not self.keeps:
            await super()._forget_prefixes()


@dataclass
class Written:
    """A completion that weights changed under. `logprobs`: as recorded."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]


async def write(
    engine: VllmEngine, prompt: Sequence[int], seed: int, max_tokens: int
) -> Written:
    body = {
        "request_id": f"swap-{seed}-{len(prompt)}-{time.monotonic_ns()}", "model": "rollout", "prompt": list(prompt),
        "max_tokens": max_tokens, "seed": seed, "logprobs": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    engine._request_ids.add(body["request_id"])
    choice = (await engine.request("POST", "/v1/completions", body))["choices"][0]
    engine._request_ids.discard(body["request_id"])
    return Written(list(prompt), choice["token_ids"], choice["logprobs"]["token_logprobs"])


async def swapped(
    engine: KeepingEngine, method: str, weights: dict[int, Path], job: argparse.Namespace
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(100, 40_000, (job.at_once, _PROMPT_TOKENS), generator=generator)
    began = time.perf_counter()
    tasks = [
        asyncio.create_task(write(engine, prompt, seed, job.tokens))
        for seed, prompt in enumerate(prompts.tolist())
    ]
    await asyncio.sleep(job.after)
    if method == "kept":
        await engine.request("POST", "/pause?mode=keep&clear_cache=false")
        engine.keeps = True
        await engine.load_weights(weights[2], 2)
        engine.keeps = False
        await engine.request("POST", "/resume")
        completions = await asyncio.gather(*tasks)
    elif method == "anew":
        while not all(task.done() for task in tasks):
            await engine.abort()
            await asyncio.wait(tasks, timeout=0.02)
        halves = [task.result() for task in tasks]
        await engine.load_weights(weights[2], 2)
        rests = await asyncio.gather(
            *(
                write(
                    engine,
                    half.prompt + half.token_ids,
                    seed + job.at_once,
                    job.tokens - len(half.token_ids),
                )
                for seed, half in enumerate(halves)
            )
        )
        completions = [
            Written(half.prompt, half.token_ids + rest.token_ids, half.logprobs + rest.logprobs)
            for half, rest in zip(halves, rests, strict=True)
        ]
    else:
        completions = await asyncio.gather(*tasks)
    seconds = time.perf_counter() - began
    if method == "none":
        return {"seconds": seconds}
    by_new = [
        await engine.logprobs_of(completion.prompt, completion.token_ids)
        for completion in completions
    ]
    await engine.load_weights(weights[1], 1)
    by_old = [
        await engine.logprobs_of(completion.prompt, completion.token_ids)
        for completion in completions
    ]
    places, gaps, moved = [], [], []
    for completion, old, new in zip(completions, by_old, by_new, strict=True):
        place = swap_place(completion.logprobs, old, new)
        places.append(place)
        gaps += [
            abs(a - b) for a, b in zip(completion.logprobs[place:], new[place:], strict=True)
        ]
        moved += [abs(a - b) for a, b in zip(old[place:], new[place:], strict=True)]
    return {
        "seconds": seconds,
        "tokens_before": fmean(places),
        "gap": fmean(gaps),
        "between_the_versions": fmean(moved),
    }


def swap_place(recorded: Sequence[float], old: Sequence[float], new: Sequence[float]) -> int:
    """Return after how many tokens the recorded log-probabilities are nearest to the new weights', before to the old's."""
    by_old = [abs(a - b) for a, b in zip(recorded, old, strict=True)]
    by_new = [abs(a - b) for a, b in zip(recorded, new, strict=True)]
    return min(
        range(len(recorded) + 1), key=lambda place: sum(by_old[:place]) + sum(by_new[place:])
    )


async def measured(
    spec: EngineSpec, weights: dict[int, Path], job: argparse.Namespace
) -> list[dict[str, dict[str, Any]]]:
    engine = KeepingEngine(
        spec.name, spec.socket, SamplingParams(max_tokens=job.tokens), request_timeout_s=600
    )
    await engine.load_weights(weights[1], 1)
    turns = []
    for turn in range(job.turns + 1):  # the first is not counted
        figures = {method: await swapped(engine, method, weights, job) for method in METHODS}
        for method in METHODS[1:]:
            figures[method]["swap_s"] = figures[method]["seconds"] - figures["none"]["seconds"]
        turns += [figures] if turn else []
    await engine.close()
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m")
    add("--at-once", type=int, default=16, help="requests")
    add("--tokens", type=int, default=192, help="of a completion")
    add("--after", type=float, default=8.0, help="seconds from the requests to the swap")
    add("--change", type=float, default=0.003, help="deviation of the adapters' second factor")
    add("--turns", type=int, default=3)
    job = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = fetch_model(resolve_model(job.model, trust_remote_code=False), log=Path(os.devnull))
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    policy = get_peft_model(
        policy, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    )
    folder = RunFolder(Path(tempfile.mkdtemp(prefix="ycore-swap-")))
    memory = Path(tempfile.mkdtemp(prefix="ycore-swap-", dir="/dev/shm"))
    spec = EngineSpec(
        name="rollout-0", model=model, socket=folder.socket("rollout-0"), temporary=folder.temporary,
        run_id=folder.run_id, dtype="bfloat16", max_model_len=1024, max_num_seqs=64, seed=0,
        cores=(max(os.sched_getaffinity(0)),),
    )  # fmt: skip
    weights = {version: memory / str(version) for version in (1, 2)}
    try:
        for version, where in weights.items():
            where.mkdir()
            write_weights(policy, where, dtype=torch.bfloat16, version=version)
            with torch.no_grad():
                for name, parameter in policy.named_parameters():
                    if "lora_B" in name:
                        parameter.normal_(std=job.change)
        with _serving(folder, [spec]):
            turns = asyncio.run(measured(spec, weights, job))
    finally:
        shutil.rmtree(folder.root, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    print(json.dumps({"machine": describe_machine(), "turns": turns}, indent=2))


if __name__ == "__main__":
    main()
