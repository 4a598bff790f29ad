"""The parts of the device check, as far as a CPU can do them; `test_on_device` runs them on a GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from ycore_cli.main import run

from tests.gpu import engine_parts, run_parts, training_parts
from tests.gpu.check import PARTS, Part, run_part
from tests.tiny_model import write_tiny_model
from ycore.engine import shared_bucket
from ycore.engine.kinds import is_vllm_installed
from ycore.errors import RunError
from ycore.launch import layout
from ycore.launch.layout import Gpu, Machine
from ycore.models.model_facts import KNOWN_CONFIGS
from ycore.run.files import RunFolder

TINY: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 2, "vocab_size": 128, "max_position_embeddings": 4096,
}  # fmt: skip


def test_the_stages_of_a_sync_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_parts, "_SMOLLM2", TINY)
    monkeypatch.setattr(training_parts, "_BILLION", TINY)
    monkeypatch.setattr(shared_bucket, "BUCKET_BYTES", 2**20)
    said = training_parts.sync(tmp_path)
    assert said.count("GB/s") == 5 and said.endswith("GB/s, which another process opened")
    assert (
        list(Path("/dev/shm").glob(f"ycore-{training_parts.RunFolder(tmp_path).run_id}")) == []
    )


def test_all_paths_score_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_parts, "_SMOLLM2", TINY)
    costs = [
        list(training_parts.forward_costs(path, 2, [600, 900])) for path in ("mask", "segments")
    ]
    assert [cost["tokens"] for cost in costs[0]] == [600, 900]
    for masked, segmented in zip(*costs, strict=True):
        assert masked["mean_logprob"] == pytest.approx(segmented["mean_logprob"], abs=1e-2)
        assert segmented["seconds"] > 0


def test_attention_ends_within_its_limit_and_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 processes of 6 s of imports each, with limits longer than the part's, lost all figures."""
    longest = len(training_parts.PATHS) * training_parts.PATH_WITHIN_S
    assert longest < PARTS["attention"].limit_s
    line = json.dumps({"tokens": 1024, "seconds": 0.5, "gib": 1.0, "mean_logprob": -4.0})
    script = (
        f"import sys, time; print('{line}', flush=True); time.sleep(60 * ('mask' in sys.argv))"
    )
    monkeypatch.setattr(training_parts, "PATH_WITHIN_S", 2)
    run = subprocess.run

    def started(command: list[str], **options: Any) -> Any:
        return run([sys.executable, "-c", script, *command[4:]], **options)

    monkeypatch.setattr(training_parts.subprocess, "run", started)
    said = training_parts.attention(tmp_path)
    assert said.startswith(
        "mask not to its end (no end after 2 s); 1024 tokens: segments 0.500 s"
    )
    assert "mask 0.500 s" in said


def small_shape(folder: Path, name: str) -> Path:
    config = write_tiny_model(folder) / "config.json"
    context = {"max_position_embeddings": KNOWN_CONFIGS[name]["max_position_embeddings"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | context))
    return folder


RUNS = ("ways", "memory", "exact", "seven")
H100 = Machine(
    tuple(range(16)), ("0",), 79.6 * 2**30, 79.1 * 2**30, host_bytes=128e9, shm_bytes=64e9
)
ROW = {
    "step": 1, "loss": 0.5, "grad_norm": 2.0, "ycore/logprob_gap": 0.01, "ycore/sync_proved": 1.0,
    "ycore/time/step": 3.0, "ycore/time/sync": 0.2,
}  # fmt: skip


@pytest.fixture
def commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[list[str]]:
    """The runs that parts start on a described H100: each is accepted there, and leaves the metrics of two steps."""
    started: list[list[str]] = []

    def command(words: list[str], output: Path, *, on_cpu: bool = False) -> RunFolder:
        started.append(words)
        capsys.readouterr()
        status, said = run([*words, "--dry-run", "--json"]), capsys.readouterr()
        assert status == 0, (words, said)
        output.mkdir()
        folder = RunFolder(output)
        folder.config.write_text(json.dumps({"config": json.loads(said.out)["config"]}))
        folder.metrics.write_text("".join(json.dumps(ROW | {"step": n}) + "\n" for n in (1, 2)))
        return folder

    gpu = Gpu("0", "GPU-a", "H100", "580.65", 79.6, 79.1, (9, 0))
    for module in (training_parts, run_parts):
        monkeypatch.setattr(module, "visible_gpus", lambda: (gpu,))
        monkeypatch.setattr(module, "run_command", command)
    monkeypatch.setattr(training_parts, "_ASK_MEMORY", ("sh", "-c", "echo 1024; echo 2048"))
    monkeypatch.setattr(layout, "this_machine", lambda: H100)
    monkeypatch.setattr("ycore.engine.kinds.is_vllm_installed", lambda: True)
    return started


def test_every_run_of_the_check_is_accepted_on_a_device(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts follow the code's options, and what they read of a run and of a plan is there."""
    monkeypatch.setattr(run_parts, "write_shaped", small_shape)
    said = {}
    for part in (training_parts.steps, *(getattr(run_parts, name) for name in RUNS)):
        folder = tmp_path / part.__name__
        folder.mkdir()
        said[part.__name__] = part(folder)
    assert "memory 1.0 GiB, planned" in said["steps"]
    assert said["ways"].count("sync 0.20 s") == len(run_parts.AWAKE | run_parts.ASLEEP)
    assert said["memory"].count(": 1.0 GiB, planned") == 3
    assert "1.0 GiB at most" in said["seven"]
    assert "twice the same loss" in said["exact"]
    assert len(commands) == 1 + len(run_parts.AWAKE | run_parts.ASLEEP) + 3 + 2 + 1


def test_memory_beyond_the_plan_and_another_run_fail(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_parts, "write_shaped", small_shape)
    monkeypatch.setattr(run_parts, "_GROWN", 0.1)
    with pytest.raises(RunError, match=r"LoRA: 1\.0 GiB, planned .*; 0\.1 times the planned"):
        run_parts.memory(tmp_path)
    losses = iter((0.5, 0.5, 0.5, 0.6))
    monkeypatch.setattr(run_parts, "read_metrics", lambda path: [
        ROW | {"step": step, "loss": next(losses)} for step in (1, 2)
    ])  # fmt: skip
    with pytest.raises(RunError, match=r"step 2: --deterministic gave other loss$"):
        run_parts.exact(tmp_path)


def test_an_engine_that_is_not_the_policy_fails_a_way(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROW, "ycore/sync_proved", 0.8)
    with pytest.raises(
        RunError, match=r"awake: .* 0\.800 of the weights proved; .* are allowed"
    ):
        run_parts.ways(tmp_path)


def test_a_shaped_model_says_any_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "Qwen/Qwen2.5-1.5B-Instruct"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    monkeypatch.setitem(KNOWN_CONFIGS, name, KNOWN_CONFIGS[name] | sizes)
    folder = run_parts.write_shaped(tmp_path, name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer) == KNOWN_CONFIGS[name]["vocab_size"]
    assert tokenizer.decode([6, len(tokenizer) - 1]) == f"0<{len(tokenizer) - 1}>"


@pytest.mark.parametrize(
    ("other", "message"), [({}, None), ({"loss": 0.6}, "losses within 1.0e-01")]
)
def test_a_replay_that_differs_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    other: dict[str, float],
    message: str | None,
) -> None:
    """The commands are not run here; the journal's replay has its own tests."""

    def command(words: list[str], output: Path, *, on_cpu: bool = False) -> RunFolder:
        output.mkdir()
        folder = RunFolder(output)
        row = {"loss": 0.5, "grad_norm": 2.0} | ({} if on_cpu else other)
        folder.metrics.write_text(json.dumps({"step": 1, **row}) + "\n")
        return folder

    monkeypatch.setattr(training_parts, "run_command", command)
    if message is None:
        assert training_parts.replay_full(tmp_path).startswith("1 steps, losses within 0.0e+00")
        return
    with pytest.raises(RunError, match=message):
        training_parts.replay_full(tmp_path)


def test_a_part_that_fails_or_hangs_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PARTS, "sync", Part("nowhere.work", 30, "nothing"))
    with pytest.raises(RunError, match=r"sync: .*No module named"):
        run_part("sync", tmp_path, device=None)
    monkeypatch.setitem(PARTS, "attention", Part("training_parts.attention", 0.01, "nothing"))
    with pytest.raises(RunError, match="attention: no end after"):
        run_part("attention", tmp_path, device=None)


def test_a_sleep_that_keeps_the_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_parts, "_HOLD", "raise MemoryError('{bytes}')")
    with pytest.raises(
        RunError, match=r"asleep at level 2, the engine keeps 6\.0 of its 7\.0 GiB"
    ):
        engine_parts._check_freed(2, held_gib=7.0, freed_gib=1.0)
    with pytest.raises(RunError, match=r"another process cannot use 5\.4 GiB: MemoryError"):
        engine_parts._check_freed(1, held_gib=7.0, freed_gib=6.0)
    monkeypatch.setattr(engine_parts, "_HOLD", "{bytes}")
    assert "of 7.0 GiB 6.0 were free" in engine_parts._check_freed(
        1, held_gib=7.0, freed_gib=6.0
    )


@pytest.mark.engine
@pytest.mark.verify
@pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed")
def test_engines_sleep_wake_and_are_replaced(tmp_path: Path) -> None:
    """Real servers: sleep at both levels, the same tokens after it, one that is killed asleep."""
    said = engine_parts.engines(tmp_path)
    assert "level 1" in said and said.count("level 2") == 2 and "killed asleep" in said
    assert "from this process's memory, loaded and proved" in said
