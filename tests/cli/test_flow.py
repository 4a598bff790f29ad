"""`ycore flow` as it is typed: plans, and bad input in one line. Nothing is trained here."""

import json
from pathlib import Path

import pytest
from ycore_cli.main import run

from tests.chaos.command_lines import replaced
from tests.flow.conftest import save_tiny_model

ASKS = "messages:\n- {role: user, content: '{completion} {rubric} {labl} {how_to_answer}'}\n"
REWARD = "def bright(images, label):\n    return [0.0 for _ in images]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("YCORE_CACHE", str(tmp_path / "cache"))
    save_tiny_model(tmp_path / "tiny")
    (tmp_path / "rewards.py").write_text(REWARD)
    remote = "base_url: http://localhost:9/v1\nmodel: eyes\n"
    for name, keys in (
        ("here", ""),
        ("pairs", f"{remote}mode: pairwise\n"),
        ("column", f"{remote}{ASKS}"),
    ):
        (tmp_path / f"{name}.yaml").write_text(
            f"{keys}rubric: Is it right?\nverdict: {{kind: score}}\n"
        )
    (tmp_path / "prompts.jsonl").write_text('{"label": 0}\n{"label": 2}\n')
    return tmp_path


GIVEN = [
    "flow",
    "--model",
    "tiny",
    "--dataset",
    "prompts.jsonl",
    "--reward",
    "rewards.py:bright",
    "--dry-run",
]


def test_a_dry_run_shows_the_plan_and_writes_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(
            [
                *GIVEN,
                "--method",
                "grpo",
                "--set",
                "flow.window=2",
                "--eval-reward",
                "rewards.py:bright",
            ]
        )
        == 0
    )
    out = capfd.readouterr().out
    assert "DiTTransformer2DModel" in out and "sde, 10 steps with noise 0.7 in 2 of them" in out
    assert (
        "every weight, float32, learning rate 1e-05" in out and not (folder / "runs").exists()
    )
    assert run([*GIVEN, "--json", "--learning-rate", "1e-3"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["config"]["learning_rate"] == 1e-3 and plan["dataset"]["rows"] == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--model", "."], "is no flow model"),
        (["--model", "tin"], "--model tin is no folder"),
        (["--method", "grpo", "--set", "flow.noise=0"], "which only steps with noise have"),
        (["--set", "condition_column=digit"], "has no column 'digit'"),
        (["--reward", "exact_answer"], "is a function of images"),
        (["--reward", "rewards.py:brigt"], "did you mean 'bright'"),
        (["--learning-rate", "fast"], "must be a number; it is 'fast'"),
        (["--steps", "few"], "must be a whole number"),
        (["--recipe", "quickstart"], "is for `ycore grpo`, not flow"),
        (["--set", "flow.kl=x"], "flow.kl must be a number"),
        (["--accept-changes"], "is about a run that goes on"),
        (
            ["--set", "trl.beta=0.1"],
            "ycore flow has no trl, and it is {'beta': 0.1}; leave it out",
        ),
        (
            ["--reward", "judge:here.yaml"],
            "would be served here, where judges read text only; give it a base_url",
        ),
        (
            ["--eval-reward", "judge:pairs.yaml"],
            "is pairwise, and pictures are judged one by one",
        ),
        (["--reward", "judge:column.yaml"], "a field of its messages is 'labl'"),
        (["--reward", "judge:nothing.yaml"], "nothing.yaml"),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, change: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(replaced(GIVEN, change)) == 2
    err = capfd.readouterr().err
    assert said in err and err.count("\n") == 1, err


def test_resuming_takes_only_keys_of_such_a_run(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([*GIVEN, "--json", "--output", "runs/x"]) == 0
    config = json.loads(capfd.readouterr().out)["config"]
    (folder / "runs" / "x").mkdir(parents=True)
    (folder / "runs" / "x" / "run.json").write_text(json.dumps({"config": config}))
    assert run(["resume", "runs/x", "--dry-run"]) == 0
    assert "going on from its last checkpoint" in capfd.readouterr().out
    assert run(["resume", "runs/x", "--dry-run", "--beta", "0.1"]) == 2
    assert "no option --beta" in capfd.readouterr().err
    assert run(["resume", "runs/x", "--dry-run", "--set", "flow.kl=1"]) == 2
    assert "flow.kl: 0.0 there, 1.0 here" in capfd.readouterr().err


def test_plan_is_for_other_runs_and_says_whose_recipe_it_is(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "--recipe", "digits"]) == 2
    assert "say ycore flow --recipe" in capfd.readouterr().err


def test_a_recipe_that_draws_is_reproduced_like_any_other(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [
        "recipes",
        "digits",
        "--seeds",
        "3",
        "--set",
        "steps=1",
        "--output",
        "runs/three",
        "--dry-run",
    ]
    save_tiny_model(folder / "models" / "flow-digits")
    assert run(words) == 0
    assert "3 runs of digits in runs/three" in capfd.readouterr().out
