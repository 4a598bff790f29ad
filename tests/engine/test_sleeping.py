"""Engines that leave their device and come back: which calls, in which order, and a whole run of them.

Nothing here has a device. The engines are scripted, a test tool that speaks vLLM's routes of sleep; what a real engine
frees and takes was never seen.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import write_tiny_model
from ycore.engine import SamplingParams
from ycore.engine.server import (
    DROP,
    KEEP,
    SleepingEngine,
    SleepTogether,
    asleep_file,
    mark_asleep,
)
from ycore.engine.vllm_engine import VllmEngine
from ycore.engine.weight_proof import TensorSums, write_manifest

WAKE = ["POST /wake_up?tags=weights", "POST /wake_up?tags=kv_cache"]
WITH_RELOAD = [WAKE[0], "reload", WAKE[1]]


class ScriptedServer:
    """Writes down what it is asked."""

    def __init__(self, socket: Path, calls: list[str] | None = None) -> None:
        self.socket = socket
        self.calls: list[str] = [] if calls is None else calls

    async def request(self, method: str, path: str, body: object = None) -> Any:
        self.calls.append(f"{method} {path}")

    async def reload(self) -> None:
        self.calls.append("reload")


def slept_and_woken(socket: Path, level: int = DROP) -> list[str]:
    """Return all calls of a sleep and the wake after it, each asked for twice."""
    server = ScriptedServer(socket)

    async def work() -> None:
        engine = SleepingEngine(server, refill=server.reload, level=level)
        for _ in range(2):
            await engine.sleep()
        assert not engine.has_weights and asleep_file(socket).is_file()
        for _ in range(2):
            await engine.wake()
        assert engine.has_weights and not asleep_file(socket).exists()

    asyncio.run(work())
    return server.calls


def test_a_policy_is_dropped_and_loaded_before_the_cache(tmp_path: Path) -> None:
    assert slept_and_woken(tmp_path / "e.sock") == ["POST /sleep?level=2", *WITH_RELOAD]


def test_kept_weights_are_not_loaded_again(tmp_path: Path) -> None:
    assert slept_and_woken(tmp_path / "e.sock", KEEP) == ["POST /sleep?level=1", *WAKE]


@pytest.mark.parametrize(("level", "calls"), [(KEEP, WAKE), (DROP, WITH_RELOAD)])
def test_whoever_put_it_to_sleep_it_wakes_from_that_level(
    tmp_path: Path, level: int, calls: list[str]
) -> None:
    socket = tmp_path / "e.sock"
    server = ScriptedServer(socket)
    mark_asleep(socket, level)
    engine = SleepingEngine(server, refill=server.reload)
    assert not engine.has_weights
    asyncio.run(engine.wake())
    assert server.calls == calls


class KilledAfter(ScriptedServer):
    """Whoever asks is killed once it has asked that much."""

    def __init__(self, socket: Path, num_calls: int) -> None:
        super().__init__(socket)
        self._left = num_calls

    async def request(self, method: str, path: str, body: object = None) -> Any:
        await super().request(method, path, body)
        self._left -= 1
        if not self._left:
            raise SystemExit


@pytest.mark.parametrize(
    "num_calls", [1, 2, 3], ids=["as-it-fell-asleep", "before-the-load", "before-the-cache"]
)
def test_weights_that_may_be_lost_are_loaded_by_the_next_trainer(
    tmp_path: Path, num_calls: int
) -> None:
    socket = tmp_path / "e.sock"
    killed = KilledAfter(socket, num_calls)
    first = SleepingEngine(killed, refill=killed.reload)

    async def work() -> None:
        await first.sleep()
        await first.wake()

    with pytest.raises(SystemExit):
        asyncio.run(work())
    assert killed.calls[0] == "POST /sleep?level=2"
    assert slept_and_woken(socket, KEEP) == ["POST /sleep?level=2", *WITH_RELOAD]
    assert slept_and_woken(socket, KEEP) == ["POST /sleep?level=1", *WAKE], (
        "and then it is over"
    )


def test_the_models_of_a_role_sleep_and_wake_together(tmp_path: Path) -> None:
    calls: list[str] = []
    servers = [
        ScriptedServer(tmp_path / f"{name}.sock", calls) for name in ("judge-0", "judge-1")
    ]
    both = SleepTogether([[SleepingEngine(server, refill=server.reload)] for server in servers])

    async def work() -> None:
        await both.sleep()
        await both.wake()

    asyncio.run(work())
    assert calls == ["POST /sleep?level=2"] * 2 + WITH_RELOAD * 2


# -- VllmEngine over a socket --------------------------------------------------------------------------------------


Serving = Callable[..., list[str]]


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serving:
    """Run `work(engine)` against a server that answers what vLLM does, and return the routes that it was asked."""
    write_manifest(tmp_path, 3, {"norm.weight": TensorSums(100, 2, rows=5, columns=6)})
    monkeypatch.chdir(tmp_path)  # a socket's path must be short

    def run(work: Callable[[VllmEngine], Any]) -> list[str]:
        routes: list[str] = []
        answers = {
            "/weight_info": {"weight_version": "3"},
            "/collective_rpc": {"results": [[["norm.weight", 0, 0, 2, 5, 6]]]},
        }

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while line := await reader.readline():
                    length = 0
                    while (header := await reader.readline()).strip():
                        name, _, value = header.partition(b":")
                        length = int(value) if name.lower() == b"content-length" else length
                    body = json.loads(await reader.readexactly(length)) if length else {}
                    path = line.split()[1].decode()
                    if path != "/health":
                        routes.append(path + (f" {body['method']}" if "method" in body else ""))
                    answer = json.dumps(answers.get(path)).encode()
                    writer.write(
                        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer
                    )
            finally:
                writer.close()

        async def all_of_it() -> None:
            server = await asyncio.start_unix_server(handle, "e.sock")
            socket = Path("e.sock")
            engine = VllmEngine(
                "rollout-0",
                socket,
                SamplingParams(max_tokens=1),
                request_timeout_s=5,
                sleeps=True,
            )
            try:
                await work(engine)
            finally:
                await engine.close()
                server.close()

        asyncio.run(asyncio.wait_for(all_of_it(), 20))
        return routes

    return run


SENT = [
    "/collective_rpc load_policy",
    "/reset_prefix_cache",
    "/update_weight_version",
    "/weight_info",
]


def test_weights_for_an_engine_that_sleeps_are_sent_between_its_memorys_two_halves(
    serving: Serving, tmp_path: Path
) -> None:
    async def work(engine: VllmEngine) -> None:
        assert engine.sleeper is not None
        mark_asleep(Path("e.sock"), DROP)
        engine.sleeper.has_weights = False
        await engine.load_weights(tmp_path, 3)
        assert engine.version == 0
        await engine.sleeper.wake()
        assert (engine.version, engine.verified_share) == (3, 1.0)
        await engine.sleeper.sleep()
        await engine.sleeper.wake()

    a_wake = ["/wake_up?tags=weights", *SENT, "/wake_up?tags=kv_cache"]
    assert serving(work) == [*a_wake, "/sleep?level=2", *a_wake]


def test_an_engine_that_was_never_sent_weights_reads_its_own_again(serving: Serving) -> None:
    async def work(engine: VllmEngine) -> None:
        assert engine.sleeper is not None
        await engine.sleeper.sleep()
        await engine.sleeper.wake()

    assert serving(work) == [
        *["/sleep?level=2", "/wake_up?tags=weights"],
        *["/collective_rpc reload_weights", "/wake_up?tags=kv_cache"],
    ]


# -- a whole run ---------------------------------------------------------------------------------------------------


JUDGE = """
model: policy-base
rubric: Is it good?
verdict: {kind: json, min: 0, max: 1}
"""
COMMAND = """
import sys
from ycore.launch import layout
devices = sys.argv.pop(1).split(",")
layout.this_machine = lambda: layout.Machine(cores=(0,), devices=tuple(devices))
from tests.chaos.command import main
main()
"""
A_NAP = (
    "(sleeps at level 1;wakes: weights|sleeps at level 2;wakes: weights;loads);wakes: kv_cache"
)
ASLEEP = "sleeps at level [12]"
"""A judge's engine says this: weights that it dropped are read again, weights that it kept are not. Which level it is
told, and how often it wakes, follows from the seconds that were measured.
"""
SAME = ("loss", "grad_norm", "reward", "completions/mean_length")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model, a judge, and a run whose engines stay awake."""
    folder = tmp_path_factory.mktemp("place")
    write_tiny_model(folder / "model")
    (folder / "judge.yaml").write_text(JUDGE)
    run_with_devices(folder, "awake", "engine.sleep=false")
    return folder


def run_with_devices(place: Path, name: str, *sets: str) -> str:
    """Run on what the launcher takes for two devices, with scripted engines, and return the output."""
    options: dict[str, Any] = {
        "--model": place / "model",
        "--dataset": "task:addition?digits=1",
        "--reward": f"judge:{place / 'judge.yaml'}",
        "--output": place / name,
        "--steps": 3,
        "--prompts-per-step": 4,
        "--group-size": 4,
        "--max-tokens": 8,
        "--engine": "vllm",
        "--learning-rate": 1e-2,
    }
    words = [str(word) for option, value in options.items() for word in (option, value)]
    settings = ["dtype=float32", "sampling.dynamic=false", "engine.max_model_len=64", *sets]
    words += [word for value in settings for word in ("--set", value)]
    command = [
        sys.executable,
        "-c",
        COMMAND,
        "0,1",
        json.dumps({"--think-s": "0.01"}),
        "grpo",
        *words,
    ]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "COLUMNS": "300"},
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def rests(output: Path, engine: str) -> list[str]:
    """Return the lines of the scripted engine that say how it slept and woke, without its start."""
    lines = (output / "logs" / f"{engine}.log").read_text().splitlines()
    return [line for line in lines if line.startswith(("sleeps", "wakes", "loads"))]


@pytest.mark.slow
@pytest.mark.verify
@pytest.mark.parametrize("placement", ["split:1:1", "dynamic"])
def test_a_run_whose_engines_sleep_learns_the_same(place: Path, placement: str) -> None:
    output = run_with_devices(place, placement.partition(":")[0], f"placement={placement}")
    awake, asleep = place / "awake", place / placement.partition(":")[0]
    assert "engines sleep while the trainer trains" in output
    expected, seen = rows(awake), rows(asleep)
    assert [{key: row[key] for key in SAME} for row in seen] == [
        {key: row[key] for key in SAME} for row in expected
    ]
    assert len({row["loss"] for row in expected}) == 3
    assert "sleeps at level 2" not in rests(awake, "rollout-0")
    policy = rests(asleep, "rollout-0")
    a_turn = ["wakes: weights", "loads", "wakes: kv_cache", "sleeps at level 2"]
    assert policy[0] == "sleeps at level 2" and len(policy) > 8
    assert policy[1:] == a_turn * (len(policy) // 4), (
        "weights before the cache, and asleep at the end"
    )
    if placement == "split:1:1":
        assert len(policy) == 1 + 4 * (3 + 2), (
            "a turn a round, and one each for the samples before and after"
        )
        assert rests(asleep, "judge-0") == ["sleeps at level 1"], (
            "a role that has no part of the slot is never woken"
        )
    judges = [";".join(rests(asleep, f"judge-{slot}")) for slot in (0, 1)]
    assert all(re.fullmatch(f"({A_NAP};)*{ASLEEP}", rested) for rested in judges), judges
    said = {word for rested in judges for word in rested.split(";")}
    assert {"sleeps at level 1", "wakes: kv_cache"} <= said
    assert "sleeps at level 2" not in said, "frozen weights are kept"
