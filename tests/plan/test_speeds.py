"""A curve of step times from what requests met: its points, between them, beyond them."""

import pytest

from ycore.placement.load import Speed
from ycore.plan.recording import Seen, curve

LINE = Speed(0.02, 0.003)


def seen(*met: tuple[float, float]) -> list[Seen]:
    """Three requests of ten tokens for each (depth, step)."""
    return [Seen(10.0, 10.0 * step, depth) for depth, step in met for _ in range(3)]


def test_points_are_what_was_met_and_lines_lie_between() -> None:
    told = curve(LINE, seen((1, 0.05), (8, 0.06), (32, 0.14)))
    assert [told.step_s(depth) for depth in (1, 8, 20, 32)] == pytest.approx([0.05, 0.06, 0.10, 0.14])


def test_beyond_the_ends_the_line_leads_on() -> None:
    told = curve(LINE, seen((8, 0.06), (32, 0.14)))
    assert told.step_s(42) == pytest.approx(0.17) and told.step_s(4) == pytest.approx(0.048)
    assert curve(LINE, seen((60, 0.2))).step_s(1) == pytest.approx(0.023)
    assert curve(Speed(0.9, 0.003), seen((60, 0.2))).step_s(1) == pytest.approx(0.2), "never longer than when deeper"


def test_requests_count_by_their_tokens_and_few_are_told_with_others() -> None:
    told = curve(LINE, [Seen(30.0, 3.0, 3.0), Seen(10.0, 2.0, 4.0), Seen(10.0, 1.0, 5.0)])
    assert told.depths == pytest.approx((3.6,)) and told.seconds == pytest.approx((0.12,))
    several = curve(LINE, [*seen((2, 0.05)), Seen(10.0, 5.0, 50.0)])
    assert len(several.depths) == 1


def test_a_step_is_never_shorter_when_deeper() -> None:
    told = curve(LINE, seen((1, 0.06), (8, 0.05), (32, 0.14)))
    assert told.seconds == pytest.approx((0.06, 0.06, 0.14))
