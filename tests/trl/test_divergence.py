import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trl.divergence_definitions import exact, gradient
from ycore.trl.importance import DIVERGENCES, stand_in

NAMES = sorted(DIVERGENCES)


def divergence(name: str, logps: torch.Tensor, ref_logps: torch.Tensor) -> torch.Tensor:
    return DIVERGENCES[name](ref_logps - logps).clamp(min=0)  # js can round to just below 0


POLICY, REFERENCE = [0.5, 0.25, 0.125, 0.125], [0.125, 0.25, 0.5, 0.125]

logits = st.lists(st.floats(-3, 3, width=32), min_size=5, max_size=5).map(
    lambda row: torch.tensor(row).double()
)


def test_single_values_by_hand() -> None:
    """ref / pi = 2 at the first token and 1/2 at the second; log 2 = 0.6931472, log 1.5 = 0.4054651."""
    logps, ref_logps = torch.tensor([0.25, 0.5]).log(), torch.tensor([0.5, 0.25]).log()
    by_hand = {
        "reverse-kl": [2 - 1 - 0.6931472, 0.5 - 1 + 0.6931472],
        "forward-kl": [2 * 0.6931472 - 1, -0.5 * 0.6931472 + 0.5],
        "js": [
            (2 * 0.6931472 - 3 * 0.4054651) / 2,
            (-0.5 * 0.6931472 + 1.5 * 0.2876821) / 2,
        ],  # log 0.75 = -0.2876821
    }
    for name, values in by_hand.items():
        torch.testing.assert_close(
            divergence(name, logps, ref_logps), torch.tensor(values), rtol=0, atol=1e-6
        )


@pytest.mark.parametrize(
    ("name", "value"),
    # 0.375 log 4 both ways, as the two are mirror images; js: m = 5/16 1/4 5/16 1/8,
    # 0.5 log 1.6 - 0.125 log 2.5 = 0.2350018 - 0.1145363
    [
        ("reverse-kl", 0.375 * math.log(4)),
        ("forward-kl", 0.375 * math.log(4)),
        ("js", 0.1204655),
    ],
)
def test_expectation_over_a_small_distribution_by_hand(name: str, value: float) -> None:
    policy, reference = torch.tensor(POLICY), torch.tensor(REFERENCE)
    estimate = (policy * divergence(name, policy.log(), reference.log())).sum()
    assert estimate.item() == pytest.approx(value, abs=1e-6)


def test_reverse_kl_is_trls_formula() -> None:
    draw = torch.Generator().manual_seed(0)
    logps, ref = torch.randn(3, 7, generator=draw), torch.randn(3, 7, generator=draw)
    theirs = torch.exp(ref - logps) - (ref - logps) - 1
    torch.testing.assert_close(
        divergence("reverse-kl", logps, ref), theirs, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(weights=logits, reference_weights=logits)
def test_expectation_is_the_exact_divergence(
    name: str, weights: Tensor, reference_weights: Tensor
) -> None:
    policy, reference = weights.softmax(-1), reference_weights.softmax(-1)
    values = divergence(name, policy.log(), reference.log())
    assert (values >= 0).all()
    torch.testing.assert_close(
        (policy * values).sum(), exact(name, policy, reference), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(weights=logits, reference_weights=logits)
def test_with_the_ratio_the_gradient_is_that_of_the_divergence(
    name: str, weights: Tensor, reference_weights: Tensor
) -> None:
    weights.requires_grad_(True)
    policy, reference = weights.softmax(-1), reference_weights.softmax(-1)
    sampled = policy.detach()
    loss = (
        sampled * (policy / sampled) * divergence(name, policy.log(), reference.log())
    ).sum()
    wanted = gradient(exact(name, policy, reference), weights)
    torch.testing.assert_close(gradient(loss, weights), wanted, rtol=1e-7, atol=1e-10)


def test_without_the_ratio_reverse_kl_has_the_gradient_of_forward_kl() -> None:
    weights = torch.tensor([1.0, -0.5, 0.25]).double().requires_grad_(True)
    policy, reference = weights.softmax(-1), torch.tensor([0.2, 0.3, 0.5]).double()
    loss = (policy.detach() * divergence("reverse-kl", policy.log(), reference.log())).sum()
    torch.testing.assert_close(
        gradient(loss, weights), gradient(exact("forward-kl", policy, reference), weights)
    )
    assert not torch.allclose(
        gradient(loss, weights), gradient(exact("reverse-kl", policy, reference), weights)
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100)
@given(logp=st.floats(-40, 0, width=32), ref_logp=st.floats(-40, 0, width=32))
def test_float32_values_are_finite_and_never_negative(
    name: str, logp: float, ref_logp: float
) -> None:
    logps = torch.tensor([logp], requires_grad=True)
    value = divergence(name, logps, torch.tensor([ref_logp]))
    (slope,) = torch.autograd.grad(value.sum(), logps)
    assert torch.isfinite(value).all() and torch.isfinite(slope).all()
    assert value.item() >= 0
    assert value.item() > 0 or abs(logp - ref_logp) < 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_rounding_next_to_equality_never_makes_it_negative(name: str) -> None:
    gaps = torch.logspace(-9, 0, 20_000)
    values = divergence(name, torch.zeros(40_000), torch.cat([gaps, -gaps]))
    assert values.min().item() >= 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", [1e-8, 1e-6, 1e-4, 1e-2])
def test_near_equality_it_is_a_parabola(name: str, gap: float) -> None:
    """All three are curvature * gap^2 / 2 there, with curvature 1, and 1/4 for js; so is the slope."""
    curvature = 0.25 if name == "js" else 1.0
    logps = torch.tensor([-2.0], dtype=torch.float64, requires_grad=True)
    value = divergence(name, logps, logps.detach() + gap)
    (slope,) = torch.autograd.grad(value.sum(), logps)
    assert value.item() == pytest.approx(curvature * gap**2 / 2, rel=0.02, abs=1e-16)
    assert -slope.item() == pytest.approx(curvature * gap, rel=0.02, abs=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_zero_with_zero_slope_at_equality_in_any_shape(name: str) -> None:
    logps = torch.tensor([[-0.1, -2.0, -30.0], [0.0, -1e-3, -7.0]], requires_grad=True)
    value = divergence(name, logps, logps.detach())
    (slope,) = torch.autograd.grad(value.sum(), logps)
    assert torch.equal(value, torch.zeros(2, 3))
    torch.testing.assert_close(slope, torch.zeros(2, 3), rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_the_stand_in_gives_trls_formula_the_divergences_value_and_gradient(name: str) -> None:
    gaps = torch.cat([torch.logspace(-7, 1.2, 400), torch.zeros(1)])
    logps = torch.full((802,), -3.0, dtype=torch.float64, requires_grad=True)
    reference = logps.detach() + torch.cat([gaps, -gaps])
    stood_in = stand_in(name, logps, reference) - logps
    trls = torch.exp(stood_in) - stood_in - 1  # as in TRL's loss
    wanted = divergence(name, logps, reference)
    torch.testing.assert_close(trls, wanted, rtol=1e-6, atol=1e-15)
    torch.testing.assert_close(
        gradient(trls.sum(), logps), gradient(wanted.sum(), logps), rtol=2e-5, atol=1e-12
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(logp=st.floats(-40, 0, width=32), ref_logp=st.floats(-40, 0, width=32))
def test_the_stand_in_is_finite_in_float32(name: str, logp: float, ref_logp: float) -> None:
    logps = torch.tensor([logp], requires_grad=True)
    stood_in = stand_in(name, logps, torch.tensor([ref_logp]))
    (slope,) = torch.autograd.grad((stood_in - logps).sum(), logps)
    assert torch.isfinite(stood_in).all() and torch.isfinite(slope).all()
