"""`ycore selftest`: what it compares, and the whole of it on real runs."""

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ycore.errors import ConfigError
from ycore.run.metrics import MetricsWriter
from ycore.run.paths import RunFolder
from ycore.tools.selftest import compare_runs, leftovers, selftest


def run_folder(root: Path, *losses: float, weight: float = 1.0) -> RunFolder:
    folder = RunFolder(root)
    folder.model.mkdir(parents=True)
    save_file({"w": torch.tensor([weight])}, folder.model / "model.safetensors")
    with closing(MetricsWriter(folder.metrics)) as metrics:
        for step, loss in enumerate(losses, start=1):
            metrics.write(
                {"step": step, "loss": loss, "grad_norm": 1.0, "reward": 0.5, "learning_rate": 1e-3}
            )
    return folder


def test_equal_runs_have_no_difference(tmp_path: Path) -> None:
    assert (
        compare_runs(run_folder(tmp_path / "a", 1.0, 2.0), run_folder(tmp_path / "b", 1.0, 2.0))
        == []
    )


def test_every_kind_of_difference_is_found(tmp_path: Path) -> None:
    whole = run_folder(tmp_path / "whole", 1.0, 2.0)
    (metrics,) = compare_runs(whole, run_folder(tmp_path / "metrics", 1.0, 2.0 + 1e-12))
    assert metrics.startswith("step, loss, grad_norm") and "2.000000000001" in metrics
    (steps,) = compare_runs(whole, run_folder(tmp_path / "steps", 1.0))
    assert "by step" in steps
    assert compare_runs(whole, run_folder(tmp_path / "weights", 1.0, 2.0, weight=1.5)) == [
        "the weights differ"
    ]
    empty = run_folder(tmp_path / "empty", 1.0, 2.0)
    (empty.model / "model.safetensors").unlink()
    assert compare_runs(whole, empty) == compare_runs(empty, empty) == ["no weights were saved"]


def test_a_socket_folder_is_a_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ycore.tools.selftest._GONE_WITHIN_S", 0.0)
    folder = RunFolder(tmp_path / "run")
    assert leftovers(folder) == []
    folder.sockets.mkdir(parents=True)
    try:
        assert leftovers(folder) == [str(folder.sockets)]
    finally:
        folder.sockets.rmdir()


def test_a_folder_that_is_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(ConfigError, match="--output must be new or empty"):
        selftest(seed=0, output=tmp_path, say=print)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_resumes_exactly_here(tmp_path: Path) -> None:
    lines: list[str] = []
    result = selftest(seed=1, output=tmp_path / "runs", say=lines.append)
    assert result["passes"], lines
    assert [row["name"] for row in result["checks"]] == ["run", "kill and resume", "leftovers"]
    assert "SIGKILL" in (tmp_path / "runs" / "killed.log").read_text()
    assert (
        len(
            {
                json.loads(row)["loss"]
                for row in (tmp_path / "runs/whole/metrics.jsonl").read_text().splitlines()
            }
        )
        > 1
    )
