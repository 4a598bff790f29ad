"""The two command lines that are compared, built from the same settings, and the times that each run records."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark_reward import LENGTHS

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that both sides share."""

    model: Path
    prompts: Path
    max_tokens: int
    steps: int
    num_prompts: int
    group_size: int
    learning_rate: float
    seed: int
    dtype: str
    lora_r: int = 16
    lora_alpha: int = 32

    @property
    def completions(self) -> int:
        return self.num_prompts * self.group_size


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step. `seconds` is all of it; `parts` says where they went and adds up to it.

    `tokens` are those of its prompts and completions, without padding.
    """

    seconds: float
    parts: Mapping[str, float]
    tokens: float
    mean_completion: float


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def trl_command(settings: Settings, *, batch_size: int) -> list[str]:
    """Build the command of `trl grpo`, which generates with transformers, on every core."""
    options = {
        "model_name_or_path": settings.model,
        "dataset_name": settings.prompts.parent,
        "reward_funcs": "trl_probe.distinct_characters",
        "output_dir": "run",
        "dtype": settings.dtype,
        "use_peft": "true",
        "lora_r": settings.lora_r,
        "lora_alpha": settings.lora_alpha,
        "lora_dropout": 0.0,
        "lora_target_modules": "all-linear",
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": settings.completions // batch_size,
        "num_generations": settings.group_size,
        "max_completion_length": settings.max_tokens,
        "max_steps": settings.steps,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": "true",
        "bf16": str(settings.dtype == "bfloat16").lower(),
        "use_cpu": "true",
        # What follows goes on to `accelerate launch`, which gives a process one thread unless told otherwise.
        "num_processes": 1,
        "num_cpu_threads_per_process": num_cores(),
    }
    return [str(BIN / "trl"), "grpo", *_options(options | _shared(settings), dash="_")]


def ycore_command(settings: Settings, *, engine: str) -> list[str]:
    options = {
        "model": settings.model,
        "dataset": settings.prompts,
        "reward": f"{HERE / 'benchmark_reward.py'}:distinct_characters",
        "output": "run",
        "prompts_per_step": settings.num_prompts,
        "group_size": settings.group_size,
        "max_tokens": settings.max_tokens,
        "steps": settings.steps,
        "engine": engine,
    }
    sets = {
        "dtype": settings.dtype,
        "sampling.dynamic": "false",  # TRL trains on every group, also on those that teach nothing
        "sandbox.level": "none",  # the reward writes its record into the run's folder
        "lora.r": settings.lora_r,
        "lora.alpha": settings.lora_alpha,
        "checkpoint_every": settings.steps,
    }
    overrides = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    return [
        str(BIN / "ycore"),
        "grpo",
        *_options(options | _shared(settings), dash="-"),
        *overrides,
    ]


def _shared(settings: Settings) -> dict[str, Any]:
    """Return the fields of TRL's config that both command lines take."""
    return {
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": "false",
        "report_to": "none",
        "seed": settings.seed,
    }


def _options(options: Mapping[str, Any], *, dash: str) -> list[str]:
    return [
        word
        for name, value in options.items()
        for word in ("--" + name.replace("_", dash), str(value))
    ]


def environment() -> dict[str, str]:
    """Return variables with which nothing is fetched, and the reward and the clocks can be imported."""
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def trl_steps(folder: Path) -> list[Step]:
    """Read the steps from the clocks inside `trl grpo` (`trl_probe`)."""
    lines = read_lines(folder / "clock.jsonl")
    totals = [line["logs"]["num_tokens"] for line in lines]
    steps = []
    for line, tokens in zip(lines, _increments(totals), strict=True):
        spans = line["spans"]
        generate, prepare, forward = (
            spans[name] for name in ("transformers.generate", "_prepare_inputs", "compute_loss")
        )
        parts = {
            "generate": generate,
            "score and batch": prepare - generate,
            "forward": forward,
            "backward and optimizer": line["seconds"] - prepare - forward,
        }
        steps.append(
            Step(line["seconds"], parts, tokens, line["logs"]["completions/mean_length"])
        )
    return steps


def ycore_steps(folder: Path) -> list[Step]:
    """Read the steps from the run's own metrics."""
    lines = read_lines(folder / "run" / "metrics.jsonl")
    totals = [line["num_tokens"] for line in lines]
    return [
        Step(
            line["ycore/time/step"],
            {name: line[f"ycore/time/{name}"] for name in ("sync", "round", "train")},
            tokens,
            line["completions/mean_length"],
        )
        for line, tokens in zip(lines, _increments(totals), strict=True)
    ]


def round_lengths(folder: Path, *, step: int) -> list[tuple[int, int]]:
    """Return the prompt and the number of tokens of each completion of one step, as the reward wrote them down."""
    calls = [line for line in read_lines(folder / LENGTHS) if line["step"] == step]
    return [
        pair
        for call in calls
        for pair in zip(call["prompt_index"], call["tokens"], strict=True)
    ]


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _increments(totals: list[float]) -> list[float]:
    return [after - before for before, after in zip([0.0, *totals], totals, strict=False)]
