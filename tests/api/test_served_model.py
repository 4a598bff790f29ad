"""`ycore serve` and `ycore chat --at`, with vLLM's own server."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ycore.api.trained import ChatSettings, ServedChat
from ycore.engine.kinds import is_vllm_installed
from ycore.errors import RunError
from ycore.models.tiny import write_tiny_model

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
def test_a_chat_is_answered_by_the_server_in_pieces(model: Path) -> None:
    def chat(system: str) -> ServedChat:
        before = [{"role": "system", "content": system}]
        settings = ChatSettings(24, 1.0, 0, before)
        return ServedChat(model, settings, address=f"{ADDRESS}/", name="sums")

    pieces: list[str] = []
    served = chat("Add.")
    answers = [served.say("2 + 2?", show=pieces.append), served.say("3 + 3?")]
    assert "".join(pieces) == answers[0] != "" and len([piece for piece in pieces if piece]) > 1
    again = chat("Add.")
    assert [again.say("2 + 2?"), again.say("3 + 3?")] == answers
    assert chat("Multiply.").say("2 + 2?") != answers[0]


@pytest.mark.usefixtures("server")
def test_a_model_that_is_not_served_there_is_told_with_the_servers_words(model: Path) -> None:
    other = ServedChat(model, ChatSettings(24, 1.0, 0), address=ADDRESS, name="other")
    with pytest.raises(RunError, match=r"answered 404: .*other.*; is other served there"):
        other.say("2 + 2?")
