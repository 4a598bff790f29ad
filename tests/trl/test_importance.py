"""Weights for the gap between engine and trainer, and which tokens DPPO drops, against tables worked out by hand."""

import math

import pytest
import torch

from ycore.trl.importance import absolute_gap, behaviour_logps, effective_share, importance_ratio, keeps, region_weights

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
def test_ratios_by_hand(mode: str, clip_min: float | None, clip_max: float | None, expected: list[list[float]]) -> None:
    ratio = importance_ratio(TRAINER, ENGINE, MASK, mode=mode, clip_min=clip_min, clip_max=clip_max)
    torch.testing.assert_close(ratio, torch.tensor(expected, dtype=torch.float32))


def test_equal_logprobs_weigh_one_in_every_mode() -> None:
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        ratio = importance_ratio(TRAINER, TRAINER, MASK, mode=mode, clip_min=None, clip_max=3.0)
        assert torch.equal(ratio, torch.ones_like(ratio))


def test_the_gap_leaves_out_padding_and_unknown_tokens() -> None:
    gap = absolute_gap(TRAINER, ENGINE, MASK)
    torch.testing.assert_close(gap, torch.tensor([math.log(2), math.log(3), math.log(4), math.log(2)]))


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
def test_which_tokens_are_dropped(old: float, new: float, sign: int, by_tv: bool, by_kl: bool, kl: float) -> None:
    logps, behaviour = torch.tensor([[math.log(new)]]), torch.tensor([[math.log(old)]])
    advantages = torch.tensor([[float(sign)]])
    assert keeps("dppo-tv", logps, behaviour, advantages).item() == by_tv
    assert keeps("dppo-kl", logps, behaviour, advantages).item() == by_kl
    assert all(keeps(name, logps, behaviour, -advantages).item() for name in ("dppo-tv", "dppo-kl")), "it leads back"
    assert old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new)) == pytest.approx(kl, abs=1e-5)
    weight = region_weights("dppo-tv", logps, behaviour, advantages).item()
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
    assert torch.equal(behaviour_logps(None, old, now), old) and torch.equal(behaviour_logps(None, None, now), now)
