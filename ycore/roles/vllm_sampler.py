"""Seeded sampling on CPU at a fifth of vLLM's price: the same race of exponentials, run by a faster generator.

A token is drawn as the one whose probability over an exponential variable of its own is largest, which draws it with
exactly that probability. vLLM lets torch make those variables: one a token of the vocabulary, for all requests and
then again for those that have a seed, 45 of the 120 ms of a decoding step (32 requests, 49,152 tokens, one core).
numpy's ziggurat makes them in 5, in double precision: single precision is zero once in 6 million times, and a zero
wins any race. Each request's own torch generator seeds it, so a completion is still a function of its prompt, its
weights and its seed alone.

Not here: the worker that vLLM loads this into (`vllm_worker`), and devices other than CPUs.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np


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
