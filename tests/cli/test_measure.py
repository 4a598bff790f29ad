"""`ycore preflight` as it is typed: what it says of runs that cannot learn."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from ycore_cli.main import run

from tests.tiny_model import write_tiny_model
from ycore.evaluation.preflight import PreflightMeasurements, PromptLengths, preflight_verdict
from ycore.models.names import HubAnswer
from ycore.run.files import TRACKER_GROUP

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"

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
    rows = [
        json.dumps({"prompt": f"{number} + 1 =", "answer": str(number + 1)})
        for number in range(20)
    ]
    (root / "train.jsonl").write_text("\n".join(rows) + "\n")
    (root / "rewards.py").write_text(REWARD)
    (root / "babble.yaml").write_text(JUDGE)
    return root


def typed(place: Path, output: str, more: str) -> list[str]:
    line = f"--model {place}/model --dataset {place}/train.jsonl --output {place}/{output} --group-size 4 "
    return (line + "--set dtype=float32 --set reward_workers.workers=1 " + more).split()


def test_a_dry_run_checks_and_starts_nothing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = typed(place, "dry", f"--reward {place}/rewards.py:spread --dry-run")
    assert run(["preflight", *words]) == 0
    output = capsys.readouterr().out
    assert "dry-preflight" in output and "Nothing was started" in output
    assert not list(place.glob("dry*"))


def test_a_mistake_is_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["preflight", *typed(place, "bad", "--reward no_such_reward")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.verify
def test_a_run_does_not_learn_where_nothing_can_be_learned(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = typed(
        place,
        "run",
        f"--reward {place}/rewards.py:nothing --engine transformers --max-tokens 4",
    )
    assert run(["preflight", *words]) == 1
    output = capsys.readouterr().out
    assert (
        "this run will not learn" in output
        and "every reward is 0" in output
        and "0.00" in output
    )
    assert (place / "run-preflight" / "preflight.json").is_file() and not (
        place / "run"
    ).exists()


def test_a_sampled_completion_is_printed_as_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = PreflightMeasurements(
        4, 8, 64, PromptLengths(4, 1, 0, 0, 56), num_prompts=4, rewards=(0.0, 1.0)
    )
    result: dict[str, Any] = {
        "preflight": asdict(measured),
        **asdict(preflight_verdict(measured)),
    }
    result["samples"] = [{"completion": "\x1b[2J[/INST]\x07", "reward": 1.0}]
    monkeypatch.setattr("ycore.api.evaluations.run_preflight", lambda config: result)
    words = [
        "preflight",
        "--model",
        "m",
        "--dataset",
        "d",
        "--reward",
        "length",
        "--output",
        "out",
    ]
    assert run(words) == int(not result["learns"])
    assert r"   1.00  \x1b[2J[/INST]\x07" in capsys.readouterr().out


@pytest.mark.engine
@pytest.mark.verify
def test_a_judge_that_never_parses_is_found_in_real_engines(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A random model judges."""
    words = typed(
        place,
        "babbles",
        f"--reward {place}/rewards.py:spread --reward judge:{place}/babble.yaml --engine vllm --max-tokens 8 --json "
        "--set engine.count=1 --set engine.max_model_len=512",
    )
    assert run(["preflight", *words]) == 1
    result = json.loads(capsys.readouterr().out)
    measured = result["preflight"]
    assert measured["judges"]["calls"] == measured["judges"]["unreadable"] > 0
    assert "judge" in " ".join(finding["what"] for finding in result["findings"])


def test_a_benchmark_is_its_row_of_the_table_under_the_users_options(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "test.jsonl").write_text(
        json.dumps({"question": "1 + 1?", "answer": "It is two.\n#### 2"}) + "\n"
    )
    words = f"--model {place}/model --benchmark gsm8k --dataset {place}/test.jsonl --output {place}/b --dry-run --json"
    assert run(["eval", *words.split(), "--max-tokens", "32"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["prompt_column"], config["split"], config["max_tokens"]) == (
        "question",
        "train",  # the default: a file has no splits
        32,
    )
    assert [reward["reward"] for reward in config["rewards"]] == ["math"] and "boxed" in config[
        "system_prompt"
    ]


def test_a_benchmark_out_of_reach_or_unknown_is_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = HubAnswer("unreachable", problem="no network")
    monkeypatch.setattr("ycore.data.source.ask_hub", lambda ask: answer)
    words = [
        "eval",
        "--model",
        f"{place}/model",
        "--output",
        f"{place}/c",
        "--max-tokens",
        "64",
        "--dry-run",
    ]
    assert run([*words, "--benchmark", "math500"]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    assert (
        "no network; fetch test.jsonl of huggingface.co/datasets/HuggingFaceH4/MATH-500, and add --dataset"
        in stderr
    )
    assert run([*words, "--benchmark", "gsm8"]) == 2
    assert "did you mean 'gsm8k'?" in capsys.readouterr().err


@pytest.mark.skipif(
    not SHARED.is_dir(), reason="the data sets that developers share are not on this machine"
)
@pytest.mark.parametrize(
    ("name", "file", "rows"),
    [
        ("gsm8k", "gsm8k/train.jsonl", 7473),
        ("humaneval", "humaneval/HumanEval.jsonl.gz", 164),
        (
            "harmless-base",
            "hh-rlhf/harmless-base-test.jsonl.gz",
            2303,
        ),  # nine are equal or part too early
    ],
)
def test_a_benchmarks_real_rows_fit_its_row_of_the_table(
    place: Path, capsys: pytest.CaptureFixture[str], name: str, file: str, rows: int
) -> None:
    words = f"--model {place}/model --benchmark {name} --dataset {SHARED}/{file} --output {place}/d --max-tokens 64"
    words += " --reward length" if name == "harmless-base" else ""
    assert run(["eval", *words.split(), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dataset"]["rows"] == rows


def test_pairs_are_a_benchmark_of_who_scores(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "chosen": "\n\nHuman: Hi\n\nAssistant: Good",
        "rejected": "\n\nHuman: Hi\n\nAssistant: Bad",
    }
    (place / "harmless.jsonl").write_text(json.dumps(row) + "\n")
    words = f"eval --model {place}/model --benchmark harmless-base --dataset {place}/harmless.jsonl --output {place}/h"
    assert run([*words.split(), "--reward", "length", "--dry-run", "--json"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert config["pairs"] and config["dataset"] == f"{place}/harmless.jsonl"
    assert run([*words.split(), "--dry-run"]) == 2
    assert "no rewards given" in capsys.readouterr().err
    two = ["--model", f"{place}/model/", "--reward", "length", "--dry-run"]
    assert run([*words.split(), *two]) == 2
    assert "give one --model, and several --reward" in capsys.readouterr().err


def test_a_family_of_reasoning_gym_is_a_benchmark(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(
        "reasoning_gym", reason="the optional package reasoning-gym is not installed"
    )
    words = [
        "eval",
        "--model",
        f"{place}/model",
        "--output",
        f"{place}/g",
        "--max-tokens",
        "64",
        "--dry-run",
        "--json",
    ]
    assert run([*words, "--benchmark", "gym:chain_sum"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["dataset"]["rows"], plan["config"]["split"], plan["config"]["seed"]) == (
        100,
        "test",
        0,
    )
    assert [reward["reward"] for reward in plan["config"]["rewards"]] == ["gym"]
    assert run([*words, "--benchmark", "gym:chain_sun"]) == 2
    assert "did you mean 'chain_sum'" in capsys.readouterr().err
    assert run([*words, "--benchmark", "gym:chain_sum?size=5"]) == 2
    assert "a benchmark is one of gsm8k" in capsys.readouterr().err


def test_a_reward_is_measured_on_pairs_without_any_policy(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`length` prefers what is longer: of 12 pairs 9 times the better, twice the worse, once neither."""
    lengths = [(9, 3)] * 9 + [(3, 9)] * 2 + [(5, 5)]
    rows = [
        {"prompt": "Hi", "chosen": "a" * long, "rejected": "b" * short}
        for long, short in lengths
    ]
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "long.py").write_text(
        "def long(completions):\n    return [float(len(str(text))) for text in completions]\n"
    )
    line = f"eval --model {place}/model --pairs --dataset {place}/pairs.jsonl --reward {place}/long.py:long --seed 1 "
    line += "--max-tokens 8 --engine transformers --set dtype=float32 --set reward_workers.workers=1"
    assert run([*line.split(), "--output", f"{place}/pairs"]) == 0
    assert "both answers of each row" in capsys.readouterr().out
    figures = json.loads((place / "pairs/eval.json").read_text())
    assert (figures["num_pairs"], figures["accuracy"], figures["equal"], figures["masked"]) == (
        12,
        9.5 / 12,
        1 / 12,
        0,
    )
    assert (
        figures["accuracy/low"] < 9.5 / 12 < figures["accuracy/high"]
        and "pass@1" not in figures
    )
    assert run([*line.split(), "--model", "other", "--dry-run"]) == 2
    assert "give one --model" in capsys.readouterr().err


@pytest.mark.verify
def test_two_models_are_compared_on_the_same_prompts(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_model(place / "other", seed=1)
    words = f"eval --model {place}/model --model {place}/other --dataset {place}/train.jsonl --limit 6 --num-samples 2"
    words += f" --reward {place}/rewards.py:spread --engine transformers --max-tokens 8 --output {place}/side"
    words += " --set dtype=float32 --set reward_workers.workers=1"
    assert run(words.split()) == 0
    output = capsys.readouterr().out
    assert f"{place}/model" in output and f"{place}/other" in output
    rows = [line.partition("  ")[0] for line in output.splitlines()]
    assert {
        "reward",
        "rewards/spread",
        "pass@2",
        "reward less the first's",
        "cut off",
        "written",
    } <= set(rows)
    compared = json.loads((place / "side/comparison.json").read_text())
    first, other = (compared["models"][f"{place}/{name}"] for name in ("model", "other"))
    gap = compared["differences"][f"{place}/other"]
    assert gap["num_prompts"] == 6 and gap["reward/low"] <= gap["reward"] <= gap["reward/high"]
    assert gap["reward"] == pytest.approx(other["reward"] - first["reward"])


@pytest.mark.parametrize(("outer_group", "group"), [(None, "both"), ("family", "family")])
def test_evaluations_of_several_models_are_one_group_of_trackers(
    outer_group: str | None, group: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[str | None] = []

    def noted(*_: Any) -> dict[str, Any]:
        groups.append(os.environ.get(TRACKER_GROUP))
        return {}

    monkeypatch.setattr("ycore.launch.launcher.run_worker", noted)
    monkeypatch.setattr("ycore.api.evaluations.compare_evaluations", lambda *_: ({}, []))
    monkeypatch.delenv(TRACKER_GROUP, raising=False)
    if outer_group is not None:
        monkeypatch.setenv(TRACKER_GROUP, outer_group)
    (place / "other").symlink_to(place / "model") if not (place / "other").exists() else None
    words = f"eval --model {place}/model --dataset {place}/train.jsonl --reward exact_answer".split()
    assert run([*words, "--model", f"{place}/other", "--output", str(place / "both")]) == 0
    assert run([*words, "--output", str(place / "one")]) == 0
    assert (
        groups == [group, group, outer_group] and os.environ.get(TRACKER_GROUP) == outer_group
    )


def test_the_plan_of_an_evaluation_has_no_held_out_rows(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe's `eval_dataset` is measured while its run trains."""
    rows = f"{place}/train.jsonl"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"{{model: {place}/model, dataset: {rows}, eval_dataset: {rows}, rewards: [length]}}"
    )
    assert run(["eval", "--recipe", str(recipe), "--dry-run"]) == 0
    assert "before the first step" not in capsys.readouterr().out


def test_a_model_is_not_compared_with_itself(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"eval --model {place}/model --model {place}/model --dataset {place}/train.jsonl --reward length --dry-run"
    assert run(words.split()) == 2
    assert "must differ" in capsys.readouterr().err
