"""Write the policy's weights for an engine as a checkpoint, with sums of each tensor.

Names are the checkpoint's, by transformers' own tables of what it renames and stacks (the experts of a mixture).
Adapters are merged, and all has one dtype. Adapters are merged into a copy of the base
weights: merging in place and subtracting again loses a little of a bfloat16 base at every step. Sharded weights
(ZeRO-3, FSDP2) are gathered one at a time, so all ranks must walk them together; only the rank that writes merges,
casts and copies. A weight is merged, cast and summed on its device, so the sums cover the copy to the host too.

Threads write several files at once, over those of the last sync: memory that a file has already is filled four times
as fast as new memory. Until a file is whole it has no header, so that nothing can load it.
"""

import copy
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer, ParamWrapper
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from ycore.engine.commands import engine_rank
from ycore.engine.weight_proof import TensorSums, begin_weights, tensor_sums, write_manifest
from ycore.errors import SyncError

NUM_FILES = 4  # written at the same time
QUEUED_BYTES = 2**29  # of weights that wait to be written, unless one weight has more
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""safetensors' names of dtypes."""
_TILE = 2**19  # numbers of a weight that are merged at a time on a CPU: 2 MiB
_ENTRY = 200  # bytes of a tensor's entry in a header, at most, beside its name
_BASE_SUMS: WeakKeyDictionary[torch.nn.Module, dict[str, TensorSums]] = WeakKeyDictionary()
"""The sums of each model's frozen base."""


def write_weights(
    model: torch.nn.Module,
    folder: Path,
    *,
    dtype: torch.dtype,
    writes: bool = True,
    version: int | None = None,
) -> int:
    """Write the policy into `folder` as safetensors, in `NUM_FILES` files. All ranks must call it.

    Args:
        model: The policy, not wrapped; its adapters are merged in what is written.
        writes: Whether this rank writes; the others only help to gather sharded weights.
        version: The policy version. With one, a manifest is written last, by which engines verify what they load.

    Returns:
        The bytes of all weights; 0 where this rank does not write.
    """
    weights = engine_weights(model, dtype=dtype, writes=writes)
    if not writes:
        deque(weights, maxlen=0)
        return 0
    begin_weights(folder)
    room = sum(len(name) + _ENTRY for name in _checkpoint_names(model))
    files = [
        _File(folder / f"model-{number:05d}.safetensors", room) for number in range(NUM_FILES)
    ]
    waiting: deque[tuple[Future[None], int]] = deque()
    sums: dict[str, TensorSums] = {}
    try:
        with ThreadPoolExecutor(NUM_FILES, "weights") as threads:
            for name, weight in weights:
                while (
                    waiting and sum(size for _, size in waiting) + weight.nbytes > QUEUED_BYTES
                ):
                    waiting.popleft()[0].result()
                write = min(files, key=lambda file: file.end).add(name, weight, sums)
                waiting.append((threads.submit(write), weight.nbytes))
            for written, _ in waiting:
                written.result()
        num_bytes = sum(file.finish() for file in files)
    finally:
        for file in files:
            os.close(file.descriptor)
    if version is not None:
        write_manifest(folder, version, sums)
    return num_bytes


def note_weights(
    model: torch.nn.Module, folder: Path, *, dtype: torch.dtype, version: int
) -> int:
    """Write the manifest alone, for engines that copy the weights from this process; return the bytes of all weights."""
    begin_weights(folder)
    sums = {name: tensor_sums(weight) for name, weight in engine_weights(model, dtype=dtype)}
    write_manifest(folder, version, sums)
    return sum(tensor.num_bytes for tensor in sums.values())


def write_adapters(model: PeftModel, folder: Path, *, dtype: torch.dtype, version: int) -> int:
    """Write the policy's adapters into `folder` for an engine that has the base; return their bytes. Not for shards.

    The manifest has the sums of the adapters and of the base. The scale is in B, and ranks are padded with zeros, so
    that an engine holds every number as it is sent.

    Raises:
        SyncError: An engine cannot add what is trained to its base: no plain LoRA of linear layers.
    """
    rank = engine_rank(model.active_peft_config.r)
    tensors: dict[str, torch.Tensor] = {}
    for owner, layer in model.get_base_model().named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        (name,) = layer.active_adapters
        if name not in layer.lora_A or isinstance(layer, ParamWrapper):
            raise SyncError(
                f"engine.sync=adapter sends plain LoRA of linear layers, and {owner} has another kind"
            )
        down = layer.lora_A[name].weight.detach()
        up = layer.lora_B[name].weight.detach() * layer.scaling[name]
        padding = rank - len(down)
        padded = {
            "A": torch.nn.functional.pad(down, (0, 0, 0, padding)),
            "B": torch.nn.functional.pad(up, (0, padding)),
        }
        for letter, matrix in padded.items():
            tensors[f"{owner}.lora_{letter}.weight"] = matrix.to("cpu", dtype)
    if model not in _BASE_SUMS:
        _BASE_SUMS[model] = {
            name: tensor_sums(weight)
            for name, weight in engine_weights(model, dtype=dtype, merges=False)
        }
    begin_weights(folder)
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    adapter_sums = {name: tensor_sums(tensor) for name, tensor in tensors.items()}
    write_manifest(folder, version, _BASE_SUMS[model] | adapter_sums)
    return sum(tensor.nbytes for tensor in tensors.values())


def _checkpoint_names(model: torch.nn.Module) -> Iterable[str]:
    """Return the names of what `engine_weights` yields, and perhaps a few more."""
    shapes = {
        _without_wrappers(name): getattr(weight, "ds_shape", weight.shape)
        for name, weight in _base_of(model).named_parameters(remove_duplicate=False)
    }
    with torch.device("meta"):
        weights = {name: torch.empty(shape) for name, shape in shapes.items()}
    return [*_as_saved(_base_of(model), weights), *dict(_base_of(model).named_buffers())]


class _File:
    """A file of safetensors, with room for its header (https://github.com/huggingface/safetensors#format)."""

    def __init__(self, path: Path, room: int) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.pwrite(self.descriptor, bytes(8), 0)  # a header of 0 bytes, which no reader takes
        self._entries: dict[str, dict[str, object]] = {}
        self._start = self.end = -(-(8 + 2 + room) // 64) * 64

    def add(
        self, name: str, weight: torch.Tensor, sums: dict[str, TensorSums]
    ) -> Callable[[], None]:
        """Place the weight in the file and begin to copy it to the host; return a function that writes it and its sums."""
        begin = self.end
        self.end += weight.nbytes
        offsets = [begin - self._start, self.end - self._start]
        self._entries[name] = {
            "dtype": _DTYPES[weight.dtype],
            "shape": [*weight.shape],
            "data_offsets": offsets,
        }
        host, wait = copied_to_host(weight)

        def write() -> None:
            sums[name] = tensor_sums(weight)
            wait()
            data = memoryview(host.view(-1).view(torch.uint8).numpy())
            place = begin
            while place < begin + weight.nbytes:  # one call writes 2 GiB at most
                place += os.pwrite(self.descriptor, data[place - begin :], place)

        return write

    def finish(self) -> int:
        """Write the header; return the bytes of the weights."""
        header = (
            json.dumps(self._entries, separators=(",", ":")).encode().ljust(self._start - 8)
        )
        os.truncate(self.descriptor, self.end)
        os.pwrite(self.descriptor, header, 8)
        os.pwrite(self.descriptor, len(header).to_bytes(8, "little"), 0)
        return self.end - self._start


def copied_to_host(weight: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
    """Return the weight in host memory, and a function that waits for it; the device goes on meanwhile."""
    if not weight.is_cuda:
        return weight.cpu(), lambda: None
    host = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=True)
    host.copy_(weight, non_blocking=True)
    return host, torch.cuda.current_stream(weight.device).record_event().synchronize


def save_merged(model: PeftModel, folder: Path, *, dtype: torch.dtype, writes: bool) -> None:
    """Write the model with its adapters merged, as `from_pretrained` reads it; arguments as `write_weights`."""
    write_weights(model, folder, dtype=dtype, writes=writes)
    if not writes:
        return
    files: dict[str, str] = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            files |= dict.fromkeys(opened.keys(), file.name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files}, indent=2)
    )
    base = model.get_base_model()
    config = copy.deepcopy(base.config)
    if hasattr(config, "quantization_config"):  # what was merged is whole again
        del config.quantization_config
    config.save_pretrained(folder)
    if base.generation_config is not None:
        base.generation_config.save_pretrained(folder)


def engine_weights(
    model: torch.nn.Module, *, dtype: torch.dtype, writes: bool = True, merges: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight with its checkpoint name, adapters merged, on its device; tied ones once, by their first name.

    A tensor may be the policy's own memory: it must be read before the policy changes.

    Args:
        writes: False yields nothing, and does a rank's part in gathering.
        merges: False leaves the adapters out.
    """
    base = _base_of(model)
    layers = base.named_modules() if merges else ()
    adapted = {
        _without_wrappers(f"{name}.{getattr(layer, 'parameter_name', 'weight')}"): layer
        for name, layer in layers
        if isinstance(layer, LoraLayer)
    }
    seen: set[int] = set()
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if ".lora_" in name or ".modules_to_save." in name or id(parameter) in seen:
            continue
        if name.startswith("critic."):  # PPO's, which is the trainer's own
            continue
        seen.add(id(parameter))
        name = _without_wrappers(name)
        layer = adapted.get(name)
        adapters = (
            []
            if layer is None
            else [value for key, value in layer.named_parameters() if "lora_" in key]
        )
        with _gathered([parameter, *adapters]):
            if not writes and not isinstance(parameter, DTensor):
                continue
            if getattr(parameter, "quant_state", None) is not None:  # bitsandbytes
                weight = _dequantised(parameter)
            else:
                weight = _unsharded(parameter.detach())
            if layer is not None:
                weight = _merged(layer, weight, dtype)
            if writes:  # a copy of what is gathered, which is freed at the end of this block
                weight = weight.to(
                    dtype, copy=layer is None and "ds_id" in vars(parameter)
                ).contiguous()
                yield from _as_saved(base, {name: weight}).items()
    saved = base.state_dict() if writes else ()
    for (
        name,
        buffer,
    ) in base.named_buffers():  # e.g. the bias by which experts are chosen, in its own dtype
        if name in saved and not name.startswith("critic."):
            yield name, buffer.contiguous()


def _as_saved(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights by the names and in the shapes in which transformers saves them."""
    if getattr(model, "_weight_conversions", None) == []:  # it saves them as they are
        return weights
    saved: dict[str, torch.Tensor] = revert_weight_conversion(model, weights)
    return saved


def _base_of(model: torch.nn.Module) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _without_wrappers(name: str) -> str:
    """Return the name of a weight of the model without peft's wrappers of it."""
    return name.replace(".base_layer", "")


def _dequantised(parameter: Any) -> torch.Tensor:
    """Return the weight that the trainer multiplies with, of one that bitsandbytes holds in 4 bits."""
    from bitsandbytes import functional

    state = copy.copy(parameter.quant_state)
    data = parameter.data.to(state.absmax.device)  # packed weights may wait on the host
    if getattr(state, "packing_format_for_cpu", False):
        # The first forward has packed it; its scales are no longer in 8 bits.
        state.original_nested = False
        data, state = functional._convert_weight_packed_for_cpu_inverse(data, state)
        state.absmax = state.absmax.T.reshape(-1).float()
    weight: torch.Tensor = functional.dequantize_4bit(data, state)
    return weight


def _gathered(parameters: list[torch.nn.Parameter]) -> AbstractContextManager[None]:
    """Gather ZeRO-3's shards of these parameters on every rank."""
    sharded = [parameter for parameter in parameters if "ds_id" in vars(parameter)]
    if not sharded:
        return nullcontext()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    context: AbstractContextManager[None] = GatheredParameters(sharded)
    return context


def _unsharded(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


@torch.no_grad()
def _merged(layer: LoraLayer, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add the active adapters' products to the weight in float32 (LoRA, arXiv 2106.09685).

    On a CPU by tiles of rows that stay in its cache, 13 times as fast as whole: most of that were page faults.
    """
    if isinstance(layer, ParamWrapper):  # a stack of experts, or a router
        whole = weight.float()
        for name in layer.active_adapters:
            whole = whole + layer.get_delta_weight(name).float()
        return whole.to(dtype)
    factors = []
    for name in layer.active_adapters:
        if name in layer.lora_A:
            left = layer.lora_B[name].weight
            right = layer.lora_A[name].weight
        elif name in layer.lora_embedding_A:
            left = layer.lora_embedding_A[name].T
            right = layer.lora_embedding_B[name].T
        else:
            continue
        left = _unsharded(left).float()
        right = _unsharded(right).float()
        if getattr(layer, "fan_in_fan_out", False) and layer.lora_A:
            left, right = right.T, left.T
        factors.append((left, right, layer.scaling[name]))
    if factors:  # where the adapters are: frozen weights may be in host memory
        weight = weight.to(factors[0][0].device, non_blocking=True)
    merged = torch.empty_like(weight, dtype=dtype)
    rows = max(1, _TILE // weight.size(1)) if weight.is_cpu else len(weight)
    for first in range(0, len(weight), rows):
        tile_rows = slice(first, first + rows)
        tile = weight[tile_rows].float()
        for left, right, scale in factors:
            tile = tile.addmm(left[tile_rows], right, alpha=scale)
        merged[tile_rows] = tile
    return merged
