import io

import pytest

from ycore.view.progress import BarProgress, as_duration, open_progress

ROW = {
    "step": 3,
    "reward": 0.4167,
    "completions/mean_length": 12.4,
    "frac_reward_zero_std": 0.25,
    "ycore/time/sync": 0.5,
    "ycore/time/round": 2.0,
    "ycore/time/train": 7.5,
    "ycore/time/step": 10.0,
    "ycore/tokens_per_s": 431.7,
    "ycore/logprob_gap": 0.0004,
}


def test_a_pipe_gets_one_plain_line_a_step() -> None:
    stream = io.StringIO()
    progress = open_progress(10, stream=stream)
    progress.say("engine ready after 19 s")
    progress.step(ROW)
    progress.step({"train_loss": 0.0})
    progress.step({"step": 10, "reward": None})
    progress.close()
    assert stream.getvalue().splitlines() == [
        "engine ready after 19 s",
        "step 3/10  reward 0.417  length 12  zero-variance 25%  sync 0.5 s  round 2.0 s  train 7.5 s  432 tok/s"
        "  gap 0.0004  1 min 10 s left",
        "step 10/10",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    progress = open_progress(10, stream=stream)
    assert isinstance(progress, BarProgress)
    progress.say("starting [2] engines")
    progress.step(ROW)
    progress.close()
    shown = stream.getvalue()
    assert "starting [2] engines" in shown
    assert "step 3/10" in shown
    assert "0.417" in shown and "zero-variance 25%" in shown
    assert "1 min 10 s left" in shown


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_what_others_wrote_is_data_in_a_pipe_and_in_a_terminal(
    kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stream = kind()
    progress = open_progress(10, stream=stream)
    progress.say("the trainer failed: ValueError: '[/INST] \x1b]0;title\x07 :smile:'")
    progress.step(ROW | {"ycore/reward_problems": {"raised ValueError: no number in '[/INST] 7'\x1b[2J": 2}})
    progress.close()
    assert r"ValueError: '[/INST] \x1b]0;title\x07 :smile:'" in stream.getvalue()
    assert r"2 x raised ValueError: no number in '[/INST] 7'\x1b[2J" in stream.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert as_duration(seconds) == text
