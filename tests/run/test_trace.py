"""trace.json: whole whatever happens, bounded, and followed."""

import json
from pathlib import Path
from typing import Any

import pytest
from simulator.recording import read_trace

from ycore.run import trace
from ycore.run.files import LineFollower
from ycore.run.trace import (
    IN_FLIGHT,
    Levels,
    Mark,
    Span,
    TraceWriter,
    earlier_part,
    new_events,
    parse_event,
)


def spans(num: int = 5) -> list[Span]:
    return [
        Span("rollout", 0, number % 2, 100.0 + number, 0.5, {"request": number})
        for number in range(num)
    ]


def write(path: Path, written: list[Span]) -> None:
    writer = TraceWriter(path)
    for span in written:
        writer.add(span)
    writer.flush()


def events_of(path: Path) -> list[Any]:
    """Return the events as viewers read them, who forgive that the last bracket is missing."""
    return list(json.loads(path.read_text().removesuffix(",\n") + "]"))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write(path, spans())
    assert read_trace(path) == spans()
    events = events_of(path)
    assert [event["ph"] for event in events] == ["X"] * 5 and events[2]["ts"] == 102_000_000


def test_moments_are_for_followers_and_viewers_and_are_no_spans(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    written = [
        Levels(IN_FLIGHT, 1, 100.5, {"judge 0": 3}, {"judge 0": 1.25}),
        Mark("sync", 1, 100.0),
        *spans(1),
    ]
    writer = TraceWriter(path)
    for event in written:
        writer.add(event)
    writer.flush()
    events = [parse_event(line) for line in path.read_text().splitlines()]
    assert events == [None, *written]  # the first line opens the array
    assert read_trace(path) == spans(1)
    counter, moment, _ = events_of(path)
    assert (counter["ph"], counter["pid"], counter["args"]) == ("C", 1, {"judge 0": 3})
    assert (moment["ph"], moment["ts"]) == ("i", 100_000_000)


def test_half_a_line_is_dropped_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write(path, spans(3))
    with path.open("a") as file:
        file.write('{"name": "roll')
    assert read_trace(path) == spans(3)
    write(path, spans(2))
    assert len(events_of(path)) == 5


def test_the_newest_events_are_kept_in_bounded_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "_MAX_BYTES", 20_000)
    path = tmp_path / "trace.json"
    written = [Span("rollout", 0, 0, float(number), 0.5) for number in range(2000)]
    ranks = [TraceWriter(path) for _ in range(2)]
    for number, span in enumerate(written):
        ranks[number % 2].add(span)
        ranks[number % 2].flush()
        if number % 100 == 0:
            assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 41_000
    assert set(tmp_path.iterdir()) <= {path, earlier_part(path)}
    kept = read_trace(path)
    assert len(kept) > 200 and kept == written[-len(kept) :]
    assert len(events_of(earlier_part(path))) > 150


def write_spans(path: Path, numbers: range) -> list[Span]:
    writer = TraceWriter(path)
    written = [Span("rollout", 0, 0, float(number), 0.5) for number in numbers]
    for span in written:
        writer.add(span)
    writer.flush()
    return written


def test_a_trace_is_followed_event_by_event_also_past_its_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    follower = LineFollower(path, tail_bytes=2**21)
    assert new_events(follower) == []
    written = write_spans(path, range(3))
    assert new_events(follower) == written and new_events(follower) == []
    with path.open("a") as file:
        file.write('{"name": "roll')
    assert new_events(follower) == []
    written = write_spans(path, range(3, 5))
    assert new_events(follower) == written
    path.rename(earlier_part(path))
    assert new_events(follower) == []
    written = write_spans(path, range(5, 7))
    assert new_events(follower) == written


def test_a_long_trace_is_followed_from_near_its_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    follower = LineFollower(path, tail_bytes=1000)
    for looks in (range(500), range(500, 1000)):
        written = write_spans(path, looks)
        last = new_events(follower)
        assert 5 < len(last) < 20 and last == written[-len(last) :]
