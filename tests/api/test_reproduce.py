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
from ycore_cli import look

from docs.benchmarks.band import interval, machine_in_words, make_band
from tests.tiny_model import write_tiny_model
from ycore.api.reproduce import curve_of, final_of, judge_run, stored_band
from ycore.errors import Interrupted
from ycore.run.paths import TRACKER_GROUP


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
