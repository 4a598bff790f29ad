"""The exact divergences of distillation: by hand, and their gradients by autograd of the definition."""

import math

import pytest
import torch
from torch import Tensor

from tests.trl.divergence_definitions import exact, gradient, kl
from ycore.trl.distill import exact_divergence

NAMES = ("forward-kl", "js", "reverse-kl")


STUDENT, TEACHER = (
    torch.tensor([0.5, 0.3, 0.15, 0.05]).double(),
    torch.tensor([0.4, 0.4, 0.1, 0.1]).double(),
)


def of_logits(
    name: str, policy: Tensor, teacher: Tensor, beta: float = 0.5
) -> tuple[float, list[float]]:
    """The exact divergence, and its gradient by the policy's logits."""
    logits = policy.log().requires_grad_(True)
    value = exact_divergence(name, logits.log_softmax(-1), teacher.log(), beta=beta)
    return value.item(), gradient(value, logits).tolist()


@pytest.mark.parametrize(
    ("name", "beta", "value"),
    [
        ("reverse-kl", 0.5, 0.051430),
        ("forward-kl", 0.5, 0.054584),
        ("js", 0.1, 0.004867),
        ("js", 0.5, 0.013132),
        ("js", 0.9, 0.004643),
    ],
)
def test_exact_values_by_hand_and_their_gradients_by_definition(
    name: str, beta: float, value: float
) -> None:
    divergence, slopes = of_logits(name, STUDENT, TEACHER, beta)
    assert divergence == pytest.approx(value, abs=1e-6)
    logits = STUDENT.log().requires_grad_(True)
    policy = logits.softmax(-1)
    middle = beta * TEACHER + (1 - beta) * policy
    jensen = beta * kl(TEACHER, middle) + (1 - beta) * kl(policy, middle)
    defined = jensen if name == "js" else exact(name, policy, TEACHER)
    assert slopes == pytest.approx(gradient(defined, logits).tolist(), abs=1e-9)


def test_exact_gradients_by_hand() -> None:
    by_hand = {
        "reverse-kl": [0.085857, -0.101733, 0.053105, -0.037229],
        "forward-kl": [0.1, -0.1, 0.05, -0.05],
    }
    for name, slopes in by_hand.items():
        assert of_logits(name, STUDENT, TEACHER)[1] == pytest.approx(slopes, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_equal_models_are_at_distance_0_with_gradient_0(name: str) -> None:
    """Exactly, in float32: of rounding Adam would make a step."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    values = exact_divergence(
        name, logits.log_softmax(-1), logits.detach().log_softmax(-1), beta=0.3
    )
    assert values.tolist() == [0, 0, 0] and not gradient(values.sum(), logits).any()


@pytest.mark.parametrize("name", NAMES)
def test_far_apart_it_is_finite_in_float32(name: str) -> None:
    logits = torch.tensor([200.0, 0.0, -200.0]).requires_grad_(True)
    value = exact_divergence(
        name, logits.log_softmax(-1), torch.tensor([-200.0, 0.0, 200.0]).log_softmax(-1)
    )
    assert value.item() == pytest.approx(math.log(2) if name == "js" else 400, rel=1e-5)
    assert gradient(value, logits).isfinite().all()


def test_the_likeliest_tokens_alone_give_no_divergence() -> None:
    """Which is why no top-k is offered: by hand, it is below 0, or lower the less mass they have."""
    for tokens, reverse, forward in (
        ([0, 1, 2], 0.086087, -0.014731),
        ([0, 1, 3], -0.009390, 0.095130),
    ):
        p, q = STUDENT[tokens], TEACHER[tokens]
        raw = [
            exact_divergence(name, p.log(), q.log()).item()
            for name in ("reverse-kl", "forward-kl")
        ]
        assert raw == pytest.approx([reverse, forward], abs=1e-6) and min(raw) < 0
    p, q = STUDENT[:3], TEACHER[:3]
    whole = [
        of_logits(name, p / p.sum(), q / q.sum())[0] for name in ("reverse-kl", "forward-kl")
    ]
    assert whole == pytest.approx([0.036551, 0.037699], abs=1e-6)
