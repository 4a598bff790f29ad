"""Weights sent to an engine: merged, against adapters alone. One engine at a time, on one core.

Per kind: MB and seconds of a sync (written, then loaded and proved), tokens per second of 32 completions of 64 tokens,
and of four greedy completions the tokens and log-probabilities, which are compared. SmolLM2-135M with LoRA of rank 16
on all linear layers, its B random. The first sync and the first completions of each engine are not counted.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the tests' way to start an engine
from tests.engine.conftest import _serving
from ycore.engine import Sampling
from ycore.engine.commands import EngineSpec
from ycore.engine.vllm_engine import VllmEngine
from ycore.engine.weights import write_adapters, write_weights
from ycore.models.fetch import fetch_model
from ycore.models.names import resolve_model
from ycore.run.paths import RunFolder

_RANK, _TOKENS, _AT_ONCE = 16, 64, 32
_WRITE = {"merged": write_weights, "adapter": write_adapters}


async def figures(kind: str, policy: Any, spec: EngineSpec, weights: Path, dtype: torch.dtype) -> dict[str, Any]:
    engine = VllmEngine(spec.name, spec.socket, Sampling(max_tokens=_TOKENS), request_timeout_s=600)
    said: dict[str, Any] = {}
    for version in (1, 2, 3):
        began = time.perf_counter()
        num_bytes = _WRITE[kind](policy, weights, dtype=dtype, version=version)
        written = time.perf_counter()
        await engine.load_weights(weights, version)
        said |= {"MB": num_bytes / 1e6, "write_s": written - began, "load_s": time.perf_counter() - written}
        assert engine.verified_share == 1.0
    prompts = [[504, 3575, 282, 4649, 314, 100 + number] for number in range(_AT_ONCE)]
    for _ in range(2):
        began = time.perf_counter()
        answers = await asyncio.gather(*(engine.complete(prompt, seed) for seed, prompt in enumerate(prompts)))
        said["tokens_per_s"] = sum(len(one.token_ids) for one in answers) / (time.perf_counter() - began)
    said["greedy"] = [await engine.complete(prompt, 0, greedy=True) for prompt in prompts[:4]]
    await engine.close()
    return said


def measured(kind: str, model: Path, dtype: str) -> dict[str, Any]:
    torch.manual_seed(0)
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    policy = get_peft_model(policy, LoraConfig(r=_RANK, lora_alpha=32, target_modules="all-linear"))
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
        with _serving(folder, [spec]):
            return asyncio.run(figures(kind, policy, spec, weights, getattr(torch, dtype)))
    finally:
        shutil.rmtree(folder.root, ignore_errors=True)
        shutil.rmtree(weights, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    job = parser.parse_args()
    torch.set_num_threads(1)
    model = fetch_model(resolve_model(job.model, trust_remote_code=False), log=Path(os.devnull))
    found = {kind: measured(kind, model, job.dtype) for kind in _WRITE}
    pairs = list(zip(*(one.pop("greedy") for one in found.values()), strict=True))
    gaps, same = [], 0
    for one, other in pairs:
        same += one.token_ids == other.token_ids
        for a, b, first, second in zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=False):
            gaps.append(abs(first - second))
            if a != b:
                gaps.pop()
                break
    compared = {"greedy_the_same": f"{same} of {len(pairs)}", "largest_gap": max(gaps)}
    print(json.dumps({"machine": describe_machine(), **found, **compared}, indent=2))


if __name__ == "__main__":
    main()
