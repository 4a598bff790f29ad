"""The policy's weights as an engine reads them: names of the checkpoint, adapters merged, one dtype.

Adapters are merged beside the base weights, never into them: merging in place and subtracting again loses a little of
a bfloat16 base at every step.

Not here: how they reach the engine (`roles.engines`), and sharded weights.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file

WEIGHTS_FILE = "model.safetensors"


def engine_weights(model: torch.nn.Module, *, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the policy with its checkpoint name, adapters merged, on the CPU, in `dtype`."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    adapted = {name: layer for name, layer in base.named_modules() if isinstance(layer, LoraLayer)}
    seen: set[int] = set()
    for name, parameter in base.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.partition(".base_layer.")
        if _is_adapter(name) or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        weight = parameter.detach()
        if leaf == "weight" and owner in adapted:
            weight = _merged(adapted[owner], weight)
        yield (f"{owner}.{leaf}" if leaf else name), weight.to(device="cpu", dtype=dtype).contiguous()


def write_weights(model: torch.nn.Module, folder: Path, *, dtype: torch.dtype) -> int:
    """Write what `engine_weights` gives as safetensors into `folder`; returns the bytes written.

    Tied weights are written once, under the first of their names, as checkpoints have them.
    """
    tensors = dict(engine_weights(model, dtype=dtype))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = folder / f"{WEIGHTS_FILE}.part"
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(folder / WEIGHTS_FILE)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _is_adapter(name: str) -> bool:
    return ".lora_" in name or ".modules_to_save." in name


def _merged(layer: LoraLayer, weight: torch.Tensor) -> torch.Tensor:
    delta = torch.zeros_like(weight, dtype=torch.float32)
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            delta += layer.get_delta_weight(adapter).float()
    return weight.float() + delta
