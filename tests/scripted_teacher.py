"""A teacher's address that speaks as a vLLM server: `/tokenize`, and the probabilities of a prompt's tokens.

The probabilities follow from the token alone, so the same question always has the same answer.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


def logprob_of(token: int) -> float:
    return -1.0 - token % 7 / 3


@contextmanager
def teacher_at(model: Path) -> Iterator[str]:
    """The `base_url` of a teacher with the tokenizer in this folder."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer: Any = {"error": self.path}
            if self.path == "/tokenize":
                answer = {
                    "tokens": tokenizer.encode(
                        body["prompt"], add_special_tokens=body["add_special_tokens"]
                    ).ids
                }
            elif self.path == "/v1/completions":
                logprobs = [
                    {str(token): {"logprob": logprob_of(token)}} for token in body["prompt"][1:]
                ]
                answer = {"choices": [{"prompt_logprobs": [None, *logprobs]}]}
            sent = json.dumps(answer).encode()
            self.send_response(404 if "error" in answer else 200)
            self.send_header("content-length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
