"""Weights for the gap between engine and trainer, and which tokens DPPO drops, against tables worked out by hand."""

import math

import pytest
import torch

from ycore.trl.importance import (
    absolute_gap,
    behaviour_logps,
    effective_share,
    importance_ratio,
    keeps,
    old_by_completion,
    region_weights,
)

NAN = float("nan")
TRAINER = torch.log(torch.tensor([[0.4, 0.9, 0.1], [0.2, 0.5, 0.7]]))
ENGINE = torch.log(torch.tensor([[0.2, 0.3, 0.4], [0.4, NAN, 0.1]]))
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])  # the last token of the second sequence is padding

# ratios of the tokens: 2, 3, 1/4 and 1/2, 1 (unknown), 1 (padding); of the sequences: 3/2 and 1/2
TABLE = [
    ("token_truncate", None, 2.5, [[2, 2.5, 0.25], [0.5, 1, 1]]),
    ("token_truncate", 0.4, None, [[2, 3, 0.4], [0.5, 1, 1]]),
    ("token_mask", None, 2.5, [[2, 0, 0.25], [0.5, 1, 1]]),
    ("token_mask", 0.4, 2.5, [[2, 0, 0], [0.5, 1, 1]]),
    ("token_mask", None, None, [[2, 3, 0.25], [0.5, 1, 1]]),
    ("sequence_truncate", None, 1.2, [[1.2], [0.5]]),
    ("sequence_truncate", 0.6, 3.0, [[1.5], [0.6]]),
    ("sequence_mask", None, 1.2, [[0], [0.5]]),
    ("sequence_mask", 0.6, None, [[1.5], [0]]),
    ("sequence_mask", None, 3.0, [[1.5], [0.5]]),
]


@pytest.mark.parametrize(("mode", "clip_min", "clip_max", "expected"), TABLE)
def test_ratios_by_hand(
    mode: str, clip_min: float | None, clip_max: float | None, expected: list[list[float]]
) -> None:
    ratio = importance_ratio(
        TRAINER, ENGINE, MASK, mode=mode, clip_min=clip_min, clip_max=clip_max
    )
    torch.testing.assert_close(ratio, torch.tensor(expected, dtype=torch.float32))


def test_equal_logprobs_weigh_one_in_every_mode() -> None:
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        ratio = importance_ratio(TRAINER, TRAINER, MASK, mode=mode, clip_min=None, clip_max=3.0)
        assert torch.equal(ratio, torch.ones_like(ratio))


def test_the_gap_leaves_out_padding_and_unknown_tokens() -> None:
    gap = absolute_gap(TRAINER, ENGINE, MASK)
    torch.testing.assert_close(
        gap, torch.tensor([math.log(2), math.log(3), math.log(4), math.log(2)])
    )


def test_no_known_token_has_no_gap() -> None:
    assert absolute_gap(TRAINER, torch.full_like(ENGINE, NAN), MASK).numel() == 0


REGION = [  # probability when written, now, sign of the advantage; kept by TV and by KL; binary KL
    (0.5, 0.64, 1, True, True, 0.04082),
    (0.5, 0.75, 1, False, False, 0.14384),
    (0.05, 0.15, 1, True, False, 0.05073),
    (0.001, 0.05, 1, True, True, 0.04633),
    (0.9, 0.76, -1, True, False, 0.06462),
    (0.95, 0.78, -1, False, False, 0.11323),
    (0.01, 0.0001, -1, True, True, 0.0362),
]


@pytest.mark.parametrize(("old", "new", "sign", "by_tv", "by_kl", "kl"), REGION)
def test_which_tokens_are_dropped(
    old: float, new: float, sign: int, by_tv: bool, by_kl: bool, kl: float
) -> None:
    logps, behaviour = torch.tensor([[math.log(new)]]), torch.tensor([[math.log(old)]])
    advantages = torch.tensor([[float(sign)]])
    assert keeps("dppo-tv", logps, behaviour, advantages).item() == by_tv
    assert keeps("dppo-kl", logps, behaviour, advantages).item() == by_kl
    assert all(
        keeps(name, logps, behaviour, -advantages).item() for name in ("dppo-tv", "dppo-kl")
    ), "it leads back"
    assert old * math.log(old / new) + (1 - old) * math.log(
        (1 - old) / (1 - new)
    ) == pytest.approx(kl, abs=1e-5)
    weight = region_weights("dppo-tv", logps, behaviour, advantages, torch.ones(1, 1)).item()
    assert weight == pytest.approx(min(new / old, 20.0) if by_tv else 0.0)


def test_a_certain_token_has_a_finite_distance() -> None:
    certain, half = torch.tensor([0.0]), torch.tensor([math.log(0.5)])
    assert keeps("dppo-kl", certain, half, torch.tensor([1.0])).tolist() == [False]
    assert keeps("dppo-kl", certain, certain, torch.tensor([1.0])).tolist() == [True]


def test_the_effective_share_of_the_tokens() -> None:
    assert effective_share(torch.zeros(7)) == pytest.approx(1.0)
    assert effective_share(torch.tensor([0.0, math.log(3.0)])) == pytest.approx(16 / 10 / 2)
    assert effective_share(torch.tensor([0.0, 800.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert effective_share(torch.empty(0)) == 1.0


def test_who_wrote_the_tokens() -> None:
    now, old = torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -4.0])
    assert behaviour_logps(torch.tensor([math.nan, -5.0]), old, now).tolist() == [-1.0, -5.0]
    assert torch.equal(behaviour_logps(None, old, now), old) and torch.equal(
        behaviour_logps(None, None, now), now
    )


LOG_RATIOS = torch.tensor([[0.1, -0.2, 0.5, 1.2]], dtype=torch.float64)
WEIGHTS = [1.105171, 0.818731, 1.648721, 3.320117]


@pytest.mark.parametrize(
    ("mode", "low", "high", "expected"),
    [
        ("token_truncate", None, 2.0, [*WEIGHTS[:3], 2.0]),
        ("token_mask", 0.5, 2.0, [*WEIGHTS[:3], 0.0]),
        ("sequence_truncate", None, None, [4.953032]),
        ("sequence_truncate", None, 3.0, [3.0]),
        ("sequence_mask", None, 3.0, [0.0]),
    ],
)
def test_weights_of_one_completion(
    mode: str, low: float | None, high: float | None, expected: list[float]
) -> None:
    none, mask = torch.zeros_like(LOG_RATIOS), torch.ones_like(LOG_RATIOS)
    weights = importance_ratio(LOG_RATIOS, none, mask, mode=mode, clip_min=low, clip_max=high)
    assert weights[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_regions_of_weights() -> None:
    """The geometric mean of the four is exp(0.4) = 1.491825; of the same with their negatives it is 1."""
    none, advantages, mask = torch.zeros_like(LOG_RATIOS), torch.ones(1, 1), torch.ones(1, 8)
    assert region_weights("icepop", LOG_RATIOS, none, advantages, mask[:, :4])[
        0
    ].tolist() == pytest.approx(WEIGHTS, abs=1e-6)
    outside = region_weights(
        "icepop", torch.tensor([[1.7, -0.8, 0.0]]), torch.zeros(1, 3), advantages, mask[:, :3]
    )
    assert outside.tolist() == [[0.0, 0.0, 1.0]], "above 5 and below a half"
    assert not region_weights("geometric", LOG_RATIOS, none, advantages, mask[:, :4]).any()
    both = torch.cat([LOG_RATIOS, -LOG_RATIOS], dim=1)
    weights = region_weights("geometric", both, torch.zeros_like(both), advantages, mask)
    assert weights[0, :4].tolist() == pytest.approx(WEIGHTS, abs=1e-6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0]])
    assert not region_weights("geometric", both, torch.zeros_like(both), advantages, mask).any()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratios", [(0.05, 0.1), (0.3, -0.25), (0.2, 0.2), (-0.2, -0.3)])
def test_by_completion_the_ratio_is_the_product_and_so_is_its_clip(
    log_ratios: tuple[float, float], advantage: float
) -> None:
    """Value and gradient of -min(R A, clip(R) A), R = exp of the sum; the third token is padding."""
    old = torch.tensor([[-1.0, -2.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0]])
    logps = (old + torch.tensor([[*log_ratios, 7.0]])).requires_grad_(True)
    ratio = (logps - old_by_completion(logps.detach(), old, mask)).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    (actual,) = torch.autograd.grad((loss * mask).sum(), logps)
    whole = ((logps - old) * mask).sum().exp()
    expected = -torch.minimum(whole * advantage, whole.clamp(0.8, 1.2) * advantage)
    assert loss[mask.bool()].tolist() == pytest.approx([expected.item()] * 2, abs=1e-12)
    (gradient,) = torch.autograd.grad(expected, logps)
    assert torch.allclose(actual, gradient, atol=1e-12)
