"""Three lines of Python: the same checks, processes and folder as the command."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pandas
import pytest

import ycore
from tests.tiny_model import write_tiny_model
from ycore.api.run_settings import settings_config
from ycore.config.schema import RunConfig
from ycore.errors import ConfigError, RunFolderError, UserError

SMALL: dict[str, Any] = {
    "engine": "transformers", "dtype": "float32", "prompts_per_step": 2, "group_size": 2, "max_tokens": 4,
    "reward_workers": {"workers": 1}, "learning_rate": 1e-3,
}  # fmt: skip


def letters(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    return [len(set(completion[0]["content"])) / 8 for completion in completions]


def letters_over(most: float) -> Any:
    share = lambda text: len(set(text)) / most  # noqa: E731

    def score(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        return [share(completion[0]["content"]) for completion in completions]

    return score


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
def test_rows_and_a_function_become_a_run(tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(6)]
    rewards = [letters, letters_over(4)]
    run = ycore.grpo(
        model=str(model),
        dataset=rows,
        reward=rewards,
        steps=2,
        output=str(tmp_path / "run"),
        **SMALL,
    )
    assert all(
        row["rewards/score/mean"] == 2 * row["rewards/letters/mean"] > 0 for row in run.metrics
    )
    assert [row["step"] for row in run.metrics] == [1, 2] and run.summary[
        "status"
    ] == "finished"
    assert run.config["trl"]["learning_rate"] == 1e-3
    assert run.report().is_file() and run.tokenizer().eos_token == "<|end|>"
    assert (
        sum(weight.numel() for name, weight in run.model().named_parameters() if "lora" in name)
        > 0
    )
    again = ycore.Run(tmp_path / "run")
    assert again.metrics == run.metrics and again.summary == run.summary
    measured = ycore.evaluate(
        model=str(tmp_path / "run" / "model"), dataset=rows, reward=letters, num_samples=2,
        output=str(tmp_path / "measured"), **{key: SMALL[key] for key in ("engine", "dtype", "max_tokens")},
    )  # fmt: skip
    assert 0 <= measured.summary["reward"] <= 1 and len(measured.completions) == 12


@pytest.mark.verify
@pytest.mark.slow
def test_a_model_is_measured_on_a_benchmark(tmp_path: Path, model: Path) -> None:
    rows = [{"question": f"{number} + 1 =", "answer": str(number + 1)} for number in range(3)]
    run = ycore.evaluate(
        model=str(model), benchmark="gsm8k", dataset=iter(rows), reward=letters, num_samples=2,
        output=str(tmp_path / "one"), **{key: SMALL[key] for key in ("engine", "dtype", "max_tokens")},
    )  # fmt: skip
    assert run.config["prompt_column"] == "question" and "boxed" in run.config["system_prompt"]
    assert len(run.completions) == 6 and run.summary["num_samples"] == 2


def test_a_benchmark_is_of_an_evaluation(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'gsm8k'"):
        ycore.evaluate(model=str(model), benchmark="gsm8", output=str(tmp_path / "x"))
    with pytest.raises(ConfigError, match="benchmark"):
        ycore.dry_run("grpo", model=str(model), benchmark="gsm8k")


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training leaves a folder and takes no step."""

    def leave_folder(config: Any, plan: Any, **_: Any) -> None:
        Path(config.output).mkdir()
        (Path(config.output) / "run.json").write_text("{}")

    monkeypatch.setattr("ycore.api.functions.run_training", leave_folder)


@pytest.mark.usefixtures("untrained")
def test_held_out_rows_that_are_also_trained_on_are_warned_of_where_they_were_given(
    tmp_path: Path, model: Path
) -> None:
    rows = [{"prompt": f"{number}?", "completion": "4", "answer": "4"} for number in range(3)]
    arguments: dict[str, Any] = {"model": str(model), "dataset": rows, "eval_dataset": rows[:2]}
    with pytest.warns(
        UserWarning, match="^2 of the 2 held-out prompts are also trained on"
    ) as caught:
        ycore.sft(**arguments, output=str(tmp_path / "sft"))
        ycore.grpo(**arguments, reward="exact_answer", **SMALL, output=str(tmp_path / "grpo"))
    assert [warning.filename for warning in caught] == [__file__] * 2
    with warnings.catch_warnings(action="error"):
        ycore.sft(
            **arguments | {"eval_dataset": [{"prompt": "4?", "completion": "4"}]},
            output=str(tmp_path / "other"),
        )


@pytest.mark.usefixtures("untrained")
def test_the_commands_check_of_checkpoints_is_made(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="save_total_limit must be 2 or more"):
        ycore.grpo(
            model=str(model), dataset="task:addition", reward="exact_answer", save_total_limit=1, **SMALL,
            output=str(tmp_path / "x"),
        )  # fmt: skip


def test_a_dry_run_is_the_commands_plan(tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": "1?", "completion": "4"}, {"prompt": "2?", "completion": "5"}]
    output = tmp_path / "run"
    plan = ycore.dry_run(
        "sft", model=str(model), dataset=rows, eval_dataset=rows[1:], output=str(output)
    )
    lines = {line.split()[0]: line for line in str(plan).splitlines()}
    assert lines.keys() >= {"model", "dataset", "read", "learned", "batch", "run", "output"}
    assert "warning" in lines
    assert "2 rows to train on, 1 held out" in " ".join(str(plan).split())
    assert "1 of the 1 held-out prompts" in " ".join(str(plan).split())
    assert plan.values["dataset"]["overlap"] == 1 and not output.exists()
    measured = ycore.dry_run(
        "eval", model=str(model), benchmark="gsm8k", dataset=[{"question": "1 + 1?", "answer": "2"}], max_tokens=8,
        reward=letters, output=str(output),
    )  # fmt: skip
    assert "completions of each prompt" in str(measured)
    assert measured.values["config"]["prompt_column"] == "question"


def test_memory_and_time_are_planned_without_devices() -> None:
    plan = ycore.plan_run(
        model="Qwen/Qwen2.5-7B-Instruct",
        devices="8x80GB",
        max_tokens=1024,
        prompts_per_step=64,
        learning_rate=1e-5,
    )
    assert "8 x " in str(plan) and plan.values["work"]["prompts_per_step"] == 64
    assert plan.values["fits"] and "--processes 8" in plan.values["options"]
    with pytest.raises(ConfigError, match="prompts_per_ste"):
        ycore.plan_run(model="Qwen/Qwen2.5-7B-Instruct", devices="8x80GB", prompts_per_ste=64)


def folder_of(
    root: Path, algorithm: str, summary: dict[str, Any], rows: list[dict[str, Any]]
) -> Path:
    root.mkdir()
    (root / "run.json").write_text(json.dumps({"config": {"algorithm": algorithm}}))
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary:
        (root / "summary.json").write_text(json.dumps(summary))
    return root


def test_a_run_that_is_there_is_opened_by_its_folder(tmp_path: Path) -> None:
    run = ycore.Run(
        folder_of(tmp_path / "sft", "sft", {"status": "finished"}, [{"step": 1, "loss": 0.5}])
    )
    assert run.summary == {"status": "finished"} and repr(run) == f"Run('{tmp_path}/sft')"
    goes_on = ycore.Run(
        str(folder_of(tmp_path / "on", "eval", {}, [{"step": 64, "reward": 0.5}]))
    )
    assert goes_on.summary == {} and goes_on.metrics == [{"step": 64, "reward": 0.5}]
    with pytest.raises(RunFolderError, match=r"no run\.json"):
        ycore.Run(tmp_path)


def test_a_mistake_is_the_commands_own(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="step"):
        ycore.grpo(
            model=str(model),
            dataset="task:addition",
            reward="exact_answer",
            step=3,
            output=str(tmp_path / "x"),
        )
    with pytest.raises(UserError, match="no such model folder"):
        ycore.sft(
            model=str(tmp_path / "none"), dataset="rows.jsonl", output=str(tmp_path / "x")
        )
    with pytest.raises(ConfigError, match="row 1 of the dataset is no mapping of plain values"):
        rows = [{"prompt": "1"}, {"prompt": object()}]
        ycore.grpo(model=str(model), dataset=rows, reward="length", output=str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_several_datasets_may_have_settings_of_their_own(tmp_path: Path) -> None:
    parts = [
        {"dataset": "a.jsonl", "share": 0.5, "rewards": ["length"]},
        {"dataset": "b", "share": 1},
    ]
    settings = {
        "model": "m",
        "dataset": parts,
        "rewards": ["length"],
        "output": str(tmp_path / "o"),
    }
    config = settings_config("grpo", settings)
    assert isinstance(config, RunConfig) and not any(tmp_path.iterdir())
    assert [(part.dataset, part.share) for part in config.mixture] == [
        ("a.jsonl", 0.5),
        ("b", 1),
    ]


def test_rows_of_the_datasets_library_have_their_own_keys_alone(tmp_path: Path) -> None:
    """Arrow gives each object the keys of all, with null."""
    from datasets import Dataset

    rows = [
        {"prompt": "?", "tools": [{"name": name, "parameters": {name: {"type": "string"}}}]}
        for name in ("find", "look")
    ]
    settings = {
        "model": "m",
        "dataset": Dataset.from_list(rows),
        "rewards": ["length"],
        "output": str(tmp_path / "out"),
    }
    file = Path(settings_config("grpo", settings).dataset)
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows


def test_a_frame_of_pandas_is_rows(tmp_path: Path, model: Path) -> None:
    frame = pandas.DataFrame({"prompt": ["1 + 1 =", "2 + 2 ="], "answer": [2, 4]})
    config = settings_config(
        "grpo",
        {
            "model": str(model),
            "dataset": frame,
            "rewards": ["exact_answer"],
            "output": str(tmp_path / "run"),
        },
        resume=False,
    )
    rows = [json.loads(line) for line in Path(config.dataset).read_text().splitlines()]
    assert rows == [{"prompt": "1 + 1 =", "answer": 2}, {"prompt": "2 + 2 =", "answer": 4}]


def test_rows_lie_beside_the_run(tmp_path: Path) -> None:
    from ycore.api.run_settings import settings_config

    settings = {
        "model": "m",
        "dataset": [{"prompt": "é"}],
        "rewards": [letters],
        "output": str(tmp_path / "run"),
    }
    config = settings_config("grpo", settings, resume=False)
    assert json.loads(Path(config.dataset).read_text()) == {"prompt": "é"}
    assert (
        Path(config.dataset).parent == tmp_path
        and config.rewards[0].reward == f"{Path(__file__).resolve()}:letters"
    )


def test_a_later_call_leaves_what_an_earlier_one_wrote(tmp_path: Path) -> None:
    from ycore.api.run_settings import settings_config

    def rows(prompt: str) -> Path:
        settings = {"model": "m", "dataset": [{"prompt": prompt}], "rewards": ["length"]}
        return Path(
            settings_config(
                "grpo", settings | {"output": str(tmp_path / "run")}, resume=False
            ).dataset
        )

    first, second = rows("a"), rows("b")
    assert rows("a") == first != second
    assert [json.loads(file.read_text())["prompt"] for file in (first, second)] == ["a", "b"]


def test_every_name_of_the_package_has_a_docstring() -> None:
    assert all(getattr(ycore, name).__doc__ for name in ycore.__all__)
    with pytest.raises(AttributeError, match="no attribute 'gpro'"):
        ycore.gpro  # noqa: B018


def test_importing_ycore_is_light() -> None:
    code = "import ycore, sys, json; ycore.grpo; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    loaded = set(json.loads(done.stdout))
    assert not loaded & {"torch", "transformers", "trl", "vllm", "datasets", "numpy", "typer"}


@pytest.mark.parametrize(
    ("key", "way_out"),
    [
        ("gpus", "; as an option it is --processes VALUE"),
        ("lr", "; as an option it is --learning-rate VALUE"),
        ("lora_r", "; as an option it is --set lora.r=VALUE"),
        ("max_new_tokens", "; as an option it is --max-tokens VALUE"),
        ("reward_funcs", "; as an option it is --reward VALUE"),
        ("num_generation", "; did you mean 'num_generations'?"),
    ],
)
def test_a_key_of_another_trainer_is_answered_like_its_option(key: str, way_out: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ycore.grpo(model="m", dataset="d", reward="length", **{key: 2})
    assert str(caught.value) == f"no key {key}{way_out}"


def test_a_strange_key_is_answered_in_a_short_line() -> None:
    with pytest.raises(ConfigError, match=r"^no key zzzz; `ycore docs options` lists them$"):
        ycore.grpo(model="m", dataset="d", reward="length", zzzz=2)
