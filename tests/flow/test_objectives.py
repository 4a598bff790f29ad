"""What is learned from rewarded pictures: the optimum of DiffusionNFT's loss, the clip, the exact KL, advantages."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from ycore.flow.denoising import step
from ycore.flow.objectives import (
    group_advantages,
    grpo_loss,
    nft_loss,
    noised,
    share_of,
    step_kl,
    velocity_penalty,
)


@pytest.mark.parametrize("b", [1.0, 0.1])
def test_the_optimum_of_the_plain_loss_is_the_improved_velocity(b: float) -> None:
    """At one point of a mixture of five pictures: v_old + (2 / b) E[r] (v_good - v_old), to rounding."""
    torch.manual_seed(0)
    x0 = torch.randn(5, 1, 1, 3, dtype=torch.float64)
    weights, rewards = (
        torch.rand(5, dtype=torch.float64).softmax(0),
        torch.rand(5, dtype=torch.float64),
    )
    time, x = 0.6, torch.randn(1, 1, 1, 3, dtype=torch.float64)
    velocities = (x - x0) / time  # of the straight ways through x to each picture
    shaped = weights.view(-1, 1, 1, 1)
    v_old = (shaped * velocities).sum(0, keepdim=True)
    good = weights * rewards
    v_good = (good.view(-1, 1, 1, 1) * velocities).sum(0, keepdim=True) / good.sum()
    wanted = v_old + (2 / b) * good.sum() * (v_good - v_old)

    times = torch.full((5,), time, dtype=torch.float64)

    def loss(v: torch.Tensor) -> torch.Tensor:
        five = (v.expand(5, -1, -1, -1), v_old.expand(5, -1, -1, -1), x.expand(5, -1, -1, -1))
        return (weights * nft_loss(*five, x0, times, rewards, b=b, adaptive=False)).sum()

    v = torch.zeros_like(v_old)
    gradient = torch.autograd.functional.jacobian(loss, v).flatten()
    hessian = torch.autograd.functional.hessian(loss, v).view(3, 3)
    found = v.flatten() - torch.linalg.solve(hessian, gradient)
    assert torch.allclose(found, wanted.flatten(), atol=1e-12)


def test_the_adaptive_weight_has_no_gradient_and_makes_errors_of_all_sizes_count_alike() -> (
    None
):
    torch.manual_seed(0)
    v_old, x0, noise = (torch.randn(2, 1, 2, 2) for _ in range(3))
    v = v_old.clone().requires_grad_()
    times = torch.tensor([0.3, 0.9])
    loss = nft_loss(v, v_old, noised(x0, noise, times), x0, times, torch.tensor([1.0, 0.0]))
    loss.sum().backward()
    miss = noised(x0, noise, times) - times.view(-1, 1, 1, 1) * v_old - x0
    weight = miss.abs().flatten(1).mean(1)
    assert torch.allclose(loss, (miss**2).flatten(1).mean(1) / weight)
    signs = torch.tensor(
        [1.0, -1.0]
    )  # of v- at its own v_old the error is that of the mirrored velocity
    by_hand = signs * -2 * times / weight / 4
    assert v.grad is not None and torch.allclose(
        v.grad, by_hand.view(-1, 1, 1, 1) * miss, atol=1e-6
    )


def test_advantages_compare_within_groups_and_scale_by_the_round() -> None:
    found = group_advantages([[1.0, 0.0], [1.0, 1.0], [0.0, None]])
    std = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]).std(correction=0).item() + 1e-4
    assert found == [pytest.approx([0.5 / std, -0.5 / std]), [0.0, 0.0], [0.0, 0.0]]
    assert group_advantages([[1e6, *[0.0] * 200]])[0][0] == 5.0
    assert group_advantages([[None]]) == [[0.0]]
    assert share_of(torch.tensor([-9.0, 0.0, 0.5, 9.0])).tolist() == [0.0, 0.5, 0.75, 1.0]


def test_the_clip_holds_what_has_moved_far_enough() -> None:
    new, old = torch.tensor([0.5, 0.5, 0.0]), torch.zeros(3)
    found = grpo_loss(new, old, torch.tensor([1.0, -1.0, 1.0]), clip=0.2)
    assert found.is_clipped.tolist() == [True, False, False]
    assert found.loss.tolist() == pytest.approx([-1.2, float(torch.tensor(0.5).exp()), -1.0])


def test_the_kl_of_a_step_is_that_of_its_gaussians() -> None:
    torch.manual_seed(0)
    x, v, other = (torch.randn(2, 1, 2, 2) for _ in range(3))
    now, then = torch.tensor([0.9, 0.5]), torch.tensor([0.8, 0.4])
    made, reference = (
        step("sde", x, one, now, then, level=0.7, near_one=0.9) for one in (v, other)
    )
    wanted = (
        kl_divergence(Normal(made.mean, made.std), Normal(reference.mean, reference.std))
        .flatten(1)
        .sum(1)
    )
    assert torch.allclose(step_kl(made, reference), wanted, rtol=1e-4)
    density = Normal(made.mean, made.std).log_prob(x).flatten(1).sum(1)
    assert torch.allclose(
        step("sde", x, v, now, then, level=0.7, near_one=0.9, reached=x).logprob,
        density,
        rtol=1e-4,
    )
    assert torch.equal(velocity_penalty(v, v), torch.zeros(2))
