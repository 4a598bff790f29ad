"""A process says what it is busy with: its line, its file, and when it is shown, with a clock of the test's own."""

import io
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from ycore.run.work import (
    EVERY_S,
    FIRST_S,
    Pulse,
    Work,
    command_pulse,
    counted_in,
    current,
    publish_work,
    quiet,
    working,
)
from ycore.view.activity import read_work


@pytest.fixture(autouse=True)
def progress_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("YCORE_PROGRESS")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_shown_where_progress_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YCORE_PROGRESS", "off")
    stream = io.StringIO()
    with Pulse(stream, lambda: "converting") as pulse:
        pulse.look(time.monotonic() + 10)
    assert stream.getvalue() == ""


def test_work_is_told_with_its_rate_and_the_time_left() -> None:
    work = Work("writing sums.gguf", total=270e6, unit="MB", done=120e6, began=1000.0)
    assert work.line(1012.0) == (
        "writing sums.gguf for 12 s, 120 of 270 MB, 10 MB/s, 15 s left"
    )
    work = Work("evaluating", total=8, unit="prompts", began=1000.0)
    assert work.line(1012.0) == "evaluating for 12 s, 0 of 8 prompts"
    assert Work("loading weights", began=1000.0).line(1003.0) == "loading weights for 3 s"


def test_the_innermost_work_is_shown() -> None:
    assert current() is None
    with working("a model"):
        with working("its weights", total=4) as inner:
            inner.add(3)
            assert current() is inner and inner.share() == 0.75
        assert (work := current()) is not None and work.words == "a model"
    assert current() is None


def test_silence_ends_within_2_s_and_then_every_5_s() -> None:
    """A fake clock looks five times a second, as a pulse does: over a minute, and after a line of another."""
    stream = io.StringIO()
    spoken = []
    began = time.monotonic()
    with Pulse(stream, lambda: "converting") as pulse:
        for tick in range(1, 301):
            now = began + tick / 5
            if tick == 40:
                pulse.end_silence(now)
            else:
                pulse.look(now)
            if stream.getvalue().count("now") > len(spoken):
                spoken.append(now)
    moments = sorted([began, began + 8.0, *spoken])
    assert spoken[0] - began <= FIRST_S
    assert max(later - earlier for earlier, later in pairwise(moments)) <= EVERY_S + 1e-6
    assert len(spoken) <= 2 + 60 / (EVERY_S - 0.5)


def test_a_pipe_gets_a_plain_line_that_begins_with_now(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    with Pulse(stream, lambda: "converting \x1b[31m for 3 s") as pulse:
        began = time.monotonic()
        pulse.look(began + FIRST_S)
        pulse.look(began + FIRST_S + 1)
        pulse.look(began + FIRST_S + EVERY_S)
    assert stream.getvalue().splitlines() == [r"now  converting \x1b[31m for 3 s"] * 2


def test_a_terminal_gets_a_bar_that_goes_when_the_work_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    with command_pulse(stream, "ycore export") as pulse, working("writing", total=4) as work:
        work.add(2)
        pulse.look(time.monotonic() + FIRST_S)
    output = stream.getvalue()
    assert "━" * 12 + "─" * 12 in output and "2 of 4" in output
    assert output.endswith("\x1b[2K"), "the line is cleared"


def test_of_several_pulses_the_newest_alone_speaks() -> None:
    later = time.monotonic() + FIRST_S
    outer, inner = io.StringIO(), io.StringIO()
    with Pulse(outer, lambda: "a command") as command:
        with Pulse(inner, lambda: "its run") as run:
            command.look(later)
            run.look(later)
        with quiet():
            command.look(later)
        assert outer.getvalue() == ""
        command.look(later)
    assert outer.getvalue() == "now  a command\n" and inner.getvalue() == "now  its run\n"


def test_a_process_of_a_run_publishes_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ycore.run.work._board", None)
    board = tmp_path / "work.json"
    publish_work(board)
    assert read_work(board) is None
    with working("evaluating", total=8, unit="prompts"):
        published = read_work(board)
        assert published is not None
        assert (published.words, published.total) == ("evaluating", 8)
    assert read_work(board) is None
    board.write_text('{"words": 3')
    assert read_work(board) is None, "half of a file is not worth a run"


def test_a_childs_own_progress_bar_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert counted_in(log) is None
    log.write_text("Loading weights:  10%| 3/30 [00:01\rLoading weights:  40%| 12/30 [00:04")
    assert counted_in(log) == (12, 30)
    assert counted_in(log, begin=log.stat().st_size) is None


def test_a_silent_command_is_not_silent() -> None:
    """The thread of its own looks; nothing here waits longer than the line needs."""
    stream = io.StringIO()
    with command_pulse(stream, "ycore eval"):
        wait_for(lambda: "now  ycore eval for " in stream.getvalue())
    assert all(thread.name != "ycore-pulse" or not thread.is_alive() for thread in stopped())


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def stopped() -> list[threading.Thread]:
    threads = [thread for thread in threading.enumerate() if thread.name == "ycore-pulse"]
    for thread in threads:
        thread.join(60)
    return threads
