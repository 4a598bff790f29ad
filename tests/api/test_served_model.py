"""`ycore serve`, with vLLM's own server."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.tiny_model import write_tiny_model
from ycore.engine.kinds import is_vllm_installed

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed"),
]

PORT = 8000 + os.getpid() % 20_000
ADDRESS = f"http://127.0.0.1:{PORT}/v1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "sums"
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[subprocess.Popen[bytes]]:
    words = [sys.executable, "-c", "from ycore_cli.main import main; main()"]
    process = subprocess.Popen(
        [*words, "serve", str(model), "--port", str(PORT)], start_new_session=True
    )
    until = time.monotonic() + 300
    try:
        while not _answers():
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.5)
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert not _answers()


def _answers() -> bool:
    try:
        return httpx.get(f"{ADDRESS}/models", timeout=5).is_success
    except httpx.HTTPError:
        return False


@pytest.mark.usefixtures("server")
def test_a_model_is_served_by_its_folders_name() -> None:
    body = {
        "model": "sums",
        "messages": [{"role": "user", "content": "2 + 2?"}],
        "max_tokens": 4,
    }
    reply = httpx.post(f"{ADDRESS}/chat/completions", json=body, timeout=60)
    assert reply.json()["choices"][0]["message"]["role"] == "assistant"
