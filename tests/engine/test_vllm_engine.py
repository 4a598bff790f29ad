"""VllmEngine against servers that misbehave: real ones, on real sockets, that answer what the test says.

Not here: a real vLLM server (`test_real_engine`).
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ycore.engine import SamplingParams, vllm_engine
from ycore.engine.vllm_engine import VllmEngine
from ycore.engine.weight_proof import TensorSums, write_manifest
from ycore.errors import EngineError, SyncError

SAMPLING = SamplingParams(max_tokens=12, stop_token_ids=(2,))
Answer = Callable[[str], Awaitable[tuple[int, bytes]]]


@pytest.fixture
def socket() -> Iterator[Path]:
    """Return a socket in a folder of its own with a short name: a socket's path holds about 100 characters."""
    with tempfile.TemporaryDirectory(prefix="yc-") as folder:
        yield Path(folder) / "e.sock"


@asynccontextmanager
async def serving(socket: Path, answer: Answer) -> AsyncIterator[None]:
    connections: set[asyncio.StreamWriter] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(writer)
        try:
            while line := await reader.readline():
                length = 0
                while (header := await reader.readline()).strip():
                    name, _, value = header.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                await reader.readexactly(length)
                status, body = await answer(line.split()[1].decode())
                writer.write(
                    b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body
                )
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(handle, socket)
    try:
        yield
    finally:
        server.close()
        for writer in connections:  # as the kernel does when a process ends
            writer.close()


def engine_at(
    socket: Path,
    *,
    timeout_s: float = 5.0,
    sampling: SamplingParams = SAMPLING,
    **settings: float,
) -> VllmEngine:
    settings = {"restart_timeout_s": 20.0, **settings}
    return VllmEngine("rollout-7", socket, sampling, request_timeout_s=timeout_s, **settings)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Write the manifest of a trainer's version 3; the engine never looks at the tensors themselves."""
    write_manifest(tmp_path, 3, SUMS)
    return tmp_path


SUMS = {
    "q_proj.weight": TensorSums(600, 8, rows=1, columns=2),
    "k_proj.weight": TensorSums(300, 8, rows=2**64 - 1, columns=4),
    "norm.weight": TensorSums(100, 2, rows=5, columns=6),
}
HELD = [[name, 0, 0, sums.width, sums.rows, sums.columns] for name, sums in SUMS.items()]


async def says_version(version: str, path: str, pieces: object = HELD) -> tuple[int, bytes]:
    answers = {
        "/weight_info": {"weight_version": version},
        "/collective_rpc": {"results": [pieces]},
    }
    return 200, json.dumps(answers[path]).encode() if path in answers else b""


def sync(
    socket: Path, weights: Path, answer: Answer, *, version: int = 3, min_verified: float = 1.0
) -> VllmEngine:
    async def work() -> VllmEngine:
        async with serving(socket, answer):
            engine = engine_at(socket, min_verified=min_verified)
            try:
                await engine.load_weights(weights, version)
            finally:
                await engine.close()
            return engine

    return asyncio.run(work())


@pytest.mark.parametrize("version", ["2", "4", "", "default"])
def test_an_engine_that_names_another_version_is_a_sync_error(
    socket: Path, weights: Path, version: str
) -> None:
    with pytest.raises(SyncError, match=f"rollout-7: holds policy version {version}, not 3"):
        sync(socket, weights, lambda path: says_version(version, path))


@pytest.mark.parametrize("num_refusals", [2, 1000])
def test_keys_of_earlier_weights_are_dropped_before_the_next_request(
    socket: Path, weights: Path, monkeypatch: pytest.MonkeyPatch, num_refusals: int
) -> None:
    """vLLM refuses to drop them while a request holds some; its answer was not read."""
    monkeypatch.setattr(vllm_engine, "_RESET_WAIT_S", 0.001)
    resets = 0

    async def answer(path: str) -> tuple[int, bytes]:
        nonlocal resets
        if path != "/reset_prefix_cache":
            return await says_version("3", path)
        resets += 1
        return 200, json.dumps({"success": resets > num_refusals}).encode()

    if num_refusals == 2:
        assert sync(socket, weights, answer).version == 3
        assert resets == 3
    else:
        with pytest.raises(SyncError, match="rollout-7 still held keys and values of earlier"):
            sync(socket, weights, answer)


def test_the_version_and_the_sums_read_back_are_taken(socket: Path, weights: Path) -> None:
    engine = sync(socket, weights, lambda path: says_version("3", path))
    assert (engine.version, engine.verified_share) == (3, 1.0)


def test_a_tensor_that_the_engine_cannot_tell_of_is_refused_unless_that_is_accepted(
    socket: Path, weights: Path
) -> None:
    answer = lambda path: says_version("3", path, HELD[1:])  # noqa: E731
    with pytest.raises(
        SyncError,
        match=r"rollout-7: policy version 3: 2 of 3 tensors \(40.0% of the bytes\).*q_proj",
    ):
        sync(socket, weights, answer)
    assert sync(socket, weights, answer, min_verified=0.4).verified_share == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        (
            [[*HELD[0][:4], 4, 1], [*HELD[1][:4], 1, 2], HELD[2]],
            r"2 of 3 tensors .*: k_proj.weight, q_proj.weight$",
        ),
        ([*HELD[:2], [*HELD[2][:4], 5, 7]], r"1 of 3 tensors .*: norm.weight$"),
        ([], r"0 of 3 tensors \(0.0% of the bytes\) are verified"),
        (None, r"0 of 3 tensors \(0.0% of the bytes\) are verified"),
        ([["other.weight", 0, 0, 8, 1, 1]], "0 of 3 tensors"),
    ],
)
def test_sums_that_are_not_the_trainers_are_a_sync_error(
    socket: Path, weights: Path, pieces: object, said: str
) -> None:
    with pytest.raises(SyncError, match=f"rollout-7: policy version 3: .*{said}"):
        sync(socket, weights, lambda path: says_version("3", path, pieces))


@pytest.mark.parametrize(
    ("version", "first", "num_calls"),
    [(0, HELD, 1), (0, HELD[:2], 2), (0, [[*HELD[0][:4], 8, 8], *HELD[1:]], 2), (3, HELD, 1)],
    ids=["the same", "too few are known", "others", "a trained version"],
)
def test_a_first_version_that_the_engine_has_read_itself_is_not_loaded(
    socket: Path, tmp_path: Path, version: int, first: object, num_calls: int
) -> None:
    """One call asks for the sums of what it holds, and another loads; a trained version is loaded without asking."""
    write_manifest(tmp_path, version, SUMS)
    answers: list[object] = []

    async def answer(path: str) -> tuple[int, bytes]:
        if path == "/collective_rpc":
            answers.append(HELD if answers else first)
            return await says_version("", path, answers[-1])
        return await says_version(str(version), path)

    engine = sync(socket, tmp_path, answer, version=version, min_verified=0.0)
    assert (len(answers), engine.version, engine.verified_share) == (num_calls, version, 1.0)


def test_weights_that_were_not_written_are_not_sent(
    socket: Path, weights: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        SyncError, match=r"stale weights: .* holds policy version 3, and 4 was to be sent"
    ):
        sync(socket, weights, lambda path: says_version("4", path), version=4)
    (tmp_path / "weights.json").unlink()
    with pytest.raises(SyncError, match="no weights to send"):
        sync(socket, weights, lambda path: says_version("3", path))


async def refuses(path: str) -> tuple[int, bytes]:
    return 500, b'{"error": "no such token"}'


async def knows_no_such_model(path: str) -> tuple[int, bytes]:
    return 404, b"no such model"


async def babbles(path: str) -> tuple[int, bytes]:
    return 200, b"<html>"


async def hangs(path: str) -> tuple[int, bytes]:
    await asyncio.sleep(60)
    return 200, b""


async def hangs_up(path: str) -> tuple[int, bytes]:
    raise ConnectionResetError


def healthy(answer: Answer) -> Answer:
    """Return these answers, beside a health check that passes."""

    async def answers(path: str) -> tuple[int, bytes]:
        return (200, b"") if path == "/health" else await answer(path)

    return answers


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (refuses, "rollout-7: /v1/completions answered 500: .*no such token"),
        (knows_no_such_model, "rollout-7: /v1/completions answered 404: no such model"),
        (babbles, "rollout-7: /v1/completions answered '<html>', which is not JSON"),
        (hangs, "rollout-7: no answer to /v1/completions within 1 s"),
        (hangs_up, "rollout-7: /v1/completions failed"),
        (
            None,
            "rollout-7: no answer to /v1/completions within 1 s .*, and from another process within 1 s more",
        ),
    ],
    ids=["refuses", "bad-request", "babbles", "hangs", "hangs-up", "dead"],
)
def test_whatever_goes_wrong_is_an_engine_error_in_time(
    socket: Path, answer: Answer | None, said: str
) -> None:
    async def ask() -> None:
        engine = engine_at(socket, timeout_s=1.0, restart_timeout_s=1.0)
        with pytest.raises(EngineError, match=said):
            await engine.complete([9, 8], 1)
        await engine.close()

    async def work() -> None:
        if answer is None:
            return await ask()
        async with serving(socket, healthy(answer)):
            await ask()

    asyncio.run(work())


def test_a_server_that_closes_every_connection_is_given_up_at_the_deadline(
    socket: Path,
) -> None:
    """It closes them at /health too, so that it is not known to be back; and its process stays the one it was."""
    paths: list[str] = []

    async def answers(path: str) -> tuple[int, bytes]:
        paths.append(path)
        if paths == ["/health"]:
            return 200, b""
        raise ConnectionResetError

    async def work() -> None:
        async with serving(socket, answers):
            engine = engine_at(socket, timeout_s=1.0, restart_timeout_s=60.0)
            said = r"within 1 s \(engine.request_timeout_s\), sent 2 times; first failure: .*/v1/completions failed"
            with pytest.raises(EngineError, match=said):
                await engine.complete([9, 8], 1)
            await engine.close()

    asyncio.run(asyncio.wait_for(work(), 20))
    assert paths.count("/v1/completions") == 1 and paths.count("/health") > 2


def test_waiting_ends_when_the_engine_comes_or_the_time_is_over(socket: Path) -> None:
    async def work() -> None:
        engine = engine_at(socket)
        with pytest.raises(
            EngineError, match=r"rollout-7: not ready after 1 s; see logs/rollout-7\.log"
        ):
            await engine.wait_ready(timeout_s=1)
        waiting = asyncio.create_task(engine.wait_ready(timeout_s=20))
        await asyncio.sleep(0.3)
        async with serving(socket, lambda path: says_version("0", path)):
            await waiting
        await engine.close()

    asyncio.run(work())


class Incarnations:
    """One engine after another behind the same socket, of which the first die in the midst of what they were asked."""

    def __init__(self, dies_at: list[int | None]) -> None:
        self.seen: list[list[str]] = []
        self._dies_at = dies_at

    async def live(self, socket: Path) -> None:
        for dies_at in self._dies_at:
            socket.unlink(missing_ok=True)
            died, paths = asyncio.Event(), list[str]()
            self.seen.append(paths)

            async def answer(
                path: str, *, at: int | None = dies_at, e: asyncio.Event = died
            ) -> tuple[int, bytes]:
                if path == "/health":
                    return (503 if e.is_set() else 200), b""
                self.seen[-1].append(path)
                if e.is_set() or self.seen[-1].count("/v1/completions") == at:
                    e.set()
                    raise ConnectionResetError
                await asyncio.sleep(0.05)
                choice = {
                    "token_ids": [5],
                    "logprobs": {"token_logprobs": [-1.0]},
                    "text": "a",
                    "finish_reason": "stop",
                }
                if path == "/v1/completions":
                    return 200, json.dumps({"choices": [choice]}).encode()
                return await says_version("3", path)

            async with serving(socket, answer):
                await (died.wait() if dies_at is not None else asyncio.sleep(3600))
                await asyncio.sleep(0.3)


def test_a_new_process_gets_the_weights_before_the_unfinished_requests(
    socket: Path, weights: Path
) -> None:
    async def work() -> None:
        engines = Incarnations(dies_at=[3, 1, None])
        living = asyncio.create_task(engines.live(socket))
        engine = engine_at(socket)
        await engine.load_weights(weights, 3)
        written = await asyncio.gather(*(engine.complete([9], seed) for seed in range(6)))
        living.cancel()
        await engine.close()
        assert len(written) == 6 and {completion.policy_version for completion in written} == {
            3
        }
        assert engine.restarts == 2
        load = ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
        for paths in engines.seen:
            assert paths[:3] == load and paths[3:].count("/collective_rpc") == 0
        assert engines.seen[-1].count("/v1/completions") >= 4, "the unfinished were asked again"

    asyncio.run(work())


def test_a_new_process_is_noticed_though_nothing_was_under_way(
    socket: Path, weights: Path
) -> None:
    async def work() -> None:
        engine = engine_at(socket)
        for _ in range(2):
            engines = Incarnations(dies_at=[None])
            living = asyncio.create_task(engines.live(socket))
            if not engine.version:
                await engine.load_weights(weights, 3)
            await engine.complete([9], 1)
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
            (paths,) = engines.seen
            assert paths.index("/collective_rpc") < len(paths) - 1 - paths[::-1].index(
                "/v1/completions"
            ), "what it wrote before it had the weights was taken"
        assert engine.restarts == 1
        await engine.close()

    asyncio.run(work())
