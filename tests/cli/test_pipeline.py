"""`ycore pipeline` as it is typed: plans and refusals, without starting anything."""

from pathlib import Path

import pytest
from ycore_cli.main import run

from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "stages.yaml"
    file.write_text(
        """
stages:
  sft:
    dataset: task:addition?size=20
    steps: 2
  pairs:
    dataset: task:addition?size=8
    rewards: [exact_answer]
    max_tokens: 8
  dpo:
    dataset: ${pairs.dataset}
"""
    )
    return file


def test_a_dry_run_shows_every_stages_plan(
    stages: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "pipeline",
        str(stages),
        "--model",
        str(model),
        "--output",
        "out",
        "--set",
        "pairs.num_samples=6",
    ]
    assert run([*words, "--dry-run"]) == 0
    output = capsys.readouterr().out
    names = [line.split(" ")[1] for line in output.splitlines() if line.startswith("stage ")]
    assert names == ["sft", "pairs", "dpo"]
    assert "6 completions of each prompt" in output
    of_pairs = output.split("stage pairs")[1].split("stage dpo")[0]
    assert "checkpoints/" not in of_pairs and "tokens a step" not in of_pairs
    assert "it takes what an earlier stage makes" in output
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--set", "spt.steps=3"],
            "--set spt.steps=3: say STAGE.KEY=VALUE, with a stage of the file; did you mean 'sft'?",
        ),
        (["--set", "sft.step=3"], "stage sft: no key step; did you mean 'steps'?"),
        (["--set", "pairs.num_samples=none"], "stage pairs: num_samples must be"),
        (["--set", "dpo.dataset=${pair.dataset}"], "did you mean 'pairs.dataset'"),
        (
            ["--resume"],
            "--resume needs the folder of a pipeline, and out holds none; leave it out",
        ),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_runs(
    arguments: list[str],
    said: str,
    stages: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        run(["pipeline", str(stages), "--model", str(model), "--output", "out", *arguments])
        == 2
    )
    stderr = capsys.readouterr().err.strip()
    assert said in stderr and stderr.startswith("error: ") and "\n" not in stderr
    assert not Path("out").exists()


def test_a_pipeline_is_no_recipe_of_another_command(
    stages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["grpo", "--recipe", str(stages)]) == 2
    assert (
        f"is for `ycore pipeline`, not grpo; say ycore pipeline {stages}"
        in capsys.readouterr().err
    )
    assert run(["pipeline", "quickstart"]) == 2
    assert "say ycore grpo --recipe quickstart" in capsys.readouterr().err
