"""`ycore preflight` as it is typed: what it says of runs that cannot learn, and `--preflight` before one."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from ycore_cli import measure
from ycore_cli.main import run

from ycore.config.schema import RewardConfig, RunConfig
from ycore.models.tiny import write_tiny_model
from ycore.plan.preflight_verdict import Measurements, verdict

pytestmark = pytest.mark.timeout(300)

REWARD = """
def spread(completion_ids):
    return [sum(ids) % 7 / 7 for ids in completion_ids]

def nothing(completion_ids):
    return [0.0] * len(completion_ids)
"""
JUDGE = """
rubric: Is it a word?
verdict: {kind: score}
max_tokens: 8
retries: 0
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("place")
    write_tiny_model(root / "model")
    rows = [json.dumps({"prompt": f"{number} + 1 =", "answer": str(number + 1)}) for number in range(20)]
    (root / "train.jsonl").write_text("\n".join(rows) + "\n")
    (root / "rewards.py").write_text(REWARD)
    (root / "babble.yaml").write_text(JUDGE)
    return root


def typed(place: Path, output: str, more: str) -> list[str]:
    line = f"--model {place}/model --dataset {place}/train.jsonl --output {place}/{output} --group-size 4 "
    return (line + "--set dtype=float32 --set reward_workers.workers=1 " + more).split()


def test_a_dry_run_checks_and_starts_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = typed(place, "dry", f"--reward {place}/rewards.py:spread --dry-run")
    assert run(["preflight", *words]) == 0
    told = capsys.readouterr().out
    assert "dry-preflight" in told and "Nothing was started" in told
    assert not list(place.glob("dry*"))


def test_a_mistake_is_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["preflight", *typed(place, "bad", "--reward no_such_reward")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_run_is_not_started_where_nothing_can_be_learned(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = typed(
        place, "run", f"--reward {place}/rewards.py:nothing --engine transformers --max-tokens 4 --steps 1 --preflight"
    )
    assert run(["grpo", *words]) == 1
    told = capsys.readouterr().err
    assert "this run will not learn" in told and "every reward is 0" in told and "0.00" in told
    assert (place / "run-preflight" / "preflight.json").is_file() and not (place / "run").exists()


def test_a_sampled_completion_is_printed_as_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measurements(4, 4, 8, 64, truncated=0.0, equal=0.0, rewards=(0.0, 1.0), masked=0.0)
    result: dict[str, Any] = {"preflight": asdict(measured), **asdict(verdict(measured))}
    result["samples"] = [{"completion": "\x1b[2J[/INST]\x07", "reward": 1.0}]
    monkeypatch.setattr(measure, "_run_preflight", lambda config: result)
    monkeypatch.setattr("ycore_cli.checks.checked_plan", lambda config, **more: {})
    measure.fly_first(RunConfig(model="m", dataset="d", rewards=[RewardConfig(reward="length")], output="out"))
    assert r"   1.00  \x1b[2J[/INST]\x07" in capsys.readouterr().err


@pytest.mark.engine
def test_weights_that_never_arrive_and_a_judge_that_never_parses_are_found_in_real_engines(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`sync_weights: false` freezes the engine at its first weights, as a broken sync would; a random model judges."""
    words = typed(
        place,
        "frozen",
        f"--reward {place}/rewards.py:spread --reward judge:{place}/babble.yaml --engine vllm --max-tokens 8 --json "
        "--set engine.count=1 --set engine.max_model_len=512 --set sync_weights=false",
    )
    assert run(["preflight", *words]) == 1
    told = json.loads(capsys.readouterr().out)
    measured = told["preflight"]
    assert measured["logprob_gap"] < 0.01  # on the first weights engine and trainer agree
    assert measured["stale_gap"] < 0.01 < measured["sync_gap"]
    found = " ".join(finding["what"] for finding in told["findings"])
    assert "changed weights do not arrive" in found
    assert measured["judges"]["calls"] == measured["judges"]["unreadable"] > 0 and "judge" in found
