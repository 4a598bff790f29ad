"""Weights sent to an engine: merged in files, adapters alone, merged through memory. One engine at a time, on one core.

Per kind: MB and seconds of a sync by stage, tokens per second of 32 completions of 64 tokens, and of four greedy
completions the tokens and log-probabilities, which are compared with the first kind's. LoRA of rank 16 on all linear
layers, its B random, on SmolLM2-135M or on random weights of a shape (`--model 1b`). The first sync and the first
completions of each engine are not counted; of the two syncs after it the faster one is told, by each stage.

`merge_s` merges and casts, `sum_s` does that and takes the sums, `write_s` does all that the trainer does before an
engine is asked. `load_s` is the engine's part, of which `proof_s` are the sums that it takes. `--writer` measures the
`write_weights` of another file, such as an older version of `ycore/engine/weights.py`.
"""

import argparse
import asyncio
import json
import os
import runpy
import shutil
import sys
import tempfile
import time
from collections import deque
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from peft import LoraConfig, get_peft_model
from shaped_models import SHAPES, write_model
from transformers import AutoModelForCausalLM

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # for the tests' way to start an engine
from tests.engine.conftest import _serving
from ycore.engine import SamplingParams, WeightSource
from ycore.engine.commands import EngineSpec
from ycore.engine.vllm_engine import VllmEngine
from ycore.engine.weight_proof import tensor_sums
from ycore.engine.weights import engine_weights, note_weights, write_adapters, write_weights
from ycore.models.fetch import fetch_model
from ycore.models.names import resolve_model
from ycore.run.files import RunFolder

_RANK, _TOKENS, _AT_ONCE = 16, 64, 32
_WRITE: dict[str, Any] = {
    "merged": write_weights,
    "adapter": write_adapters,
    "ipc": note_weights,
}


async def figures(
    kind: str, policy: Any, spec: EngineSpec, weights: Path, dtype: torch.dtype, *, loads: bool
) -> dict[str, Any]:
    engine = VllmEngine(
        spec.name, spec.socket, SamplingParams(max_tokens=_TOKENS), request_timeout_s=600
    )
    if kind == "ipc":
        engine.source = WeightSource(
            partial(engine_weights, policy, dtype=dtype), torch.device("cpu")
        )
    stages: dict[str, list[float]] = {
        name: [] for name in ("merge_s", "sum_s", "write_s", "load_s", "proof_s")
    }
    num_bytes = 0
    for version in (1, 2, 3):
        marks = [time.perf_counter()]
        for work in (torch.Tensor.data_ptr, tensor_sums):
            deque((work(weight) for _, weight in engine_weights(policy, dtype=dtype)), 0)
            marks.append(time.perf_counter())
        num_bytes = _WRITE[kind](policy, weights, dtype=dtype, version=version)
        marks.append(time.perf_counter())
        if loads:
            await engine.load_weights(weights, version)
            marks.append(time.perf_counter())
            await engine._call("held_policy")
            marks.append(time.perf_counter())
            assert engine.verified_share == 1.0
        for durations, (begin, end) in zip(stages.values(), pairwise(marks), strict=loads):
            durations.append(end - begin)
    results: dict[str, Any] = {"MB": num_bytes / 1e6} | {
        name: min(times[1:]) for name, times in stages.items() if times
    }
    if not loads:
        return results
    prompts = [[504, 3575, 282, 4649, 314, 100 + number] for number in range(_AT_ONCE)]
    for _ in range(2):
        began = time.perf_counter()
        completions = await asyncio.gather(
            *(engine.complete(prompt, seed) for seed, prompt in enumerate(prompts))
        )
        results["tokens_per_s"] = sum(
            len(completion.token_ids) for completion in completions
        ) / (time.perf_counter() - began)
    results["greedy"] = [
        await engine.complete(prompt, 0, greedy=True) for prompt in prompts[:4]
    ]
    await engine.close()
    return results


def measure_kind(kind: str, model: Path, dtype: str, *, loads: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    policy = get_peft_model(
        policy, LoraConfig(r=_RANK, lora_alpha=32, target_modules="all-linear")
    )
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    folder = RunFolder(Path(tempfile.mkdtemp(prefix="ycore-adapters-")))
    weights = Path(tempfile.mkdtemp(prefix="ycore-adapters-", dir="/dev/shm"))
    spec = EngineSpec(
        name="rollout-0", model=model, socket=folder.socket("rollout-0"), temporary=folder.temporary,
        run_id=folder.run_id, dtype="float32" if dtype == "float32" else "bfloat16", max_model_len=512,
        max_num_seqs=64, seed=0, cores=(max(os.sched_getaffinity(0)),), lora_rank=_RANK if kind == "adapter" else 0,
    )  # fmt: skip
    try:
        with _serving(folder, [spec] if loads else []):
            return asyncio.run(
                figures(kind, policy, spec, weights, getattr(torch, dtype), loads=loads)
            )
    finally:
        shutil.rmtree(folder.root, ignore_errors=True)
        shutil.rmtree(weights, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kinds", default="merged,adapter,ipc")
    parser.add_argument("--writer", type=Path)
    parser.add_argument("--no-engine", action="store_true", help="the trainer's stages alone")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    job = parser.parse_args()
    torch.set_num_threads(1)
    if job.writer is not None:
        _WRITE["merged"] = runpy.run_path(str(job.writer))["write_weights"]
    with tempfile.TemporaryDirectory(prefix="ycore-model-") as folder:
        name = "smollm2-135m" if job.model in SHAPES else job.model
        model = fetch_model(resolve_model(name, trust_remote_code=False), log=Path(os.devnull))
        if job.model in SHAPES:
            model = write_model(job.model, Path(folder), tokenizer=model)
        results = {
            kind: measure_kind(kind, model, job.dtype, loads=not job.no_engine)
            for kind in job.kinds.split(",")
        }
    greedy = [result.pop("greedy", []) for result in results.values()]
    print(
        json.dumps(
            {"machine": describe_machine(), "model": job.model, "dtype": job.dtype, **results},
            indent=2,
        )
    )
    if not job.no_engine:
        for kind, completions in list(zip(results, greedy, strict=True))[1:]:
            pairs = list(zip(greedy[0], completions, strict=True))
            print(json.dumps({f"{kind} against the first": compare(pairs)}))


def compare(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Count the completions that are the same, and find the largest gap of a log-probability where they are."""
    gaps, same = [], 0
    for reference, completion in pairs:
        same += reference.token_ids == completion.token_ids
        for a, b, first, second in zip(
            reference.token_ids,
            completion.token_ids,
            reference.logprobs,
            completion.logprobs,
            strict=False,
        ):
            gaps.append(abs(first - second))
            if a != b:
                gaps.pop()
                break
    return {"greedy_the_same": f"{same} of {len(pairs)}", "largest_gap": max(gaps)}


if __name__ == "__main__":
    main()
