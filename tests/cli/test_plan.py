"""`ycore plan` as it is typed: a table or JSON, from a config.json alone, importing nothing heavy."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ycore_cli.main import run

HEAVY = (
    "torch",
    "transformers",
    "trl",
    "vllm",
    "datasets",
    "accelerate",
    "peft",
    "deepspeed",
    "matplotlib",
)


def typed(line: str) -> int:
    return run(line.split())


def test_a_plan_for_devices_that_are_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --model Qwen/Qwen2.5-7B-Instruct --devices 8x80GB --judge Qwen3-8B --max-tokens 1024"
    assert run([*line.split(), "--prompts-per-step", "64", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    best = plan["fits"][0]
    assert plan["model"]["num_params"] == 7_615_616_512 and plan["devices"]["count"] == 8
    assert set(best["seconds"]) == {
        "sync",
        "generate",
        "judge",
        "swaps",
        "round",
        "train",
        "step",
    }
    assert best["peak_bytes"] <= best["capacity_bytes"] < 80e9
    assert {"trainer", "judge"} <= set(best["memory"]["judge"])
    assert best["strategy"]["judge_tensor_parallel"] == 2 and not plan["cannot_be_run"]
    assert "--set rewards.0.args.tensor_parallel=2" in plan["options"]


def test_a_reward_model_that_engines_serve_is_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = "plan --model Qwen/Qwen2.5-1.5B-Instruct --set rewards.0.reward=rm:Qwen/Qwen2.5-0.5B --devices 2x80GB"
    assert typed(f"{line} --json") == 0
    best = json.loads(capsys.readouterr().out)["fits"][0]
    assert best["engines"]["reward_model"]["weights"] > 0.8 * 2**30
    assert best["seconds"]["score"] > 0 and {"trainer", "reward_model"} <= set(
        best["memory"]["score"]
    )
    assert typed(line) == 0
    assert "scorer   Qwen/Qwen2.5-0.5B: 0.49 billion parameters" in capsys.readouterr().out


def test_a_teacher_that_engines_serve_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The teacher is a run's adapter, which has the sizes of its base."""
    adapter = tmp_path / "model"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "Qwen/Qwen2.5-7B-Instruct"})
    )
    line = f"plan --recipe distill-quickstart --set rewards.0.reward=teacher:{adapter} --devices 1x80GB --json"
    assert typed(line) == 0
    best = json.loads(capsys.readouterr().out)["fits"][0]
    assert best["engines"]["teacher"]["weights"] > 13 * 2**30 and best["seconds"]["teach"] > 0


def test_the_table_says_what_a_person_wants_to_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        typed("plan --model llama-3.1-8b --devices 4xH100 --accelerate zero3 --full --beta 0.1")
        == 0
    )
    output = capsys.readouterr().out
    assert "8.03 billion parameters, every weight" in output and "4 x H100" in output
    assert "zero3" in output and "zero2" not in output and "reference" in output
    assert "sync" in output and "wake-up" not in output
    assert all(len(line) <= 80 for line in output.splitlines() if "trainer of a rank" in line)
    *_, before, line = output.splitlines()
    assert before == "the first runs with these options"
    assert line.startswith("  --processes 4") and "--beta" not in line


def test_what_does_not_fit_says_why_and_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("plan --model Qwen/Qwen2.5-7B-Instruct --devices 1x80GB --full") == 1
    output = capsys.readouterr().out
    assert "nothing fits" in output and "most of it the trainer" in output
    assert "--lora" in output and "more devices" in output


def test_a_recipe_is_planned_for_the_machine_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("plan --recipe quickstart --devices cpu --set lora.r=4") == 0
    output = capsys.readouterr().out
    assert "LoRA r=4" in output and "all at once" in output and "GFLOP/s" in output
    (lengths,) = re.findall(r"prompts of (\d+) tokens x 8 completions of (\d+)", output)
    assert int(lengths[0]) < 100 and lengths[1] == "16", "lengths are the recipe's own"
    assert "dataset" not in output and "asked" not in output
    assert typed("plan --recipe quickstart --devices cpu --prompt-tokens 99") == 0
    assert "8 prompts of 99 tokens" in capsys.readouterr().out


def test_rows_of_the_dataset_are_shown_as_a_dry_run_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"instruction": "Add.", "input": text, "source": "s"} for text in ("1, 2", "3, 4")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = f"plan --model Qwen/Qwen2.5-7B-Instruct --devices 8x80GB --dataset {file}"
    assert typed(f"{line} --show-rows 3") == 0
    output = capsys.readouterr().out
    assert "question from instruction + input; not used: source" in output
    assert output.count("asked ") == 2 and "user: Add.\\n\\n3, 4" in output
    assert "without its chat template" in output, "the model is not on this machine"
    assert typed(f"{line} --json") == 0
    assert len(json.loads(capsys.readouterr().out)["dataset"]["reading"]["rows"]) == 1
    assert typed("plan --model smollm2-135m --devices cpu --show-rows 3") == 2
    assert "name it with --dataset" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--model nosuch/model --devices 1x80GB", "no config of 'nosuch/model'"),
        ("--model smollm2-135m --devices 8xh1000", "did you mean 'h100'"),
        (
            "--model smollm2-135m --devices 8xT4 --set dtype=bfloat16",
            "device T4 has none; train with --set dtype=float32",
        ),
        (
            "--model smollm2-135m --devices 2x24GB --per-device-train-batch-size 5",
            "they are 5 * 6 and 8 prompts x 8 / 2 = 32",
        ),
        ("--devices 8x80GB", "model"),
        (
            "--model smollm2-135m --devices 1x80GB --prompt-tokens few",
            "must be a whole number",
        ),
        (
            "--model smollm2-135m --devices 1x80GB --judge nosuch/judge",
            "no config of 'nosuch/judge'",
        ),
    ],
)
def test_mistakes_are_one_line(
    line: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run(["plan", *line.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from ycore_cli.main import run; "
        "run('plan --model smollm2-135m --devices 1x80GB --json'.split()); "
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stderr.strip().splitlines()[-1] == "[]"


EXAMPLES = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("column", [1, 2, 3])
def test_the_worked_examples_of_the_docs_are_what_it_plans(
    column: int, capsys: pytest.CaptureFixture[str]
) -> None:
    section = EXAMPLES.partition("## Worked examples\n")[2].partition("\n### ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line[:1] == "|"]
    model, sharding, width, *figures = (row[column].strip().strip("`") for row in rows[2:])
    line = section[section.index("`ycore ") :].split("`")[1]
    assert run([*line.split()[1:], "--model", *model.split(), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    best, options = plan["fits"][0], plan["options"]
    assert f"--accelerate {sharding} --set engine.tensor_parallel={width[0]}" in options
    assert all(setting in options for setting in width.split("`")[1::2])
    gib = [
        [size / 2**30 for size in best["memory"][phase].values()]
        for phase in ("train", "generate")
    ]
    assert figures[:2] == [f"{a:.1f} + {b:.1f} = {a + b:.1f}" for a, b in gib]
    seconds = [best["seconds"][part] for part in ("sync", "generate", "swaps", "train")]
    assert figures[2] == ", ".join(f"{part:.1f}" if part else "0" for part in seconds)
    assert figures[3] == f"{best['seconds']['step']:.1f}"


@pytest.mark.parametrize("row", [0, 1, 2, 3])
def test_the_table_of_several_machines_is_what_it_plans(
    row: int, capsys: pytest.CaptureFixture[str]
) -> None:
    section = EXAMPLES.partition("### On several machines\n")[2].partition("\n### ")[0]
    fleets = re.findall(r"`([\dx]+H100[^`]*)`", section)[:3]
    table = [line.strip("|").split("|") for line in section.splitlines() if line[:1] == "|"]
    model, *cells = (cell.strip() for cell in table[2 + row])
    line = EXAMPLES[EXAMPLES.index("`ycore plan --devices 8xH100 --prompts") :].split("`")[1]
    for fleet, cell in zip(fleets, cells, strict=True):
        words = line.replace("8xH100", fleet).split()[1:]
        assert run([*words, "--model", *model.strip("`").split(), "--json"]) in (0, 1)
        plan = json.loads(capsys.readouterr().out)
        if cell.startswith("lacks"):
            nearest = plan["does_not_fit"][0]
            lacking = (nearest["peak_bytes"] - nearest["capacity_bytes"]) / 2**30
            assert not plan["fits"] and cell == f"lacks {lacking:.1f}"
            continue
        for name, seconds in re.findall(r"`(\w+)` ([\d.]+)", cell):
            forecasts = [
                forecast
                for forecast in plan["fits"]
                if forecast["strategy"]["sharding"] == name
            ]
            assert f"{forecasts[0]['seconds']['step']:.1f}" == seconds


def test_a_file_of_accelerates_is_planned_as_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text(
        "distributed_type: FSDP\nnum_processes: 8\nnum_machines: 1\nfsdp_config: {fsdp_version: 2}\n"
    )
    words = ["plan", "--model", "Qwen/Qwen2.5-7B-Instruct", "--devices", "8xH100", "--json"]
    assert run([*words, "--accelerate", str(file)]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {forecast["strategy"]["sharding"] for forecast in plan["fits"]} == {"fsdp2"}
    assert "--accelerate" not in plan["options"]
    assert run([*words, "--accelerate", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
