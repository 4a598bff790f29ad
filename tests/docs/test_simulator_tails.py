"""Steps in virtual time: by hand where they are few, and what they must obey where they are many."""

import random
from typing import Any

import pytest
from published_stream import PUBLISHED, played
from simulator.speeds import Speed
from simulator.tails import Drafting, Steps, Stream, compare_tails

LONG = Steps(Speed(0.02, 0.0001), num_slots=8, need=64, train_s=40.0, swap_s=2.0, num_steps=12)


def lognormal(position: int) -> list[float]:
    source = random.Random(position)
    return [
        min(8192.0, max(1.0, 600 * pow(2.718281828, source.gauss(0, 0.8)))) for _ in range(8)
    ]


def test_a_step_by_hand() -> None:
    """One completion of 10 tokens and one of 30 on two slots, a second a token; training takes 8 s on both."""
    lengths = [[10.0], [30.0]]
    steps = Steps(Speed(1.0, 0.0), num_slots=2, need=2, train_s=8.0, swap_s=2.0, num_steps=4)
    now, carried, divided, ahead, _ = compare_tails(
        steps, lambda at: lengths[at % 2], oversample=2.0
    )
    assert now.seconds == 30 + 8 + 2 and now.tokens == 20
    assert divided.seconds == 30 + 16 and divided.rolling == 1
    assert ahead.seconds == 30
    assert carried.seconds < now.seconds and carried.early_tokens < 20


def test_a_step_of_one_length_gains_nothing_by_carrying() -> None:
    steps = Steps(Speed(1.0, 0.0), num_slots=2, need=4, train_s=8.0, swap_s=2.0, num_steps=4)
    now, carried, *_ = compare_tails(steps, lambda at: [16.0, 16.0], oversample=2.0)
    assert carried.seconds == pytest.approx(now.seconds, rel=0.4)
    assert carried.tokens == carried.early_tokens == 16


def test_long_tails_are_shortened_and_short_completions_come_first() -> None:
    now, carried, divided, ahead, both = compare_tails(LONG, lognormal, oversample=1.5)
    assert carried.seconds < 0.8 * now.seconds
    assert ahead.seconds < divided.seconds
    assert both.seconds <= ahead.seconds
    assert carried.early_tokens < now.early_tokens


def test_drafts_pay_where_few_requests_are_in_flight() -> None:
    """By hand for one request; off where a pass is bound by arithmetic, and where nothing is accepted."""
    drafting = Drafting(1.0, 0.25, num_drafted=1, accepted=0.5)
    assert drafting.step_s(1) == (1 + 0.25 * 2) / 1.5 and drafting.step_s(100) == Speed(
        1.0, 0.25
    ).step_s(100)
    named = {
        tail.name: tail
        for tail in compare_tails(LONG, lognormal, oversample=1.5, drafts=(4, 0.5))
    }
    assert 0.4 < named["drafts of 4"].seconds / named["as it is"].seconds < 1
    assert named["drafts of 4"].tokens == named["as it is"].tokens
    useless = compare_tails(LONG, lognormal, oversample=1.5, drafts=(4, 0.0))
    assert useless[2].seconds == useless[0].seconds


def test_no_token_is_written_twice_or_left_out() -> None:
    """With engines that read any number at once and many steps, each group is trained on in its whole length."""
    seen: list[int] = []

    def at(position: int) -> list[float]:
        seen.append(position)
        return [float(1 + position % 7)]

    steps = Steps(Speed(1.0, 0.0), num_slots=2, need=3, train_s=1.0, swap_s=0.0, num_steps=30)
    _, carried, *_ = compare_tails(steps, at, oversample=2.0)
    assert carried.tokens == pytest.approx(4.0, abs=0.35)


def test_a_stream_by_hand() -> None:
    """One slot writes groups of 10 tokens, a second each, with any number in flight; training takes 4 s on the other.

    Engines need no more time for more groups, so training never waits once enough are begun, and a sync adds its own.
    """
    steps = Steps(
        Speed(1.0, 0.0), num_slots=2, need=2, train_s=2.0, swap_s=0.0, num_steps=30, sync_s=0.5
    )
    in_time = Stream(steps, lambda at: [10.0], 3, 1).play()
    assert in_time.seconds == pytest.approx(4.5) and in_time.waits == 0
    assert in_time.tokens == 10 and in_time.staleness == 3  # written over three steps
    late = Stream(steps, lambda at: [10.0], 1, 1).play()
    assert late.seconds > 4.5 and late.staleness is not None and late.staleness <= 1


def test_a_stream_is_bound_by_its_slower_side() -> None:
    """64 groups of eight, 600 tokens in the mean: with one slot for engines they are what takes the time."""
    slow = Stream(LONG, lognormal, 8, 1).play()
    fast = Stream(LONG, lognormal, 8, 7).play()
    assert slow.idle == pytest.approx(0.0, abs=0.02) and slow.waits is not None
    assert slow.waits == pytest.approx(1 - LONG.train_s * 8 / 7 / slow.seconds)
    assert fast.waits == 0
    assert fast.seconds == pytest.approx(LONG.train_s * 8)


@pytest.mark.parametrize(
    "published", PUBLISHED, ids=lambda published: f"{published.num_gpus} GPUs"
)
def test_a_stream_comes_within_a_quarter_of_published_steps(published: Any) -> None:
    (seconds,) = played(published, [2], 24)
    assert seconds == pytest.approx(published.asynchronous, rel=0.25)
