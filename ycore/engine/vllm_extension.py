"""What ycore adds to a vLLM worker, through vLLM's own `--worker-extension-cls`: a reload that leaves nothing old.

On CPU, vLLM multiplies with packed copies of its weights and keeps no others. Its reload packs anew what the checkpoint
names, and an output head that is tied to the embedding is not named there: it would go on with the first policy's
weights. So the head is packed again here; and what is packed is added up as it is handed over, since nobody can read
it afterwards.

Seeded sampling on CPU at a fifth of vLLM's price: the same race of exponentials, run by a faster generator.

What vLLM loads of ycore into each worker, by the name in `--worker-extension-cls`. To import it is to change vLLM.

Not here: who asks for it (`vllm_engine`), what the sums are good for (`algorithms.checksum`). vLLM imports this module
in the engine's own process.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.platforms import current_platform

from ycore.run.reports import tell_stacks


def sample_faster() -> None:
    """Give vLLM's CPU sampler the faster draw. Must come before the engine's model runner is made."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    stock = TopKTopPSampler.forward_cpu

    def forward_cpu(self: Any, logits: Any, generators: Mapping[int, Any], k: Any, p: Any) -> tuple[Any, Any]:
        draw = stock if not generators or self.use_fp64_gumbel else _forward
        return tuple(draw(self, logits, generators, k, p))

    TopKTopPSampler.forward_cpu = forward_cpu


def _forward(self: Any, logits: Any, generators: Mapping[int, Any], k: Any, p: Any) -> tuple[Any, Any]:
    """In the place of `TopKTopPSampler.forward_cpu`: token ids `[B]`, and what its logprobs mode asks for, `[B, V]`."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, sample_with_exponential_noise

    logits = apply_top_k_top_p(logits, k, p)
    returned = None
    if self.logprobs_mode == "processed_logits":
        returned = logits
    elif self.logprobs_mode == "processed_logprobs":
        returned = logits.log_softmax(dim=-1, dtype=torch.float32)
    probabilities = logits.softmax(dim=-1, dtype=torch.float32)
    noise = torch.empty_like(probabilities)
    fill_with_exponentials(noise.numpy(), [_seed(generators.get(row)) for row in range(len(probabilities))])
    return sample_with_exponential_noise(probabilities, noise), returned


def fill_with_exponentials(rows: np.ndarray, seeds: list[int]) -> None:
    """Standard exponential variables into `rows` `[B, V]`; row i is a function of `seeds[i]` alone."""
    for row, seed in zip(rows, seeds, strict=True):
        row[:] = np.random.Generator(np.random.SFC64(seed)).standard_exponential(row.shape)


def _seed(generator: Any) -> int:
    """The next seed of a request's own generator, or of the process's for a request that has none."""
    import torch

    return int(torch.randint(2**62, (1,), generator=generator))


PACKED: dict[Any, int] = {}
"""The sum of the weights that a layer multiplies with, by the layer, where they were packed."""


class PolicyWorker:
    """Mixed into vLLM's worker; its methods are called by name, over `/collective_rpc`."""

    def load_policy(self: Any, weights_path: str) -> list[tuple[list[str], int]]:
        """Take the weights in a folder, tied ones included; what the model then holds, as `checksum.ReadBack`."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.platforms import current_platform

        self.reload_weights(weights_path=weights_path)
        model = self.model_runner.get_model()
        if current_platform.is_cpu():
            for module in model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
        return read_back(model, dtype=self.model_config.dtype)


def read_back(model: Any, *, dtype: Any) -> list[tuple[list[str], int]]:
    """Every parameter of a loaded model: the checkpoint's names for it, and its sum; one in another dtype is left out.

    A tied head is told as what it is tied to, with the sum of its own packed copy.
    """
    from ycore.engine.weights import byte_sum

    parts = vars(type(model)).get("packed_modules_mapping") or {}
    told: list[tuple[list[str], int]] = []
    first_name: dict[int, str] = {}
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{leaf}"
            if parameter.numel():
                name = first_name.setdefault(parameter.data_ptr(), name)
            if parameter.dtype == dtype:
                packed = PACKED.get(module) if leaf == "weight" else None
                told.append((checkpoint_names(name, parts), byte_sum(parameter) if packed is None else packed))
    return told


def checkpoint_names(name: str, parts: dict[str, list[str]]) -> list[str]:
    """`a.qkv_proj.weight` is the checkpoint's `a.q_proj.weight`, `a.k_proj.weight` and `a.v_proj.weight`."""
    *owner, module, leaf = name.split(".")
    return [".".join([*owner, part, leaf]) for part in parts.get(module, [module])]


def note_what_is_packed() -> None:
    """From now on in this process: add up each weight as vLLM packs it for its CPU kernels."""
    from vllm.model_executor.layers import utils

    from ycore.engine.weights import byte_sum

    pack = utils.dispatch_cpu_unquantized_gemm

    def noted(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if not weight.is_meta and weight.dim() == 2:
            PACKED[layer] = byte_sum(weight)
        pack(layer, remove_weight=remove_weight)

    utils.dispatch_cpu_unquantized_gemm = noted


__all__ = ["PolicyWorker"]

tell_stacks()
if current_platform.is_cpu():
    sample_faster()
    note_what_is_packed()
