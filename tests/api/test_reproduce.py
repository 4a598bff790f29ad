"""The band of several seeds, and whether another run is inside it."""

import json
import os
import random
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from ycore_cli import look, options
from ycore_cli.main import run as run_command

from docs.benchmarks.band import interval, machine_in_words, make_band
from tests.tiny_model import write_tiny_model
from ycore.api.reproduce import compare_settings, curve_of, final_of, judge_run, stored_band
from ycore.config.recipe_files import read_sweep
from ycore.errors import ConfigError, Interrupted
from ycore.run.files import TRACKER_GROUP


def run(seed: int, *, gain: float = 0.8, steps: int = 40) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return [
        {"step": n + 1, "ycore/reward": gain * n / steps + chance.gauss(0, 0.05)}
        for n in range(steps)
    ]


def test_a_prediction_interval_by_hand() -> None:
    low, high = interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx(
        (2 - 4.303 * (1 + 1 / 3) ** 0.5, 2 + 4.303 * (1 + 1 / 3) ** 0.5), rel=1e-3
    )
    assert interval([1.0, 1.0, 1.0]) == pytest.approx((0.98, 1.02)), (
        "one that ends with 0.99 has reproduced it"
    )
    with pytest.raises(SystemExit, match="3 seeds or more; there are 2"):
        interval([1.0, 2.0])


def test_curves_are_trailing_means() -> None:
    rows = [{"step": n, "ycore/reward": float(n)} for n in range(1, 13)]
    assert (
        curve_of(rows)[:2] == [1.0, 1.5]
        and curve_of(rows)[-1] == 10.0
        and final_of(rows) == 11.0
    )
    assert curve_of([{"step": 0, "ycore/eval/reward": 1.0}, *rows]) == curve_of(rows)


def test_runs_of_the_same_recipe_are_inside_and_others_are_not() -> None:
    band = make_band({seed: {"": run(seed)} for seed in range(5)}, {"machine": "a test"})
    inside = [judge_run("", run(seed), band).is_inside for seed in range(100, 200)]
    assert sum(inside) >= 85
    outside = [judge_run("", run(seed, gain=0.3), band) for seed in range(100, 110)]
    assert not any(verdict.is_inside for verdict in outside)
    assert not judge_run("", run(7, steps=20), band).is_inside, (
        "a run that ended early has not reproduced the recipe"
    )
    assert band["machine"] == "a test" and len(band["steps"]) == 40 and len(band["finals"]) == 5


def test_every_stage_of_a_pipeline_has_a_band() -> None:
    runs = {
        seed: {"sft": run(seed), "after": [{"reward": 0.7 + seed / 100}]} for seed in range(5)
    }
    band = make_band(runs, {"recipe": "mine"})
    after = band["stages"]["after"]
    assert band["recipe"] == "mine" and after["finals"]["4"] == 0.74
    verdict = judge_run("9/after", [{"reward": 0.72}], after)
    assert str(verdict) == "seed 9/after is inside the band: 100% of its steps, final 0.720"
    assert "OUTSIDE" in str(judge_run("9/after", [{"reward": 0.3}], after))
    assert not judge_run("9/after", [], after).is_inside


def test_a_machine_is_described_in_words() -> None:
    machine = {"cores": 2, "processor": "AMD EPYC", "flags": ["avx2"], "memory_gib": 23.5}
    assert machine_in_words(machine) == "2 cores of AMD EPYC (avx2), 23.5 GiB"
    assert machine_in_words({**machine, "devices": ["H200", "H200"]}).startswith(
        "2 x H200, 2 c"
    )


@pytest.mark.parametrize(
    "name", sorted(file.stem for file in Path(str(files("ycore_recipes"))).glob("bands/*.json"))
)
def test_every_band_that_ycore_brings_can_be_compared_with(name: str) -> None:
    band = stored_band(name)
    assert band is not None and band["machine"] and "sets" in band
    for stage in band.get("stages", {"": band}).values():
        assert len(stage["final"]) == 2 and len(stage["finals"]) >= 3
        assert all(low <= high for low, high in stage["steps"])
        judge_run("0", [], stage)


RECIPE = """algorithm: dpo
model: model
dataset: pairs.jsonl
steps: 3
dtype: float32
"""


@pytest.mark.slow
@pytest.mark.verify
def test_a_recipe_is_run_once_a_seed_and_compared(tmp_path: Path) -> None:
    prepare(tmp_path, RECIPE)
    status, said = reproduce(tmp_path, "mine.yaml --json")
    result = json.loads(said)
    assert (
        status == 0 and sorted(result["finals"]) == ["0", "1", "2"] and result["verdicts"] == []
    )
    script = Path(__file__).parents[2] / "docs/benchmarks/band.py"
    made = [sys.executable, str(script), "again", "band.json"]
    subprocess.run(made, cwd=tmp_path, check=True)
    band = json.loads((tmp_path / "band.json").read_text())
    assert band["metric"] == "rewards/accuracies" and band["versions"]["trl"]
    assert len(band["steps"]) == 3 and re.fullmatch(
        r".*cores of .*, [\d.]+ GiB", band["machine"]
    )
    status, said = reproduce(
        tmp_path, "mine.yaml --band band.json"
    )  # all three are finished: nothing is run again
    assert status == 0 and said.count("is inside the band") == 3 and "step 1/3" not in said
    assert (tmp_path / "again" / "report.html").is_file()
    band |= {"final": [2.0, 3.0], "sets": ["lora.r=4"]}
    (tmp_path / "other.json").write_text(json.dumps(band))
    status, said = reproduce(tmp_path, "mine.yaml --band other.json")
    assert status == 1 and said.count("is OUTSIDE the band") == 3
    assert "with --set lora.r=4" in said and "other settings than the band's" in said
    status, said = reproduce(tmp_path, "mine.yaml --set lora.r=4")
    assert status == 2 and "another run" in said and "lora.r" in said


STAGES = """model: model
stages:
  dpo: {dataset: pairs.jsonl, steps: 2, dtype: float32}
  after:
    command: eval
    dataset: task:addition?digits=1
    rewards: [length]
    engine: {kind: transformers}
    limit: 4
    max_tokens: 4
    dtype: float32
    seed: 7
"""


@pytest.mark.slow
@pytest.mark.verify
def test_a_pipeline_is_run_once_a_seed_and_compared(tmp_path: Path) -> None:
    prepare(tmp_path, STAGES)
    status, said = reproduce(tmp_path, "mine.yaml --seeds 2 --json")
    finals = json.loads(said)["finals"]
    assert status == 0 and sorted(finals) == ["0/after", "0/dpo", "1/after", "1/dpo"]
    seeds = [
        json.loads((tmp_path / f"again/seed-{n}/after/run.json").read_text())["config"]["seed"]
        for n in (0, 1)
    ]
    assert seeds == [7, 1007], "a stage's own seed is told apart too"
    status, said = reproduce(tmp_path, "mine.yaml --seeds 2")
    assert status == 0 and "running stage" not in said and "none is stored" in said


@pytest.mark.slow
@pytest.mark.verify
def test_a_sweep_runs_each_combination_once_and_compares_their_means(tmp_path: Path) -> None:
    prepare(tmp_path, RECIPE)
    sweep = {"recipe": "mine.yaml", "grid": {"trl.learning_rate": [1e-06, 0.01], "lora.r": [2]}}
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep))
    status, said = reproduce(tmp_path, "sweep.yaml --seeds 3 --json")
    assert status == 0, said
    rows = json.loads(said)["settings"]
    assert json.loads((tmp_path / "again/sweep.json").read_text())["settings"] == rows
    by_setting = {row["setting"]: row for row in rows}
    assert by_setting.keys() == {
        "trl.learning_rate=1e-06,lora.r=2",
        "trl.learning_rate=0.01,lora.r=2",
    }
    assert rows[0]["mean"] >= rows[1]["mean"]
    for place, row in by_setting.items():
        assert row["mean"] == pytest.approx(sum(row["finals"]) / 3) and row["half_95"] >= 0
        for seed in range(3):
            run_json = json.loads(
                (tmp_path / f"again/{place}/seed-{seed}/run.json").read_text()
            )
            config = run_json["config"]
            assert (config["seed"], config["lora"]["r"]) == (seed, 2)
            assert config["trl"]["learning_rate"] == float(
                place.split(",")[0].partition("=")[2]
            )
    status, said = reproduce(tmp_path, "sweep.yaml --seeds 3")
    assert status == 0 and said.count("mean ") == 2 and "step 1/3" not in said


@pytest.mark.verify
@pytest.mark.slow
def test_the_best_of_a_sweep_goes_on_for_longer_and_the_same_command_begins_nothing_again(
    tmp_path: Path,
) -> None:
    prepare(tmp_path, RECIPE)
    sweep = {
        "recipe": "mine.yaml",
        "grid": {"learning_rate": [1e-06, 0.01]},
        "halving": {"steps": [2, None]},
    }
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep))
    status, said = reproduce(tmp_path, "sweep.yaml --seeds 1 --json")
    assert status == 0, said
    best, other = json.loads(said)["settings"]
    assert (best["steps"], other["steps"]) == (None, 2)
    lengths = [
        len(
            (tmp_path / f"again/{row['setting']}/seed-0/metrics.jsonl").read_text().splitlines()
        )
        for row in (best, other)
    ]
    assert lengths[0] > lengths[1], "the kept run has the recipe's own three steps"
    status, said = reproduce(tmp_path, "sweep.yaml --seeds 1")
    assert status == 0 and "step " not in said.replace("steps", ""), said
    sweep["grid"] = {"learning_rat": [1e-06]}
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep))
    status, said = reproduce(tmp_path, "sweep.yaml --seeds 1")
    assert status == 2 and "no key learning_rat; did you mean 'learning_rate'?" in said


def test_a_sweep_is_every_combination_by_its_own_folder(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "recipe: quickstart\ngrid: {lora.r: [4, 8], model: [a/b, a-b], dynamic_sampling: [true]}"
    )
    sweep = read_sweep(str(file))
    settings = sweep.settings(options.KEYS)
    assert sweep.recipe == "quickstart" and len(settings) == 4 and sweep.halving.steps == [None]
    assert settings["lora.r=8,model=a%2Fb,sampling.dynamic=true"] == [
        "lora.r=8",
        'model="a/b"',
        "sampling.dynamic=true",
    ]
    alone = read_sweep("quickstart")
    assert alone.recipe == "quickstart" and alone.settings({}) == {"": []}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("recipe: quickstart\ngrid: {lora.r: 4}", "grid.lora.r must be a list; it is 4"),
        (
            "recipe: quickstart\ngrid: {lora.r: []}",
            "grid.lora.r must be a list of 1 or more; it is []",
        ),
        ("recipe: quickstart\ngrid: [4]", "grid must be a mapping; it is [4]"),
        ("recipe: q\nmodel: mine\ngrid: {lora.r: [4]}", "model must be left out; it is 'mine'"),
        ("grid: {lora.r: [4]}", "recipe must be given"),
        (
            "recipe: q\ngrid: {lora.r: [4]}\nhalving: {steps: [0, 4]}",
            "halving.steps.0 must be greater than 0; it is 0",
        ),
        (
            "recipe: q\ngrid: {lora.r: [4]}\nhalving: {factor: 1}",
            "halving.factor must be at least 2; it is 1",
        ),
    ],
)
def test_what_is_no_sweep_is_one_line(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_sweep(str(tmp_path / "sweep.yaml"))
    assert named in str(caught.value) and "recipe: quickstart, grid:" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("grid: {lora.r: [4]}\nhalving: {steps: [40, 20]}", "must grow, with null as the last; they are [40, 20]"),
        ("grid: {lora.r: [4]}\nhalving: {steps: [null, 20]}", "they are [null, 20]; write e.g. [20, 60, null]"),
        ("grid: {lora.r: [4]}\nhalving: {steps: [2, null]}", "iterative-dpo has none; write a number"),
        ("grid: {seed: [1, 2]}", "seed is not of the grid, it is [1, 2]; take --seeds N"),
        ("grid: {output: [a]}", "take --output FOLDER"),
        ("grid: {steps: [4, 8]}\nhalving: {steps: [2, 4]}", "take halving.steps"),
        ("grid: {lora.r: [2026-01-01]}", "a date in quotes"),
    ],
)  # fmt: skip
def test_a_grid_whose_runs_would_not_differ_is_one_line(
    text: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / "sweep.yaml").write_text(f"recipe: iterative-dpo\n{text}")
    with pytest.raises(ConfigError) as caught:
        read_sweep(str(tmp_path / "sweep.yaml"))
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_a_setting_keeps_its_name_and_its_place(tmp_path: Path) -> None:
    """A value with a space at its end was told by another name, and left out of the next rung."""
    write_run(tmp_path / "best " / "seed-0", [0.9])
    result, _ = compare_settings(tmp_path, {"best ": []}, 1)
    assert [row["setting"] for row in result["settings"]] == ["best "]


def write_run(folder: Path, rewards: list[float]) -> None:
    """Write the files of a run that are compared."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": n, "ycore/reward": reward} for n, reward in enumerate(rewards, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"algorithm": "grpo", "steps": len(rewards)}
    (folder / "run.json").write_text(json.dumps({"config": config}))


def test_settings_are_compared_by_the_means_of_their_finals_as_of_a_step(
    tmp_path: Path,
) -> None:
    finals = {"low": [0.1, 0.2, 0.3], "high": [0.9, 0.5, 0.7], "rising": [0.4, 0.4, 0.4]}
    for name, rewards in finals.items():
        for seed, reward in enumerate(rewards):
            late = 1.0 if name == "rising" else reward
            write_run(tmp_path / name / f"seed-{seed}", [reward] * 4 + [late] * 4)
    settings: dict[str, list[str]] = {name: [] for name in finals}
    result, lines = compare_settings(tmp_path, settings, 3)
    assert [row["setting"] for row in result["settings"]] == ["rising", "high", "low"]
    by_name = {row["setting"]: row for row in result["settings"]}
    assert by_name["high"]["mean"] == pytest.approx(0.7)
    assert by_name["high"]["half_95"] == pytest.approx(4.303 * 0.2 / 3**0.5, rel=1e-3)
    assert by_name["low"]["finals"] == pytest.approx(finals["low"])
    assert lines[1][0] == "high" and "mean 0.700 +- 0.497" in lines[1][1]

    early, lines = compare_settings(
        tmp_path, settings, 3, steps=4, ended=result["settings"][:1]
    )
    assert [row["setting"] for row in early["settings"]] == ["high", "rising", "low", "rising"]
    assert "after 4 steps" in lines[0][1] and "after" not in lines[3][1]
    assert json.loads((tmp_path / "sweep.json").read_text()) == early


def test_runs_without_a_reward_are_compared_by_what_they_have(tmp_path: Path) -> None:
    """The comparison ended in a traceback after all runs."""
    for seed in range(3):
        write_run(tmp_path / "kto" / f"seed-{seed}", [0.0])
        write_run(tmp_path / "gold" / f"seed-{seed}", [0.0])
        row = {"step": 1, "loss": 0.5}
        (tmp_path / "gold" / f"seed-{seed}" / "metrics.jsonl").write_text(json.dumps(row))
        row["rewards/margins"] = 0.25
        (tmp_path / "kto" / f"seed-{seed}" / "metrics.jsonl").write_text(json.dumps(row))
    result, _ = compare_settings(tmp_path, {"kto": []}, 3)
    assert [row["mean"] for row in result["settings"]] == [0.25]
    compare_settings(tmp_path, {"gold": []}, 3)
    (gold,) = json.loads((tmp_path / "sweep.json").read_text())["settings"]
    assert gold["mean"] is None


@pytest.mark.parametrize("band", ["{}", '{"machine": "m", "sets": [], "steps": []}'])
def test_what_is_no_band_is_refused_before_any_run(
    band: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "band.json").write_text(band)
    words = ["--band", str(tmp_path / "band.json"), "--output", str(tmp_path / "runs")]
    assert run_command(["recipes", "quickstart", *words]) == 2
    assert "is no band" in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_a_file_of_ones_own_has_no_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was compared with the band of the shipped recipe of the same name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart.yaml").write_text("recipe: quickstart")
    write_run(tmp_path / "runs" / "seed-0", [0.1, 0.2])
    monkeypatch.setattr("ycore_cli.look._run_rungs", lambda *_, **__: None)
    words = ["--seeds", "1", "--output", str(tmp_path / "runs")]
    assert run_command(["recipes", "./quickstart.yaml", *words]) == 0
    assert "none is stored" in " ".join(capsys.readouterr().out.split())


def test_halving_runs_all_and_lets_the_best_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, int]] = []

    def run_seed(
        recipe: str, seed: int, root: Path, *, sets: Any, steps: int, **_: Any
    ) -> None:
        rate = float(sets[0].partition("=")[2])
        reward = 1 - abs(rate - 3) / 10  # the third is best
        ran.append((sets[0], steps))
        write_run(root, [reward] * steps)

    monkeypatch.setattr(look, "_run_seed", run_seed)
    sweep = {
        "recipe": "quickstart",
        "grid": {"learning_rate": [1, 2, 3, 4, 5]},
        "halving": {"steps": [4, 8, 16], "factor": 2},
    }
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep))
    assert (
        look.recipes(str(tmp_path / "sweep.yaml"), output=tmp_path / "runs", seeds=2, json=True)
        == 0
    )
    assert [steps for _, steps in ran] == [4] * 10 + [8] * 6 + [16] * 4
    assert {name for name, steps in ran if steps == 8} == {
        f"learning_rate={n}" for n in (2, 3, 4)
    }
    rows = json.loads(capsys.readouterr().out)["settings"]
    assert [row["steps"] for row in rows] == [16, 16, 8, 4, 4]
    assert rows[0]["setting"] == "learning_rate=3" and len(rows[0]["finals"]) == 2


def test_a_stop_says_which_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(recipe: str, seed: int, root: Path, **_: Any) -> None:
        if seed == 1:
            raise Interrupted("stopped in reward; the same command goes on with --resume")

    monkeypatch.setattr(look, "_run_seed", stopped)
    with pytest.raises(Interrupted, match=r"stopped with seed 1; the same command goes on$"):
        look.recipes("rlhf-pipeline", output=tmp_path)


def test_seeds_are_one_group_of_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[str | None] = []
    monkeypatch.delenv(TRACKER_GROUP, raising=False)
    monkeypatch.setattr(
        look, "_run_seed", lambda *_, **__: groups.append(os.environ.get(TRACKER_GROUP))
    )
    assert look.recipes("quickstart", output=tmp_path / "again", dry_run=True, seeds=3) == 0
    assert groups == ["again"] * 3 and TRACKER_GROUP not in os.environ


def prepare(folder: Path, recipe: str) -> None:
    write_tiny_model(folder / "model")
    pairs = [{"prompt": f"{n} + 1?", "chosen": str(n + 1), "rejected": "no"} for n in range(20)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "mine.yaml").write_text(recipe)


def reproduce(folder: Path, words: str) -> tuple[int, str]:
    command = [
        sys.executable,
        "-c",
        "from ycore_cli.main import main; main()",
        "recipes",
        *words.split(),
    ]
    command += ["--output", "again"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    return done.returncode, done.stdout + ("" if "--json" in words else done.stderr)
