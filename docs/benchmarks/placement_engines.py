"""The engines of `placement`: vLLM servers of a rollout and of a judge on each of two cores, stopped at the end."""

import argparse
import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ycore.engine import Engine
from ycore.engine.commands import EngineSpec, engine_command, engine_environment
from ycore.engine.server import Server, SleepingEngine, is_healthy
from ycore.launch.guardian import RunWatch, remove_leftovers
from ycore.launch.processes import ManagedProcess
from ycore.models.fetch import fetch_model
from ycore.models.names import resolve_model
from ycore.placement.placement import JUDGE, ROLLOUT
from ycore.run.files import RunFolder, make_private
from ycore.types import Completion

_START_S = 300.0


class SeededEngine(Engine):
    """An engine that writes exactly as many tokens as the seed's length says, whatever the model would like."""

    def __init__(self, name: str, socket: Path, length_of: Callable[[int], int]) -> None:
        self.name = name
        self.server = Server(name, socket, request_timeout_s=600)
        self._length_of = length_of

    async def complete(
        self, prompt_ids: Sequence[int], seed: int, *, greedy: bool = False
    ) -> Completion:
        return await self.write(prompt_ids, seed, self._length_of(seed))

    async def write(self, prompt_ids: Sequence[int], seed: int, length: int) -> Completion:
        """Write `length` tokens."""
        body = {
            "model": "rollout",
            "prompt": list(prompt_ids),
            "n": 1,
            "seed": seed,
            "temperature": 1.0,
            "logprobs": 0,
        }
        body |= {"max_tokens": length, "ignore_eos": True, "return_token_ids": True}
        answer = await self.server.request("POST", "/v1/completions", body)
        tokens = answer["choices"][0]["token_ids"]
        assert len(tokens) == length
        return Completion(tuple(tokens), None, "", "length", 0)


@dataclass(frozen=True, slots=True)
class Engines:
    """Both roles, slot by slot."""

    rollouts: Sequence[SeededEngine]
    judges: Sequence[SeededEngine]


PUBLISHED_S = {ROLLOUT: 1.92, JUDGE: 1.44}
"""Seconds of a sleep and the wake after it, 0.6B on a GPU (vllm-project/vllm#48337): level 2 for the policy, whose
weights are sent again anyway, and level 1 for the judge."""


class WaitingEngine(SleepingEngine):
    """vLLM's own sleep and wake, which move no memory on a CPU, and a wait of half the published length with each."""

    def __init__(self, server: Server, wait_s: float) -> None:
        super().__init__(server, refill=_nothing)
        self._wait_s = wait_s

    async def sleep(self) -> None:
        if not self._asleep.exists():
            await asyncio.gather(super().sleep(), asyncio.sleep(self._wait_s))

    async def wake(self) -> None:
        if self._asleep.exists():
            await asyncio.gather(super().wake(), asyncio.sleep(self._wait_s))


async def _nothing() -> None:
    """On a CPU the weights stay where they are."""


def sleepers(
    engines: Engines, slots: Collection[int]
) -> Mapping[str, Mapping[int, WaitingEngine]]:
    """Return the engines of these slots, by role and slot."""
    roles = {ROLLOUT: engines.rollouts, JUDGE: engines.judges}
    return {
        role: {
            slot: WaitingEngine(of_role[slot].server, PUBLISHED_S[role] / 2) for slot in slots
        }
        for role, of_role in roles.items()
    }


def clients(sockets: Path, *, length_of: Callable[[int], int]) -> Engines:
    """Make a process's own clients of the four servers."""
    roles = [
        [SeededEngine(name, sockets / f"{name}.sock", of) for name in names]
        for names, of in (
            (("rollout-0", "rollout-1"), length_of),
            (("judge-0", "judge-1"), lambda length: length),
        )
    ]
    return Engines(*roles)


@contextmanager
def engines_running(job: argparse.Namespace, output: Path) -> Iterator[Path]:
    """Run four servers on two cores; yield the folder of their sockets. Of their files only logs stay, in `output`."""
    folder = RunFolder(Path(tempfile.mkdtemp(prefix="ycore-placement-")))
    model = fetch_model(
        resolve_model(job.model, trust_remote_code=False), log=output / "model.log"
    )
    cores = sorted(os.sched_getaffinity(0))[:2]
    planned = [
        _engine(f"{role}-{slot}", model, folder, job, cores[slot])
        for role in ("rollout", "judge")
        for slot in (0, 1)
    ]
    with served(folder, planned, output):
        yield folder.sockets


@contextmanager
def served(folder: RunFolder, planned: Sequence[EngineSpec], output: Path) -> Iterator[None]:
    """Run the servers, and yield once all of them answer; at the end leave nothing but their logs."""
    for path in (folder.sockets, folder.temporary):
        make_private(path)
    watch = RunWatch(folder.run_id)
    processes = []
    try:
        for engine in planned:
            processes.append(
                ManagedProcess(
                    engine.name,
                    engine_command(engine),
                    environment=engine_environment(engine),
                    run_id=folder.run_id,
                    log=output / f"{engine.name}.log",
                    cores=engine.cores,
                )
            )
        _wait(planned, processes, watch)
        yield
    finally:
        watch.look()
        watch.kill(grace_s=0)
        for process in processes:
            process.wait(timeout_s=20)
        remove_leftovers(folder)
        shutil.rmtree(folder.root, ignore_errors=True)


def _engine(
    name: str, model: Path, folder: RunFolder, job: argparse.Namespace, core: int
) -> EngineSpec:
    return EngineSpec(
        name=name,
        model=model,
        socket=folder.socket(name),
        temporary=folder.temporary,
        run_id=folder.run_id,
        dtype="bfloat16",
        # 32 more than a judge writes, since its speed is measured with longer answers
        max_model_len=max(
            job.longest + job.prompt_tokens, job.judge_reads + job.judge_tokens + 32
        ),
        max_num_seqs=job.max_num_seqs,
        seed=0,
        cores=(core,),
    )


def _wait(planned: Sequence[EngineSpec], processes: Sequence[Any], watch: RunWatch) -> None:
    deadline = time.monotonic() + _START_S
    while not all(is_healthy(engine.socket) for engine in planned):
        watch.look()
        for process in processes:
            if process.exit_code is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{process.name} did not start: {process.last_line()}")
        time.sleep(0.5)
