"""The readers of the recipes `digits`: both read digits that neither has seen, and they are two of a kind."""

import numpy as np
import pytest
from ycore_recipes import digits


def test_both_readers_read_digits_that_they_have_not_seen() -> None:
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    pillow = pytest.importorskip("PIL.Image")
    dataset = load_digits()
    rows = np.random.default_rng(0).permutation(len(dataset.target))[1400:]
    images = [
        pillow.fromarray((picture * 255 / 16).round().astype(np.uint8))
        for picture in dataset.images[rows]
    ]
    labels = dataset.target[rows].tolist()
    assert np.mean(digits.hits(images, labels)) > 0.97
    assert np.mean(digits.judge(images, labels)) > 0.97
    wrong = [(label + 1) % 10 for label in labels]
    assert (
        np.mean(digits.hits(images, wrong)) < 0.02
        and np.mean(digits.judge(images, wrong)) < 0.02
    )


def test_thrift_is_for_ink_that_is_not_there() -> None:
    pillow = pytest.importorskip("PIL.Image")
    blank, full = (pillow.new("L", (8, 8), value) for value in (0, 255))
    assert digits.thrift([blank, full]) == [1.0, 0.0]
