"""`ycore doctor --gpu`: what a CPU can do of it, how a part that fails or hangs is told, and all of it on a device."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ycore_cli.main import run

from ycore.engine import shared_bucket
from ycore.errors import RunError
from ycore.launch.engines import is_vllm_installed
from ycore.launch.gpus import ask_driver
from ycore.tools import device_check, device_engines, device_training
from ycore.tools.device_check import PARTS, Part, device_report

TINY: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 2, "vocab_size": 128, "max_position_embeddings": 4096,
}  # fmt: skip


def test_the_stages_of_a_sync_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_training, "_SMOLLM2", TINY)
    monkeypatch.setattr(device_training, "_BILLION", TINY)
    monkeypatch.setattr(shared_bucket, "BUCKET_BYTES", 2**20)
    said = device_training.sync(tmp_path)
    assert said.count("GB/s") == 5 and said.endswith("GB/s, which another process opened")
    assert list(Path("/dev/shm").glob(f"ycore-{device_training.RunFolder(tmp_path).run_id}")) == []


def test_both_paths_score_the_same_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_training, "_SMOLLM2", TINY)
    found = [device_training.forward_cost(600, path) for path in ("mask", "segments")]
    assert found[0]["mean_logprob"] == pytest.approx(found[1]["mean_logprob"], abs=1e-3)
    assert all(one["seconds"] > 0 for one in found)


@pytest.mark.parametrize(
    ("other", "message"), [({}, None), ({"loss": 0.6}, "losses within 1.0e-01")]
)
def test_a_replay_that_differs_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, float], message: str | None
) -> None:
    """The commands are not run here; the journal's replay has its own tests."""

    def command(words: list[str], folder: Any, *, on_cpu: bool) -> int:
        folder.root.mkdir()
        row = {"loss": 0.5, "grad_norm": 2.0} | ({} if on_cpu else other)
        folder.metrics.write_text(json.dumps({"step": 1, **row}) + "\n")
        return 0

    monkeypatch.setattr(device_training, "run_command", command)
    if message is None:
        assert device_training.replay_full(tmp_path).startswith("1 steps, losses within 0.0e+00")
        return
    with pytest.raises(RunError, match=message):
        device_training.replay_full(tmp_path)


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi on PATH that lists one device, with 1 GiB less free memory at each question."""
    program = folder / "nvidia-smi"
    program.write_text(f"""#!/bin/sh
case "$1" in --query-gpu=index*) ;; *) exit 0 ;; esac
echo x >> {folder}/asked
echo "0, GPU-1, NVIDIA Test, 24576, $((24576 - 1024 * $(wc -l < {folder}/asked))), 8.6, 580.95.05"
""")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def _forget_the_driver() -> Iterator[None]:
    ask_driver.cache_clear()
    yield
    ask_driver.cache_clear()


def test_a_part_that_fails_or_hangs_is_told_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PARTS, "sync", Part("nowhere.work", 30, "nothing"))
    monkeypatch.setitem(PARTS, "attention", Part("device_training.attention", 0.01, "nothing"))
    said: list[str] = []
    report = device_report(said.append, on="cpu", parts=("device", "sync", "attention"))
    first, second = report["checks"]
    assert (
        not report["ok"]
        and "No module named" in first["value"]
        and "no end after" in second["value"]
    )
    assert any(line.startswith("  FAIL") for line in said)
    assert report["not_run"]["device"] == PARTS["device"].left_out


@pytest.mark.usefixtures("_forget_the_driver")
def test_a_device_that_torch_does_not_see_is_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver lists one. The parts after it would run on the CPU, and pass."""
    if torch.cuda.is_available():
        pytest.skip("torch sees a device here")
    driver(tmp_path, monkeypatch)
    report = device_report(lambda line: None, parts=("device", "sync"))
    values = {one["name"]: one for one in report["checks"]}
    assert report["device"] == "NVIDIA Test" and not report["ok"]
    assert "sees no device" in values["device"]["value"]
    assert "sync" not in values and "`device` failed" in report["not_run"]["sync"]


@pytest.mark.usefixtures("_forget_the_driver")
def test_the_driver_is_asked_again_for_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere its first answer is kept; with that a sleep would seem to free nothing, and its check be left out."""
    driver(tmp_path, monkeypatch)
    first, second = device_engines._free_gib(), device_engines._free_gib()
    assert first is not None and second == first - 1


def test_a_sleep_that_keeps_the_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_engines, "_HOLD", "raise MemoryError('{bytes}')")
    with pytest.raises(RunError, match=r"asleep at level 2, the engine keeps 6\.0 of its 7\.0 GiB"):
        device_engines._check_freed(2, held=7.0, freed=1.0)
    with pytest.raises(RunError, match=r"another process cannot use 5\.4 GiB: MemoryError"):
        device_engines._check_freed(1, held=7.0, freed=6.0)
    monkeypatch.setattr(device_engines, "_HOLD", "{bytes}")
    assert "of 7.0 GiB 6.0 were free" in device_engines._check_freed(1, held=7.0, freed=6.0)


def test_the_command_shows_the_parts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def report(say: Any, *, on: str) -> dict[str, Any]:
        say("replay-lora ...")
        return {
            "ok": True,
            "device": None,
            "checks": [device_check.check("replay-lora", "fine")],
            "not_run": {},
        }

    monkeypatch.setattr(device_check, "device_report", report)
    assert run(["doctor", "--gpu", "--device", "cpu"]) == 0
    out = capfd.readouterr().out
    assert "replay-lora ..." in out and "no GPU was tried" in out
    assert run(["doctor", "--gpu", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["checks"][0]["name"] == "replay-lora"


def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run(["doctor", "--gpu"]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and "the driver lists none; add --device cpu" in lines[0]
    assert run(["doctor", "--device", "cpu"]) == 2
    assert run(["doctor", "--gpu", "--dry-run"]) == 0
    listed = capfd.readouterr().out
    assert all(word in listed for word in ("Nothing was started", *PARTS))


@pytest.mark.engine
@pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed")
def test_engines_sleep_wake_and_are_replaced(tmp_path: Path) -> None:
    """Real servers: sleep at both levels, the same tokens after it, one that is killed asleep."""
    said = device_engines.engines(tmp_path)
    assert "level 1" in said and said.count("level 2") == 2 and "killed asleep" in said
    assert "from this process's memory, loaded and proved" in said


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_part_passes_on_a_device() -> None:
    report = device_report(print)
    assert report["ok"], report["checks"]
