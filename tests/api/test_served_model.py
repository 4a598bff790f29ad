"""`ycore serve`, with vLLM's own server."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from transformers import AutoTokenizer

from tests.tiny_model import write_tiny_model
from ycore.engine.kinds import is_vllm_installed
from ycore.round.assemble import Assembly
from ycore.run.files import RunFolder
from ycore.types import Prompt

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed"),
]

PORT = 8000 + os.getpid() % 20_000
ADDRESS = f"http://127.0.0.1:{PORT}/v1"


ARGUMENTS = {"mark": "!"}
REWARD = """
from pathlib import Path
def letters(completions):
    texts = [turns[-1]["content"] for turns in completions]
    Path(__file__).with_suffix(".txt").write_text(repr(texts))
    return [sum(map(ord, text)) for text in texts]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose chat template got an argument in training."""
    folder = RunFolder(tmp_path_factory.mktemp("served") / "sums")
    write_tiny_model(folder.model)
    tokenizer = AutoTokenizer.from_pretrained(folder.model)
    tokenizer.chat_template += "{{ mark }}"
    tokenizer.save_pretrained(folder.model)
    config = {"algorithm": "grpo", "trl": {"chat_template_kwargs": ARGUMENTS}}
    folder.config.write_text(json.dumps({"config": config}))
    (folder.root / "rewards.py").write_text(REWARD)
    return folder.root


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[subprocess.Popen[bytes]]:
    words = [sys.executable, "-c", "from ycore_cli.main import main; main()"]
    best = ["--best-of", "3", "--best-by", f"{run}/rewards.py:letters"]
    process = subprocess.Popen(
        [*words, "serve", str(run), "--port", str(PORT), *best], start_new_session=True
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
def test_a_run_is_served_by_its_folders_name_and_asked_as_in_training(run: Path) -> None:
    turns = [{"role": "user", "content": "2 + 2?"}]
    body = {"model": "sums", "messages": turns, "max_tokens": 4, "return_token_ids": True}
    reply = httpx.post(f"{ADDRESS}/chat/completions", json=body, timeout=60).json()
    assert reply["choices"][0]["message"]["role"] == "assistant"
    in_training = SimpleNamespace(
        config=SimpleNamespace(trl={"chat_template_kwargs": ARGUMENTS}),
        tokenizer=AutoTokenizer.from_pretrained(RunFolder(run).model),
        dialogues=SimpleNamespace(tool_sets={}),
    )
    ids = Assembly.encode(in_training, Prompt(0, turns))  # type: ignore[arg-type]
    assert tuple(reply["prompt_token_ids"]) == ids
    assert in_training.tokenizer.decode(ids).endswith("<|assistant|>!")


@pytest.mark.usefixtures("server")
def test_the_best_of_three_answers_is_sent(run: Path) -> None:
    body = {
        "model": "sums",
        "messages": [{"role": "user", "content": "2 + 2?"}],
        "max_tokens": 4,
    }
    reply = httpx.post(f"{ADDRESS}/chat/completions", json=body, timeout=60).json()
    texts = ast.literal_eval((run / "rewards.txt").read_text())
    (choice,) = reply["choices"]
    assert len(texts) == 3 and len(set(texts)) > 1
    assert choice["message"]["content"] == max(texts, key=lambda text: sum(map(ord, text)))
    refused = httpx.post(
        f"{ADDRESS}/chat/completions", json=body | {"stream": True}, timeout=60
    )
    assert refused.status_code == 400
