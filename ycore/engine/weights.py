"""The policy's weights on their way to an engine: written as a checkpoint, with sums of each tensor.

Names are the checkpoint's, adapters are merged, and all has one dtype. Adapters are merged into a copy of the base
weights: merging in place and subtracting again loses a little of a bfloat16 base at every step. Sharded weights
(ZeRO-3, FSDP2) are gathered one at a time, so all ranks must walk them together; only the rank that writes keeps any.
"""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from ycore.engine.weight_proof import TensorSums, remove_manifest, tensor_sums, write_manifest

FILE_BYTES = 2 * 2**30  # of a file, and so the most that the writing rank holds of the policy at a time


def write_weights(
    model: torch.nn.Module, folder: Path, *, dtype: torch.dtype, writes: bool = True, version: int | None = None
) -> int:
    """Write the policy into `folder` as safetensors, in files of up to `FILE_BYTES`. All ranks must call it.

    Args:
        model: The policy, not wrapped; its adapters are merged in what is written.
        writes: Whether this rank writes; the others only help to gather sharded weights.
        version: The policy version. With one, a manifest is written last, by which engines verify what they load.
    """
    tensors: dict[str, torch.Tensor] = {}
    sums: dict[str, TensorSums] = {}
    num_files = num_bytes = held = 0
    if writes:
        remove_manifest(folder)
    for name, tensor in engine_weights(model, dtype=dtype):
        if not writes:
            continue
        if held and held + tensor.nbytes > FILE_BYTES:
            _write_file(tensors, folder, num_files)
            num_files, held, tensors = num_files + 1, 0, {}
        tensors[name] = tensor.contiguous()
        sums[name] = tensor_sums(tensors[name])
        held += tensor.nbytes
        num_bytes += tensor.nbytes
    if tensors:
        _write_file(tensors, folder, num_files)
    if version is not None and writes:
        write_manifest(folder, version, sums)
    return num_bytes


def save_merged(model: PeftModel, folder: Path, *, dtype: torch.dtype, writes: bool) -> None:
    """Write the model with its adapters merged, as `from_pretrained` reads it; arguments as `write_weights`."""
    write_weights(model, folder, dtype=dtype, writes=writes)
    if not writes:
        return
    files: dict[str, str] = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            files |= dict.fromkeys(opened.keys(), file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}, indent=2))
    base = model.get_base_model()
    base.config.save_pretrained(folder)
    if base.generation_config is not None:
        base.generation_config.save_pretrained(folder)


def engine_weights(model: torch.nn.Module, *, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight with its checkpoint name, adapters merged, on the CPU; tied weights once, under their first name."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    adapted = {name: layer for name, layer in base.named_modules() if isinstance(layer, LoraLayer)}
    seen: set[int] = set()
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if ".lora_" in name or ".modules_to_save." in name or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        owner, _, leaf = name.partition(".base_layer.")
        layer = adapted.get(owner) if leaf == "weight" else None
        adapters = [] if layer is None else [value for key, value in layer.named_parameters() if "lora_" in key]
        with _gathered([parameter, *adapters]):
            weight = _unsharded(parameter.detach())
            weight = weight if layer is None else _merged(layer, weight)
            yield (f"{owner}.{leaf}" if leaf else name), weight.to(device="cpu", dtype=dtype, copy=True)


def _gathered(parameters: list[torch.nn.Parameter]) -> AbstractContextManager[None]:
    """ZeRO-3's shards of these parameters, whole on every rank."""
    sharded = [parameter for parameter in parameters if "ds_id" in vars(parameter)]
    if not sharded:
        return nullcontext()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    context: AbstractContextManager[None] = GatheredParameters(sharded)
    return context


def _unsharded(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _merged(layer: LoraLayer, weight: torch.Tensor) -> torch.Tensor:
    delta = torch.zeros_like(weight, dtype=torch.float32)
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            delta += _unsharded(layer.get_delta_weight(adapter)).float()
    return weight.float() + delta


def _write_file(tensors: dict[str, torch.Tensor], folder: Path, number: int) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = folder / f"part-{number}"
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(folder / f"model-{number:05d}.safetensors")
