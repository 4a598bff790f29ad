"""A hostile server: whatever it answers, the client ends in time and within memory, and the judge in one line."""

import asyncio
import gzip
import json
import resource
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress

import pytest

from ycore.config.schema import RewardConfig
from ycore.engine import judge_engine
from ycore.engine.judge_engine import QuestionRefused, RemoteJudge
from ycore.errors import EngineError
from ycore.judge.declaration import judge_of

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
TIMEOUT_S = 2.0
MORE_MEMORY = 1 << 30
GOOD = {"choices": [{"message": {"content": "7"}}]}


def whole(body: bytes, *headers: bytes, status: bytes = OK) -> bytes:
    lines = b"".join(line + b"\r\n" for line in headers)
    return status + lines + b"Content-Length: %d\r\n\r\n" % len(body) + body


def said(value: object) -> bytes:
    return whole(json.dumps(value).encode())


def deflated(size: int, *, gzipped: bool) -> bytes:
    packer = zlib.compressobj(9, wbits=31 if gzipped else 15)
    return b"".join(packer.compress(b" " * 2**20) for _ in range(size >> 20)) + packer.flush()


def endless(first: bytes, part: bytes, *, every_s: float = 0.0) -> Iterator[bytes]:
    yield first
    while True:
        yield part
        time.sleep(every_s)


GZIP = b"Content-Encoding: gzip"
KINDS: dict[str, object] = {
    "endless chunks": lambda: endless(CHUNKED, b"10000\r\n" + b" " * 65536 + b"\r\n"),
    "a byte a second": lambda: endless(whole(b"{}" * 500), b" ", every_s=1.0),
    "headers a byte a second": lambda: endless(OK, b"x", every_s=1.0),
    "endless headers": lambda: endless(OK, b"a: " + b"b" * 1000 + b"\r\n"),
    "endless 1xx": lambda: endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "10 MB of headers": OK + b"a: " + b"b" * 10_000_000 + b"\r\n\r\n",
    "a chunk of 2^60": CHUNKED + b"fffffffffffffff\r\n" + b"x" * 100,
    "a chunk of text": CHUNKED + b"zz\r\n",
    "no answer": b"",
    "no HTTP": b"hello\r\n\r\n",
    "status of text": b"HTTP/1.1 abc OK\r\n\r\n",
    "content-length too large": OK + b"Content-Length: 1000\r\n\r\n{}",
    "content-length negative": OK + b"Content-Length: -1\r\n\r\n{}",
    "content-length of text": OK + b"Content-Length: many\r\n\r\n{}",
    "two content-lengths": OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    "content-length too small": OK + b"Content-Length: 5\r\n\r\n" + json.dumps(GOOD).encode(),
    "redirect to itself": whole(b"", b"Location: /", status=b"HTTP/1.1 302 Found\r\n"),
    "redirect to a file": whole(b"", b"Location: file:///etc/passwd", status=b"HTTP/1.1 307 X\r\n"),
    "gzip bomb": lambda: whole(deflated(2**30, gzipped=True), GZIP),
    "deflate bomb": lambda: whole(deflated(2**30, gzipped=False), b"Content-Encoding: deflate"),
    "twice packed": whole(gzip.compress(gzip.compress(b"{}")), b"Content-Encoding: gzip, gzip"),
    "brotli": whole(b"x" * 100, b"Content-Encoding: br"),
    "broken gzip": whole(b"x" * 100, GZIP),
    "cut gzip": whole(gzip.compress(b"{}" * 1000)[:20], GZIP),
    "NaN": whole(b"NaN"),
    "1e999": whole(b'{"choices": 1e999}'),
    "100,000 brackets": whole(b"[" * 100_000),
    "deep objects": whole(b'{"a":' * 100_000),
    "a long number": whole(b"9" * 100_000),
    "invalid UTF-8": whole(b'{"choices": "\xff\xfe"}'),
    "BOM alone": whole(b"\xef\xbb\xbf"),
    "UTF-32": whole("[]".encode("utf-32")),
    "odd charset": whole(b"{}", b"Content-Type: application/json; charset=rot13"),
    "an odd retry-after": whole(
        b"", b"Retry-After: \xc2\xb2", status=b"HTTP/1.1 503 Busy\r\n"
    ),
    "a long retry-after": whole(
        b"", b"Retry-After: " + b"9" * 5000, status=b"HTTP/1.1 503 Busy\r\n"
    ),
    "an error object": said({"error": {"message": "no"}}),
    "no choices": said({"choices": []}),
    "a null choice": said({"choices": [None]}),
    "content of numbers": said({"choices": [{"message": {"content": [1]}}]}),
    "tokens of text": said({"choices": [{**GOOD["choices"][0], "logprobs": {"content": "x"}}]}),
    "an empty body": whole(b""),
    "a page": whole(b"<html>\x1b[2J</html>"),
    "a status of 500": whole(b"x", status=b"HTTP/1.1 500 No\r\n"),
    "a status of 404 with a screen code": whole(b"\x1b[2J\n\nx", status=b"HTTP/1.1 404 No\r\n"),
}  # fmt: skip
READABLE = {
    "null content": said({"choices": [{"message": {"content": None}}]}),
    "unknown tools": said(
        {"choices": [{"message": {"content": "7", "tool_calls": [{"id": 1}, "x", None]}}]}
    ),
    "duplicate keys": whole(b'{"choices": 1, "choices": [{"message": {"content": "7"}}]}'),
    "half of a character": whole(b'{"choices": [{"message": {"content": "\\ud800"}}]}'),
    "trailing garbage": said(GOOD) + b"HTTP/1.1 200 OK\r\n\r\n" * 100,
    "gzip with a tail": whole(gzip.compress(json.dumps(GOOD).encode()) + b"tail", GZIP),
    "usage of text": said({**GOOD, "usage": {"total_tokens": "many"}}),
    "usage of 1e999": whole(json.dumps(GOOD).encode()[:-1] + b', "usage": {"total_tokens": 1e999}}'),
    "a cookie of 50 kB": whole(json.dumps(GOOD).encode(), b"Set-Cookie: a=" + b"b" * 50_000),
}  # fmt: skip


def serve(listener: socket.socket, answer: object) -> None:
    """Answer every connection by the same bytes, until the listener closes."""
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.settimeout(TIMEOUT_S)
                connection.recv(65536)
                parts = answer() if callable(answer) else answer
                for part in [parts] if isinstance(parts, bytes) else parts:
                    connection.sendall(part)


def outcome_of(answer: object) -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener, answer), daemon=True).start()
        base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        args = {"base_url": base_url, "model": "big", "verdict": {"kind": "score"}}
        judge = judge_of(RewardConfig(reward="judge:test", args=args))

        async def work() -> str:
            engine = RemoteJudge("test", judge, request_timeout_s=TIMEOUT_S)
            try:
                return (await engine.ask(judge, [], seed=0)).text
            except (QuestionRefused, EngineError) as refusal:
                return f"refused: {refusal}"
            finally:
                await engine.close()

        return asyncio.run(work())


@pytest.mark.verify
@pytest.mark.parametrize("kind", [*KINDS, *READABLE])
def test_no_answer_takes_time_or_memory_or_ends_a_run(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_engine, "TRIES", 3)
    monkeypatch.setattr(judge_engine, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(judge_engine, "PATIENCE_S", 0.5)
    answer = {**KINDS, **READABLE}[kind]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    outcome = outcome_of(answer)
    assert time.monotonic() - began < 20 * TIMEOUT_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MORE_MEMORY >> 10
    assert outcome.startswith("refused: ") == (kind in KINDS), outcome
    assert outcome.isprintable() and len(outcome) < 500
