"""A run whose `max_tokens` truncates nearly every completion is refused before its first step, in one line."""

import json
from pathlib import Path

import pytest

from tests.harness import ycore
from ycore.config.schema import RunConfig
from ycore.errors import ConfigError
from ycore.run.metrics import read_metrics
from ycore.trainer.rollout_run import truncation

RUN = {"model": "m", "dataset": "d", "output": "o", "rewards": [{"reward": "exact_answer"}]}


def test_the_share_of_truncated_completions_is_said_or_refused() -> None:
    config = RunConfig.model_validate(RUN | {"max_tokens": 64})
    assert truncation(["length", *["stop"] * 15], config).startswith(
        "6% of 16 sampled completions"
    )
    with pytest.raises(
        ConfigError,
        match=r"^94% of 16 .* at 64 tokens, and .*--max-tokens 256 .*max_truncated=1",
    ):
        truncation(["stop", *["length"] * 15], config)


@pytest.mark.verify
def test_a_length_that_truncates_too_many_is_refused_before_the_first_step(
    tmp_path: Path, chat_model: Path
) -> None:
    line = (
        f"grpo --model {chat_model} --output out --prompts-per-step 2 --group-size 4 --set dtype=float32 --dataset "
        "task:addition?digits=1 --reward exact_answer --steps 1 --engine transformers --max-tokens 64"
    )
    refused = ycore(f"{line} --set max_truncated=0.1", cwd=tmp_path, status=2)
    (error,) = [row for row in refused.stderr.splitlines() if row.startswith("error: ")]
    assert "cut off at 64 tokens, and max_truncated is 0.1; say --max-tokens 256" in error
    assert read_metrics(tmp_path / "out/metrics.jsonl") == []
    done = ycore(f"{line} --set max_truncated=1 --resume --json", cwd=tmp_path)
    assert json.loads(done.stdout)["status"] == "finished"
