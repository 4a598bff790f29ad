"""Hub models against a hub of our own on this machine (a few routes of the real one), and the cache of built models."""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.tiny_model import write_tiny_model
from ycore.errors import ModelError
from ycore.models.names import build_once, cache_dir

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ASK = """
import sys
from ycore.errors import ModelError
from ycore.models.fetch import fetch_model
from ycore.models.names import resolve_model
try:
    plan = resolve_model(sys.argv[1])
    print(plan.kind, plan.ready, plan.has_chat_template, plan.note, sep="|")
    assert not {"torch", "transformers", "datasets"} & set(sys.modules)
    if "fetch" in sys.argv:
        print(fetch_model(plan))
except ModelError as problem:
    print("error:", problem)
"""


class Hub(BaseHTTPRequestHandler):
    """Repositories are folders `<root>/<owner>/<name>`."""

    root: Path

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if "tree" in parts:
            self.send(json.dumps(self.tree(parts[2], parts[3])).encode(), "application/json")
        elif parts[:2] == ["api", "models"] and (self.root / parts[2] / parts[3]).is_dir():
            self.send(
                json.dumps(self.describe(parts[2], parts[3])).encode(), "application/json"
            )
        elif (
            "resolve" in parts
            and (file := self.root.joinpath(*parts[:2], *parts[4:])).is_file()
        ):
            self.send(file.read_bytes(), "application/octet-stream")
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def describe(self, owner: str, name: str) -> dict[str, object]:
        folder = self.root / owner / name
        file = folder / "config.json"
        config = json.loads(file.read_text()) if file.is_file() else {}
        siblings = [{"rfilename": path.name} for path in sorted(folder.iterdir())]
        return {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": siblings, "config": config}

    def tree(self, owner: str, name: str) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0" * 40}
            for path in sorted((self.root / owner / name).iterdir())
        ]

    def send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("hub")
    write_tiny_model(root / "some" / "model")
    write_adapter(root / "some" / "adapter", of=root / "some" / "model", named="some/model")
    for name, change in (("coded", {"auto_map": {"AutoModel": "code.Model"}}), ("pickled", {})):
        folder = root / "some" / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(change))
        (
            folder / ("pytorch_model.bin" if name == "pickled" else "model.safetensors")
        ).write_bytes(b"")
    Hub.root = root
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def write_adapter(folder: Path, *, of: Path, named: str) -> None:
    """A LoRA adapter that is not nothing, with its tokenizer, and with `named` as its base's name."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(of), config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(of).save_pretrained(folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps({**settings, "base_model_name_or_path": named})
    )


def ask(home: Path, endpoint: str, *arguments: str, **more: str) -> list[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("HF_")
    }
    environment |= {
        "HF_HOME": str(home),
        "HF_ENDPOINT": endpoint,
        "YCORE_CACHE": str(home),
        **more,
    }
    done = subprocess.run(
        [sys.executable, "-c", ASK, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=True,
    )
    return done.stdout.strip().splitlines()


def test_a_hub_model_is_planned_then_downloaded_then_found(hub: str, tmp_path: Path) -> None:
    planned, folder = ask(tmp_path, hub, "some/model", "fetch")
    assert planned == "hub|False|True|will be downloaded from the hub"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in Path(folder).iterdir()
    }
    (offline_plan,) = ask(tmp_path, hub, "some/model", HF_HUB_OFFLINE="1")
    assert offline_plan.startswith("hub|True|True|found in")


@pytest.mark.verify
def test_an_adapter_of_the_hub_is_merged_with_its_base(hub: str, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    planned, folder = ask(tmp_path, hub, "some/adapter", "fetch")
    assert planned == "hub|False|True|will be downloaded from the hub"
    base = AutoModelForCausalLM.from_pretrained(Hub.root / "some" / "model")
    apart = PeftModel.from_pretrained(base, str(Hub.root / "some" / "adapter")).eval()
    merged, ids = (
        AutoModelForCausalLM.from_pretrained(folder).eval(),
        torch.arange(3, 20).unsqueeze(0),
    )
    torch.testing.assert_close(merged(ids).logits, apart(ids).logits, atol=1e-5, rtol=1e-5)

    shutil.rmtree(tmp_path / "adapters")
    planned, again = ask(tmp_path, hub, "some/adapter", "fetch", HF_HUB_OFFLINE="1")
    assert (
        planned.startswith("hub|False|True|will be merged with its base some/model once")
        and again == folder
    )
    shutil.rmtree(tmp_path / "hub" / "models--some--model")  # the merged model needs it no more
    (offline_plan,) = ask(tmp_path, hub, "some/adapter", HF_HUB_OFFLINE="1")
    assert offline_plan.startswith("adapter|True|True|found in")


def test_half_a_download_is_not_ready(hub: str, tmp_path: Path) -> None:
    _, folder = ask(tmp_path, hub, "some/model", "fetch")
    (Path(folder) / "model.safetensors").unlink()
    (planned,) = ask(tmp_path, hub, "some/model")
    assert planned.startswith("hub|False|")


def test_a_model_the_hub_does_not_have(hub: str, tmp_path: Path) -> None:
    (said,) = ask(tmp_path, hub, "some/other")
    assert said.startswith(
        "error: no model folder and no hub model 'some/other' that can be loaded: "
    )
    assert "give a local folder" in said


def test_a_mistyped_built_in_name(hub: str, tmp_path: Path) -> None:
    for typed in ("smollm2-135", "SmolLM2-135M", "smolm2-135m"):
        (said,) = ask(tmp_path, hub, typed)
        assert "did you mean 'smollm2-135m'?" in said


def test_code_and_pickles_are_refused_before_the_download(hub: str, tmp_path: Path) -> None:
    assert "--trust-remote-code" in ask(tmp_path, hub, "some/coded")[0]
    assert "no weights in safetensors" in ask(tmp_path, hub, "some/pickled")[0]


@pytest.mark.parametrize("name", ["some/model", "-bad-/name..", "gpt2"])
def test_offline_says_so(tmp_path: Path, name: str) -> None:
    (said,) = ask(tmp_path, "http://127.0.0.1:9", name, HF_HUB_OFFLINE="1")
    assert (
        said.startswith("error: no model folder")
        and "HF_HUB_OFFLINE is set" in said
        and "smollm2-135m" in said
    )


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    (said,) = ask(tmp_path, "http://127.0.0.1:9", "some/model")
    assert "cannot be reached" in said and "give a local folder" in said


def test_a_hub_that_answers_forever(tmp_path: Path) -> None:
    """A byte now and then passes every timeout of the client's."""
    with socket.socket() as dripping:
        dripping.bind(("127.0.0.1", 0))
        dripping.listen(8)
        threading.Thread(target=drip, args=(dripping,), daemon=True).start()
        begin = time.monotonic()
        (said,) = ask(tmp_path, f"http://127.0.0.1:{dripping.getsockname()[1]}", "some/model")
        assert time.monotonic() - begin < 60
    assert "did not answer within 3 s" in said


def drip(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection, contextlib.suppress(OSError):
        connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        for _ in range(400):
            connection.sendall(b"x")
            time.sleep(0.5)


def test_a_hub_that_never_answers(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        begin = time.monotonic()
        (said,) = ask(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}", "some/model")
        assert time.monotonic() - begin < 60
    assert "error: no model folder 'some/model'" in said


def test_the_built_in_name_needs_no_answer(tmp_path: Path) -> None:
    (planned,) = ask(tmp_path, "http://127.0.0.1:9", "smollm2-135m")
    assert planned.startswith("builtin|False|True|will be fetched once")


KILLED = """
import os, signal, sys
from pathlib import Path
from ycore.models.names import build_once

def build(folder):
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

build_once(Path(sys.argv[1]), build)
"""
COUNTED = """
import sys, time
from pathlib import Path
from ycore.models.names import build_once

def build(folder):
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    time.sleep(0.5)
    (folder / "whole").write_text("whole")

build_once(Path(sys.argv[1]), build)
"""


def test_the_cache_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YCORE_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("YCORE_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "ycore"


def test_a_killed_build_is_not_used(tmp_path: Path) -> None:
    entry = tmp_path / "cache" / "entry"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(entry)], timeout=240, check=False
    )
    assert killed.returncode < 0 and not entry.exists()

    build_once(entry, lambda folder: (folder / "whole").touch())
    assert [path.name for path in entry.iterdir()] == ["whole"]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").touch()
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        build_once(tmp_path / "entry", build)
    assert [path.name for path in tmp_path.iterdir()] == ["entry.lock"]


def test_two_that_meet_build_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COUNTED, str(tmp_path / "entry"), str(tmp_path / "log")]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=240) for process in both] == [0, 0]
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="set YCORE_CACHE"):
        build_once(tmp_path / "file" / "entry", os.fspath)  # type: ignore[arg-type]
