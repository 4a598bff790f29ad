"""Sums of tensors: what engines do to a checkpoint does not change them, and what a failed sync leaves does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ycore.engine.vllm_extension import checkpoint_names
from ycore.engine.weights import byte_sum, check_read_back, read_manifest, write_weights
from ycore.errors import SyncError
from ycore.models.tiny import write_tiny_model

DTYPES = [torch.bfloat16, torch.float32]


def same(one: int, other: int) -> bool:
    return (one - other) % 2**64 == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 8), (5, 3), (7,)])
def test_rows_laid_one_after_another_add_up(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    parts = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    assert same(byte_sum(torch.cat(parts)), sum(byte_sum(part) for part in parts))


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_with_zeros_and_strides_change_nothing(dtype: torch.dtype) -> None:
    tensor = torch.randn(10, 8, dtype=dtype)
    padded = torch.cat([tensor, torch.zeros(6, 8, dtype=dtype)])
    assert byte_sum(padded) == byte_sum(tensor) == byte_sum(torch.stack([tensor, tensor], dim=-1)[..., 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_change_of_one_number_is_seen(dtype: torch.dtype) -> None:
    tensor = torch.randn(64, 64, dtype=dtype)
    before = byte_sum(tensor)
    tensor[17, 3] = torch.nextafter(tensor[17, 3], torch.tensor(10.0, dtype=dtype))
    assert byte_sum(tensor) != before


def test_what_is_written_says_its_version_last(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "model"))
    folder = tmp_path / "weights"
    write_weights(model, folder, dtype=torch.float32, version=4)
    sums = read_manifest(folder, version=4)
    names = {name for name, _ in model.named_parameters()}
    assert sums.keys() == names and sums["model.norm.weight"] == byte_sum(model.model.norm.weight)
    with pytest.raises(SyncError, match="stale weights"):
        read_manifest(folder, version=5)
    write_weights(model, folder, dtype=torch.float32)
    with pytest.raises(SyncError, match="no weights to send"):
        read_manifest(folder, version=4)  # it was of the weights before these


def test_parameters_are_named_as_the_checkpoint_names_them() -> None:
    parts = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    attention = "model.layers.0.self_attn"
    assert checkpoint_names(f"{attention}.qkv_proj.weight", parts) == [
        f"{attention}.{part}_proj.weight" for part in "qkv"
    ]
    assert checkpoint_names(f"{attention}.o_proj.weight", parts) == [f"{attention}.o_proj.weight"]
    assert checkpoint_names("lm_head.weight", parts) == ["lm_head.weight"]


def test_a_parameter_of_which_not_all_was_sent_proves_nothing() -> None:
    sums = {"q_proj.weight": 1, "norm.weight": 2}
    assert check_read_back(sums, [(["q_proj.weight", "k_proj.weight"], 9), (["norm.weight"], 2)]) == 1
