"""Hub datasets against a hub of our own on this machine: a few routes of the real one's."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ASK = """
import sys
from ycore.config.schema import RunConfig
from ycore.data.prompts import load_prompts
from ycore.errors import DataError
name, split, limit = sys.argv[1:]
plain = {"model": "m", "rewards": [{"reward": "r"}], "output": "o"}
try:
    found = load_prompts(RunConfig(dataset=name, split=split, limit=int(limit) or None, **plain))
    print(len(found.prompts), found.prompts[0].content, dict(found.prompts[0].columns), found.reading["split"], sep="|")
except DataError as problem:
    print("error:", problem)
print("torch" in sys.modules)
"""


class Hub(BaseHTTPRequestHandler):
    """One dataset, some/data, whose files lie in `root`."""

    root: Path

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        wanted = body["paths"] if isinstance(body["paths"], list) else [body["paths"]]
        self.send(
            json.dumps([entry for entry in self.tree() if entry["path"] in wanted]).encode()
        )

    def answer(self) -> None:
        path = self.path.split("?")[0].strip("/")
        name = path.partition("/resolve/")[2].partition("/")[2]
        if path.startswith("api/datasets/some/data") and "/tree/" in path:
            self.send(json.dumps(self.tree()).encode())
        elif path.startswith("api/datasets/some/data"):
            siblings = [{"rfilename": entry["path"]} for entry in self.tree()]
            self.send(
                json.dumps({"id": "some/data", "sha": COMMIT, "siblings": siblings}).encode()
            )
        elif path.startswith("datasets/some/data/resolve/") and (self.root / name).is_file():
            self.send((self.root / name).read_bytes())
        else:
            missing = (
                "EntryNotFound" if path.startswith("datasets/some/data/") else "RepoNotFound"
            )
            self.send_response(404)
            self.send_header("X-Error-Code", missing)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0" * 40}
            for path in sorted(self.root.glob("*.jsonl"))
        ]

    def send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    Hub.root = tmp_path_factory.mktemp("hub")
    for split, number in (("train", 5), ("test", 2)):
        rows = [{"question": f"{split} {row}?", "answer": str(row)} for row in range(number)]
        (Hub.root / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    (Hub.root / "safe").mkdir()
    (Hub.root / "safe" / "pairs.jsonl").write_text(
        json.dumps({"question": "safe?", "answer": "yes"}) + "\n"
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def ask(
    home: Path, endpoint: str, name: str, *, split: str = "train", limit: int = 0, **more: str
) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, **more}
    command = [sys.executable, "-c", ASK, name, split, str(limit)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=environment, check=True
    )
    said, torch_loaded = done.stdout.strip().splitlines()
    assert torch_loaded == "False"
    return said


def test_a_hub_dataset_is_loaded_and_then_found_offline(hub: str, tmp_path: Path) -> None:
    assert ask(tmp_path, hub, "some/data") == "5|train 0?|{'answer': '0'}|train"
    assert ask(tmp_path, hub, "some/data", split="test") == "2|test 0?|{'answer': '0'}|test"
    assert ask(tmp_path, hub, "some/data:default", limit=3).startswith("3|train 0?")
    assert ask(tmp_path, hub, "some/data", HF_HUB_OFFLINE="1").startswith("5|train 0?")
    assert ask(tmp_path, "http://127.0.0.1:9", "some/data").startswith("5|train 0?")


def test_a_file_of_a_hub_dataset(hub: str, tmp_path: Path) -> None:
    assert ask(tmp_path, hub, "some/data:safe/pairs.jsonl") == "1|safe?|{'answer': 'yes'}|"
    assert ask(tmp_path, hub, "some/data:safe/pairs.jsonl", HF_HUB_OFFLINE="1").startswith(
        "1|safe?"
    )
    said = ask(tmp_path, hub, "some/data:safe/other.jsonl")
    assert said.startswith("error: no file safe/other.jsonl of the hub dataset some/data: 404")
    said = ask(tmp_path, hub, "some/data:other.jsonl", HF_HUB_OFFLINE="1")
    assert said.startswith(
        "error: no file other.jsonl of the hub dataset some/data: HF_HUB_OFFLINE is set; give"
    )


def test_what_the_dataset_does_not_have(hub: str, tmp_path: Path) -> None:
    said = ask(tmp_path, hub, "some/data", split="validation")
    assert said.startswith("error: ") and "validation" in said and "train" in said
    said = ask(tmp_path, hub, "some/data:other")
    assert said.startswith("error: ") and "other" in said and "default" in said


def test_a_dataset_the_hub_does_not_have(hub: str, tmp_path: Path) -> None:
    said = ask(tmp_path, hub, "some/other")
    assert (
        said.startswith("error: no dataset file and no hub dataset 'some/other'")
        and "give a local file" in said
    )


@pytest.mark.parametrize(
    "name", ["some/data", "some/data:main", "gsm8k", "-not-/a-name..", "x" * 300]
)
def test_offline_says_so(tmp_path: Path, name: str) -> None:
    said = ask(tmp_path, "http://127.0.0.1:9", name, HF_HUB_OFFLINE="1")
    assert (
        said.startswith("error: no dataset file")
        and "HF_HUB_OFFLINE is set" in said
        and "task:addition" in said
    )


def test_a_hub_that_never_answers(hub: str, tmp_path: Path) -> None:
    (tmp_path / "filled").mkdir()
    ask(tmp_path / "filled", hub, "some/data")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begin = time.monotonic()
        said = ask(tmp_path / "empty", endpoint, "some/data")
        assert ask(tmp_path / "filled", endpoint, "some/data").startswith("5|train 0?")
        assert time.monotonic() - begin < 30
    assert said.startswith("error: no dataset file 'some/data', and the hub cannot be reached")
