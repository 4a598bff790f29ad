"""Engines of a CPU are forks of one process that has imported vLLM, and behave like processes of their own."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.tiny_model import write_tiny_model
from ycore.config.schema import EngineSettings
from ycore.engine import SamplingParams
from ycore.engine.commands import EngineSpec
from ycore.engine.kinds import is_vllm_installed
from ycore.engine.vllm_engine import VllmEngine
from ycore.errors import EngineError
from ycore.launch import processes
from ycore.launch.engine_watch import EngineWatch, start_engines
from ycore.launch.guardian import RunWatch, remove_leftovers
from ycore.run.files import RunFolder, make_private

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed"),
]
WITHIN_S = 300.0


@contextmanager
def started(folder: RunFolder, specs: list[EngineSpec]) -> Iterator[EngineWatch]:
    for path in (folder.sockets, folder.temporary, folder.logs):
        make_private(path)
    try:
        settings = EngineSettings(
            health_timeout_s=WITHIN_S, start_timeout_s=WITHIN_S, restarts=1
        )
        yield start_engines(specs, folder, settings, say=print)
    finally:
        RunWatch(folder.run_id).kill(grace_s=0)
        remove_leftovers(folder)


def wait_until_ready(watch: EngineWatch) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not watch.are_ready:
        watch.look()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def two_of(spec: EngineSpec, folder: RunFolder, *, num_threads: int = 1) -> list[EngineSpec]:
    cores = sorted(os.sched_getaffinity(0)) * num_threads
    return [
        replace(
            spec,
            name=f"rollout-{number}",
            socket=folder.socket(f"rollout-{number}"),
            cores=tuple(cores[number : number + num_threads]),
        )
        for number in range(2)
    ]


@pytest.mark.verify
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_forks_with_two_threads_answer(
    tmp_path: Path, cpu_engine: Callable[..., EngineSpec]
) -> None:
    """A fork of a process whose threads have worked would wait for them for ever."""
    folder = RunFolder(tmp_path / "run")
    spec = cpu_engine(folder, write_tiny_model(tmp_path / "model"))
    with started(folder, two_of(spec, folder, num_threads=2)) as watch:
        wait_until_ready(watch)
        for engine in watch.engines:
            client = VllmEngine(
                engine.name, engine.socket, SamplingParams(max_tokens=8), request_timeout_s=60
            )
            answer = asyncio.run(asyncio.wait_for(client.complete([5, 6, 7], 1), 120))
            assert answer.token_ids


@pytest.mark.verify
def test_a_server_that_dies_before_it_forks_ends_the_start(
    tmp_path: Path, cpu_engine: Callable[..., EngineSpec]
) -> None:
    folder = RunFolder(tmp_path / "run")
    spec = cpu_engine(folder, write_tiny_model(tmp_path / "model"))
    with started(folder, two_of(spec, folder)) as watch:
        (server,) = {engine.processes()[0].pid for engine in watch.engines}
        time.sleep(1.0)
        os.kill(server, signal.SIGKILL)
        with pytest.raises(EngineError, match="rollout-0 ended with killed by SIGKILL"):
            wait_until_ready(watch)


def test_orphans_are_adopted_until_the_last_engine_has_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine is an orphan once the process between it and the server has ended, for which the server waits."""
    seen: list[tuple[bool, int | None]] = []
    monkeypatch.setattr(
        processes,
        "_adopt_orphans",
        lambda adopts: seen.append((adopts, server.process.returncode if seen else None)),
    )
    server = processes.ForkServer(dict(os.environ), tmp_path / "log")
    with (tmp_path / "engine").open("w") as output:
        order = {"options": ["--help"], "environment": {}, "cores": []}
        fork = server.fork("rollout-0", order, output)
    deadline = time.monotonic() + WITHIN_S
    while len(seen) == 1:
        fork.poll()
        assert time.monotonic() < deadline
    assert seen == [(True, None), (False, 0)], "adopts, the exit status of the server"


def test_two_engines_are_forked_and_one_that_is_killed_is_started_again(
    tmp_path: Path, cpu_engine: Callable[..., EngineSpec]
) -> None:
    folder = RunFolder(tmp_path / "run")
    model = write_tiny_model(tmp_path / "model")
    specs = two_of(cpu_engine(folder, model), folder)
    with started(folder, specs) as watch:
        wait_until_ready(watch)
        leaders = [engine.processes()[0] for engine in watch.engines]
        me = psutil.Process()
        for leader, spec in zip(leaders, specs, strict=True):
            assert leader.ppid() == me.pid and os.getsid(leader.pid) == leader.pid
            assert leader.cpu_affinity() == list(spec.cores)
            assert spec.name in " ".join(leader.cmdline())
            assert Path(f"/proc/{leader.pid}/fd/2").resolve() == folder.log(spec.name).resolve()
        assert not set(leaders[0].children(True)) & set(leaders[1].children(True))
        living = {process.pid for process in RunWatch(folder.run_id).look()}
        below = {child.pid for leader in leaders for child in leader.children(recursive=True)}
        assert living == below | {leader.pid for leader in leaders}, "the server has ended"

        leaders[0].send_signal(signal.SIGKILL)
        deadline = time.monotonic() + WITHIN_S
        while (fault := watch.engines[0].find_fault()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "killed by SIGKILL" in fault.problem
        assert watch.engines[1].find_fault() is None
        watch.look()
        wait_until_ready(watch)
        assert watch.num_restarts == 1 and leaders[1].is_running()


@pytest.mark.verify
def test_an_engine_that_does_not_start_says_why(
    tmp_path: Path, cpu_engine: Callable[..., EngineSpec]
) -> None:
    folder = RunFolder(tmp_path / "run")
    model = write_tiny_model(tmp_path / "model")
    wrong = cpu_engine(folder, model, arguments=(("no_such_option", 1),))
    with (
        started(folder, two_of(wrong, folder)) as watch,
        pytest.raises(
            EngineError, match=r"rollout-\d ended with exit status 2.*no-such-option"
        ),
    ):
        wait_until_ready(watch)
