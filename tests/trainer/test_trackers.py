"""Trackers receive what metrics.jsonl does, ycore's own numbers too. Real trackers, writing to files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ycore.models.tiny import write_tiny_model
from ycore.run.paths import RunFolder

COMMAND = [sys.executable, "-c", "import sys; from ycore_cli.main import main; sys.exit(main())", "grpo"]


@pytest.mark.slow
def test_wandb_offline_and_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, output = write_tiny_model(tmp_path / "model"), tmp_path / "run"
    options = {
        "--model": model,
        "--dataset": "task:addition?digits=1",
        "--reward": "length",
        "--output": output,
        "--steps": 2,
        "--prompts-per-step": 2,
        "--group-size": 2,
        "--max-tokens": 6,
        "--engine": "transformers",
        "--report-to": "wandb,tensorboard",
        "--project": "sums",
    }
    words = [str(word) for option, value in options.items() for word in (option, value)]
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*COMMAND, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr

    # The same folder goes on: a second file of the same page, whose id is the folder's.
    resumed = subprocess.run(
        [*COMMAND, "--resume", "--output", str(output), "--steps", "3"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    run_id = RunFolder(output).run_id
    assert [path.name for path in files] == [f"run-{run_id}.wandb"] * 2
    tables = list(tmp_path.glob("wandb/offline-run-*/files/media/table/ycore/completions_*.table.json"))
    assert len(tables) == 2
    table = json.loads(tables[0].read_text())
    samples = json.loads((output / "samples.json").read_text())
    assert table["columns"] == ["prompt", "before", "after"] and len(table["data"]) == len(samples["before"])

    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    wandb_file = files[0]
    told = wandb_file.read_bytes()
    assert b"ycore/time/round" in told and b"frac_reward_zero_std" in told
    assert b"sums" in told and b"ycore/config" in told and b"prompts_per_step" in told and b"ycore/curve" in told
    assert list(wandb_file.parent.glob("files/media/images/ycore/curve_*.png"))

    found = (path for path in tmp_path.rglob("events.out.tfevents.*") if path.suffix not in (".curve", ".completions"))
    events = min(found, key=lambda path: path.stat().st_mtime)
    scalars = EventAccumulator(str(events)).Reload()
    assert "train/ycore/time/train" in scalars.Tags()["scalars"]
    assert [round(event.value, 4) for event in scalars.Scalars("train/reward")] == [
        round(row["reward"], 4) for row in rows[:2]
    ]
    page = EventAccumulator(str(events.parent), size_guidance={"tensors": 0}).Reload()
    assert "ycore/text_summary" in page.Tags()["tensors"] and "ycore/curve" in page.Tags()["images"]
    assert "ycore/completions/text_summary" in page.Tags()["tensors"]
