"""`ycore resume` and what stands beside it on `ycore grpo`: what they plan, and what they refuse."""

import json
from pathlib import Path

import pytest
from ycore_cli.main import run

from ycore.config.resolve import resolve
from ycore.models.tiny import write_tiny_model
from ycore.run.claim import claim
from ycore.run.paths import RunFolder
from ycore.run.resuming import round_file


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    write_tiny_model(place / "model")
    (place / "train.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 4)
    return place


@pytest.fixture
def stopped(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was started in `place` with paths relative to it, and then stopped."""
    monkeypatch.chdir(place)
    options = {"model": "model", "dataset": "train.jsonl", "rewards": ["exact_answer"], "steps": 9}
    config = resolve(options={**options, "output": str(tmp_path / "run"), "trl": {"beta": 0.25}})
    claim(RunFolder(tmp_path / "run"), config, resume=False).release()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def test_resume_needs_nothing_but_the_folder(stopped: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not even the folder in which the run was started."""
    assert run(["resume", "run", "--dry-run", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert (plan["trl"]["max_steps"], plan["trl"]["beta"], plan["output"]) == (9, 0.25, str(stopped))


def test_more_steps_are_no_change(stopped: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["resume", str(stopped), "--steps", "20", "--logging-steps", "5", "--dry-run", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["config"]["steps"] == 20


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--set seed=5", "seed: 0 there, 5 here"),
        ("--beta 0.5", "trl.beta: 0.25 there, 0.5 here"),
        ("--set processes=2", "processes: 1 there, 2 here"),
        ("--set prompts_per_step=4", "prompts_per_step: 8 there, 4 here"),
        ("--resume-from 3", "no checkpoint of step 3; no checkpoint was saved yet"),
        ("--resume-from later", "--resume-from takes a step or a folder"),
        ("--save-total-limit 1", "save_total_limit must be 2 or more"),
    ],
)
def test_another_run_is_refused_by_name(more: str, said: str, stopped: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["resume", str(stopped), "--dry-run", *more.split()]) == 2
    err = capfd.readouterr().err
    assert said in err and err.count("\n") == 1
    if "there," in said:
        assert "--accept-changes" in err
        assert run(["resume", str(stopped), "--dry-run", "--accept-changes", *more.split()]) == 0


@pytest.mark.parametrize(
    "words",
    ["--logging-steps 5 {run}", "--logging-steps=5 {run} --no-log-completions", "--log-completions {run}"],
)
def test_trls_options_may_come_before_the_folder(words: str, stopped: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["resume", *words.format(run=stopped).split(), "--dry-run", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["output"] == str(stopped)
    assert plan["trl"].get("logging_steps", 5) in (1, 5) and "logging_steps" in plan["trl"]
    assert plan["trl"].get("log_completions") is {"--logging-steps 5 {run}": None, "--log-completions {run}": True}.get(
        words, False
    )


def test_options_without_a_folder_are_refused_with_what_resume_takes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["resume", "--learning-rate", "1e-6", str(tmp_path / "nothing")]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "takes the folder of a run before its options" in err
    assert "say ycore resume runs/first --learning-rate ..." in err


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["resume", str(tmp_path / "nothing")]) == 2
    assert "holds no run.json" in capfd.readouterr().err


def test_changes_are_accepted_only_of_a_run_that_goes_on(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = f"grpo --model {place}/model --dataset {place}/train.jsonl --reward exact_answer --output {place}/new"
    assert run([*line.split(), "--dry-run", "--accept-changes"]) == 2
    assert "say --resume too" in capfd.readouterr().err


def test_a_replay_takes_its_settings_from_the_run(stopped: Path, capfd: pytest.CaptureFixture[str]) -> None:
    replay = ["grpo", "--replay", str(stopped), "--learning-rate", "1e-3", "--dry-run", "--json"]
    journal = RunFolder(stopped).journal
    journal.mkdir()

    def refused() -> str:
        assert run(replay) == 2
        return capfd.readouterr().err

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(json.loads((stopped / "run.json").read_text())["directory"]))
        assert "train it with --keep-journal" in refused()
        round_file(journal, 3, 0).write_text("")
        assert "begins at step 3" in refused()
        round_file(journal, 0, 0).write_text("")
        assert run(replay) == 0
    plan = json.loads(capfd.readouterr().out)
    assert (plan["engine"], plan["trl"]["learning_rate"], plan["trl"]["beta"]) == ("replay", 1e-3, 0.25)
    assert plan["output"] == f"{stopped}-replay"
