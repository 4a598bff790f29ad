"""The parts of the device check that are whole runs: every way to share a device and to send weights, memory beside the
plan's, a model that fits only while engines and trainer take turns, and the same run twice.

Models have random weights: memory, speed and syncs do not depend on their values.
"""

import json
from pathlib import Path
from typing import Any

from tests.gpu.training_parts import GIB, LARGEST_GAP, run_command, sampled_gib
from tests.tiny_model import tiny_tokenizer, write_tiny_model
from ycore.config.resolve import read_config
from ycore.errors import RunError
from ycore.launch.layout import visible_gpus
from ycore.models.model_facts import KNOWN_CONFIGS, model_facts
from ycore.plan.memory import Strategy, trainer_memory, workload_of
from ycore.run.files import RunFolder
from ycore.run.metrics import read_metrics

_STEP = (
    "--dataset", "task:addition?digits=1", "--reward", "exact_answer", "--no-dynamic-sampling",
    "--prompts-per-step", "8", "--group-size", "8", "--seed", "1", "--steps", "2",
)  # fmt: skip
_DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2}
AWAKE = {
    "awake": ("engine.sleep=false",),
    "ipc": ("engine.sleep=false", "engine.sync=ipc"),
    "adapter": ("engine.sleep=false", "engine.sync=adapter"),
    "drafts": ("engine.sleep=false", f"engine.args.speculative_config={json.dumps(_DRAFTS)}"),
    "eager": ("engine.sleep=false", "engine.args.enforce_eager=true"),
}
ASLEEP = {
    "asleep": ("engine.sleep=true", "engine.offload=none"),
    "optimizer away": ("engine.sleep=true", "engine.offload=optimizer"),
    "weights away": ("engine.sleep=true", "engine.offload=weights"),
    "ipc asleep": ("engine.sleep=true", "engine.sync=ipc"),
}
TRAINED = {"LoRA": (), "every weight": ("--full",), "4 bits": ("--quantize", "4bit")}
_GROWN = 1.25
_TIMES = ("time/step", "time/sync", "time/train", "swap_s")
_SAME = ("loss", "reward", "grad_norm", "entropy", "completions/mean_length")


def ways(folder: Path) -> str:
    """Make a run for each way to share a device and to send weights; a CPU has those in which no engine sleeps."""
    model = write_tiny_model(folder / "model")
    said = []
    for name, sets in (AWAKE | ASLEEP if visible_gpus() else AWAKE).items():
        words = [word for setting in sets for word in ("--set", setting)]
        run = _run(folder / name.replace(" ", "-"), model, "--max-tokens", "16", *words)
        said.append(f"{name}: {_costs(name, run)}")
    return "; ".join(said)


def memory(folder: Path) -> str:
    """Compare the trainer's memory with the plan's, without vLLM: LoRA, all weights and 4 bits of 1.5 billion."""
    model = write_shaped(folder / "model", "Qwen/Qwen2.5-1.5B-Instruct")
    options = (
        "--max-tokens",
        "128",
        "--engine",
        "transformers",
        "--gradient-checkpointing",
        "true",
    )
    said, failed = [], False
    for name, words in TRAINED.items():
        place = folder / name.replace(" ", "-")
        with sampled_gib(folder / f"{place.name}.used") as used:
            run = _run(place, model, *options, "--per-device-train-batch-size", "8", *words)
        work = workload_of(read_config(run), model_facts(str(model)))  # type: ignore[arg-type]
        planned = trainer_memory(work, Strategy(1, 1, "ddp", 8, True)).peak / GIB
        failed |= max(used) - used[0] > _GROWN * planned
        said.append(f"{name}: {max(used) - used[0]:.1f} GiB, planned {planned:.1f}")
    if failed:
        raise RunError(f"{'; '.join(said)}; {_GROWN} times the planned memory are allowed")
    return "; ".join(said)


def seven(folder: Path) -> str:
    """LoRA of 7 billion parameters: the engine sleeps while the trainer trains, whose frozen weights then leave."""
    model = write_shaped(folder / "model", "Qwen/Qwen2.5-7B-Instruct")
    sets = ("--set", "engine.sleep=true", "--set", "engine.offload=weights")
    with sampled_gib(folder / "used") as used:
        run = _run(folder / "run", model, "--max-tokens", "512", *sets)
    return f"{_costs('seven', run)}; {max(used) - used[0]:.1f} GiB at most"


def exact(folder: Path) -> str:
    """Train twice with `--deterministic`, and compare every step."""
    model = write_tiny_model(folder / "model")
    first, second = (
        read_metrics(
            _run(folder / name, model, "--max-tokens", "16", "--deterministic").metrics
        )
        for name in ("first", "second")
    )
    for row, other_row in zip(first, second, strict=True):
        if differ := [name for name in _SAME if row.get(name) != other_row.get(name)]:
            raise RunError(
                f"step {row['step']}: --deterministic gave other {', '.join(differ)}"
            )
    return f"{len(first)} steps, twice the same {', '.join(_SAME)}"


def _run(output: Path, model: Path, *more: str) -> RunFolder:
    return run_command(
        ["grpo", "--model", str(model), *_STEP, "--output", str(output), *more], output
    )


def _costs(name: str, run: RunFolder) -> str:
    """Return the seconds of the last step; RunError where the engine is not the trainer's policy."""
    rows = read_metrics(run.metrics)
    gap = max(row["ycore/logprob_gap"] for row in rows)
    proved = min(row["ycore/sync_proved"] for row in rows)
    if gap > LARGEST_GAP or proved < 1:
        raise RunError(
            f"{name}: a gap of {gap:.3f} nats a token, and {proved:.3f} of the weights proved; {LARGEST_GAP} and 1 are "
            "allowed"
        )
    seconds = {
        figure: rows[-1][f"ycore/{figure}"]
        for figure in _TIMES
        if f"ycore/{figure}" in rows[-1]
    }
    costs = ", ".join(
        f"{figure.removeprefix('time/')} {took:.2f} s" for figure, took in seconds.items()
    )
    return f"{costs}, gap {gap:.4f}"


def write_shaped(folder: Path, name: str) -> Path:
    """Write a model of the size of one that `ycore plan` knows, with random weights and a token a character."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tiny_tokenizer(chat=True)
    sizes: dict[str, Any] = dict(KNOWN_CONFIGS[name])
    sizes |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes, bos_token_id=None)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]  # any token may be sampled
    vocabulary |= {f"<{n}>": n for n in range(len(vocabulary), config.vocab_size)}
    file.write_text(json.dumps(content))
    return folder
