"""`python -m ycore.rollout.agent_host`: a confined process with an agent and the OpenAI address it asks.

It imports the standard library alone, starts the agent's command, and serves the address on its own loopback. A call
goes to the trainer as JSON lines on the process' socket, so that nothing listens outside of the sandbox. The first line
is `{"nonce", "command", "variables"}`, answered by `{"nonce", "ready": true}`, or `{"nonce", "error": line}` where the
command cannot be started. Each later line is `{"nonce", "reply"}`, the answer of the last call if there is one. It is
answered by the next event: `{"nonce", "value": {"body"}}` of a call, or `{"exit", "paid"}` once the agent has ended.
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

from ycore.sandbox.channel import Handler, answer_requests
from ycore.types import JsonObject

MAX_BODY = 2**20  # bytes of a request
MODEL = "policy"
_MAX_PAID = 100  # characters
_WAIT_S = 3600.0  # for an answer; the trainer's own deadlines are shorter

Reply = tuple[int, JsonObject]
"""A status, and a body."""

ReplyQueue = queue.Queue[Reply]
"""Takes the reply to a call."""


class ChatServer(ThreadingHTTPServer):
    """The address: each call waits in its thread until the trainer has answered it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _ChatHandler)
        self.key = f"sk-{secrets.token_hex(16)}"
        self.events: queue.Queue[tuple[JsonObject, ReplyQueue]] = queue.Queue()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def ask(self, body: JsonObject) -> Reply:
        answer = ReplyQueue()
        self.events.put(({"body": body}, answer))
        return answer.get(timeout=_WAIT_S)


class _ChatHandler(BaseHTTPRequestHandler):
    server: ChatServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length") or ""
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True
            line = f"a request needs a Content-Length of at most {MAX_BODY} bytes"
            return self._refuse(413, line)
        data = self.rfile.read(int(length))
        key = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(key.encode(errors="replace"), self.server.key.encode()):
            line = "the key is not that of this completion; take OPENAI_API_KEY"
            return self._refuse(401, line)
        if not self.path.rstrip("/").endswith("/chat/completions"):
            line = "only POST /v1/chat/completions is served"
            return self._refuse(404, line)
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            return self._refuse(400, "the body is no JSON object")
        status, answer = self.server.ask(body)
        if status == 200 and body.get("stream"):
            return self._write(status, "text/event-stream", _stream_of(answer).encode())
        self._send(status, answer)

    def _refuse(self, status: int, line: str) -> None:
        error = {"message": line, "type": "invalid_request_error", "code": None}
        self._send(status, {"error": error})

    def _send(self, status: int, body: JsonObject) -> None:
        self._write(status, "application/json", json.dumps(body).encode())

    def _write(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def _stream_of(answer: JsonObject) -> str:
    """Return the whole answer as a stream of one chunk."""
    choice = answer["choices"][0]
    delta = dict(choice["message"])
    if delta.get("tool_calls"):
        delta["tool_calls"] = [
            {**call, "index": index} for index, call in enumerate(delta["tool_calls"])
        ]
    last = {**answer, "object": "chat.completion.chunk", "choices": []}
    chunk = {"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}
    first = {**last, "choices": [chunk]}
    first.pop("usage")
    return f"data: {json.dumps(first)}\n\ndata: {json.dumps(last)}\n\ndata: [DONE]\n\n"


def start_agent(first: JsonObject, server: ChatServer) -> None:
    """Start the agent; its end is an event."""
    reward_file = Path(tempfile.mkdtemp()) / "reward"
    variables = {
        "OPENAI_BASE_URL": server.url,
        "OPENAI_API_KEY": server.key,
        "OPENAI_MODEL": MODEL,
        "YCORE_REWARD_FILE": str(reward_file),
        **first["variables"],
    }
    agent = subprocess.Popen(
        first["command"],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
    )

    def wait() -> None:
        code = agent.wait()
        paid = None
        if reward_file.is_file():
            paid = reward_file.read_text(errors="replace")[:_MAX_PAID]
        server.events.put(({"exit": code, "paid": paid}, ReplyQueue()))

    threading.Thread(target=wait, daemon=True).start()


def serve_agent(first: JsonObject) -> tuple[bool, Handler]:
    """Start the address and the agent; return the function that waits for the agent's next event."""
    server = ChatServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    start_agent(first, server)
    waiting = ReplyQueue()

    def next_event(request: JsonObject) -> JsonObject:
        nonlocal waiting
        waiting.put(request["reply"])
        event, waiting = server.events.get()
        return {"value": event}

    return True, next_event


if __name__ == "__main__":
    answer_requests(serve_agent)
