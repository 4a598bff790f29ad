"""A device moves from training to the engines while a run goes on: it is stopped, and goes on with another split.

The cores are this machine's, each counted twice, and the scripted engine is as fast on one as on three: what is shown is
that the move costs no step and changes none, and no gain.
"""

import json
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.job import Job, write_inputs
from tests.harness import HANG_S, start_ycore
from ycore.run.files import RunFolder
from ycore.run.metrics import read_metrics
from ycore.run.resuming import round_file, rounds_in

pytestmark = [pytest.mark.slow, pytest.mark.verify]

SCRIPTED = {"cores": "4", "--token-s": "0.3"}  # so slow that training waits
SAME = ("loss", "grad_norm", "reward", "completions/mean_length", "learning_rate", "entropy")
AFTER = 3  # steps that are compared after the move


def devices(row: dict[str, Any]) -> int:
    return int(row.get("ycore/engine_devices", 0))


def run_until(
    words: Sequence[str], output: Path, is_enough: Callable[[list[dict[str, Any]]], bool]
) -> list[dict[str, Any]]:
    """Start a command, press Ctrl-C once its metrics are enough, and return the metrics."""
    folder = RunFolder(output)
    log = output.with_suffix(".log")
    process = start_ycore(words, cwd=output.parent, log=log, scripted_engine=SCRIPTED)
    deadline = time.monotonic() + HANG_S
    while process.poll() is None and time.monotonic() < deadline:
        if is_enough(read_metrics(folder.metrics)):
            process.send_signal(signal.SIGINT)
            break
        time.sleep(0.1)
    assert process.wait(timeout=300) == 130, log.read_text()[-2000:]
    return read_metrics(folder.metrics)


def groups_in(file: Path) -> list[dict[str, Any]]:
    """Return the groups of a round's file: below its first line, which describes the file."""
    groups: list[dict[str, Any]] = json.loads(file.read_text().splitlines()[1])["groups"]
    return groups


def test_a_core_moves_to_the_engines_and_no_step_is_lost_or_changed(tmp_path: Path) -> None:
    """It starts with two ranks on two of four cores, and goes on with one rank on one."""
    job = Job(write_inputs(tmp_path / "inputs"), steps=5000, checkpoint_every=1000, ranks=2)
    keys = ["engine.devices=2", "engine.count=auto", "engine.rebalance=true"]
    sets = [word for key in keys for word in ("--set", key)]
    whole = tmp_path / "whole"
    rows = run_until(
        [*job.words(whole), "--max-staleness", "1", *sets, "--keep-journal"],
        whole,
        lambda rows: sum(devices(row) == 3 for row in rows) > AFTER,
    )
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "each step once"
    number = next(row["step"] for row in rows if devices(row) == 3) - 1
    assert [devices(row) for row in rows] == [0] + [2] * (number - 1) + [3] * (
        len(rows) - number
    )
    assert 11 < number < 20, "ten steps after the first are measured"
    config = json.loads((whole / "run.json").read_text())["config"]
    assert config["engine"]["devices"] == 3 and config["processes"] == 1
    said = whole.with_suffix(".log").read_text()
    assert "training waited" in said and "engine.devices=3 would take" in said
    assert "stopping: the trainer finishes its step and saves a checkpoint" in said
    rounds = rounds_in(whole / "journal")
    assert list(rounds) == list(range(len(rounds)))
    assert {
        step: len(ranks) for step, ranks in rounds.items() if step <= number
    } == dict.fromkeys(range(number + 1), 2), "the round that was written ahead was kept"
    assert all(ranks == {0} for step, ranks in rounds.items() if step > number)

    # The same by hand: from the same checkpoint, with the same split, and no round of what came after.
    by_hand = tmp_path / "by_hand"
    shutil.copytree(whole, by_hand)
    for step, ranks in rounds.items():
        for rank in ranks if step > number else ():
            round_file(by_hand / "journal", step, rank).unlink()
    last = int(number) + AFTER
    hand_rows = run_until(
        [
            "resume",
            str(by_hand),
            "--resume-from",
            str(int(number)),
            "--set",
            "engine.rebalance=false",
        ],
        by_hand,
        lambda rows: (
            any(row["step"] >= last and devices(row) == 3 for row in rows)
            and len(rows) < len(read_metrics(whole / "metrics.jsonl"))
        ),
    )
    for row, hand_row in zip(rows[:last], hand_rows[:last], strict=True):
        assert [row.get(name) for name in SAME] == [hand_row.get(name) for name in SAME]
    assert rows[last - 1]["loss"] != rows[last - 2]["loss"]


def test_a_core_moves_while_a_stream_is_in_flight(tmp_path: Path) -> None:
    """Unfinished completions begin anew with one rank; no step and no group comes twice, and none is too old."""
    max_staleness = 3
    job = Job(write_inputs(tmp_path / "inputs"), steps=5000, checkpoint_every=1000, ranks=2)
    keys = ["engine.devices=2", "engine.count=auto", "engine.rebalance=true"]
    sets = [word for key in keys for word in ("--set", key)]
    run = tmp_path / "run"
    rows = run_until(
        [*job.words(run), "--max-staleness", str(max_staleness), *sets, "--keep-journal"],
        run,
        lambda rows: sum(devices(row) == 3 for row in rows) > AFTER,
    )
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "each step once"
    moved_at = next(row["step"] for row in rows if devices(row) == 3)
    assert all(devices(row) == 3 for row in rows if row["step"] >= moved_at)
    assert max(row["ycore/staleness"] for row in rows) <= max_staleness
    assert any(row["ycore/rounds_ahead"] > 1 for row in rows), "it was a stream"
    positions = Counter(
        group["draw"]["position"]
        for step, ranks in rounds_in(run / "journal").items()
        for rank in ranks
        for group in groups_in(round_file(run / "journal", step, rank))
    )
    assert positions and set(positions.values()) == {1}, "no group is trained on twice"
