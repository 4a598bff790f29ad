"""The live view: what it says of a row, that it fits a terminal, and its small pictures."""

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ycore.telemetry.live import RunView, slowest_part, sparkline

ROW: dict[str, Any] = {
    "step": 3,
    "ycore/reward": 0.4167,
    "reward_std": 0.21,
    "completions/mean_length": 12.4,
    "frac_reward_zero_std": 0.25,
    "ycore/sampling/drawn": 24.0,
    "ycore/time/sync": 0.5,
    "ycore/time/round": 2.0,
    "ycore/time/train": 7.5,
    "ycore/time/step": 10.0,
    "ycore/tokens_per_s": 431.7,
}


def shown(view: RunView, *, width: int = 80) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(view)
    return stream.getvalue()


def test_a_row_is_told_in_full() -> None:
    view = RunView(10)
    view.add({**ROW, "step": 2, "ycore/reward": 0.2})
    view.add({**ROW, "ycore/reward_problems": {"raised KeyError": 3}})
    text = shown(view)
    for part in ("step 3/10", "1 min 10 s left", "0.417 ± 0.210  ▁█", "zero-variance 25%", "drawn 24", "432 a second"):
        assert part in text
    assert "step 10.0 s:  sync 0.5  round 2.0  train 7.5" in text
    assert "training, 75% of the step" in text and "3 x raised KeyError" in text


def test_what_a_row_has_not_is_not_shown() -> None:
    view = RunView(None, unit="prompt")
    view.add({"step": 1, "reward": None})
    assert shown(view).split() == ["prompt", "1"]
    view.add({"train_loss": 1.0})
    assert shown(view).split() == ["prompt", "1"]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_fits(width: int) -> None:
    view = RunView(1000)
    for step in range(1, 200):
        view.add({**ROW, "step": step, "ycore/reward": step / 200})
    assert max(map(len, shown(view, width=width).splitlines())) <= width


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 60))
def test_a_sparkline_is_never_wider_than_it_may_be(values: list[float], width: int) -> None:
    assert len(sparkline(values, width=width)) == min(len(values), width)


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], width=8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0] * 8 + [1.0] * 8, width=4) == "▁▁██"
    assert sparkline([2, 2], width=8) == "▄▄"


def test_the_slowest_part_is_named() -> None:
    assert slowest_part({"ycore/time/round": 6.0, "ycore/time/train": 2.0}) == "generating and scoring, 75% of the step"
    assert slowest_part({"reward": 1.0}) == ""
