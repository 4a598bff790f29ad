"""Steps and losses where the answers are known: marginals, densities, ratios, the optimum, the clip, the KL."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

from ycore.flow.flow_math import (
    SamplingPath,
    draw,
    euler_step,
    group_advantages,
    grpo_loss,
    nft_loss,
    noise_of,
    noised,
    sde_step,
    share_of,
    step_kl,
    time_grid,
    velocity_penalty,
)

MEAN, STD = 1.0, 0.5


def gaussian_velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """E[eps - x0 | x] where x0 is N(MEAN, STD^2): linear in x."""
    t = t.view(-1, 1, 1, 1).to(x.dtype)
    variance = (1 - t) ** 2 * STD**2 + t**2
    return -MEAN + (t - (1 - t) * STD**2) / variance * (x - (1 - t) * MEAN)


def marginal(rule: str, level: float, times: tuple[float, ...]) -> tuple[float, float]:
    """Mean and std of what the steps lead to from N(0, 1), exactly: each step is linear and adds its own variance."""
    mean, variance = 0.0, 1.0
    for now, then in pairwise(times):
        x = torch.tensor([[[[0.0]]], [[[1.0]]]])
        ends = [torch.full((2,), time) for time in (now, then)]
        v = gaussian_velocity(x, ends[0])
        ends_at, std = euler_step(x, v, *ends), 0.0
        if rule == "sde":
            step = sde_step(x, v, *ends, SamplingPath(times, level=level))
            ends_at, std = step.mean, float(step.std.flatten()[0])
        at_zero, at_one = ends_at.flatten().tolist()
        mean = at_zero + (at_one - at_zero) * mean
        variance = (at_one - at_zero) ** 2 * variance + std**2
    return mean, math.sqrt(variance)


@pytest.mark.parametrize(
    ("rule", "level", "stds"),
    [
        ("ode", 0.0, (0.369, 0.431, 0.464, 0.482, 0.499)),
        ("sde", 0.7, (0.460, 0.480, 0.491, 0.497, 0.501)),
        ("sde", math.sqrt(2), (0.524, 0.504, 0.501, 0.500, 0.500)),
    ],
)
def test_sampling_with_noise_and_without_lead_to_the_same_marginal(
    rule: str, level: float, stds: tuple[float, ...]
) -> None:
    marginals = [marginal(rule, level, time_grid(num)) for num in (5, 10, 20, 40, 1000)]
    assert [std for _, std in marginals] == pytest.approx(stds, abs=1.1e-3)
    assert all(mean == pytest.approx(MEAN, abs=1e-4) for mean, _ in marginals)


class Net(nn.Module):
    """A small convolution over point and time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 1, 3, padding=1)
        )

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(
            torch.cat([x, t.view(-1, 1, 1, 1).expand_as(x)], dim=1)
        )
        return result


def test_the_ratio_of_the_first_pass_is_one_to_the_bit() -> None:
    net, path = Net(), SamplingPath(time_grid(6), "sde", 0.7, length=2)
    firsts = [number % 3 for number in range(32)]
    with torch.no_grad():
        drawn = draw(net, path, list(range(32)), (1, 8, 8), firsts=firsts)
    assert drawn.points.shape == (32, 3, 1, 8, 8) and drawn.logprobs.shape == (32, 2)
    times = torch.tensor(path.times)
    for rows in (slice(0, 4), slice(4, 32)):  # other batches than the one that was sampled
        for number in range(2):
            places = torch.tensor(firsts[rows]) + number
            x, reached = drawn.points[rows, number], drawn.points[rows, number + 1]
            step = sde_step(
                x,
                net(x, times[places]),
                times[places],
                times[places + 1],
                path,
            )
            old = drawn.logprobs[rows, number]
            clipped = grpo_loss(step.logprob(reached), old, torch.ones(len(x)), clip=0.2)
            assert torch.equal(clipped.ratio, torch.ones(len(x)))


def test_a_seed_gives_the_same_picture_in_any_batch() -> None:
    net, path = Net(), SamplingPath(time_grid(4), "sde", 0.7, length=2)
    with torch.no_grad():
        whole = draw(net, path, [3, 5, 7, 9], (1, 8, 8), firsts=[0, 1, 0, 1])
        part = draw(net, path, [9, 5], (1, 8, 8), firsts=[1, 1])
    assert torch.equal(whole.pictures[[3, 1]], part.pictures)
    assert torch.equal(whole.logprobs[[3, 1]], part.logprobs)
    assert torch.equal(noise_of(5, (3,)), noise_of(5, (3,))) and not torch.equal(
        noise_of(5, (3,)), noise_of(6, (3,))
    )


def test_euler_and_heun_follow_the_same_way_and_heun_is_nearer_to_its_end() -> None:
    seeds = list(range(64))
    exact, euler, heun = (
        draw(gaussian_velocity, SamplingPath(time_grid(num), rule), seeds, (1, 1, 1)).pictures
        for num, rule in ((2000, "ode"), (10, "ode"), (10, "heun"))
    )
    assert (heun - exact).abs().max() < (euler - exact).abs().max() / 4


def test_the_grid_is_that_of_diffusers_scheduler() -> None:
    scheduler = pytest.importorskip("diffusers").FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(sigmas=[1 - number / 10 for number in range(10)])
    assert torch.tensor(time_grid(10, shift=3.0)) == pytest.approx(scheduler.sigmas, abs=1e-6)
    x, v = torch.randn(2, 1, 4, 4), torch.randn(2, 1, 4, 4)
    now, then = (scheduler.sigmas[place].expand(2) for place in (0, 1))
    ours = euler_step(x, v, now, then)
    assert torch.allclose(
        scheduler.step(v, scheduler.timesteps[0], x).prev_sample, ours, atol=1e-6
    )


def test_steps_with_noise_lie_in_the_first_half_and_follow_from_seed_and_position() -> None:
    two = SamplingPath(time_grid(10), length=2)
    firsts = [two.window(0, position) for position in range(200)]
    assert set(firsts) == {0, 1, 2, 3}
    assert firsts == [two.window(0, position) for position in range(200)]
    nine = SamplingPath(time_grid(10), length=9)
    assert {nine.window(0, position) for position in range(9)} == {0}


def test_the_policy_gradient_is_that_of_autograd() -> None:
    """A linear velocity `w0 + w1 x` a step and the reward -(x - 2)^2: its mean is exact by recursion."""
    torch.manual_seed(0)
    path = SamplingPath(time_grid(4), "sde", 0.7, length=4)
    weights = torch.randn(path.num_steps, 2, dtype=torch.float32) * 0.3
    times = torch.tensor(path.times)

    def exact(w: torch.Tensor) -> torch.Tensor:
        mean, variance = torch.zeros(()), torch.ones(())
        for number in range(path.num_steps):
            x = torch.tensor([[[[0.0]]], [[[1.0]]]])
            v = w[number, 0] + w[number, 1] * x
            now, then = (times[place].expand(2) for place in (number, number + 1))
            made = sde_step(x, v, now, then, path)
            slope = (made.mean[1] - made.mean[0]).squeeze()
            mean, variance = (
                made.mean[0].squeeze() + slope * mean,
                slope**2 * variance + made.std[0].squeeze() ** 2,
            )
        return -(variance + (mean - 2) ** 2)

    wanted = torch.autograd.functional.jacobian(exact, weights).flatten()
    x, scores = torch.randn(200_000, 1, 1, 1), []
    for number in range(path.num_steps):
        w = weights[number].expand(len(x), 2).clone().requires_grad_()
        now, then = (times[place].expand(len(x)) for place in (number, number + 1))
        v = w[:, 0].view(-1, 1, 1, 1) + w[:, 1].view(-1, 1, 1, 1) * x
        made = sde_step(x, v, now, then, path)
        reached = (made.mean + made.std * torch.randn_like(x)).detach()
        scores.append(torch.autograd.grad(made.logprob(reached).sum(), w)[0])
        x = reached
    reward = -((x.flatten() - 2) ** 2)
    sample_gradients = (reward - reward.mean())[:, None] * torch.cat(scores, dim=1)
    deviations = (sample_gradients.mean(0) - wanted) / (
        sample_gradients.std(0) / math.sqrt(len(x))
    )
    assert deviations.abs().max() < 4
    assert (
        torch.nn.functional.cosine_similarity(sample_gradients.mean(0), wanted, dim=0) > 0.999
    )


# -- two modes at (-2, 0) and (2, 0), reward 1 on the right, KL with weight 1/2: the tilt has e^2 / (1 + e^2) right ----

MODES, MODE_STD, WEIGHT = 2.0, 0.5, 0.5
TILTED = math.exp(1 / WEIGHT) / (1 + math.exp(1 / WEIGHT))


def mixture_velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """E[eps - x0 | x] of an even mixture of two Gaussians in the plane; the points are [B, 1, 1, 2]."""
    t = t.view(-1, 1, 1, 1)
    variance = (1 - t) ** 2 * MODE_STD**2 + t**2
    centre = torch.tensor([MODES, 0.0])
    right = torch.sigmoid(2 * (1 - t) * MODES * x[..., :1] / variance)
    mean = (2 * right - 1) * centre
    return -mean + (t - (1 - t) * MODE_STD**2) / variance * (x - (1 - t) * mean)


@pytest.mark.parametrize(
    ("level", "reach"), [(0.1, 0.584), (0.3, 0.731), (math.sqrt(2), 0.880)]
)
def test_what_a_kl_leaves_to_reach_depends_on_the_noise(level: float, reach: float) -> None:
    """From a starting point the best policy has `h e^2 / (h e^2 + 1 - h)` right, with h the model's own share. Only
    with a = sqrt(2) does the starting point decide nothing, and the mean is the tilt's (arXiv 2409.08861)."""
    num_starts, num_ways, path = 400, 60, SamplingPath(time_grid(20), level=level)
    torch.manual_seed(0)
    x = torch.randn(num_starts, 1, 1, 2).repeat_interleave(num_ways, dim=0)
    times = torch.tensor(path.times)
    for number in range(path.num_steps):
        now, then = (times[place].expand(len(x)) for place in (number, number + 1))
        v = mixture_velocity(x, now)
        step = sde_step(x, v, now, then, path)
        x = step.mean + step.std * torch.randn_like(x)
    h = (x[..., 0] > 0).float().view(num_starts, num_ways).mean(1)
    gain = math.exp(1 / WEIGHT)
    share_right = float((h * gain / (h * gain + 1 - h)).mean())
    assert share_right == pytest.approx(reach, abs=0.04)
    assert pytest.approx(0.881, abs=1e-3) == TILTED
    distance = TILTED - share_right
    assert (distance < 0.02) == (level > 1.4), f"{distance:.3f} below the tilt"


# -- losses ------------------------------------------------------------------------------------------------------------


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
    optimum = v.flatten() - torch.linalg.solve(hessian, gradient)
    assert torch.allclose(optimum, wanted.flatten(), atol=1e-12)


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
    advantages = group_advantages([[1.0, 0.0], [1.0, 1.0], [0.0, None]])
    std = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]).std(correction=0).item() + 1e-4
    assert advantages == [pytest.approx([0.5 / std, -0.5 / std]), [0.0, 0.0], [0.0, 0.0]]
    assert group_advantages([[1e6, *[0.0] * 200]])[0][0] == 5.0
    assert group_advantages([[None]]) == [[0.0]]
    assert share_of(torch.tensor([-9.0, 0.0, 0.5, 9.0])).tolist() == [0.0, 0.5, 0.75, 1.0]


def test_the_clip_holds_what_has_moved_far_enough() -> None:
    new, old = torch.tensor([0.5, 0.5, 0.0]), torch.zeros(3)
    surrogate = grpo_loss(new, old, torch.tensor([1.0, -1.0, 1.0]), clip=0.2)
    assert surrogate.is_clipped.tolist() == [True, False, False]
    assert surrogate.loss.tolist() == pytest.approx(
        [-1.2, float(torch.tensor(0.5).exp()), -1.0]
    )


def test_the_kl_of_a_step_is_that_of_its_gaussians() -> None:
    torch.manual_seed(0)
    x, v, other = (torch.randn(2, 1, 2, 2) for _ in range(3))
    now, then = torch.tensor([0.9, 0.5]), torch.tensor([0.8, 0.4])
    made, reference = (
        sde_step(x, velocity, now, then, SamplingPath((1.0, 0.9), level=0.7))
        for velocity in (v, other)
    )
    wanted = kl_divergence(
        Normal(made.mean, made.std), Normal(reference.mean, reference.std)
    ).flatten(1)
    assert torch.allclose(step_kl(made, reference), wanted.sum(1), rtol=1e-4)
    density = Normal(made.mean, made.std).log_prob(x).flatten(1).sum(1)
    assert torch.allclose(made.logprob(x), density, rtol=1e-4)
    assert torch.equal(velocity_penalty(v, v), torch.zeros(2))
