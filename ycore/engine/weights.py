"""The policy's weights as an engine reads them: names of the checkpoint, adapters merged, one dtype.

Adapters are merged beside the base weights, never into them: merging in place and subtracting again loses a little of
a bfloat16 base at every step. Sharded weights (ZeRO-3, FSDP2) are made whole one at a time, so every rank must walk
them together; only the rank that writes keeps any.

Whether an engine's weights are the trainer's: one sum a tensor, written beside the weights and read back.

Not here: how they reach the engine (`roles.vllm_engine`), and the sums that prove it (`checksum`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from ycore.errors import SyncError
from ycore.run.files import read_json, write_json_atomic

if TYPE_CHECKING:
    import torch

MANIFEST = "weights.json"
_WORDS = 2**64
_NAMED = 3  # tensors that an error names, of all that differ

ReadBack = Sequence[tuple[Sequence[str], int]]
"""What an engine holds: the checkpoint's names that one of its parameters is made of, and that parameter's sum."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Of which version the weights in a folder are, and each tensor's sum by its checkpoint name."""

    version: int
    sums: Mapping[str, int]


def byte_sum(tensor: "torch.Tensor") -> int:
    """The sum of a contiguous tensor's bytes, as signed words; of the width of one number where rows need it.

    Vectors are always added up number by number: biases that become one need not each fill whole words.
    """
    import torch

    flat = tensor.detach().contiguous()
    width = flat.element_size()
    by_words = flat.dim() > 1 and flat.size(-1) * width % 8 == 0
    words = torch.int64 if by_words else {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    return int(flat.view(-1).view(words).sum(dtype=torch.int64))


def write_manifest(folder: Path, version: int, sums: Mapping[str, int]) -> None:
    """Say what the folder's weights are; written after them, so that it never speaks of weights that are not there."""
    write_json_atomic(folder / MANIFEST, {"version": version, "sums": dict(sums)})


def read_manifest(folder: Path, *, version: int) -> Manifest:
    """The manifest of these weights; SyncError where there is none, or they are of another version."""
    path = folder / MANIFEST
    if not path.is_file():
        raise SyncError(f"no weights to send: there is no {path}, which the trainer writes after the weights")
    told = read_json(path)
    if told["version"] != version:
        raise SyncError(f"stale weights: {folder} holds policy version {told['version']}, and {version} was to be sent")
    return Manifest(told["version"], told["sums"])


def check_read_back(sums: Mapping[str, int], told: ReadBack) -> int:
    """How many of the tensors are proved to be loaded, and equal; SyncError naming those that are not.

    A tensor of which the engine says nothing is not an error by itself: a model may keep it in a form that has no
    such sum (fused experts). That it says nothing of any is.
    """
    differ: set[str] = set()  # a tied head is told of beside its embedding, by the same name
    proved: set[str] = set()
    for names, held in told:
        if not all(name in sums for name in names):
            continue
        proved |= set(names)
        if (sum(sums[name] for name in names) - held) % _WORDS:
            differ |= set(names)
    if differ:
        listed = ", ".join(sorted(differ)[:_NAMED]) + (", ..." if len(differ) > _NAMED else "")
        raise SyncError(f"{len(differ)} of {len(sums)} tensors are not the trainer's after they were loaded: {listed}")
    if not proved:
        raise SyncError(
            f"it named none of the {len(sums)} tensors that were sent, so nothing proves that they are there"
        )
    return len(proved)


FILE_BYTES = 2 * 2**30
"""A file's size, and so the most that the writing rank holds of the policy at a time."""


def engine_weights(model: torch.nn.Module, *, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the policy with its checkpoint name, adapters merged, on the CPU, in `dtype`.

    Tied weights come once, under the first of their names, as checkpoints have them.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    adapted = {name: layer for name, layer in base.named_modules() if isinstance(layer, LoraLayer)}
    seen: set[int] = set()
    for name, parameter in base.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.partition(".base_layer.")
        if _is_adapter(name) or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        layer = adapted.get(owner) if leaf == "weight" else None
        with _whole([parameter, *_adapter_parameters(layer)]):
            weight = _full(parameter.detach())
            weight = weight if layer is None else _merged(layer, weight)
            yield (f"{owner}.{leaf}" if leaf else name), weight.to(device="cpu", dtype=dtype, copy=True)


def write_weights(
    model: torch.nn.Module, folder: Path, *, dtype: torch.dtype, writes: bool = True, version: int | None = None
) -> int:
    """Write what `engine_weights` gives into `folder` as safetensors; returns the bytes written.

    With a version, the sum of every tensor is written last, so that an engine can prove which weights it has loaded.
    Ranks that do not write still walk along, so that sharded weights can be gathered.
    """
    tensors: dict[str, torch.Tensor] = {}
    sums: dict[str, int] = {}
    num_files = num_bytes = held = 0
    if writes:
        (folder / MANIFEST).unlink(missing_ok=True)  # while the weights change it is true of none
    for name, tensor in engine_weights(model, dtype=dtype):
        if not writes:
            continue
        if held and held + tensor.nbytes > FILE_BYTES:
            _write(tensors, folder, num_files)
            num_files, held, tensors = num_files + 1, 0, {}
        tensors[name] = tensor.contiguous()
        sums[name] = byte_sum(tensors[name])
        held += tensor.nbytes
        num_bytes += tensor.nbytes
    if tensors:
        _write(tensors, folder, num_files)
    if version is not None and writes:
        write_manifest(folder, version, sums)
    return num_bytes


def save_merged(model: PeftModel, folder: Path, *, dtype: torch.dtype, writes: bool) -> None:
    """The model with its adapters merged in, as `from_pretrained` reads it; all ranks walk along."""
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


def _write(tensors: dict[str, torch.Tensor], folder: Path, number: int) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = folder / f"part-{number}"
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(folder / f"model-{number:05d}.safetensors")


def _is_adapter(name: str) -> bool:
    return ".lora_" in name or ".modules_to_save." in name


def _adapter_parameters(layer: LoraLayer | None) -> list[torch.nn.Parameter]:
    return [] if layer is None else [value for name, value in layer.named_parameters() if "lora_" in name]


def _whole(parameters: list[torch.nn.Parameter]) -> AbstractContextManager[None]:
    """Inside, ZeRO-3's shards of these parameters are gathered on every rank; other parameters are whole already."""
    sharded = [parameter for parameter in parameters if "ds_id" in vars(parameter)]
    if not sharded:
        return nullcontext()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    context: AbstractContextManager[None] = GatheredParameters(sharded)
    return context


def _full(weight: torch.Tensor) -> torch.Tensor:
    """FSDP2's shards as one tensor."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _merged(layer: LoraLayer, weight: torch.Tensor) -> torch.Tensor:
    delta = torch.zeros_like(weight, dtype=torch.float32)
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            delta += _full(layer.get_delta_weight(adapter)).float()
    return weight.float() + delta
