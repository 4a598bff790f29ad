"""A run's slots, queues and phase are read from events and two files' times, also of a run that was killed."""

import json
import os
from pathlib import Path

import pytest

from ycore.run.files import RunFolder
from ycore.run.trace import (
    IN_FLIGHT,
    ROUND,
    SYNC,
    WAITING,
    Event,
    Levels,
    Mark,
    Span,
    TraceWriter,
)
from ycore.run.work import working
from ycore.view.activity import (
    Activity,
    RunActivity,
    Scene,
    engine_phase,
    slot_names,
    starting_words,
)

T = 1000.0


def levels(at: float, *, rank: int = 0, waiting: int = 0, **flying: int) -> list[Event]:
    """Return events of these levels: `judge_0=3` is three in flight of a role on a slot, the oldest for 20 s."""
    counts = {name.replace("_", " "): count for name, count in flying.items()}
    oldest = {name: 20.0 for name, count in counts.items() if count}
    return [
        Levels(WAITING, rank, at, {"rollout": waiting}),
        Levels(IN_FLIGHT, rank, at, counts, oldest),
    ]


def scene(
    *events: Event, until: float = T + 30, began: float | None = T, ended: float | None = None
) -> Scene:
    activity = Activity()
    activity.add(list(events))
    return Scene(activity, until, False, began, ended)


def test_queues_are_those_of_all_ranks() -> None:
    events = [
        *levels(T + 1, waiting=5, rollout_0=8, judge_0=1),
        *levels(T + 1, rank=1, waiting=2, rollout_0=4),
    ]
    now = scene(*events)
    assert now.queues() == {"rollout": (12, 7), "judge": (1, 0)}
    assert now.slots() == {
        (0, 0): [
            "rollout 8 in flight, the oldest for 49 s",
            "judge 1 in flight, the oldest for 49 s",
        ],
        (1, 0): ["rollout 4 in flight, the oldest for 49 s"],
    }


def test_what_an_earlier_step_left_in_flight_is_gone() -> None:
    """A trainer that was killed in a round says nothing more; the next one begins another step."""
    now = scene(*levels(T - 5, waiting=5, rollout_0=8))
    assert now.queues() == {"rollout": (0, 0)} and now.slots() == {(0, 0): []}


ROUND_OVER = Span(ROUND, 0, -1, T + 2, 8)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], "30 s into the step"),
        ([Mark(SYNC, 0, T)], "sending weights for 30 s, 30 s into the step"),
        ([Mark(SYNC, 0, T - 9), Mark(ROUND, 0, T - 8)], "30 s into the step"),
        ([Mark(ROUND, 0, T + 2)], "generating and scoring for 28 s, 30 s into the step"),
        (
            [Mark(ROUND, 0, T + 2), *levels(T + 29, rollout_0=3, judge_0=1)],
            "generating, judging for 28 s, 30 s into the step",
        ),
        (
            [Mark(ROUND, 0, T + 2), *levels(T + 29, rollout_0=0)],
            "scoring for 28 s, 30 s into the step",
        ),
        ([Mark(ROUND, 0, T + 2), ROUND_OVER], "training for 20 s, 30 s into the step"),
        (
            [ROUND_OVER, Mark(ROUND, 1, T + 2)],
            "rank 1: generating and scoring for 28 s, 30 s into the step",
        ),
    ],
)
def test_it_is_said_what_a_step_waits_for(events: list[Event], said: str) -> None:
    assert scene(*events).now() == said


def test_before_and_between_steps() -> None:
    assert scene(began=None).now() == "starting"
    assert scene(began=T, ended=T + 12).now() == "between steps for 18 s"
    assert scene(began=T, ended=T).now() == "30 s into the step"


def test_names_say_the_rank_where_there_are_several() -> None:
    assert slot_names([(0, 0), (0, 1)]) == ["slot 0", "slot 1"]
    assert slot_names([(0, 1), (1, 1)]) == ["rank 0, 1", "rank 1, 1"]


def test_a_folder_is_followed(tmp_path: Path) -> None:
    """A folder has a run without a trace, then with one, then over: it ends where its last event did."""
    look = RunActivity(tmp_path).look()
    assert not look.has_begun and not look.slots() and not look.is_over
    writer = TraceWriter(tmp_path / "trace.json")
    for event in (Span("rollout", 0, 0, T, 5), *levels(T + 7, rollout_0=2)):
        writer.add(event)
    writer.flush()
    (tmp_path / "step_began").touch()
    os.utime(tmp_path / "step_began", (T, T))
    look = RunActivity(tmp_path).look()
    assert (
        look.has_begun
        and len(look.slots()[0, 0]) == 1
        and look.step_began == T
        and look.queues() == {"rollout": (2, 0)}
    )
    (tmp_path / "summary.json").touch()
    look = RunActivity(tmp_path).look()
    assert look.is_over and look.until == T + 7 and look.queues() == {"rollout": (0, 0)}
    assert RunActivity(tmp_path, goes_on=lambda: True).look().until > T + 7


VLLM_LOG = [
    ("", "starting"),
    ("INFO Initializing a V1 LLM engine (v0.31) with config: ...", "starting"),
    ("INFO Starting to load model /models/tiny...", "loading weights"),
    ("INFO Loading weights took 3.2 seconds", "warming up"),
    ("INFO Dynamo bytecode transform time: 4.1 s", "compiling"),
    ("INFO torch.compile took 12.1 s in total", "warming up"),
    ("Capturing CUDA graphs: 10%", "capturing CUDA graphs"),
    (
        "INFO init engine (profile, create kv cache, warmup model) took 20 s",
        "opening its socket",
    ),
    ("INFO Available routes are:", "ready"),
]


def test_what_an_engine_does_is_what_its_log_said_last(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    assert engine_phase(log, since=0.0) == ""
    for line, phase in VLLM_LOG:
        with log.open("a") as file:
            file.write(f"{line}\n")
        assert engine_phase(log, since=0.0) == phase
    os.utime(log, (100.0, 100.0))
    assert engine_phase(log, since=200.0) == "starting", "the log is of an earlier start"


def test_before_its_engines_start_a_launcher_says_what_it_does_itself(tmp_path: Path) -> None:
    with working("converting sums.gguf"):
        assert RunActivity(tmp_path).look().now() == "converting sums.gguf for 0 s"
    assert RunActivity(tmp_path).look().now() == "starting"


def test_a_run_that_starts_says_what_its_processes_do(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    folder.engines.write_text(json.dumps({"engines": ["engine-0", "engine-1"], "scorers": []}))
    os.utime(folder.engines, (1000.0, 1000.0))
    for name in ("engine-0", "engine-1"):
        folder.log(name).write_text("INFO Starting to load model\n")
    assert starting_words(folder, 1012.0) == "starting for 12 s: 2 engines loading weights"
    folder.log("engine-1").write_text("INFO Available routes are:\n")
    folder.log("trainer").touch()
    assert starting_words(folder, 1012.0) == (
        "starting for 12 s: engine-0 loading weights, engine-1 ready, trainer getting ready"
    )
    folder.work.write_text('{"words": "loading the model"}')
    assert starting_words(folder, 1012.0).endswith("trainer loading the model")
    assert RunActivity(tmp_path).look().now().startswith("starting for ")
    folder.config.touch()  # written anew by each start, before the engines
    assert starting_words(folder, 1012.0) == ""
