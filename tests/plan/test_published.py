"""Settings that other projects have published, against what the formulas say of them.

Model states (the first rows) follow from the same definitions, so they must agree closely. Whole settings ran on other
software: a set of devices on which it trained must not be called too small by ours where ours does the same, and a
step's time must be of the same size.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from ycore.models.model_facts import ModelFacts, facts_of, model_facts
from ycore.plan.devices import DEVICES, GB, GIB, Fleet
from ycore.plan.memory import Sharding, Strategy, Workload, trainer_states
from ycore.plan.planner import forecast_step, strategies

PAGE = (
    (Path(__file__).parents[2] / "docs" / "plan.md")
    .read_text(encoding="utf-8")
    .partition("### Against published runs\n")[2]
)
_ZERO = "arXiv 1910.02054, figure 1"
_DEEPSPEED = "deepspeedai/DeepSpeed docs/code-docs/source/memory.rst"
_VERL = "verl-project/verl docs/perf/device_tuning.rst"
_NEMO = "NVIDIA-NeMo/RL docs/about/performance-summary.md, v0.4, on-policy GRPO"


def of_size(num_params: float) -> ModelFacts:
    """A model with about this many parameters, for what depends on nothing else."""
    hidden = 1024
    layers = round(num_params / 12.6e6)
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "intermediate_size": round((num_params / layers - 4 * hidden**2) / 3 / hidden),
        "vocab_size": 32,
        "tie_word_embeddings": True,
    }
    return facts_of(sizes, name="sized")


@dataclass(frozen=True)
class States:
    """Bytes of weights, gradients and optimizer on one of so many devices."""

    num_params: float
    devices: int
    sharding: Sharding
    published: float
    source: str
    within: float = 0.05


STATES = [
    States(7.5e9, 64, "ddp", 120 * GB, _ZERO),
    States(7.5e9, 64, "zero1", 31.4 * GB, _ZERO),
    States(7.5e9, 64, "zero2", 16.6 * GB, _ZERO),
    States(7.5e9, 64, "zero3", 1.88 * GB, _ZERO),
    # DeepSpeed's own estimator keeps gradients whole and in float32 for stage 2, and counts 18 bytes for stage 3.
    States(2.851e9, 8, "zero2", 15.93 * GIB, _DEEPSPEED, within=0.45),
    States(2.851e9, 8, "zero3", 6.10 * GIB, _DEEPSPEED, within=0.15),
    States(7.3767e8, 4, "zero3", 3291 * 2**20, _DEEPSPEED, within=0.15),
]


@pytest.mark.parametrize(
    "row", STATES, ids=[f"{r.num_params / 1e9:.1f}B {r.devices}x {r.sharding}" for r in STATES]
)
def test_model_states_are_those_published(row: States) -> None:
    facts = of_size(row.num_params)
    assert facts.num_params == pytest.approx(row.num_params, rel=0.01)
    work = Workload(facts, lora_rank=None)
    parts = trainer_states(work, Strategy(row.devices, row.devices, row.sharding))
    ours = sum(
        size for name, size in parts.items() if name not in ("copies", "gradient buckets")
    )  # what the sources leave out
    assert ours == pytest.approx(row.published, rel=row.within), row.source


def test_the_cache_of_a_token_is_that_published() -> None:
    """arXiv 2309.06180, section 3: 800 KB a token for OPT-13B, with 40 layers and a hidden size of 5120."""
    sizes = {
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "intermediate_size": 20480,
        "vocab_size": 50272,
    }
    opt = facts_of(sizes, name="OPT-13B")
    assert opt.kv_values * 2 == 800 * 1024


@dataclass(frozen=True)
class Setting:
    """A setting that trained, or did not."""

    model: str
    device: str
    devices: int
    lora: bool
    trains: bool
    source: str
    shardings: tuple[str, ...] = ("ddp", "zero2", "zero3", "fsdp2")


SETTINGS = [
    Setting("Qwen/Qwen2.5-0.5B-Instruct", "H100", 1, True, True, _VERL),
    Setting("Qwen/Qwen2.5-1.5B-Instruct", "H100", 1, True, True, _VERL),
    Setting("Qwen/Qwen2.5-3B-Instruct", "H100", 1, True, True, _VERL),
    Setting("Qwen/Qwen2.5-7B-Instruct", "H100", 1, True, True, _VERL),
    Setting("Qwen/Qwen2.5-14B-Instruct", "H100", 2, True, True, _VERL),
    Setting("Qwen/Qwen2.5-32B-Instruct", "H100", 4, True, True, _VERL),
    Setting("Qwen/Qwen2.5-72B-Instruct", "H100", 8, True, True, _VERL),
    Setting("Qwen/Qwen2.5-72B-Instruct", "H800", 32, False, True, _VERL),
    Setting(
        "Qwen/Qwen2.5-3B-Instruct",
        "H100",
        1,
        False,
        True,
        "huggingface/trl#2927: one device of 80 GB is enough",
    ),
    Setting(
        "Qwen/Qwen2.5-7B-Instruct",
        "H100",
        4,
        False,
        False,
        "huggingface/trl#2927: out of memory",
        ("ddp",),
    ),
    Setting(
        "Qwen/Qwen2.5-7B-Instruct",
        "H20",
        4,
        False,
        False,
        "huggingface/trl#2972: at the second step",
        ("ddp",),
    ),
]


@pytest.mark.parametrize(
    "row",
    SETTINGS,
    ids=[f"{r.model} {r.devices}x{r.device} {r.shardings[0]}" for r in SETTINGS],
)
def test_what_trained_elsewhere_fits_and_what_did_not_does_not(row: Setting) -> None:
    facts, fleet = model_facts(row.model), Fleet(DEVICES[row.device.lower()], row.devices)
    work = Workload(facts, prompts_per_step=32, group_size=4, prompt_tokens=256, completion_tokens=400, max_tokens=512,
              lora_rank=32 if row.lora else None)  # fmt: skip
    fits = any(
        forecast_step(work, strategy, fleet).fits
        for strategy in strategies(work, fleet, micro_batch=1)
        if strategy.ranks == 1 or strategy.sharding in row.shardings
    )
    assert fits == row.trains, row.source


# Seconds of a step; mean lengths are the source's, prompts taken as 100 tokens.
STEPS = [
    ("meta-llama/Llama-3.1-8B-Instruct", 16, 1060, 97.7),
    ("Qwen/Qwen3-30B-A3B", 32, 3154, 225.0),
    ("Qwen/Qwen3-32B", 32, 3206, 393.0),
]


@pytest.mark.parametrize(
    ("model", "devices", "tokens", "published_s"), STEPS, ids=[row[0] for row in STEPS]
)
def test_a_step_is_of_the_size_published(
    model: str, devices: int, tokens: int, published_s: float
) -> None:
    """Theirs computes log-probabilities twice more, of old policy and reference; ours is a plan, so within twice."""
    fleet = Fleet(DEVICES["h100"], devices)
    work = Workload(model_facts(model), prompts_per_step=64, group_size=32, prompt_tokens=100,
              completion_tokens=tokens - 100, max_tokens=3996, lora_rank=None)  # fmt: skip
    made = [
        forecast_step(work, strategy, fleet)
        for strategy in strategies(work, fleet, micro_batch=1)
    ]
    fastest_s = min(forecast.step_s for forecast in made if forecast.fits)
    assert published_s / 2 < fastest_s < published_s * 2, _NEMO
    assert re.search(rf"[| ]{fastest_s:.0f}[ ;]", PAGE), "the page's figure"


@dataclass(frozen=True)
class Training:
    """Seconds and memory in which one rank trained on its tokens, without engines."""

    model: str
    device: str
    devices: int
    lora_rank: int | None
    micro_batch: int
    tokens: int
    passes: int
    checkpointing: bool
    published_s: float
    published_gib: float | None
    source: str


_PRIME = "PrimeIntellect-ai/prime-rl benchmarks/baselines, January and February 2026"
_FMS = "foundation-model-stack/fms-fsdp README.md: tokens a second of a device"
_VERL_RUN = "eric-haibin-lin/verl-data gsm8k, step 116, timing_s/update_actor"
_LLAMA_70B = "meta-llama/Llama-3.1-70B-Instruct"
TRAININGS = [
    Training("Qwen3-4B", "h100", 8, None, 1, 16384, 2, True, 4.69, 17.1, _PRIME),
    Training("Qwen3-4B", "h100", 8, 16, 1, 16384, 2, True, 5.46, 11.1, _PRIME),
    # its frozen weights are in float32
    Training("allenai/Olmo-3-7B-Instruct", "h100", 1, 16, 1, 16384, 2, True, 6.12, None, _PRIME),
    Training("Qwen3-30B-A3B", "h100", 8, None, 1, 16384, 2, True, 8.17, 74.6, _PRIME),
    Training("Llama-2-7b-hf", "a100", 128, None, 2, 4096, 1, False, 2 * 4096 / 3760, None, _FMS),
    Training(_LLAMA_70B, "a100", 128, None, 6, 4096, 1, True, 6 * 4096 / 380, None, _FMS),
    Training("Qwen2.5-72B-Instruct", "h100", 8, 32, 8, 370, 5, True, 27.5, None, _VERL_RUN),
]  # fmt: skip


@pytest.mark.parametrize(
    "row", TRAININGS, ids=[f"{r.model} {r.devices}x{r.device} {r.lora_rank}" for r in TRAININGS]
)
def test_training_takes_the_seconds_and_the_memory_published(row: Training) -> None:
    ranks = row.devices
    work = Workload(
        model_facts(row.model),
        prompts_per_step=ranks * row.micro_batch * row.passes,
        group_size=1,
        prompt_tokens=1,
        completion_tokens=row.tokens - 1,
        max_tokens=row.tokens - 1,
        lora_rank=row.lora_rank,
    )
    sharding: Sharding = "ddp" if ranks == 1 else "fsdp2"
    strategy = Strategy(ranks, ranks, sharding, row.micro_batch, row.checkpointing)
    forecast = forecast_step(work, strategy, Fleet(DEVICES[row.device], ranks))
    seconds = forecast.seconds["train"]
    assert seconds == pytest.approx(row.published_s, rel=0.25), row.source
    assert re.search(rf"[| ]{seconds:.{int(seconds < 50)}f}[ ,]", PAGE), "the page's figure"
    if row.published_gib is not None:
        used_gib = sum(forecast.trainer.values()) / GIB
        assert used_gib == pytest.approx(row.published_gib, rel=0.25), row.source
        assert f" {used_gib:.1f} GiB" in PAGE
