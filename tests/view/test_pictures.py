"""curve.png: drawn where there is something to draw, of the right size."""

import struct
from pathlib import Path

import pytest

from ycore.view.pictures import (
    draw_curve,
    literal,
    points,
    smooth,
)


@pytest.mark.parametrize("steps", [1, 3, 200])
def test_a_picture_of_the_right_size_is_drawn(tmp_path: Path, steps: int) -> None:
    rows = [
        {"step": n, "reward": n / steps, "completions/mean_length": 9.0}
        for n in range(1, steps + 1)
    ]
    rows.append({"step": steps, "train_loss": 0.1})
    assert draw_curve(rows, tmp_path / "curve.png", "a run")
    head = (tmp_path / "curve.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:24]) == (1200, 700)
    assert len(list(tmp_path.iterdir())) == 1


def test_without_a_reward_there_is_no_picture(tmp_path: Path) -> None:
    assert not draw_curve([{"step": 1, "reward": None}], tmp_path / "curve.png", "a run")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_number_is_left_out() -> None:
    rows = [
        {"step": 1, "reward": 0.5},
        {"step": 2, "reward": None},
        {"reward": 1.0},
        {"step": 3, "reward": 1},
    ]
    assert points(rows, "reward") == ([1.0, 3.0], [0.5, 1.0])


def test_smoothing_keeps_a_straight_line() -> None:
    line = [float(n) for n in range(9)]
    assert smooth(line) == line
    assert smooth([0.0, 3.0, 0.0]) == [0.0, 1.0, 0.0]


def test_a_picture_is_drawn_where_there_is_a_loss(tmp_path: Path) -> None:
    rows = [
        {"step": step, "loss": 1.0 / step, "accuracy": 0.5, "margin": 0.1}
        for step in range(1, 7)
    ]
    assert draw_curve(rows, tmp_path / "curve.png", "title")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    measured = [*rows, {"step": 3, "ycore/eval/loss": 0.9}, {"step": 6, "ycore/eval/loss": 0.7}]
    assert draw_curve(measured, tmp_path / "measured.png", "title")
    assert (tmp_path / "measured.png").read_bytes() != (tmp_path / "curve.png").read_bytes()
    assert draw_curve([{"step": 1, "loss": 2.0}], tmp_path / "bare.png", "only a loss")
    assert not draw_curve([{"step": 1}], tmp_path / "none.png", "nothing")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bare.png",
        "curve.png",
        "measured.png",
    ]


def test_a_title_is_drawn_as_it_is(tmp_path: Path) -> None:
    assert draw_curve(
        [{"step": 1, "reward": 0.5}], tmp_path / "curve.png", r"grpo: m on data$\broken$.jsonl"
    )


@pytest.mark.parametrize(
    "name", [r"$\frac{$", "$x$", r"\$", "_hidden", "a\nb", "\x1b[2J", "half \udc80"]
)
def test_any_name_of_a_run_can_be_drawn(tmp_path: Path, name: str) -> None:
    assert draw_curve([{"step": 1, "reward": 0.5}], tmp_path / "curve.png", name)
    assert literal(name).isprintable() and not literal(name).startswith("_")
