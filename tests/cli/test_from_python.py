"""Three lines of Python: the same checks, processes and folder as the command."""

import json
from pathlib import Path
from typing import Any

import pytest

import ycore
from ycore.errors import ConfigError, UserError
from ycore.models.tiny import write_tiny_model

SMALL: dict[str, Any] = {
    "engine": "transformers", "dtype": "float32", "prompts_per_step": 2, "group_size": 2, "max_tokens": 4,
    "reward_workers": {"workers": 1}, "learning_rate": 1e-3,
}  # fmt: skip


def letters(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    return [len(set(completion[0]["content"])) / 8 for completion in completions]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
def test_rows_and_a_function_become_a_run(tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(6)]
    run = ycore.grpo(model=str(model), dataset=rows, reward=letters, steps=2, output=str(tmp_path / "run"), **SMALL)
    assert [row["step"] for row in run.metrics] == [1, 2] and run.summary["status"] == "finished"
    assert run.config["trl"]["learning_rate"] == 1e-3
    assert run.report().is_file() and run.tokenizer().eos_token == "<|end|>"
    assert sum(weight.numel() for name, weight in run.model().named_parameters() if "lora" in name) > 0
    again = ycore.Run(tmp_path / "run")
    assert again.metrics == run.metrics
    measured = ycore.evaluate(
        model=str(tmp_path / "run" / "model"), dataset=rows, reward=letters, num_samples=2,
        output=str(tmp_path / "measured"), **{key: SMALL[key] for key in ("engine", "dtype", "max_tokens")},
    )  # fmt: skip
    assert 0 <= measured.summary["reward"] <= 1 and len(measured.completions) == 12


def test_a_mistake_is_the_commands_own(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="step"):
        ycore.grpo(model=str(model), dataset="task:addition", reward="exact_answer", step=3, output=str(tmp_path / "x"))
    with pytest.raises(UserError, match="no such model folder"):
        ycore.sft(model=str(tmp_path / "none"), dataset="rows.jsonl", output=str(tmp_path / "x"))
    with pytest.raises(ConfigError, match="row 1 of the dataset is no mapping of plain values"):
        rows = [{"prompt": "1"}, {"prompt": object()}]
        ycore.grpo(model=str(model), dataset=rows, reward="length", output=str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_rows_lie_beside_the_run(tmp_path: Path) -> None:
    from ycore_cli.from_python import config_of

    settings = {"model": "m", "dataset": [{"prompt": "é"}], "rewards": [letters], "output": str(tmp_path / "run")}
    config = config_of("grpo", settings, resume=False)
    assert json.loads(Path(config.dataset).read_text()) == {"prompt": "é"}
    assert Path(config.dataset).parent == tmp_path and config.rewards[0].reward == f"{Path(__file__).resolve()}:letters"


def test_a_later_call_leaves_what_an_earlier_one_wrote(tmp_path: Path) -> None:
    from ycore_cli.from_python import config_of

    def rows(prompt: str) -> Path:
        settings = {"model": "m", "dataset": [{"prompt": prompt}], "rewards": ["length"]}
        return Path(config_of("grpo", settings | {"output": str(tmp_path / "run")}, resume=False).dataset)

    first, second = rows("a"), rows("b")
    assert rows("a") == first != second
    assert [json.loads(file.read_text())["prompt"] for file in (first, second)] == ["a", "b"]


def test_every_name_of_the_package_has_a_docstring() -> None:
    assert all(getattr(ycore, name).__doc__ for name in ycore.__all__)
    with pytest.raises(AttributeError, match="no attribute 'gpro'"):
        ycore.gpro  # noqa: B018
