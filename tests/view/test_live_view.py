"""The live view: what it says of a row, and that it fits a terminal."""

import io
from typing import Any

import pytest
from rich.console import Console

from ycore.run.trace import IN_FLIGHT, ROUND, SWAP, WAITING, Event, Levels, Mark, Span
from ycore.view.activity import Activity, Scene
from ycore.view.progress import RunView, restarted_workers

ROW: dict[str, Any] = {
    "step": 3,
    "ycore/reward": 0.4167,
    "reward_std": 0.21,
    "completions/mean_length": 12.4,
    "frac_reward_zero_std": 0.25,
    "ycore/sampling/drawn": 24.0,
    "ycore/time/sync": 0.5,
    "ycore/time/round": 2.0,
    "ycore/time/train": 7.5,
    "ycore/time/step": 10.0,
    "ycore/tokens_per_s": 431.7,
}


def rendered(view: RunView, *, width: int = 80) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(view)
    return console.export_text()


def scene(
    num_slots: int, *, until: float = 1030.0, num_ranks: int = 1, is_over: bool = False
) -> Scene:
    """Half a minute into a step: rollouts, then a swap to a judge on every slot, two requests in flight on each."""
    activity = Activity()
    for rank in range(num_ranks):
        events: list[Event] = [
            Mark(ROUND, rank, 1001.0),
            Levels(WAITING, rank, 1029.0, {"rollout": 5, "judge": 40}),
        ]
        for slot in range(num_slots):
            events.append(Span("rollout", rank, slot, 1002.0, 10.0))
            events.append(Span(SWAP, rank, slot, 1012.5, 0.1, {"awake": "judge"}))
        judging = {f"judge {slot}": 2 for slot in range(num_slots)}
        events.append(Levels(IN_FLIGHT, rank, 1029.0, judging, dict.fromkeys(judging, 15.0)))
        activity.add(events)
    return Scene(activity, until, is_over, step_began=1000.0, step_ended=999.0)


def test_a_run_that_goes_on_shows_the_step_that_it_goes_on_from() -> None:
    view = RunView(10, look=lambda: scene(1), first_step=2)
    assert "step 2/10" in rendered(view)
    view.add(ROW)
    assert "step 3/10" in rendered(view)


def test_a_row_is_told_in_full() -> None:
    view = RunView(10)
    view.add({**ROW, "step": 2, "ycore/reward": 0.2})
    view.add(
        {**ROW, "ycore/reward_problems": {"raised KeyError": 3}, "ycore/reward_restarts": 2.0}
    )
    text = rendered(view)
    assert "2 reward workers started again" in text
    assert restarted_workers({"ycore/reward_restarts": 0.5}) == "1 reward worker started again"
    for part in (
        "step 3/10",
        "1 min 10 s left",
        "0.417 ± 0.210  first 0.200",
        "zero-variance 25%",
        "432 a second",
    ):
        assert part in text
    assert "step 10.0 s:  sync 0.5  round 2.0  train 7.5" in text
    assert "3 x raised KeyError" in text


def test_what_a_row_has_not_is_not_shown() -> None:
    view = RunView(None, unit="prompt")
    view.add({"step": 1, "reward": None})
    assert rendered(view).split() == ["prompt", "1"]
    view.add({"train_loss": 1.0})
    assert rendered(view).split() == ["prompt", "1"]


HOSTILE = "raised ValueError: no number in '[/INST] 7' \x1b[2J :boom:\nand [bold]more"


def test_what_a_reward_wrote_is_shown_as_it_is() -> None:
    view = RunView(10)
    view.add({**ROW, "ycore/reward_problems": {HOSTILE: 1}})
    assert (
        r"1 x raised ValueError: no number in '[/INST] 7' \x1b[2J :boom:\nand [bold]more"
        in rendered(view, width=200)
    )


def test_slots_have_a_line_each_under_what_the_step_waits_for() -> None:
    view = RunView(10, look=lambda: scene(2))
    view.add(ROW)
    lines = [line.rstrip() for line in rendered(view).splitlines()]
    at = next(place for place, line in enumerate(lines) if line.startswith("now"))
    assert lines[at:] == [
        "now     generating, judging for 29 s, 30 s into the step",
        "queues  rollout 0 in flight, 5 waiting   judge 4 in flight, 40 waiting",
        "slot 0  judge 2 in flight, the oldest for 16 s",
        "slot 1  judge 2 in flight, the oldest for 16 s",
    ]


def test_the_first_round_is_seen_before_the_first_row() -> None:
    assert not RunView(10).has_begun
    view = RunView(10, look=lambda: scene(1))
    assert view.has_begun and "step 0/10" in rendered(view) and "slot 0" in rendered(view)


def test_past_eight_slots_the_rest_is_counted() -> None:
    lines = rendered(RunView(10, look=lambda: scene(64))).splitlines()
    assert len([line for line in lines if line.startswith("slot ")]) == 8
    assert lines[-1].split() == ["and", "56", "more"]


def test_a_run_without_slots_has_no_lines_for_them() -> None:
    view = RunView(
        10, look=lambda: Scene(Activity(), 1030.0, False, step_began=1000.0, step_ended=None)
    )
    view.add({"step": 1, "loss": 2.5})
    assert [line.split()[0] for line in rendered(view).splitlines()] == ["step", "loss", "now"]


def test_an_evaluation_of_held_out_rows_is_shown_beside_the_loss() -> None:
    view = RunView(10)
    for step, loss in ((1, 2.5), (2, 2.25)):
        view.add({"step": step, "loss": loss})
    view.add(
        {
            "step": 2,
            "ycore/eval/loss": 2.375,
            "ycore/eval/rewards/accuracies": 0.75,
            "ycore/time/eval": 1.0,
        }
    )
    lines = [line.strip().split(maxsplit=1) for line in rendered(view).splitlines()]
    assert lines[1] == ["loss", "2.250  first 2.500"], (
        "the last step's, which the evaluation is not"
    )
    assert lines[2] == ["held", "out  loss 2.3750  accuracy 75%  at step 2"]


def test_a_run_that_is_over_waits_for_nothing() -> None:
    text = rendered(RunView(10, look=lambda: scene(1, is_over=True)))
    assert "now" not in text and "queues" not in text and "slot 0" not in text


def test_it_never_shrinks_while_the_run_goes_on() -> None:
    """Nor does a lane move to another line: not for a problem that goes, nor for a step that is done."""
    now = scene(3)
    view = RunView(10, look=lambda: now)
    view.add({**ROW, "ycore/reward_problems": {"raised KeyError": 3}})
    heights = {
        rendered(view)
        .splitlines()
        .index(next(line for line in rendered(view).splitlines() if "slot 2" in line))
    }
    for moment in (
        now._replace(step_ended=1020.0),
        now._replace(step_began=None),
        now._replace(until=1100.0),
    ):
        now = moment
        view.add({**ROW, "step": 4})
        lines = rendered(view).splitlines()
        heights.add(lines.index(next(line for line in lines if "slot 2" in line)))
    assert len(heights) == 1


LABELS = {"reward", "groups", "tokens", "time", "now", "queues"}


@pytest.mark.parametrize("num_ranks", [1, 12])
@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_it_fits_and_marks_what_it_cuts(width: int, num_ranks: int) -> None:
    view = RunView(1000, look=lambda: scene(12, num_ranks=num_ranks))
    for step in range(1, 200):
        view.add({**ROW, "step": step, "ycore/reward": step / 200, "ycore/eval/reward": 0.5})
    text = rendered(view, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert width < 80 or "…" not in text
    words = set(text.split())
    assert words >= LABELS and "held out" in text
    assert "slot 7" in text and f"and {12 * num_ranks - 8} more" in text
    whole = {word.rstrip(",") for word in rendered(view, width=200).split()}
    drawn = set("━─")
    assert all(
        word.rstrip(",") in whole or set(word) <= drawn or word.endswith("…") for word in words
    )
