"""`python -m ycore.rollout.agent_host DESCRIPTOR`: a confined process with an agent and its address.

It imports the standard library alone, starts the agent's command, and serves an OpenAI address on its own loopback. A
call goes to the trainer as JSON lines on the process' pipes, so that nothing listens outside of the sandbox. The first
line is `{"nonce", "command", "variables"}`, answered by `{"nonce", "ready": true}`, or `{"nonce", "error": line}` where
the command cannot be started. Each later one is `{"nonce", "reply"}`, the answer of the last call if there is one. It
is answered by the next event: `{"nonce", "value": {"call", "body"}}`, or `{"exit", "paid"}` once the agent has ended.
"""

import hmac
import json
import os
import queue
import secrets
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ycore.sandbox.channel import Channel

MOST_BODY = 2**20  # bytes of a request
MODEL = "policy"
_MOST_PAID = 100  # characters
_WAIT_S = 3600.0  # for an answer; the trainer's own deadlines are shorter

Reply = tuple[int, dict[str, Any]]


class Door(ThreadingHTTPServer):
    """The address: each call waits in its thread until the trainer has answered it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Call)
        self.key = f"sk-{secrets.token_hex(16)}"
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._waiting: dict[int, queue.Queue[Reply]] = {}
        self._lock = threading.Lock()
        self._count = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def ask(self, body: dict[str, Any]) -> Reply:
        with self._lock:
            self._count += 1
            number = self._count
            answer = self._waiting[number] = queue.Queue()
        self.events.put({"call": number, "body": body})
        return answer.get(timeout=_WAIT_S)

    def answer(self, number: int, status: int, body: dict[str, Any]) -> None:
        self._waiting.pop(number).put((status, body))


class _Call(BaseHTTPRequestHandler):
    server: Door
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """The list of models, for clients that ask for it first."""
        found = self.path.rstrip("/").endswith("/models")
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "ycore"}
        self._send(200, {"object": "list", "data": [model]}) if found else self._send(
            *_refusal(404, "no such path")
        )

    def do_POST(self) -> None:
        try:
            length = int(self.headers.get("Content-Length") or "")
        except ValueError:
            length = -1
        if not 0 <= length <= MOST_BODY:
            self.close_connection = True
            return self._send(
                *_refusal(413, f"a request needs a Content-Length of at most {MOST_BODY} bytes")
            )
        data = self.rfile.read(length)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(errors="replace"), self.server.key.encode()):
            return self._send(
                *_refusal(401, "the key is not that of this completion; take OPENAI_API_KEY")
            )
        if not self.path.rstrip("/").endswith("/chat/completions"):
            return self._send(
                *_refusal(404, "only POST /v1/chat/completions and GET /v1/models are served")
            )
        try:
            body = json.loads(data)
            assert isinstance(body, dict)
        except (ValueError, AssertionError, RecursionError):
            return self._send(*_refusal(400, "the body is no JSON object"))
        status, answer = self.server.ask(body)
        if status == 200 and body.get("stream"):
            return self._stream(answer)
        self._send(status, answer)

    def _send(self, status: int, body: dict[str, Any]) -> None:
        self._write(status, "application/json", json.dumps(body).encode())

    def _stream(self, answer: dict[str, Any]) -> None:
        """The whole answer as one chunk."""
        choice = answer["choices"][0]
        delta = dict(choice["message"])
        if delta.get("tool_calls"):
            delta["tool_calls"] = [
                {**call, "index": index} for index, call in enumerate(delta["tool_calls"])
            ]
        head = {**answer, "object": "chat.completion.chunk"}
        first = {
            **head,
            "choices": [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}],
        }
        first.pop("usage")
        lines = [json.dumps(first), json.dumps({**head, "choices": []}), "[DONE]"]
        self._write(
            200, "text/event-stream", "".join(f"data: {line}\n\n" for line in lines).encode()
        )

    def _write(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def _refusal(status: int, line: str) -> Reply:
    return status, {"error": {"message": line, "type": "invalid_request_error", "code": None}}


def start(first: dict[str, Any], door: Door) -> None:
    """Start the agent, and tell of its end as an event."""
    paid = Path(tempfile.mkdtemp()) / "reward"
    variables = {"OPENAI_BASE_URL": door.url, "OPENAI_API_KEY": door.key, "OPENAI_MODEL": MODEL}
    variables |= {"YCORE_REWARD_FILE": str(paid), **first["variables"]}
    agent = subprocess.Popen(
        first["command"],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
    )

    def wait() -> None:
        code = agent.wait()
        text = paid.read_text(errors="replace")[:_MOST_PAID] if paid.is_file() else None
        door.events.put({"exit": code, "paid": text})

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    channel = Channel(int(sys.argv[1]))
    requests = iter(channel)
    first = next(requests)
    door = Door()
    threading.Thread(target=door.serve_forever, daemon=True).start()
    try:
        start(first, door)
        channel.reply({"nonce": first["nonce"], "ready": True})
    except (OSError, ValueError) as error:
        return channel.reply({"nonce": first["nonce"], "error": " ".join(str(error).split())[:300]})
    for request in requests:
        if request["reply"] is not None:
            door.answer(**request["reply"])
        channel.reply({"nonce": request["nonce"], "value": door.events.get()})


if __name__ == "__main__":
    main()
