"""The private members of TRL that ycore's trainers and `forward` stand on, as TRL 1.16 has them, each by name."""

import importlib.metadata
import inspect
import os
import sys
from typing import Any

import pytest
from accelerate.utils import fsdp2_prepare_model
from datasets import Dataset
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from transformers import AutoTokenizer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from trl import DPOTrainer, GRPOConfig, GRPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer
from trl.experimental.sdft import SDFTTrainer
from trl.experimental.sdpo import SDPOTrainer
from trl.models.utils import prepare_fsdp
from trl.trainer import utils

from tests.tiny_model import write_tiny_model

SIGNATURES = {
    "_generate_and_score_completions": ["self", "inputs"],
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "_prepare_inputs": ["self", "generation_batch"],
    "_compute_loss": ["self", "model", "inputs"],
    "_get_grad_norm": ["self", "model", "grad_norm"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "_generate": ["self", "prompts"],
    "_get_per_token_logps_and_entropies": [
        *("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"),
        *(
            "compute_entropy",
            "compute_aux_loss",
            "pixel_values",
            "image_grid_thw",
            "num_images",
        ),
        *(
            "pixel_attention_mask",
            "spatial_shapes",
            "num_tiles",
            "image_sizes",
            "token_type_ids",
        ),
        *("mm_token_type_ids", "image_position_ids"),
    ],
}
SAVING = {"_save_checkpoint": ["self", "model", "trial"], "_get_output_dir": ["self", "trial"]}
OWN_NAMES = (
    *(
        "writer",
        "way_out",
        "save_checkpoint",
        "refuse_broken_weights",
        "_saves_in",
        "_save_more",
        "_stop",
    ),
    *(
        "config_class",
        "task_type",
        "prepare_tokenizer",
        "bare_model",
        "base_model",
        "measure",
        "write_model",
    ),
)
TRAINERS = (GRPOTrainer, SFTTrainer, RewardTrainer, DPOTrainer, KTOTrainer)
FUNCTIONS = {
    "split_tensor_dict": ["tensor_dict", "num_chunks"],
    "shuffle_sequence_dict": ["seq_dict"],
    "add_fused_lm_head": ["model", "temperature", "cast_lm_head_to_fp32", "outputs"],
}
ATTRIBUTES = {
    "use_vllm": bool,
    "_step": int,
    "_buffered_inputs": type(None),
    "_metrics": dict,
    "_entropy_bonus_enabled": bool,
    "aux_loss_enabled": bool,
    "current_gradient_accumulation_steps": int,
    "loss_type": str,
    "num_generations": int,
    "num_iterations": int,
    "ref_model": type(None),
    "temperature": float,
    "top_entropy_quantile": float,
    "vllm_importance_sampling_correction": bool,
    "vllm_importance_sampling_mode": str,
    "vllm_importance_sampling_clip_min": type(None),
    "vllm_importance_sampling_clip_max": float,
}
KEYS = {
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "advantages",
    "num_items_in_batch",
}
ENGINE_KEYS = {"old_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps"}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"))

    def played_back(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        return {
            "prompt_ids": [[9, 8]] * 4,
            "completion_ids": [[7, 6, 5]] * 4,
            "logprobs": [[-1.0] * 3] * 4,
        }

    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=lambda completions, **columns: [0.0, 1.0, 2.0, None],
        args=GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("output")),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            per_device_train_batch_size=4,
            num_generations=4,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["tick"] * 4}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        rollout_func=played_back,
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def test_the_version_is_the_pinned_one() -> None:
    version = importlib.metadata.version("trl")
    assert version.startswith("1.16."), (
        f"TRL is {version}; ycore is written against 1.16: go through seam.py first"
    )


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_method_has_its_signature(name: str) -> None:
    assert name in dir(GRPOTrainer), f"TRL's GRPOTrainer.{name} is gone"
    parameters = list(inspect.signature(inspect.getattr_static(GRPOTrainer, name)).parameters)
    assert parameters == SIGNATURES[name], (
        f"TRL's GRPOTrainer.{name} takes {parameters}, not {SIGNATURES[name]}"
    )


@pytest.mark.parametrize("kind", TRAINERS)
def test_every_trainer_saves_by_the_same_members(kind: type[Any]) -> None:
    for name, expected in SAVING.items():
        assert name in dir(kind), f"TRL's {kind.__name__}.{name} is gone"
        parameters = list(inspect.signature(inspect.getattr_static(kind, name)).parameters)
        assert parameters == expected, (
            f"TRL's {kind.__name__}.{name} takes {parameters}, not {expected}"
        )
    assert not {*OWN_NAMES} & {*dir(kind)}, (
        f"TRL's {kind.__name__} has names that are ours in `BaseTrainer`"
    )


def test_reward_batches_are_prepared_by_the_trainer() -> None:
    assert list(inspect.signature(RewardTrainer._prepare_inputs).parameters) == [
        "self",
        "inputs",
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_its_signature(name: str) -> None:
    assert name in dir(utils), f"trl.trainer.utils.{name} is gone"
    parameters = list(inspect.signature(inspect.getattr_static(utils, name)).parameters)
    assert parameters == FUNCTIONS[name], (
        f"trl.trainer.utils.{name} takes {parameters}, not {FUNCTIONS[name]}"
    )


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_the_trainer_has_the_attribute(name: str, trainer: GRPOTrainer) -> None:
    assert name in vars(trainer), f"TRL's GRPOTrainer no longer sets {name}"
    kind = type(vars(trainer)[name])
    assert kind is ATTRIBUTES[name], (
        f"TRL's GRPOTrainer.{name} is of {kind}, not {ATTRIBUTES[name]}"
    )


@pytest.mark.parametrize("name", ["_last_loaded_step", "use_vllm", "rollout_func"])
def test_generation_reads_what_the_seam_sets(name: str) -> None:
    assert f"self.{name}" in inspect.getsource(GRPOTrainer._generate), (
        f"GRPOTrainer._generate no longer reads {name}"
    )


def test_the_constructor_takes_a_rollout_function() -> None:
    assert "rollout_func" in inspect.signature(GRPOTrainer.__init__).parameters, (
        "GRPOTrainer takes no rollout_func"
    )


def test_a_fused_head_answers_log_probs_and_entropy() -> None:
    fields = inspect.signature(utils.FusedCausalLMOutput).parameters
    assert {"log_probs", "entropy"} <= set(fields), (
        f"FusedCausalLMOutput has the fields {sorted(fields)}"
    )


def test_the_batch_has_the_keys_that_the_seam_deals(trainer: GRPOTrainer) -> None:
    rows = [{"prompt": "tick"}] * 4
    trainer.model.train()
    trainer.use_vllm = False
    without_engine = trainer._generate_and_score_completions(rows)
    assert set(without_engine) == KEYS | {"sampling_per_token_logps"}, (
        f"the batch without an engine has the keys {sorted(without_engine)}"
    )
    trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
    batch = trainer._generate_and_score_completions(rows)
    assert set(batch) == KEYS | ENGINE_KEYS, (
        f"the batch with an engine has the keys {sorted(batch)}"
    )
    sizes = {key: value.shape[0] if value.ndim else None for key, value in batch.items()}
    assert sizes == {**dict.fromkeys(KEYS | ENGINE_KEYS, 4), "num_items_in_batch": None}, (
        f"rows by key: {sizes}"
    )


@pytest.mark.parametrize(
    "trainer", [GRPOTrainer, DPOTrainer, KTOTrainer, SDFTTrainer, SDPOTrainer]
)
def test_a_reference_is_sharded_by_a_function_that_base_replaces(trainer: type[Any]) -> None:
    """`BaseTrainer` puts its own in the place of this name in the modules of its parents."""
    assert "prepare_fsdp" in vars(sys.modules[trainer.__module__])
    assert [*inspect.signature(prepare_fsdp).parameters] == ["model", "accelerator"]
    assert [*inspect.signature(fsdp2_prepare_model).parameters] == ["accelerator", "model"]


def test_fsdp2_begins_by_a_method_that_does_nothing_twice() -> None:
    """`BaseTrainer.training_step` calls it before every step."""
    assert "_get_fsdp_state" in vars(FSDPModule)
    assert "if self._is_root is not None:" in inspect.getsource(FSDPState._lazy_init)
