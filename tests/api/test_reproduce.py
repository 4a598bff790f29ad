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

from ycore.api.reproduce import (
    MIN_SEEDS,
    band_curves,
    curve_of,
    final_of,
    interval,
    judge,
    judge_stages,
    machine_in_words,
    make_band,
    notes_on,
    stored_band,
)
from ycore.errors import ConfigError, Interrupted
from ycore.models.tiny import write_tiny_model
from ycore.run.reports import TRACKER_GROUP


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
    with pytest.raises(ConfigError, match="3 seeds or more; there are 2"):
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
    inside = [judge(band, seed, run(seed)).is_inside for seed in range(100, 200)]
    assert sum(inside) >= 85
    assert not any(judge(band, seed, run(seed, gain=0.3)).is_inside for seed in range(100, 110))
    assert not judge(band, 7, run(7, steps=20)).is_inside, (
        "a run that ended early has not reproduced the recipe"
    )
    assert band["machine"] == "a test" and len(band["steps"]) == 40 and len(band["finals"]) == 5


def test_every_stage_of_a_pipeline_has_a_band() -> None:
    runs = {
        seed: {"sft": run(seed), "after": [{"reward": 0.7 + seed / 100}]} for seed in range(5)
    }
    band = make_band(runs, {"recipe": "mine"})
    assert band["recipe"] == "mine" and band["stages"]["after"]["finals"]["4"] == 0.74
    good, bad = (
        {"sft": run(9), "after": [{"reward": 0.72}]},
        {"sft": run(9), "after": [{"reward": 0.3}]},
    )
    assert [(one.stage, one.is_inside) for one in judge_stages(band, 9, good)] == [
        ("sft", True),
        ("after", True),
    ]
    assert [one.is_inside for one in judge_stages(band, 9, bad)] == [True, False]
    assert [one.is_inside for one in judge_stages(band, 9, {"after": good["after"]})] == [
        False,
        True,
    ]
    assert judge_stages(band, 9, good)[1].in_words.startswith(
        "seed 9/after is inside the band: 100% of its steps"
    )


def test_a_page_has_every_bands_curves_and_verdicts() -> None:
    runs = {
        seed: {"sft": run(seed), "after": [{"reward": 0.7 + seed / 100}]} for seed in range(5)
    }
    known = make_band(runs, {"recipe": "mine"})
    shown = {
        7: {"sft": run(7, gain=0.3), "after": [{"reward": 0.72}]},
        9: {"sft": run(9), "after": [{"reward": 0.3}]},
    }
    verdicts = [one for seed, own in shown.items() for one in judge_stages(known, seed, own)]
    sft, after = band_curves(known, shown, verdicts)
    assert (sft.stage, sft.metric, len(sft.steps), len(sft.curves["seed 9"])) == (
        "sft",
        "ycore/reward",
        40,
        40,
    )
    assert [cells[:2] for cells in sft.verdicts] == [
        ("seed 7/sft", "OUTSIDE"),
        ("seed 9/sft", "inside"),
    ]
    assert after.verdicts == [
        ("seed 7/after", "inside", "100%", "0.720"),
        ("seed 9/after", "OUTSIDE", "0%", "0.300"),
    ]
    assert after.curves == {"seed 7": [0.72], "seed 9": [0.3]}


def test_a_band_says_where_and_how_it_was_made() -> None:
    machine = {
        "cores": 2,
        "processor": "AMD EPYC",
        "flags": ["avx2", "avx512f"],
        "memory_gib": 23.5,
    }
    where = "2 cores of AMD EPYC (avx2, avx512f), 23.5 GiB, bfloat16"
    assert machine_in_words(machine, dtype="bfloat16") == where
    devices = machine_in_words({**machine, "devices": ["H200", "H200"]}, dtype="bfloat16")
    assert devices.startswith("2 x H200, 2 cores of ")
    about = {"machine": where, "command": "ycore recipes mine", "sets": []}
    band = make_band({seed: {"": run(seed)} for seed in range(3)}, about)
    assert notes_on(band, []) == [
        f"the band is of 3 seeds, on {where}, by `ycore recipes mine`"
    ]
    del band["command"]
    assert notes_on(band, ["lora.r=4"]) == [
        f"the band is of 3 seeds, on {where}",
        "the band was made with the recipe alone, these runs with --set lora.r=4",
    ]


@pytest.mark.parametrize(
    "name", sorted(file.stem for file in Path(str(files("ycore_recipes"))).glob("bands/*.json"))
)
def test_every_band_that_ycore_brings_can_be_shown(name: str) -> None:
    band = stored_band(name)
    assert band is not None and notes_on(band, [])[0].startswith(
        f"the band is of {MIN_SEEDS} seeds, on "
    )
    for one in band_curves(band, {}, []):
        assert (
            one.metric and len(one.final) == 2 and all(low <= high for low, high in one.steps)
        )


RECIPE = """algorithm: dpo
model: model
dataset: pairs.jsonl
steps: 3
dtype: float32
"""


@pytest.mark.slow
def test_a_recipe_is_run_once_a_seed_and_compared(tmp_path: Path) -> None:
    prepare(tmp_path, RECIPE)
    status, said = reproduce(tmp_path, "mine.yaml --write-band band.json --json")
    result = json.loads(said)
    assert (
        status == 0 and sorted(result["finals"]) == ["0", "1", "2"] and result["verdicts"] == []
    )
    band = json.loads((tmp_path / "band.json").read_text())
    assert (
        band["metric"] == "rewards/accuracies"
        and len(band["steps"]) == 3
        and band["versions"]["trl"]
    )
    assert re.fullmatch(r".*cores of .*, [\d.]+ GiB, float32", band["machine"])
    assert band["command"].startswith("ycore recipes mine.yaml --write-band band.json")
    status, said = reproduce(
        tmp_path, "mine.yaml --band band.json"
    )  # all three are finished: nothing is run again
    assert status == 0 and said.count("is inside the band") == 3 and "step 1/3" not in said
    page = (tmp_path / "again" / "report.html").read_text()
    assert page.count("<td>inside</td>") == 3 and "Against the band" in page
    assert "by `ycore recipes mine.yaml --write-band band.json" in page
    band |= {"final": [2.0, 3.0], "sets": ["lora.r=4"]}
    (tmp_path / "other.json").write_text(json.dumps(band))
    status, said = reproduce(tmp_path, "mine.yaml --band other.json")
    assert status == 1 and said.count("is OUTSIDE the band") == 3
    assert (
        "the band was made with --set lora.r=4, these runs with the recipe alone"
        in " ".join(said.split())
    )
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
    assert status == 0 and "stage 1 of 2" not in said and "none is stored" in said


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
