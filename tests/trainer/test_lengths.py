"""`max_tokens` from a few completions: grown by rule, written down, kept by a resumed run, and refused in one line."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ycore.config.schema import RunConfig
from ycore.errors import ConfigError
from ycore.models.tiny import write_tiny_model
from ycore.run.files import read_json
from ycore.run.metrics import read_metrics
from ycore.trainer.lengths import choose, grow, judge_cut
from ycore.types import Completion

RUN = {"model": "m", "dataset": "d", "output": "o", "rewards": [{"reward": "exact_answer"}]}


class Policy:
    """Writes 1, 2, 3, ... after each prompt `(n,)`, and ends after n tokens."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.written = 0

    async def __call__(
        self, token_ids: Sequence[int], seed: int, /, *, max_tokens: int
    ) -> Completion:
        length, done = token_ids[0], len(token_ids) - 1
        assert list(token_ids[1:]) == list(range(1, done + 1)) and done < length
        new = range(done + 1, min(length, done + max_tokens) + 1)
        self.seeds.append(seed)
        self.written += len(new)
        ends = done + max_tokens >= length
        return Completion(tuple(new), None, "", "stop" if ends else "length", 0)


def grown(lengths: Sequence[int], **limits: Any) -> tuple[dict[int, float], Policy]:
    policy = Policy()
    asked = [(length,) for length in lengths]
    return asyncio.run(grow(asked, [policy] * len(asked), seed=0, **limits)), policy


def test_the_length_doubles_until_a_tenth_is_cut_off() -> None:
    shares, policy = grown([4] * 5 + [10] * 4 + [40], first=8, most=64)
    assert shares == {8: 0.5, 16: 0.1}
    assert (
        policy.written == 5 * 4 + 4 * 10 + 16
    )  # what was cut off goes on, and nothing is written twice
    assert len(set(policy.seeds)) == len(policy.seeds) == 10 + 5


@pytest.mark.parametrize(
    ("lengths", "most", "expected"), [([3] * 4, 64, [8]), ([99] * 4, 40, [8, 16, 32])]
)
def test_it_never_falls_below_its_beginning_or_passes_the_room(
    lengths: list[int], most: int, expected: list[int]
) -> None:
    shares, _ = grown(lengths, first=8, most=most)
    assert list(shares) == expected


def test_what_is_chosen_is_said_and_a_model_that_never_ends_is_refused() -> None:
    config = RunConfig.model_validate(RUN)
    assert choose({256: 0.5, 512: 0.0625}, config) == (
        512,
        "max_tokens is 512: of 16 sampled completions are cut off 50% at 256, 6% at 512",
    )
    with pytest.raises(
        ConfigError,
        match=r"^100% of 16 .* within 512 tokens, and max_truncated is 0.9; .*--max-tok",
    ):
        choose({256: 1.0, 512: 1.0}, config)
    assert choose({256: 1.0}, config.model_copy(update={"max_truncated": 1.0}))[0] == 256


def test_a_given_length_is_judged() -> None:
    config = RunConfig.model_validate(RUN | {"max_tokens": 64})
    assert judge_cut(1, 16, config) == "6% of 16 sampled completions are cut off at 64 tokens"
    assert "a longer --max-tokens" in judge_cut(8, 16, config)
    with pytest.raises(
        ConfigError,
        match=r"^94% of 16 .* cut off at 64 tokens, and .*--max-tokens 256 .*max_truncated=1",
    ):
        judge_cut(15, 16, config)


def test_a_presets_penalty_of_long_completions_follows_the_length() -> None:
    rewards = [
        {"reward": "exact_answer"},
        {"reward": "overlong", "args": {"max_tokens": 256, "cache_tokens": 51}},
    ]
    longer = RunConfig.model_validate(
        RUN | {"rewards": rewards, "sample_max_tokens": True}
    ).with_max_tokens(512)
    assert longer.rewards[1].args == {"max_tokens": 512, "cache_tokens": 102}
    assert (longer.max_tokens, longer.sample_max_tokens) == (512, False)


# -- the whole command -------------------------------------------------------------------------------------------------

SIZES = "--prompts-per-step 2 --group-size 4 --set dtype=float32 --dataset task:addition?digits=1 --reward exact_answer"


def ycore(place: Path, line: str, *, scripted: bool) -> "subprocess.CompletedProcess[str]":
    begin = (
        ["-m", "tests.chaos.command", "{}"]
        if scripted
        else ["-c", "from ycore_cli.main import main; main()"]
    )
    return subprocess.run(
        [sys.executable, *begin, *line.split()],
        cwd=place,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_a_run_chooses_its_length_once_and_goes_on_with_it(tmp_path: Path) -> None:
    """The scripted engine's lengths are even from 2 to its limit, so that one in seven is cut off at 8."""
    write_tiny_model(tmp_path / "model")
    line = (
        f"grpo --model model --output out {SIZES} --set max_tokens=8 --set sample_max_tokens=true"
    )
    first = ycore(tmp_path, f"{line} --steps 1", scripted=True)
    assert first.returncode == 0, first.stderr
    told = read_json(tmp_path / "out/run.json")
    chosen = told["config"]["max_tokens"]
    assert chosen in (8, 16, 32) and told["config"]["sample_max_tokens"] is False
    assert str(chosen) in told["max_tokens"]["cut_off"]
    assert told["max_tokens"]["in_words"] in first.stdout
    again = ycore(tmp_path, f"{line} --steps 2 --resume", scripted=True)
    assert again.returncode == 0, again.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "out/metrics.jsonl")] == [1, 2]
    after = read_json(tmp_path / "out/run.json")
    assert after["config"]["max_tokens"] == chosen and after["max_tokens"] == told["max_tokens"]


def test_a_given_length_that_cuts_off_too_many_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    write_tiny_model(tmp_path / "model")
    line = (
        f"grpo --model model --output out {SIZES} --steps 1 --engine transformers --max-tokens 64"
    )
    refused = ycore(tmp_path, f"{line} --set max_truncated=0.1", scripted=False)
    assert refused.returncode == 2
    (error,) = [row for row in refused.stderr.splitlines() if row.startswith("error: ")]
    assert "cut off at 64 tokens, and max_truncated is 0.1; say --max-tokens 256" in error
    assert read_metrics(tmp_path / "out/metrics.jsonl") == []
    done = ycore(tmp_path, f"{line} --set max_truncated=1 --resume --json", scripted=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "finished"
    assert read_json(tmp_path / "out/run.json")["max_tokens"]["in_words"] in done.stderr
