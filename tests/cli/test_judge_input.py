"""Judges through the real command: the plan shows them, and a bad one ends with exit status 2 and one line."""

import json
from pathlib import Path

import pytest
from ycore_cli.main import run

from tests.tiny_model import write_tiny_model
from ycore.launch.layout import Machine


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("place")
    write_tiny_model(root / "model", chat=True)
    files = {
        "good": "rubric: Is it right?\nverdict: {kind: score}",
        "typo": "rubrick: Is it right?\nverdict: {kind: score}",
        "range": "verdict: {kind: score, min: 7, max: 7}",
        "column": "messages: [{role: user, content: '{completion} {anwser} {how_to_answer}'}]\nverdict: {kind: score}",
        "missing": "messages: [{role: user, content: '{prompt}'}]\nverdict: {kind: score}",
        "labels": "verdict: {kind: labels, labels: {yes: 1, no: 0}}",
        "pairs": "mode: pairwise\nverdict: {kind: json}",
        "far": "base_url: http://judge.test/v1\nmodel: big\nverdict: {kind: json}\napi_key_env: YCORE_TEST_ABSENT_KEY",
    }
    for name, text in files.items():
        (root / f"{name}.yaml").write_text(text + "\n")
    return root


def test_a_judge_is_trained_and_the_plan_says_so(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    row = {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}
    (place / "pairs.jsonl").write_text(
        "".join(json.dumps({**row, "prompt": f"Hi {n}"}) + "\n" for n in range(8))
    )
    line = "grpo --model model --dataset pairs.jsonl --reward agrees:pairs.yaml --output out --dry-run --json "
    line += "--eval-dataset pairs.jsonl --engine transformers"
    assert run(line.split()) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["scorers"] == [
        "agrees:pairs: the policy is the judge, pairwise, verdict by json"
    ]
    assert plan["dataset"]["rows"] == 8
    assert plan["dataset"]["columns"] == ["chosen", "rejected"]
    assert plan["dataset"]["reading"]["in_words"] == "question from prompt"
    assert plan["evaluation"]["overlap"] == 8, "a pair has the same question wherever it is"


_SHM = 250_000  # room for the tiny model's weights in bfloat16, and not in float32
GRPO = "grpo --model model --dataset task:addition --output out --dry-run "


def test_the_plan_shows_every_judge(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("YCORE_TEST_ABSENT_KEY", "sk-canary-canary-canary")
    line = (
        GRPO + "--reward judge:good.yaml --reward judge:far.yaml --reward judge:cheerful --json"
    )
    assert run(line.split()) == 0
    out = capsys.readouterr().out
    plan = json.loads(out)
    assert plan["scorers"] == [
        "judge good: the policy's base weights, pointwise, verdict by score",
        "judge far: big at http://judge.test/v1 (gets the variable YCORE_TEST_ABSENT_KEY), pointwise, verdict by json",
        "judge cheerful: the policy's base weights, pointwise, verdict by labels",
    ]
    first = plan["config"]["rewards"][0]
    assert (first["reward"], first["args"]) == (
        "judge:good",
        {"rubric": "Is it right?", "verdict": {"kind": "score"}},
    )
    assert "canary" not in out


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--processes 2 --placement split:1:1", None),
        ("--placement split:1:1", None),
        ("--processes 2 --set engine.count=1 --placement dynamic", None),
        (
            "--processes 2 --placement split:2:1",
            "placement split:2:1 must divide this run's slots (2) among its roles (rollout, judge); "
            "take --placement split:1:1",
        ),
        (
            "--processes 2 --set engine.count=1 --placement split:1:1",
            "must divide this run's slots (1) among its roles (rollout, judge); take --placement dynamic or colocated",
        ),
        ("--set engine.count=3", "engine.count 3 is more than the 2 cores here; lower it"),
        (
            "--processes 3",
            "--processes 3 is more than the 2 cores of this machine, and every process needs one",
        ),
        ("--set dtype=float32", "/dev/shm must hold the policy's weights"),
    ],
)
def test_a_dry_run_refuses_the_placements_that_a_launch_would(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    problem: str | None,
) -> None:
    """The slots are the machine's, whatever the number of ranks."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(
        "ycore.launch.layout.this_machine", lambda: Machine((0, 1), (), shm_bytes=_SHM)
    )
    monkeypatch.setattr("ycore.engine.kinds.is_vllm_installed", lambda: True)
    status = run((GRPO + "--reward judge:good.yaml " + line).split())
    _, err = capsys.readouterr()
    assert status == (0 if problem is None else 2)
    assert problem is None or (problem in err and err.count("\n") == 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--reward judge:god.yaml", "no such judge file: god.yaml; did you mean 'good.yaml'?"),
        ("--reward judge:typo.yaml", "no key rubrick; did you mean 'rubric'?"),
        ("--reward judge:range.yaml", "min must be below its max; they are 7 and 7"),
        (
            "--reward judge:column.yaml",
            "'anwser', which is no column of the dataset; did you mean 'answer'?",
        ),
        ("--reward judge:missing.yaml", "must have the field {completion}"),
        ("--reward judge:labels.yaml", 'quote the labels: {"yes": 1, "no": 0}'),
        (
            "--reward judge:far.yaml",
            "YCORE_TEST_ABSENT_KEY (api_key_env) is not set; export it",
        ),
        (
            "--reward judge:good.yaml --set rewards.0.args.scale=[1,1]",
            "scale gives the rewards of min and max",
        ),
        (
            "--reward judge:good.yaml --engine transformers",
            "runs in a vLLM engine, and this run generates with",
        ),
        (
            "--reward agrees:pairs.yaml",
            "with or without prompt; it has prompt, answer; name yours: --set columns.chosen=",
        ),
        ("--reward rm:model", "must be a sequence classifier with one label"),
        ("--reward rm:no-such/folder/here", "reward model no-such/folder/here: "),
    ],
)
def test_a_bad_one_is_one_line(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    message: str,
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.delenv("YCORE_TEST_ABSENT_KEY", raising=False)
    status = run((GRPO + line).split())
    out, err = capsys.readouterr()
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_agreement_needs_a_judge_of_pairs(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    Path("pairs.jsonl").write_text(
        '{"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}\n' * 20
    )
    line = GRPO.replace("task:addition", "pairs.jsonl") + "--reward agrees:good.yaml"
    assert run(line.split()) == 2
    problem = "agrees:good is pointwise, with a verdict by score; say mode: pairwise"
    assert problem in capsys.readouterr().err
