"""A run that is resumed from a checkpoint of its last step takes no further step."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Trainer

from ycore.trl.base import BaseTrainer


@pytest.mark.parametrize(
    ("step", "begins"), [(5, (1, 4)), (6, (sys.maxsize, 0)), (7, (sys.maxsize, 0))]
)
def test_no_epoch_is_left_at_the_last_step(
    step: int, begins: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "_init_training_state", lambda *args: (1, 4))
    trainer: Any = BaseTrainer.__new__(BaseTrainer)
    trainer.state = SimpleNamespace(global_step=step)
    assert trainer._init_training_state(6, 4, 2, "checkpoint", None) == begins
