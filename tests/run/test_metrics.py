from pathlib import Path

from ycore.run.metrics import MetricsWriter, read_metrics
from ycore.run.trace import MetricsFollower, Span, TraceFollower, TraceWriter, finish_trace


def test_rows_come_back_and_nan_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 1, "kl": float("nan"), "nested": {"x": [float("inf"), 1.5]}})
        assert read_metrics(path) == [{"step": 1, "kl": None, "nested": {"x": [None, 1.5]}}]


def test_half_a_last_line_is_left_out_and_does_not_spoil_the_next_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    assert read_metrics(path) == [{"step": 1}]
    with MetricsWriter(path) as writer:
        writer.write({"step": 2})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    assert MetricsFollower(tmp_path / "metrics.jsonl").read() == []


def test_a_follower_sees_each_whole_row_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    path.write_text('{"step": 1}\n{"st')
    assert follower.read() == [{"step": 1}]
    assert follower.read() == []
    with path.open("a") as file:
        file.write('ep": 2}\n{"step": 3}\n')
    assert follower.read() == [{"step": 2}, {"step": 3}]


def test_a_follower_goes_on_in_a_file_that_was_cut_and_tells_no_row_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    path.write_text('{"step": 1}\n{"step": 2, "took": 5}\n')
    assert len(follower.read()) == 2
    path.write_text('{"step": 1}\n')
    assert follower.read() == []
    path.write_text('{"step": 1}\n{"step": 2, "took": 6}\n')
    assert follower.read() == [{"step": 2, "took": 6}]


def test_a_resumed_run_shows_the_steps_that_it_takes(tmp_path: Path) -> None:
    """As the launcher and the trainer do it: the follower opens first, then later rows are dropped and taken again."""
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(1, 5):
            writer.write({"step": step, "took": 1.0})
    follower = MetricsFollower(path)
    assert follower.read() == []
    with MetricsWriter(path) as writer:
        writer.forget_after(2)
        assert follower.read() == []
        for step in range(3, 7):
            writer.write({"step": step, "took": 2.0})
    assert [row["step"] for row in follower.read()] == [3, 4, 5, 6]
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5, 6]


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
