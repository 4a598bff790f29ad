"""trace.json: whole whatever happens, bounded, and followed."""

import json
from pathlib import Path

from ycore.run.trace import (
    IN_FLIGHT,
    Levels,
    Mark,
    Span,
    TraceFollower,
    TraceWriter,
    busy_intervals,
    finish_trace,
    parse_event,
    read_trace,
)


def spans(num: int = 5) -> list[Span]:
    return [
        Span("rollout", 0, number % 2, 100.0 + number, 0.5, {"request": number})
        for number in range(num)
    ]


def write(path: Path, told: list[Span]) -> None:
    writer = TraceWriter(path)
    for span in told:
        writer.add(span)
    writer.flush()


def test_what_is_written_is_read_again_finished_or_not(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write(path, spans())
    assert read_trace(path) == spans()
    finish_trace(path)
    events = json.loads(path.read_text())
    assert [event["ph"] for event in events] == ["X"] * 5 and events[2]["ts"] == 102_000_000
    assert read_trace(path) == spans()


def test_moments_are_for_followers_and_viewers_and_are_no_spans(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    told = [
        Levels(IN_FLIGHT, 1, 100.5, {"judge 0": 3}, {"judge 0": 1.25}),
        Mark("sync", 1, 100.0),
        *spans(1),
    ]
    writer = TraceWriter(path)
    for event in told:
        writer.add(event)
    writer.flush()
    events = [parse_event(line) for line in path.read_text().splitlines()]
    assert events == [None, *told]  # the first line opens the array
    assert read_trace(path) == spans(1)
    finish_trace(path)
    counter, moment, _ = json.loads(path.read_text())
    assert (counter["ph"], counter["pid"], counter["args"]) == ("C", 1, {"judge 0": 3})
    assert (moment["ph"], moment["ts"]) == ("i", 100_000_000)


def test_a_finished_trace_goes_on_where_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for _ in range(2):
        write(path, spans())
        finish_trace(path)
    finish_trace(path)
    assert len(json.loads(path.read_text())) == 10


def test_half_a_line_is_dropped_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write(path, spans(3))
    with path.open("a") as file:
        file.write('{"name": "roll')
    assert read_trace(path) == spans(3)
    write(path, spans(2))
    finish_trace(path)
    assert len(json.loads(path.read_text())) == 5


def test_a_trace_stops_growing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    writer = TraceWriter(path, max_bytes=4000)
    for _ in range(20):
        for span in spans(10):
            writer.add(span)
        writer.flush()
    assert path.stat().st_size < 4200
    finish_trace(path)
    events = json.loads(path.read_text())
    assert events[-1]["name"] == "trace is full" and len(events) > 5


def test_intervals_that_touch_are_merged() -> None:
    told = [
        Span("judge", 0, 0, began, seconds)
        for began, seconds in ((0, 2), (1, 3), (1.5, 0.5), (6, 1))
    ]
    assert busy_intervals(told) == [(0, 4), (6, 1)]


def write_spans(path: Path, numbers: range) -> list[Span]:
    writer = TraceWriter(path)
    told = [Span("rollout", 0, 0, float(number), 0.5) for number in numbers]
    for span in told:
        writer.add(span)
    writer.flush()
    return told


def test_a_trace_is_followed_event_by_event_also_past_its_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    follower = TraceFollower(path)
    assert follower.read() == []
    told = write_spans(path, range(3))
    assert follower.read() == told and follower.read() == []
    with path.open("a") as file:
        file.write('{"name": "roll')
    assert follower.read() == []
    told = write_spans(path, range(3, 5))
    assert follower.read() == told
    finish_trace(path)
    assert follower.read() == []


def test_a_long_trace_is_followed_from_near_its_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    told = write_spans(path, range(500))
    last = TraceFollower(path, tail_bytes=1000).read()
    assert 5 < len(last) < 20 and last == told[-len(last) :]
