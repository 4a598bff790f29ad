import itertools

import pytest
import torch

from ycore.trl import lm_head
from ycore.trl.lm_head import score_tokens

N, HIDDEN, VOCABULARY = 11, 8, 23


def made(bias: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, HIDDEN, generator=draw)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=draw)
    targets = torch.randint(0, VOCABULARY, (N,), generator=draw)
    upstream = torch.randn(N, generator=draw)
    return hidden, weight, torch.randn(VOCABULARY, generator=draw) if bias else None, targets, upstream


def by_the_book(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize(
    ("frozen", "bias", "temperature", "tile"),
    list(itertools.product((True, False), (True, False), (1.0, 0.6), (512, 4))),
)
def test_values_and_gradients_equal_a_plain_softmax_in_float64(
    frozen: bool, bias: bool, temperature: float, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_head, "TILE", tile)
    hidden, weight, offset, targets, upstream = made(bias)
    exact_hidden = hidden.double().requires_grad_()
    exact_weight = weight.double().requires_grad_(not frozen)
    expected, entropy = by_the_book(
        exact_hidden, exact_weight, None if offset is None else offset.double(), targets, temperature
    )
    expected.backward(upstream.double())
    hidden.requires_grad_()
    weight.requires_grad_(not frozen)
    logps, entropies = score_tokens(hidden, weight, offset, targets, temperature=temperature)
    logps.backward(upstream)
    assert logps.dtype == entropies.dtype == torch.float32
    near = {"rtol": 1e-6, "atol": 1e-6 * 10}  # float32 holds 7 digits, and logps reach -20
    torch.testing.assert_close(logps, expected.float(), **near)
    torch.testing.assert_close(entropies, entropy.float(), **near)
    assert hidden.grad is not None and exact_hidden.grad is not None
    torch.testing.assert_close(hidden.grad, exact_hidden.grad.float(), **near)
    if not frozen:
        assert weight.grad is not None and exact_weight.grad is not None
        torch.testing.assert_close(weight.grad, exact_weight.grad.float(), **near)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_head_without_a_backward_gives_the_same_values(frozen: bool) -> None:
    hidden, weight, offset, targets, _ = made(True)
    weight.requires_grad_(not frozen)
    with_grad, _ = score_tokens(hidden.clone().requires_grad_(), weight, offset, targets, temperature=0.9)
    with torch.no_grad():
        without, _ = score_tokens(hidden, weight, offset, targets, temperature=0.9)
    torch.testing.assert_close(with_grad.detach(), without)
    assert with_grad.requires_grad and not without.requires_grad


@pytest.mark.parametrize("frozen", [True, False])
def test_nothing_to_score_still_has_a_backward(frozen: bool) -> None:
    hidden, weight, offset, targets, _ = made(False)
    hidden.requires_grad_()
    logps, entropies = score_tokens(hidden[:0], weight.requires_grad_(not frozen), offset, targets[:0], temperature=1.0)
    logps.sum().backward()
    assert logps.shape == entropies.shape == (0,)
    assert hidden.grad is not None and hidden.grad.abs().max() == 0


def test_entropies_carry_no_gradient() -> None:
    hidden, weight, offset, targets, _ = made(False)
    for frozen in (True, False):
        _, entropies = score_tokens(
            hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen), offset, targets, temperature=1.0
        )
        assert not entropies.requires_grad
