"""The patches of vLLM: parameter names, and a sampler with the right distribution, a function of the seed alone."""

import inspect
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.sample.ops import topk_topp_sampler as stock

from ycore.engine.vllm_extension import checkpoint_names, fill_with_exponentials, use_faster_sampler


@pytest.fixture
def sampler() -> Iterator[stock.TopKTopPSampler]:
    before = stock.TopKTopPSampler.forward_cpu
    use_faster_sampler()
    yield stock.TopKTopPSampler("processed_logprobs")
    stock.TopKTopPSampler.forward_cpu = before


def generators(*seeds: int) -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds)}


def test_what_it_replaces_is_as_it_was_when_this_was_written() -> None:
    forward = inspect.signature(stock.TopKTopPSampler.forward_cpu)
    assert list(forward.parameters) == ["self", "logits", "generators", "k", "p"]
    assert list(inspect.signature(stock.apply_top_k_top_p).parameters)[:3] == ["logits", "k", "p"]
    assert list(inspect.signature(stock.sample_with_exponential_noise).parameters) == ["probs", "q"]


def test_tokens_come_as_often_as_they_are_likely(sampler: stock.TopKTopPSampler) -> None:
    """60,000 draws against 5 probabilities: chi-square with 4 degrees of freedom, 23.5 at one in 10,000."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.045, 0.005])
    counts, draws = torch.zeros(5), 60_000
    own = generators(*range(500))
    for _ in range(draws // 500):
        tokens, _ = sampler.forward(probabilities.log().expand(500, 5).clone(), own, None, None)
        counts += torch.bincount(tokens, minlength=5)
    expected = probabilities * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 23.5


def test_a_draw_is_a_function_of_its_own_seed(sampler: stock.TopKTopPSampler) -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    together, _ = sampler.forward(logits.clone(), generators(7, 8, 9), None, None)
    alone, _ = sampler.forward(logits[2:].clone(), generators(9), None, None)
    other, _ = sampler.forward(logits.clone(), generators(17, 18, 19), None, None)
    assert together[2] == alone[0]
    assert together.tolist() != other.tolist()


def test_a_request_draws_anew_for_every_token(sampler: stock.TopKTopPSampler) -> None:
    own = generators(1)
    drawn = {int(sampler.forward(torch.zeros(1, 1000), own, None, None)[0]) for _ in range(20)}
    assert len(drawn) > 15


def test_logprobs_are_those_that_were_drawn_from(sampler: stock.TopKTopPSampler) -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    k = torch.tensor([3, 50])
    tokens, logprobs = sampler.forward(logits.clone(), generators(1, 2), k, None)
    kept = logits[0].topk(3).indices
    assert tokens[0] in kept and torch.isinf(logprobs[0]).sum() == 47
    assert torch.allclose(logprobs[0][kept], logits[0][kept].log_softmax(0))
    assert torch.allclose(logprobs[1], logits[1].log_softmax(0))


def test_requests_without_a_seed_may_stand_beside_others(sampler: stock.TopKTopPSampler) -> None:
    tokens, _ = sampler.forward(torch.zeros(2, 100), {1: torch.Generator().manual_seed(3)}, None, None)
    alone, _ = sampler.forward(torch.zeros(1, 100), generators(3), None, None)
    assert tokens[1] == alone[0]


def test_nobody_wins_by_a_zero() -> None:
    rows = np.empty((40, 50_000), dtype=np.float32)
    fill_with_exponentials(rows, list(range(40)))
    assert rows.min() > 0 and abs(rows.mean() - 1) < 0.01 and abs((rows < 0.001).mean() - 0.001) < 0.0002


def test_parameters_are_named_as_the_checkpoint_names_them() -> None:
    parts = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    attention = "model.layers.0.self_attn"
    assert checkpoint_names(f"{attention}.qkv_proj.weight", parts) == [
        f"{attention}.{part}_proj.weight" for part in "qkv"
    ]
    assert checkpoint_names(f"{attention}.o_proj.weight", parts) == [f"{attention}.o_proj.weight"]
    assert checkpoint_names("lm_head.weight", parts) == ["lm_head.weight"]
