"""Real engines for the tests of what is asked of them."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ycore.engine.commands import EngineSpec, engine_command, engine_environment
from ycore.engine.server import is_healthy
from ycore.launch.guardian import RunWatch, remove_leftovers
from ycore.launch.processes import ManagedProcess
from ycore.run.files import RunFolder, make_private

_READY_WITHIN_S = 240
Serve = Callable[[RunFolder, Sequence[EngineSpec]], AbstractContextManager[None]]


@pytest.fixture(scope="session")
def serve() -> Serve:
    """`with serve(folder, engines):` all of them answer; after it nothing is left of them."""
    return _serving


@pytest.fixture(scope="session")
def cpu_engine() -> Callable[..., EngineSpec]:
    """`cpu_engine(folder, model, max_model_len=64)`: a rollout engine in float32 on one core."""

    def engine(folder: RunFolder, model: Path, **changes: Any) -> EngineSpec:
        spec = EngineSpec(
            name="rollout-0",
            model=model,
            socket=folder.socket("rollout-0"),
            temporary=folder.temporary,
            run_id=folder.run_id,
            dtype="float32",
            max_model_len=128,
            max_num_seqs=16,
            seed=0,
            cores=(min(os.sched_getaffinity(0)),),
        )
        return replace(spec, **changes)

    return engine


@contextmanager
def _serving(folder: RunFolder, engines: Sequence[EngineSpec]) -> Iterator[None]:
    for path in (folder.sockets, folder.temporary):
        make_private(path)
    folder.logs.mkdir()
    watch = RunWatch(folder.run_id)
    processes: list[ManagedProcess] = []
    try:
        for engine in engines:
            processes.append(_start(folder, engine))
        deadline = time.monotonic() + _READY_WITHIN_S
        while not all(is_healthy(engine.socket) for engine in engines):
            for process in processes:
                assert process.exit_code is None, process.last_line()
            assert time.monotonic() < deadline, [process.last_line() for process in processes]
            watch.look()
            time.sleep(0.2)
        yield
    finally:
        watch.look()
        watch.kill(grace_s=0)
        for process in processes:
            process.wait(timeout_s=20)
        remove_leftovers(folder)
    assert RunWatch(folder.run_id).look() == []


def _start(folder: RunFolder, engine: EngineSpec) -> ManagedProcess:
    return ManagedProcess(
        engine.name,
        engine_command(engine),
        environment=engine_environment(engine),
        run_id=folder.run_id,
        log=folder.log(engine.name),
        cores=engine.cores,
    )
