"""The part of the device check with engines: weights over the product's own path, sleep, neighbours, a kill.

One tiny model, real vLLM servers. Without a device the servers have no sleep mode: the same requests are answered and
clear the caches, but no memory moves.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_tiny_model
from ycore.engine import SamplingParams, WeightSource
from ycore.engine.commands import EngineSpec
from ycore.engine.server import KEEP, SleepingEngine
from ycore.engine.vllm_engine import VllmEngine
from ycore.engine.weights import engine_weights, note_weights, write_weights
from ycore.errors import RunError
from ycore.launch.engine_watch import EngineWatch, LiveEngine
from ycore.launch.guardian import RunWatch, remove_leftovers
from ycore.launch.layout import Gpu, visible_gpus
from ycore.run.files import RunFolder, make_private

_READY_WITHIN_S = 240.0
_KEPT_GIB = 2.0  # at most, by an engine asleep: its CUDA context and what NCCL holds; the plan counts 1.2
_WITHIN_S = 60.0
_SHARE = 0.3  # of the device, for each engine
_HOLD = "import torch; torch.empty(int({bytes}), dtype=torch.uint8, device='cuda').fill_(1); torch.cuda.synchronize()"


def engines(folder: Path) -> str:
    """Load, sleep at both levels, wake, a neighbour in between, a second engine, and one that is killed asleep."""
    run, gpus = RunFolder(folder), visible_gpus()
    model = write_tiny_model(folder / "model")
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        policy.model.norm.weight.mul_(2.0)  # another model than the one on disk
    spec = _spec(run, model, gpus)
    second = replace(spec, name="rollout-1", socket=run.socket("rollout-1"))
    said: list[str] = []
    with _watched(run):
        before = _free_gib()
        first = _start(run, spec)
        held_gib = None if before is None else before - (_free_gib() or 0.0)
        weights = run.shared_memory
        write_weights(policy, weights, dtype=torch.float32, version=1)
        asyncio.run(_sleep_and_wake(spec, weights, policy, held_gib, said))
        beside = _start(run, second)
        said.append("a second engine started beside one asleep")
        for engine in (first, beside):
            _kill(engine)
        if before is not None and held_gib is not None:
            _wait_for_free(before - 0.2 * held_gib)
        first.restart()
        _wait_until_ready(first)
        asyncio.run(_same_after_restart(spec, weights, said))
    return "; ".join(said)


async def _sleep_and_wake(
    spec: EngineSpec,
    weights: Path,
    policy: torch.nn.Module,
    held_gib: float | None,
    said: list[str],
) -> None:
    """Tokens after each sleep are those of before, with weights from files and from this process's memory; asleep,
    another process may have the memory. It is left asleep.

    `held_gib`: GiB of the device that the engine holds awake; None where the driver does not say.
    """
    engine = _client(spec)

    async def checked(level: int, sleeper: SleepingEngine) -> None:
        began, awake, freed = time.perf_counter(), _free_gib(), ""
        await sleeper.sleep()
        if held_gib is not None and awake is not None:
            freed = _check_freed(level, held_gib, (_free_gib() or 0.0) - awake)
        await sleeper.wake()
        said.append(
            f"level {level}: asleep and awake in {time.perf_counter() - began:.1f} s{freed}"
        )
        if await _tokens(engine) != expected:
            raise RunError(
                f"after a sleep at level {level} the same requests give other tokens"
            )

    try:
        began = time.perf_counter()
        await engine.load_weights(weights, 1)
        said.append(f"weights loaded and proved in {time.perf_counter() - began:.2f} s")
        expected = await _tokens(engine)
        keeping = SleepingEngine(engine, level=KEEP)
        assert engine.sleeper is not None
        await checked(1, keeping)
        await checked(2, engine.sleeper)
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        note_weights(policy.to(device), weights / "noted", dtype=torch.float32, version=2)
        engine.source = WeightSource(
            partial(engine_weights, policy, dtype=torch.float32), device
        )
        began = time.perf_counter()
        await engine.load_weights(weights / "noted", 2)
        said.append(
            f"from this process's memory, loaded and proved in {time.perf_counter() - began:.2f} s"
        )
        await checked(2, engine.sleeper)
        await engine.sleeper.sleep()
    finally:
        await engine.close()


async def _same_after_restart(spec: EngineSpec, weights: Path, said: list[str]) -> None:
    """A new process in place of one killed asleep is woken, gets the last weights and answers as the first did."""
    engine = _client(spec)
    try:
        await engine.load_weights(weights, 1)
        first = await _tokens(engine)
        assert engine.sleeper is not None
        await engine.sleeper.sleep()
        await engine.sleeper.wake()
        if await _tokens(engine) != first:
            raise RunError("an engine started in place of one killed asleep loses its weights")
        said.append("a new engine in place of one killed asleep sleeps and wakes")
    finally:
        await engine.close()


def _client(spec: EngineSpec) -> VllmEngine:
    return VllmEngine(
        spec.name,
        spec.socket,
        SamplingParams(max_tokens=12),
        request_timeout_s=120,
        sleeps=True,
    )


async def _tokens(engine: VllmEngine) -> list[tuple[int, ...]]:
    """Write one at a time: an engine's arithmetic depends on what else is in its batch, and so do a few tokens."""
    return [
        (await engine.complete([9, 8, 7, prompt], seed=prompt)).token_ids
        for prompt in range(10, 18)
    ]


def _check_freed(level: int, held_gib: float, freed_gib: float) -> str:
    """Say how much memory is free now; another process takes nine tenths of it for a moment."""
    if held_gib - freed_gib > _KEPT_GIB:
        raise RunError(
            f"asleep at level {level}, the engine keeps {held_gib - freed_gib:.1f} of its {held_gib:.1f} GiB"
        )
    command = [sys.executable, "-c", _HOLD.format(bytes=0.9 * freed_gib * 2**30)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * _WITHIN_S)
    if done.returncode != 0:
        why = done.stderr.strip().rpartition("\n")[2]
        raise RunError(
            f"asleep at level {level}, another process cannot use {0.9 * freed_gib:.1f} GiB: {why}"
        )
    return f", and of {held_gib:.1f} GiB {freed_gib:.1f} were free for another process"


def _spec(run: RunFolder, model: Path, gpus: tuple[Gpu, ...]) -> EngineSpec:
    return EngineSpec(
        name="rollout-0",
        model=model,
        socket=run.socket("rollout-0"),
        temporary=run.temporary,
        run_id=run.run_id,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=16,
        seed=0,
        cores=() if gpus else (min(os.sched_getaffinity(0)),),
        devices=(gpus[0].id,) if gpus else (),
        gpu_memory_utilization=_SHARE,
        sleeps=bool(gpus),
    )


@contextmanager
def _watched(run: RunFolder) -> Iterator[None]:
    """Engines may be started; after it none is left."""
    for path in (run.sockets, run.temporary):
        make_private(path)
    run.logs.mkdir()
    watch = RunWatch(run.run_id)
    try:
        yield
    finally:
        watch.look()
        watch.kill(grace_s=0)
        remove_leftovers(run)


def _start(run: RunFolder, spec: EngineSpec) -> LiveEngine:
    engine = LiveEngine(spec, run, health_timeout_s=_WITHIN_S)
    _wait_until_ready(engine)
    return engine


def _wait_until_ready(engine: LiveEngine) -> None:
    watch = EngineWatch([engine], start_timeout_s=_READY_WITHIN_S, say=lambda line: None)
    while not watch.are_ready:
        watch.look()
        time.sleep(0.2)


def _kill(engine: LiveEngine) -> None:
    processes = engine.processes()
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, timeout=_WITHIN_S)


def _free_gib() -> float | None:
    """Return the free GiB of the first device, as the driver says now; None without one, and on a slice of one."""
    gpus = visible_gpus()
    return gpus[0].free_gib if gpus else None


def _wait_for_free(gib: float) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while (free := _free_gib() or 0.0) < gib:
        if time.monotonic() > deadline:
            raise RunError(
                f"{_WITHIN_S:.0f} s after the engines ended, {free:.1f} GiB are free, not {gib:.1f}"
            )
        time.sleep(0.5)
