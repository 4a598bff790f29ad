from typing import Any

import pytest

from ycore.tools.pipeline_run import headline


@pytest.mark.parametrize(
    ("figures", "told"),
    [
        ({"reward_first": 0.2, "reward_last": 0.9, "steps": 40}, "reward 0.200 -> 0.900"),
        ({"loss_first": 2.0, "loss_last": 1.0}, "loss 2.000 -> 1.000"),
        (
            {"loss_first": 2.0, "loss_last": 1.0, "held_out": {"before": {"loss": 2.5}, "after": {"loss": 1.5}}},
            "held-out loss 2.500 -> 1.500",
        ),
        (
            {"loss_first": 2.0, "held_out": {"before": {"accuracy": 0.5}, "after": {"accuracy": 0.75}}},
            "held-out accuracy 0.500 -> 0.750",
        ),
        ({"reward": 0.25, "pass@1": 0.25, "num_pairs": 12}, "12 pairs, reward 0.250, pass@1 0.250"),
        ({"reward_first": None, "reward_last": None, "held_out": None}, ""),
        ({}, ""),
    ],
)
def test_the_figure_that_tells_most(figures: dict[str, Any], told: str) -> None:
    assert headline(figures) == told
