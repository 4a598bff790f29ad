"""The picture, the plain line and the summary of a run without rollouts."""

from pathlib import Path
from typing import Any

from ycore.view.pictures import draw_loss_curve
from ycore.view.progress import describe_step

ROWS: list[dict[str, Any]] = [
    {"step": step, "loss": 1.0 / step, "accuracy": 0.5, "margin": 0.1, "learning_rate": 1e-4} for step in range(1, 7)
]


def test_a_picture_is_drawn_where_there_is_a_loss(tmp_path: Path) -> None:
    assert draw_loss_curve(ROWS, tmp_path / "curve.png", "title")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert draw_loss_curve([{"step": 1, "loss": 2.0}], tmp_path / "bare.png", "only a loss")
    assert not draw_loss_curve([{"step": 1}], tmp_path / "none.png", "nothing")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare.png", "curve.png"]


def test_the_plain_line_tells_the_loss_where_there_is_no_reward() -> None:
    assert describe_step(ROWS[1]) == ["loss 0.5000", "accuracy 50%", "margin 0.100", "rate 1.0e-04"]
    assert describe_step({"step": 1, "loss": 0.5, "mean_token_accuracy": 0.25}) == ["loss 0.5000", "token accuracy 25%"]
    assert describe_step({"step": 1, "loss": 0.5, "reward": 0.25}) == ["reward 0.250"]
