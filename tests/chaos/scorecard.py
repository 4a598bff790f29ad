"""The scorecard: real runs of ycore that are killed, stopped and damaged, and whether anything was lost.

Run it from the repository root: `python -m tests.chaos --moments 30 --json scorecard.json`. See docs/reliability.md.
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from tests.chaos.bench import Bench, Row, as_json, as_lines
from tests.chaos.job import Job, Tier, write_inputs
from tests.chaos.moments import draw_moments
from tests.chaos.patches import PATIENT, copy_package
from tests.chaos.rows_calls import (
    RANKS,
    account_row,
    calls_row,
    carried_row,
    cost_row,
    stale_row,
)
from tests.chaos.rows_ends import ends_row
from tests.chaos.rows_files import (
    damaged_round_row,
    damaged_row,
    flush_row,
    in_place_row,
    resume_row,
    save_row,
)
from tests.chaos.rows_input import bad_input_row, good_input_row, made_up_row
from tests.chaos.rows_kill import (
    ALLOCATOR,
    JUDGE,
    KILLED,
    RANK,
    ahead_row,
    allocator_row,
    exits_row,
    interrupt_row,
    kill_row,
    points_ahead_row,
    points_row,
    rank_row,
    stop_row,
)
from tests.chaos.rows_mutation import mutation_row
from tests.chaos.rows_stream import stream_faults_row, stream_points_row
from tests.chaos.rows_world import disk_world_row, kill_world_row, stop_world_row
from tests.chaos.runs import Setting
from tests.chaos.witnesses import FLUSHES_VARIABLE
from ycore.errors import ConfigError, Interrupted, RunError, nearest

MakeRow = Callable[[Bench], Row]
Say = Callable[[str], None]

_BOTH: dict[str, MakeRow] = {
    **{f"kill-{role}": partial(kill_row, role=role) for role in (*KILLED, JUDGE)},
    "kill-rank": rank_row,
    "kill-allocator": allocator_row,
    "kill-ahead": ahead_row,
    "ctrl-c-ranks": interrupt_row,
    "kill-in-save": save_row,
    **{f"stop-{role}": partial(stop_row, role=role) for role in KILLED},
    "leftovers": exits_row,
}
_SCRIPTED: dict[str, MakeRow] = {
    "ends": ends_row,
    "kill-at-points": points_row,
    "points-ahead": points_ahead_row,
    "in-place": in_place_row,
    "damaged-checkpoint": damaged_row,
    "damaged-round": damaged_round_row,
    "resume-every": resume_row,
    "kill-world": kill_world_row,
    "stop-world": stop_world_row,
    "full-disk-world": disk_world_row,
    "account": account_row,
    "kill-carried": partial(
        carried_row, name="kill-carried", option=("--oversample", "2"), ranks=((1, 1),)
    ),
    "kill-stream": partial(
        carried_row, name="kill-stream", option=("--max-staleness", "3"), ranks=RANKS
    ),
    "stream-faults": stream_faults_row,
    "stream-points": stream_points_row,
    "calls": calls_row,
    "stale-weights": stale_row,
    "mutations": mutation_row,
    "flushes": flush_row,
    "bad-input": bad_input_row,
    "good-input": good_input_row,
    "made-up": made_up_row,
}
ROWS: Mapping[Tier, Mapping[str, MakeRow]] = {
    "scripted": {**_BOTH, **_SCRIPTED},
    "vllm": {**_BOTH, "cost": cost_row},
}
TITLES: Mapping[Tier, str] = {
    "scripted": "real trainer, scripted engine that speaks vLLM's protocol",
    "vllm": "real trainer, real vLLM",
}


def run_scorecard(
    tiers: Sequence[Tier],
    *,
    names: Sequence[str],
    seed: int,
    count: int,
    parallel: int,
    output: Path | None,
    say: Say,
) -> dict[str, Any]:
    """The rows of these names, or all, of each tier; a row that could not be made has failed."""
    _check_names(names, tiers)
    began, results = time.monotonic(), []
    for tier in tiers:
        place = None if output is None else output / tier
        with _bench(
            tier, seed=seed, count=count, parallel=parallel, output=place, say=say
        ) as bench:
            wanted = {
                name: make for name, make in ROWS[tier].items() if not names or name in names
            }
            results.append((TITLES[tier], _make(wanted, bench)))
    return _finish(results, seed=seed, say=say, began=began)


def plan_rows(tiers: Sequence[Tier], *, names: Sequence[str], seed: int) -> list[str]:
    """The rows by name; of those that kill, also the first moments (finished steps + share of the next step)."""
    _check_names(names, tiers)
    lines = []
    for tier in tiers:
        lines.append(f"{TITLES[tier]}, seed {seed}")
        for name in (name for name in ROWS[tier] if not names or name in names):
            drawn = (
                draw_moments(5, steps=Job(Path()).steps, seed=seed, row=name)
                if name.removeprefix("kill-") in (*KILLED, JUDGE, RANK, ALLOCATOR)
                else []
            )
            lines.append(
                f"  {name}" + (f": {', '.join(map(str, drawn))}, ..." if drawn else "")
            )
    return lines


def _make(wanted: Mapping[str, MakeRow], bench: Bench) -> list[Row]:
    rows = []
    for name, make in wanted.items():
        bench.say(f"{name} ...")
        try:
            rows.append(make(bench))
        except RunError as error:
            rows.append(Row(name, "could not be made", 0, 1, failures=(str(error),)))
            bench.say(f"  FAIL {error}")
    return rows


def _finish(
    tiers: Sequence[tuple[str, Sequence[Row]]], *, seed: int, say: Say, began: float
) -> dict[str, Any]:
    for line in as_lines(tiers, seed=seed):
        say(line)
    return as_json(tiers, seed=seed, seconds=time.monotonic() - began)


def tiers_of(engine: str) -> tuple[Tier, ...]:
    """The tiers that `--engine` names."""
    tiers: Mapping[str, tuple[Tier, ...]] = {
        "scripted": ("scripted",),
        "vllm": ("vllm",),
        "both": ("scripted", "vllm"),
    }
    if engine not in tiers:
        raise ConfigError(
            f"--engine is scripted, vllm or both; it is {engine!r}{nearest(engine, tiers)}"
        )
    return tiers[engine]


def _check_names(names: Sequence[str], tiers: Sequence[Tier]) -> None:
    known = list(dict.fromkeys(name for tier in tiers for name in ROWS[tier]))
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--rows: there is no row {name!r}{nearest(name, known)}; the rows are {', '.join(known)}"
            )


@contextmanager
def _bench(
    tier: Tier, *, seed: int, count: int, parallel: int, output: Path | None, say: Say
) -> Iterator[Bench]:
    """A place with a copy of the package and everything that the runs read; a stop ends every run of it."""
    with tempfile.TemporaryDirectory(prefix="ycore-chaos-") as temporary:
        place = _new_folder(output) if output is not None else Path(temporary)
        job = Job(write_inputs(place / "inputs"), tier=tier)
        setting = Setting(
            place,
            scripted={"--think-s": str(job.think_s)} if tier == "scripted" else None,
            package=copy_package(place / "package", [PATIENT]),
            environment={FLUSHES_VARIABLE: str(place / "flushes.log")},
        )
        with ThreadPoolExecutor(parallel) as pool, _stopping(setting):
            yield Bench(job, setting, pool, seed=seed, count=count, say=say)


@contextmanager
def _stopping(setting: Setting) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP end every run, and with them the scorecard."""

    def stop(number: int, frame: FrameType | None) -> None:
        setting.stop.set()
        raise Interrupted("the scorecard was stopped; what it had started is gone")

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _new_folder(folder: Path) -> Path:
    if folder.exists() and os.listdir(folder):
        raise ConfigError(
            f"--output must be new or empty, and {folder} is not; choose another --output"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder.resolve()
