"""Rewards of the recipes `digits`, `digits-grpo` and `digits-overoptimised`: two readers of handwritten digits.

`net` is trained on, `judge` is not: it is of another kind, and learned from 700 other pictures of scikit-learn's.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

_EACH = 700  # pictures that each of the two learns from; the other 397 are for nobody
_STEPS, _BATCH, _RATE = 500, 64, 3e-3


def hits(images: Sequence[Any], label: Sequence[int]) -> list[float]:
    """1 where a small convolutional network reads the digit that was asked for, else 0."""
    digits = _logits(images).argmax(axis=1)
    return [float(digit == wanted) for digit, wanted in zip(digits, label, strict=True)]


def thrift(images: Sequence[Any]) -> list[float]:
    """1 for a picture without ink, 0 for one that is all ink: what nobody should ask for alone."""
    return [1 - float(_pixels([image]).mean() + 1) / 2 for image in images]


def judge(images: Sequence[Any], label: Sequence[int]) -> list[float]:
    """1 where a support vector machine reads the digit that was asked for, else 0."""
    digits = _machine().predict(_pixels(images))
    return [float(digit == wanted) for digit, wanted in zip(digits, label, strict=True)]


def _logits(images: Sequence[Any]) -> Any:
    import torch

    net = _net()
    with torch.no_grad():
        return net(torch.tensor(_pixels(images)).view(-1, 1, 8, 8)).numpy()


def _pixels(images: Sequence[Any]) -> Any:
    """In [-1, 1], 64 a picture."""
    import numpy as np

    rows = [np.asarray(image.convert("L"), dtype=np.float32).ravel() for image in images]
    return np.stack(rows) / 127.5 - 1


def _part(start: int) -> tuple[Any, Any]:
    import numpy as np
    from sklearn.datasets import load_digits

    dataset = load_digits()
    rows = np.random.default_rng(0).permutation(len(dataset.target))[start : start + _EACH]
    return (dataset.data[rows] / 8 - 1).astype(np.float32), dataset.target[rows]


@cache
def _machine() -> Any:
    from sklearn.svm import SVC

    return SVC(gamma=0.02, C=10).fit(*_part(_EACH))


@cache
def _net() -> Any:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    pictures, labels = map(torch.tensor, _part(0))
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), lr=_RATE)
    for _ in range(_STEPS):
        rows = torch.randint(len(labels), (_BATCH,))
        loss = nn.functional.cross_entropy(net(pictures[rows].view(-1, 1, 8, 8)), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval()
