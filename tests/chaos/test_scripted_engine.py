"""The scripted engine behind ycore's own client: what it writes follows from weights, prompt and seed; its faults."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.chaos.scripted_engine import Faults
from tests.tiny_model import write_tiny_model
from ycore.engine import SamplingParams
from ycore.engine.vllm_engine import VllmEngine
from ycore.engine.weight_proof import tensor_sums, write_manifest
from ycore.errors import SyncError, YcoreError
from ycore.types import Completion

Start = Callable[..., VllmEngine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(*, token_s: float = 0.0, **faults: Any) -> VllmEngine:
        socket = tmp_path / f"{len(started)}.sock"
        words = [
            "--model",
            str(model),
            "--uds",
            str(socket),
            "--faults",
            json.dumps(faults),
            "--served-model-name",
            "x",
            "--token-s",
            str(token_s),
        ]
        started.append(
            subprocess.Popen([sys.executable, "-m", "tests.chaos.scripted_engine", *words])
        )
        deadline = time.monotonic() + 120
        while not socket.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return VllmEngine(
            "scripted",
            socket,
            SamplingParams(max_tokens=12, stop_token_ids=(2,)),
            request_timeout_s=60,
        )

    yield begin
    for process in started:
        process.kill()
        process.wait()


def shared(model: Path, folder: Path, *, version: int, more: float = 0.0) -> Path:
    """Weights as the trainer shares them."""
    folder.mkdir(exist_ok=True)
    tensors = load_file(model / "model.safetensors")
    tensors = {name: tensor + more for name, tensor in tensors.items()}
    save_file(tensors, folder / "model-00000.safetensors")
    write_manifest(
        folder, version, {name: tensor_sums(tensor) for name, tensor in tensors.items()}
    )
    return folder


def test_a_completion_follows_from_weights_prompt_and_seed(
    start: Start, model: Path, tmp_path: Path
) -> None:
    async def ask(engine: VllmEngine) -> None:
        await engine.wait_ready(timeout_s=60)
        await engine.load_weights(shared(model, tmp_path / "weights", version=0), 0)
        first = await engine.complete([7, 8], 5)
        assert first == await engine.complete([7, 8], 5)
        assert {first} != {await engine.complete([7, 8], 6), await engine.complete([7, 9], 5)}
        assert 2 <= len(first.token_ids) <= 12 and first.logprobs is not None
        assert len(first.logprobs) == len(first.token_ids)
        await engine.load_weights(shared(model, tmp_path / "weights", version=1, more=0.5), 1)
        assert (await engine.complete([7, 8], 5)).token_ids != first.token_ids
        await engine.close()

    asyncio.run(ask(start()))


def test_a_completion_that_is_aborted_is_the_beginning_of_the_whole_one(
    start: Start, model: Path, tmp_path: Path
) -> None:
    async def ask(engine: VllmEngine, *, aborts: bool) -> list[Completion]:
        await engine.load_weights(shared(model, tmp_path / "weights", version=0), 0)
        requests = [asyncio.ensure_future(engine.complete([7], seed)) for seed in range(4)]
        await asyncio.sleep(4.5)  # between the first token of each and the last of the shortest
        if aborts:
            await engine.abort()
        answers = await asyncio.gather(*requests)
        await engine.close()
        return answers

    whole = asyncio.run(ask(start(), aborts=False))
    parts = asyncio.run(ask(start(token_s=3.0), aborts=True))
    assert {completion.finish_reason for completion in parts} == {"abort"}
    for part, completion in zip(parts, whole, strict=True):
        assert part.token_ids == completion.token_ids[: len(part.token_ids)] and 1 <= len(
            part.token_ids
        ) < len(completion.token_ids)
        assert part.text == completion.text[: len(part.text)]


def test_its_sums_are_those_of_the_trainer_and_a_skipped_sync_is_told(
    start: Start, model: Path, tmp_path: Path
) -> None:
    async def sync(engine: VllmEngine) -> None:
        await engine.load_weights(shared(model, tmp_path / "weights", version=0), 0)
        with pytest.raises(SyncError, match="policy version 1"):
            await engine.load_weights(
                shared(model, tmp_path / "weights", version=1, more=0.5), 1
            )
        await engine.close()

    asyncio.run(sync(start(stale_from=1)))


def test_calls_that_are_dropped_or_late_are_answered_in_the_end(
    start: Start, model: Path, tmp_path: Path
) -> None:
    async def ask(engine: VllmEngine) -> list[tuple[int, ...]]:
        await engine.load_weights(shared(model, tmp_path / "weights", version=0), 0)
        answers = await asyncio.gather(*(engine.complete([7], seed) for seed in range(16)))
        await engine.close()
        return [answer.token_ids for answer in answers]

    plain = asyncio.run(ask(start()))
    assert plain == asyncio.run(ask(start(close=0.1, late=0.1, late_s=0.2, seed=3)))


def test_an_error_is_no_completion(start: Start, model: Path, tmp_path: Path) -> None:
    async def ask(engine: VllmEngine) -> None:
        with pytest.raises(YcoreError):
            await engine.load_weights(shared(model, tmp_path / "weights", version=0), 0)
        await engine.close()

    asyncio.run(asyncio.wait_for(ask(start(error=1.0)), 60))


def test_faults_follow_from_their_seed() -> None:
    faults = Faults(seed=1, close=0.2, error=0.2, late=0.2)
    drawn = [faults.of_call(number) for number in range(200)]
    assert drawn == [faults.of_call(number) for number in range(200)]
    assert set(drawn) == {None, "close", "error", "late"}
    assert drawn != [
        Faults(seed=2, close=0.2, error=0.2, late=0.2).of_call(number) for number in range(200)
    ]
