"""The arguments that TRL gets: its own class accepts them, and what ycore owns cannot be overridden."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.config.trl_table import trl_class
from ycore.config.algorithms import ALGORITHMS, Algorithm
from ycore.config.learners import GroupConfig
from ycore.config.resolve import resolve
from ycore.config.schema import RunConfig
from ycore.config.trl_arguments import derive_batch, derive_tune_batch, refusal, trl_arguments
from ycore.errors import ConfigError
from ycore.run.files import RunFolder


def _config(**options: object) -> RunConfig:
    return resolve(
        options={
            "model": "m",
            "dataset": "d",
            "rewards": ["exact_answer"],
            "output": "o",
            **options,
        }
    )


def _arguments(config: RunConfig, folder: Path, *, on_cpu: bool = True) -> dict[str, Any]:
    return trl_arguments(
        config, derive_batch(config, world_size=1, on_cpu=on_cpu), RunFolder(folder)
    )


def test_trl_s_own_class_takes_them_and_agrees_on_the_round(tmp_path: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from trl.trainer.grpo_config import GRPOConfig

    config = _config(
        prompts_per_step=6, group_size=4, max_tokens=200, trl={"beta": "0.1"}, dtype="float32"
    )
    built = GRPOConfig(**_arguments(config, tmp_path))
    assert built.generation_batch_size == 24
    assert built.steps_per_generation == built.gradient_accumulation_steps
    assert (built.beta, built.bf16, built.use_vllm, built.max_steps) == (0.1, False, False, 100)
    assert built.gradient_checkpointing is False
    assert built.output_dir == str(tmp_path / "checkpoints")


@pytest.mark.parametrize(("lora", "rate"), [({}, 2e-5), (None, 1e-6)])
def test_the_learning_rate_follows_what_is_trained(
    lora: object, rate: float, tmp_path: Path
) -> None:
    assert _arguments(_config(lora=lora), tmp_path)["learning_rate"] == rate


def test_the_user_s_fields_win_over_defaults_and_survive_json(tmp_path: Path) -> None:
    config = _config(
        trl={"learning_rate": "3e-4", "report_to": "tensorboard", "save_total_limit": "5"},
        steps=12,
    )
    arguments = _arguments(GroupConfig.model_validate_json(config.model_dump_json()), tmp_path)
    assert (arguments["learning_rate"], arguments["report_to"]) == (3e-4, "tensorboard")
    assert (arguments["save_total_limit"], arguments["save_steps"]) == (5, 3)
    assert json.loads(json.dumps(arguments)) == arguments


def test_a_gpu_keeps_trl_s_own_choices(tmp_path: Path) -> None:
    arguments = _arguments(_config(), tmp_path, on_cpu=False)
    assert "use_cpu" not in arguments and "gradient_checkpointing" not in arguments
    assert arguments["bf16"] is True


LEARNING_RATES = {
    "sft": (2e-5, 2e-4),
    "reward": (1e-5, 1e-4),
    "dpo": (1e-6, 2e-5),
    "kto": (1e-6, 2e-5),
    "orpo": (1e-6, 2e-5),
    "cpo": (1e-6, 2e-5),
    "gold": (2e-5, 2e-4),
    "sdft": (2e-5, 2e-4),
    "sdpo": (2e-5, 2e-4),
}
NEEDS: dict[str, dict[str, Any]] = {
    "gold": {"trl": {"teacher_model_name_or_path": "teacher"}},
    "sdpo": {"reward": "exact_answer"},
}


@pytest.mark.parametrize(
    "algorithm",
    [row for row in ALGORITHMS.values() if row.learns_from == "examples"],
    ids=lambda row: row.name,
)
def test_trls_class_takes_what_ycore_says(algorithm: Algorithm, tmp_path: Path) -> None:
    def arguments(**keys: object) -> dict[str, Any]:
        options = {
            "algorithm": algorithm.name,
            "model": "m",
            "dataset": "d",
            "output": "o",
            **NEEDS.get(algorithm.name, {}),
            **keys,
        }
        config = resolve(options=options)
        batch = derive_tune_batch(config, num_rows=100, world_size=1, on_cpu=True)
        return trl_arguments(config, batch, RunFolder(tmp_path))

    built = trl_class(algorithm)(**arguments())
    assert {name: vars(built)[name] for name in arguments()} == {**arguments(), "report_to": []}
    full, lora = LEARNING_RATES[algorithm.name]
    assert built.learning_rate == lora
    assert arguments(lora=None)["learning_rate"] == full


def test_a_collective_may_wait_for_a_slow_save(tmp_path: Path) -> None:
    """The limit of a round's exchanges is minutes, and a checkpoint of hundreds of GB takes longer."""
    assert _arguments(_config(), tmp_path)["ddp_timeout"] == 3600
    assert (
        _arguments(_config(step_timeout_s=7200.0, collective_timeout_s=60.0), tmp_path)[
            "ddp_timeout"
        ]
        == 7200
    )
    assert _arguments(_config(trl={"ddp_timeout": 900}), tmp_path)["ddp_timeout"] == 900


def test_ligers_kernels_are_for_gpus_and_said_so(tmp_path: Path) -> None:
    config = _config(trl={"use_liger_kernel": True})
    assert _arguments(config, tmp_path, on_cpu=False)["use_liger_kernel"] is True
    with pytest.raises(ConfigError, match=r"use_liger_kernel needs a GPU: .* leave it out"):
        _arguments(config, tmp_path)


def test_a_deterministic_run_needs_deterministic_kernels_on_gpus_alone(tmp_path: Path) -> None:
    config = _config(deterministic=True)
    assert _arguments(config, tmp_path, on_cpu=False)["full_determinism"] is True
    assert "full_determinism" not in _arguments(config, tmp_path)
    assert "full_determinism" not in _arguments(_config(), tmp_path, on_cpu=False)


def test_flex_attention_is_for_gpus(tmp_path: Path) -> None:
    config = _config(trl={"model_init_kwargs": {"attn_implementation": "flex_attention"}})
    assert _arguments(config, tmp_path, on_cpu=False)["model_init_kwargs"] == {
        "attn_implementation": "flex_attention"
    }
    with pytest.raises(ConfigError, match=r"flex_attention needs a GPU: .* leave it out"):
        _arguments(config, tmp_path)


def test_what_makes_transformers_compile_is_refused_with_rollouts() -> None:
    """Each of these three alone does: see `TrainingArguments.__post_init__`."""
    for name in ("torch_compile", "torch_compile_backend", "torch_compile_mode"):
        assert "compiled anew" in str(refusal(name, ALGORITHMS["grpo"]))
        assert refusal(name, ALGORITHMS["sft"]) is None
