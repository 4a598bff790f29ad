import math

import pytest
import torch

from ycore.trl.batches import absolute_gap, importance_ratio

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
