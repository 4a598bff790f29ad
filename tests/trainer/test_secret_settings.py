"""A secret setting reaches TRL and the rewards, and nothing else: no file of the run, no reward's environment."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ycore_cli.main import run

from tests.tiny_model import write_tiny_model
from ycore.config.resolve import resolve
from ycore.launch.processes import worker_environment
from ycore.round.assemble import assemble
from ycore.run.claim import claim
from ycore.run.files import RunFolder, write_json_atomic
from ycore.run.secrets import VARIABLE
from ycore.sandbox import View
from ycore.sandbox.confine import confined_environment
from ycore.trainer.__main__ import open_run

TOKEN = "hf_" + "c4n4ry" * 5
KEY = "s3cr3t-c4n4ry"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("place")
    write_tiny_model(root / "tiny")
    rows = [{"prompt": f"{n} + 1 =", "completion": f"{n + 1}", "answer": "1"} for n in range(8)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "rewards.py").write_text(
        "def constant(completions, api_key, **columns):\n    return [1.0] * 4\n"
    )
    return root


def started(
    place: Path, output: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch, **keys: Any
) -> RunFolder:
    """A run's folder as the launcher leaves it, and this process's environment as the launcher sets the trainer's."""
    config: Any = resolve(
        options={
            "algorithm": algorithm,
            "model": str(place / "tiny"),
            "dataset": str(place / "rows.jsonl"),
            "output": str(output),
            "dtype": "float32",
            "steps": 1,
            "trl": {"hub_token": TOKEN},
            **keys,
        },
    )
    folder = RunFolder(output)
    claim(folder, config, resume=False).release()
    engines = {
        "kind": "transformers",
        "engines": [],
        "model": str(place / "tiny"),
        "max_model_len": 64,
    }
    write_json_atomic(output / "engines.json", {**engines, "home": str(output)})
    for name, value in worker_environment(config).items():
        monkeypatch.setenv(name, value)
    assert VARIABLE not in confined_environment(
        View(network=True), run_id="run", scratch=output
    )
    return folder


def files_with(secret: str, output: Path) -> list[str]:
    return [
        path.name
        for path in output.rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    ]


def test_given_examples(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = started(place, tmp_path / "run", "sft", monkeypatch, batch_size=4, held_out=0)
    training: Any = open_run(folder.root)
    try:
        assert training.trainer.args.hub_token == TOKEN
        assert VARIABLE not in os.environ
        training.train()
        training.save()
    finally:
        training.close()
    assert folder.model.is_dir() and list(folder.checkpoints.glob("checkpoint-*"))
    assert files_with(TOKEN, folder.root) == []


def test_rollouts(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = {"reward": f"{place / 'rewards.py'}:constant", "args": {"api_key": KEY}}
    keys: dict[str, Any] = {
        "rewards": [reward],
        "prompts_per_step": 1,
        "group_size": 4,
        "max_tokens": 8,
    }
    folder = started(
        place, tmp_path / "run", "grpo", monkeypatch, engine={"kind": "transformers"}, **keys
    )
    parts = assemble(folder.root)
    assert parts.config.trl["hub_token"] == TOKEN
    assert parts.config.rewards[0].args == {"api_key": KEY}
    assert VARIABLE not in os.environ
    assert files_with(TOKEN, folder.root) == [] == files_with(KEY, folder.root)


@pytest.mark.parametrize(
    "resumed", [["resume"], ["sft", "--resume", "--output"]], ids=["resume", "--resume"]
)
def test_a_run_does_not_go_on_without_its_secret(
    resumed: list[str],
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = started(place, tmp_path / "run", "sft", monkeypatch, batch_size=4, held_out=0)
    words = [*resumed, str(folder.root), "--dry-run"]
    assert run(words) == 2
    assert capsys.readouterr().err.strip() == (
        "error: run.json does not keep trl.hub_token, a secret; give --hub-token again"
    )
    assert run([*words, "--hub-token", TOKEN]) == 0
