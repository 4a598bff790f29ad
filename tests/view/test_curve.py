import struct
from pathlib import Path

import pytest

from ycore.view.pictures import draw_curve, points, smooth


@pytest.mark.parametrize("steps", [1, 3, 200])
def test_a_picture_of_the_right_size_is_drawn(tmp_path: Path, steps: int) -> None:
    rows = [{"step": n, "reward": n / steps, "completions/mean_length": 9.0} for n in range(1, steps + 1)]
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
    rows = [{"step": 1, "reward": 0.5}, {"step": 2, "reward": None}, {"reward": 1.0}, {"step": 3, "reward": 1}]
    assert points(rows, "reward") == ([1.0, 3.0], [0.5, 1.0])


def test_smoothing_keeps_a_straight_line() -> None:
    line = [float(n) for n in range(9)]
    assert smooth(line, window=5) == line
    assert smooth([0.0, 3.0, 0.0], window=3) == [0.0, 1.0, 0.0]
