"""A run whose loop is the caller's: the same steps as the command's, rewards of one's own, and an early end."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.tiny_model import write_tiny_model
from ycore import Round, grpo
from ycore.api.own_loop import RoundGroup, _with_rewards
from ycore.errors import ConfigError, RunError
from ycore.run.metrics import read_metrics
from ycore.types import Completion, Draw, Group, Prompt, Score

SMALL: dict[str, Any] = {
    "engine": "transformers", "dtype": "float32", "prompts_per_step": 2, "group_size": 4, "max_tokens": 8, "steps": 2,
    "sampling": {"dynamic": False}, "reward_workers": {"workers": 1}, "learning_rate": 1e-2,
}  # fmt: skip
ROWS = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(6)]


LETTERS = """
def letters(completions, **columns):
    return [len(set(completion[-1]["content"])) / 8 for completion in completions]
"""


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("rewards") / "rewards.py"
    file.write_text(LETTERS)
    return f"{file}:letters"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model")))


def test_rewards_of_ones_own_leave_constraints_their_scores() -> None:
    """Without them a completion teaches nothing."""
    completions = tuple(Completion((1,), None, text, "stop", 0) for text in "ab")
    scored = tuple((Score(value), Score(1 - value)) for value in (1.0, 0.0))
    group = Group(Draw(0, Prompt(0, "?"), (1,)), completions, scored)
    item = RoundGroup("?", {}, ("a", "b"), [3.0, None], group)
    (first, kept), (second, broken) = _with_rewards(item, [2.0, 0.0]).scores_GR
    assert (first.value, kept.value) == (1.5, 0.0)
    assert (second.value, broken.value) == (None, 1.0)


@pytest.mark.verify
def test_the_same_loop_gives_the_same_steps_as_the_command(
    tmp_path: Path, model: str, letters: str
) -> None:
    settings = {"model": model, "dataset": ROWS, "reward": letters, **SMALL}
    whole = grpo(output=str(tmp_path / "whole"), **settings)
    with Round(output=str(tmp_path / "own"), **settings) as run:
        rows = []
        while run.step < 2:
            groups = run.score(run.ask())
            assert len(groups) == run.num_prompts == 2
            assert all(len(group.rewards) == len(group.completions) == 4 for group in groups)
            rows.append(run.train(groups))
        saved = run.save()
    for mine, theirs in zip(rows, whole.metrics, strict=True):
        assert all(
            mine[name] == theirs[name]
            for name in ("step", "loss", "grad_norm", "reward", "ycore/reward")
        )
    file = "adapter_model.safetensors"
    first, second = load_file(saved / file), load_file(whole.folder / "model" / file)
    assert all((first[name] == second[name]).all() for name in second)
    assert json.loads((tmp_path / "own/summary.json").read_text())["status"] == "finished"


def test_rewards_of_ones_own_and_an_end_before_the_last_step(
    tmp_path: Path, model: str, letters: str
) -> None:
    with Round(
        model=model, dataset=ROWS, reward=letters, output=str(tmp_path / "run"), **SMALL
    ) as run:
        groups = run.ask(3)
        with pytest.raises(
            ConfigError, match="train takes 2 groups, as prompts_per_step says; it got 3"
        ):
            run.train(groups)
        chosen = groups[:2]
        with pytest.raises(ConfigError, match="no reward at all"):
            run.train(chosen)
        for group in chosen:
            group.rewards = [float(index) for index, _ in enumerate(group.completions)]
            assert group.can_teach
        row = run.train(chosen)
        assert (row["step"], row["reward"], row["grad_norm"] > 0) == (1, 1.5, True)
        assert run.step == 1
    assert [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl")] == [1]
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "interrupted"
    with pytest.raises(RunError, match="is over"):
        run.ask()


def test_what_a_round_cannot_do_is_refused(tmp_path: Path, model: str, letters: str) -> None:
    with pytest.raises(ConfigError, match="leave out replay and eval_dataset"):
        Round(
            model=model,
            dataset=ROWS,
            reward=letters,
            eval_dataset=ROWS,
            output=str(tmp_path / "run"),
            **SMALL,
        )


def test_the_loop_of_the_documentation_runs(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "use.md").read_text(encoding="utf-8")
    text = page.partition("## A loop of your own")[2].partition("```\n")[2].partition("```")[0]
    settings = SMALL | {"steps": 1, "output": str(tmp_path / "run")}
    text = (
        text.replace('model="smollm2-135m"', "model=model, **settings")
        .replace(", steps=20", "")
        .replace("20", "1")
    )
    exec(compile(text, "use.md", "exec"), {"model": model, "settings": settings})
    assert [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl")] == [1]
    assert (tmp_path / "run/model/adapter_model.safetensors").is_file()
