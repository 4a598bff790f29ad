"""GAE, macro actions, whitening, explained variance and the value loss, against tables worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from ycore.trl.returns import (
    advantages_and_targets,
    explained_variance,
    last_token,
    to_go,
    value_losses,
    whitened,
)

A_REWARDS, A_VALUES = [0.0, 0.0, 0.0, 1.0], [0.2, 0.4, 0.5, 0.7]
B_REWARDS, B_VALUES = [0.0, 0.0, 0.0], [0.1, 0.3, 0.2]


def alone(total: Tensor) -> Tensor:
    """One rank."""
    return total


def of_completion(rewards: list[float], values: list[float], **settings: float) -> list[Tensor]:
    """Advantages and targets of one completion; lam stands for both unless the target's is given."""
    rows = [torch.tensor([row], dtype=torch.float64) for row in (rewards, values)]
    settings = {"target_lam": settings.get("lam", 1.0), "lam": 1.0, **settings}
    outputs = advantages_and_targets(*rows, torch.ones_like(rows[0]), **settings)  # type: ignore[arg-type]
    return [row[0] for row in outputs]


def near(actual: Tensor, expected: list[float]) -> None:
    assert actual.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_completion_that_ended() -> None:
    advantages, targets = of_completion(A_REWARDS, A_VALUES, lam=0.95)
    near(advantages, [0.732712, 0.56075, 0.485, 0.3])
    near(targets, [0.932712, 0.96075, 0.985, 1])
    advantages, targets = of_completion(A_REWARDS, A_VALUES, lam=1.0)
    near(advantages, [0.8, 0.6, 0.5, 0.3])
    near(targets, [1, 1, 1, 1])
    advantages, targets = of_completion(A_REWARDS, A_VALUES, lam=0.0)
    near(advantages, [0.2, 0.1, 0.2, 0.3])
    near(targets, [0.4, 0.5, 0.7, 1])


def test_lambda_follows_the_length_and_the_targets_have_their_own() -> None:
    advantages, targets = of_completion(A_REWARDS, A_VALUES, lam=0.0, alpha=0.4, target_lam=1.0)
    near(advantages, [0.281445, 0.217187, 0.3125, 0.3])  # lambda 0.375
    near(targets, [1, 1, 1, 1])
    clamped, _ = of_completion(A_REWARDS, A_VALUES, lam=1.0, alpha=0.05)  # 1 - 1 / 0.2 = -4
    near(clamped, [0.2, 0.1, 0.2, 0.3])


def test_the_kl_is_in_the_rewards() -> None:
    kl = [0.1, -0.05, 0.2, 0.0]
    rewards = [reward - 0.1 * token for reward, token in zip(A_REWARDS, kl, strict=True)]
    near(of_completion(rewards, A_VALUES, lam=0.95)[0], [0.709413, 0.54675, 0.465, 0.3])


def test_a_completion_that_was_cut() -> None:
    advantages, targets = of_completion(B_REWARDS, B_VALUES, lam=0.95)
    near(advantages, [-0.0755, -0.29, -0.2])
    near(targets, [0.0245, 0.01, 0])


def test_a_reward_one_token_off_is_another_advantage() -> None:
    """The control: TRL's own PPO put the reward one token after the end, where another value stood."""
    wrong, _ = of_completion([0.0, 0.0, 0.0, 0.0, 1.0], [*A_VALUES, 0.9], lam=0.95)
    near(wrong, [0.728426, 0.556237, 0.48025, 0.295, 0.1])
    right, _ = of_completion(A_REWARDS, A_VALUES, lam=0.95)
    assert (wrong[:4] - right).abs().max() > 4e-3


def padded() -> tuple[Tensor, Tensor, Tensor]:
    """A, and B with padding of value 0.9: rewards, values, mask."""
    values = torch.tensor([A_VALUES, [*B_VALUES, 0.9]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    return torch.tensor([A_REWARDS, [*B_REWARDS, 0.0]]), values, mask


def test_padding_is_no_action() -> None:
    rewards, values, mask = padded()
    advantages, _ = advantages_and_targets(rewards, values, mask, lam=0.95, target_lam=1.0)
    near(advantages[1], [-0.0755, -0.29, -0.2, 0])
    unmasked, _ = advantages_and_targets(
        rewards, values, torch.ones_like(mask), lam=0.95, target_lam=1.0
    )
    near(unmasked[1], [-0.034888, -0.24725, -0.155, -0.9])  # the control


def test_tokens_of_an_environment_are_skipped() -> None:
    """With tokens of another between its own, a completion has the advantages that it has without them."""
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0]])
    rewards = torch.tensor([[0.0, 0, 7, 7, 0, 1, 7]])
    values = torch.tensor([[0.2, 0.4, 9, 9, 0.5, 0.7, 9]])
    advantages, targets = advantages_and_targets(
        rewards, values, mask, lam=0.95, target_lam=1.0
    )
    near(advantages[0], [0.732712, 0.56075, 0, 0, 0.485, 0.3, 0])
    near(targets[0], [1, 1, 0, 0, 1, 1, 0])
    assert last_token(mask).tolist() == [[False] * 5 + [True, False]]


MACRO_KL = [0.2, 0.0, -0.1, 0.3, 0.1, 0.0, 0.1]
MACRO_REWARDS = [-0.1 * kl + (place == 6) for place, kl in enumerate(MACRO_KL)]
MACRO_VALUES = [0.1, 0.2, 0.3, 0.3, 0.5, 0.6, 0.8]


def test_macro_actions() -> None:
    near(
        of_completion(MACRO_REWARDS, MACRO_VALUES, lam=0.95)[0],
        [0.697508, 0.650008, 0.578956, 0.598901, 0.451475, 0.3805, 0.19],
    )
    advantages, targets = of_completion(MACRO_REWARDS, MACRO_VALUES, lam=0.95, macro_tokens=3)
    near(advantages, [0.706808] * 3 + [0.473833] * 3 + [0.19])
    near(targets, [0.906808] * 3 + [0.9405] * 3 + [0.99])
    near(of_completion(MACRO_REWARDS, MACRO_VALUES, lam=0.95, macro_tokens=7)[0], [0.54] * 7)


def test_whitening_is_over_the_tokens_of_all_ranks() -> None:
    rewards, values, mask = padded()
    advantages, _ = advantages_and_targets(rewards, values, mask, lam=0.95, target_lam=1.0)
    both = whitened(advantages, mask, alone)
    right = [1.278632, 0.852988, 0.665491, 0.207577, -0.721864, -1.252797, -1.030028]
    near(both[mask.bool()], right)
    sums: dict[int, list[Tensor]] = {0: [], 1: []}
    for rank in (0, 1):  # each rank alone, to learn its sums

        def note(total: Tensor, rank: int = rank) -> Tensor:
            sums[rank].append(total)
            return total

        alone_here = whitened(advantages[rank : rank + 1], mask[rank : rank + 1], note)
        if rank == 0:
            near(
                alone_here[0], [1.187963, 0.229314, -0.192974, -1.224303]
            )  # the control: signs flip
    for rank in (0, 1):
        counts = sums[0][0] + sums[1][0]
        mean = counts[1] / counts[0]
        squares = torch.where(mask.bool(), advantages - mean, 0).square().sum().reshape(1)
        answers = iter([counts, squares])
        together = whitened(
            advantages[rank : rank + 1],
            mask[rank : rank + 1],
            lambda _, answers=answers: next(answers),
        )
        assert torch.allclose(together, both[rank : rank + 1])


def test_reinforce_plus_plus() -> None:
    """Scores 1 and 0; beta 0.1 times k1 = log pi_old / pi_ref inside the reward; whitened over all tokens."""
    old = torch.tensor([[0.5, 0.25, 0.8], [0.6, 0.2, 1.0]], dtype=torch.float64).log()
    reference = torch.tensor([[0.4, 0.5, 0.8], [0.6, 0.4, 1.0]], dtype=torch.float64).log()
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    rewards = last_token(mask) * torch.tensor([[1.0], [0.0]]) - 0.1 * (old - reference) * mask
    returns = to_go(rewards)
    near(returns[mask.bool()], [1.047, 1.069315, 1, 0.069315, 0.069315])
    expected = [0.744967, 0.786944, 0.656551, -1.094231, -1.094231]
    near(whitened(returns, mask, alone)[mask.bool()], expected)
    plain = to_go(last_token(mask) * torch.tensor([[1.0], [0.0]]).double())
    near(whitened(plain, mask, alone)[mask.bool()], [0.730297] * 3 + [-1.095445] * 2)


def test_explained_variance() -> None:
    _, values, mask = padded()
    returns = torch.tensor([[1.0, 1, 1, 1], [0.0, 0, 0, 5]])
    assert explained_variance(values, returns, mask, alone) == pytest.approx(0.35, abs=1e-6)
    assert explained_variance(values, torch.ones_like(returns), mask, alone) is None
    assert explained_variance(returns, returns, mask, alone) == pytest.approx(1)


@pytest.mark.parametrize(
    ("value", "target", "loss", "slope", "wide_loss", "wide_slope"),
    [
        (0.8, 1.0, 0.045, 0.0, 0.02, -0.2),
        (0.8, 0.0, 0.32, 0.8, 0.32, 0.8),
        (1.2, 1.0, 0.045, 0.0, 0.02, 0.2),
        (0.3, 1.0, 0.245, -0.7, 0.245, -0.7),
    ],
)
def test_the_value_loss_and_its_gradient(
    value: float, target: float, loss: float, slope: float, wide_loss: float, wide_slope: float
) -> None:
    for clip, expected, gradient in ((0.2, loss, slope), (0.5, wide_loss, wide_slope)):
        moving = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        value_loss = value_losses(
            moving, torch.tensor(0.5).double(), torch.tensor(target).double(), clip
        )
        value_loss.backward()  # type: ignore[no-untyped-call]
        assert (value_loss.item(), moving.grad.item()) == pytest.approx(
            (expected, gradient), abs=1e-6
        )  # type: ignore[union-attr]


def test_without_values_it_is_reinforce_and_with_the_groups_mean_grpo_unscaled() -> None:
    scores = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    mask = (torch.arange(5) < torch.tensor([5, 3, 1, 4, 2, 5, 5, 1]).unsqueeze(1)).long()
    rewards = last_token(mask) * scores.unsqueeze(1)
    reinforce, _ = advantages_and_targets(
        rewards, torch.zeros(8, 5), mask, lam=1.0, target_lam=1.0
    )
    assert torch.equal(reinforce, scores.unsqueeze(1).double() * mask)
    means = scores.view(2, 4).mean(dim=1).repeat_interleave(4).unsqueeze(1)
    grpo, _ = advantages_and_targets(rewards, means.expand(8, 5), mask, lam=1.0, target_lam=1.0)
    assert torch.allclose(grpo, (scores.unsqueeze(1) - means).double() * mask)


def test_it_is_the_mixture_of_all_n_step_advantages() -> None:
    """The definition, arXiv 1506.02438, eq. 16: (1 - lam) * sum over n of lam^(n - 1) * the n-step advantage."""
    torch.manual_seed(0)
    rewards, values = torch.randn(6).double(), torch.randn(6).double()
    advantages, _ = of_completion(rewards.tolist(), values.tolist(), lam=0.7)
    for start in range(6):
        steps = []
        for n in range(1, 400):
            end = min(start + n, 6)
            after = values[end] if end < 6 else 0.0
            steps.append(float(rewards[start:end].sum() + after - values[start]))
        mixed = (1 - 0.7) * math.fsum(0.7**n * step for n, step in enumerate(steps))
        assert advantages[start].item() == pytest.approx(mixed, abs=1e-9)
