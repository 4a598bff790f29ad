"""The scorecard's own arithmetic: moments, phases, comparisons, patches, accounts, the table."""

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.chaos import rows_files
from tests.chaos.bench import Row, as_json, as_lines, row_of
from tests.chaos.job import Job, is_dull
from tests.chaos.moments import Glimpse, Moment, Pace, draw_moments, pace_of, phase_of
from tests.chaos.patches import MUTATIONS, PARTS, POINTS, Edit, Patch, copy_package
from tests.chaos.results import (
    SAME,
    Difference,
    Result,
    account,
    compare,
    is_lively,
    newest_problem,
)
from tests.chaos.rows_files import num_kills
from tests.chaos.rows_input import check_made_up
from tests.chaos.runs import Setting
from tests.chaos.scorecard import ROWS, run_scorecard, tiers_of
from tests.chaos.trial import Oracle, Outcome
from tests.chaos.witnesses import dies_at, read_flushes
from ycore.errors import ConfigError, RunError


def test_moments_follow_from_seed_and_row_alone() -> None:
    drawn = draw_moments(30, steps=8, seed=3, row="kill-trainer")
    assert drawn == draw_moments(30, steps=8, seed=3, row="kill-trainer")
    assert drawn != draw_moments(30, steps=8, seed=4, row="kill-trainer")
    assert drawn != draw_moments(30, steps=8, seed=3, row="kill-launcher")
    assert drawn[:5] == draw_moments(5, steps=8, seed=3, row="kill-trainer")


def test_moments_are_dealt_evenly_over_start_steps_and_end() -> None:
    counts = Counter(moment.steps for moment in draw_moments(27, steps=8, seed=0, row="x"))
    assert counts == dict.fromkeys(range(9), 3)


def test_a_moment_is_as_far_into_a_step_as_the_pace_says() -> None:
    pace = pace_of([5.0, 5.2, 5.4, 9.0], modelled=9.5, ended=10.0)
    assert (pace.start_s, round(pace.step_s, 6), pace.end_s, pace.until_model_s) == (
        5.0,
        0.2,
        1.0,
        0.5,
    )
    pace = Pace(start_s=8, step_s=0.2, end_s=2)
    assert [Moment(steps, 0.5).delay_s(pace, of=4) for steps in (0, 1, 4)] == [4, 0.1, 1]


@pytest.mark.parametrize(
    ("seen", "phase"),
    [
        (Glimpse(), "start"),
        (Glimpse(writing_weights=True), "sync"),
        (Glimpse(has_new_weights=True), "round"),
        (Glimpse(rows=3, rounds=3), "sync"),
        (Glimpse(rows=3, rounds=3, has_new_weights=True), "round"),
        (Glimpse(rows=3, rounds=3, has_new_weights=True, committing=True), "commit"),
        (Glimpse(rows=3, rounds=4, checkpoint=2), "train"),
        (Glimpse(rows=4, rounds=4, checkpoint=2), "save"),
        (Glimpse(rows=4, rounds=4, checkpoint=4, saving=True), "save"),
        (Glimpse(rows=4, rounds=4, checkpoint=4), "sync"),
        (Glimpse(rows=8, rounds=8, checkpoint=6), "save"),
        (Glimpse(rows=8, rounds=8, checkpoint=8), "end"),
        (Glimpse(rows=8, rounds=8, checkpoint=8, has_model=True), "end"),
    ],
)
def test_a_phase_is_read_from_the_run_folder(seen: Glimpse, phase: str) -> None:
    assert phase_of(seen, steps=8, checkpoint_every=2) == phase


def result(
    losses: list[float], *, weight: float = 1.0, steps: list[int] | None = None
) -> Result:
    numbers = steps or list(range(1, len(losses) + 1))
    rows = [
        {"step": step, "loss": loss, "grad_norm": 1.0, "reward": loss}
        for step, loss in zip(numbers, losses, strict=True)
    ]
    return Result(rows, {"w": np.array([1.0, weight], dtype=np.float32)})


def test_what_is_the_same_has_no_difference() -> None:
    assert compare(result([1, 2]), result([1, 2])).is_none


def test_every_kind_of_difference_is_found() -> None:
    whole = result([1, 2])
    assert compare(whole, result([1, 2.5])).largest["loss"] == 0.5
    assert compare(whole, result([1, 2], weight=1.25)).largest["weights"] == 0.25
    assert compare(whole, result([1])).largest["loss"] == math.inf
    assert compare(whole, result([1, math.nan])).largest["loss"] == math.inf
    assert compare(whole, result([1, 2], steps=[1, 1])).notes == ("steps [1, 1] for [1, 2]",)
    written, other = (
        {1: [[0, [5], [[7], [-1.0], [{"content": text}], None]]], 2: []} for text in "ab"
    )
    notes = compare(replace(whole, written=written), replace(whole, written=other)).notes
    assert notes == ("what was written for steps [1] differs",)
    assert compare(
        replace(whole, written=written), replace(whole, written={1: written[1]})
    ).notes == ("the journal has no round of steps [2]",)
    assert "no model was saved" in compare(whole, Result(whole.rows, {})).notes


def test_rounds_are_compared_by_their_steps_where_one_journal_goes_back_further() -> None:
    """An interrupted run saves one checkpoint more, and an older one goes with its rounds."""
    whole = result([1, 2, 3])
    assert compare(
        replace(whole, written={2: ["b"], 3: ["c"]}), replace(whole, written={3: ["c"]})
    ).is_none
    notes = compare(
        replace(whole, written={2: ["b"], 3: ["c"]}), replace(whole, written={3: ["d"]})
    ).notes
    assert notes == ("what was written for steps [3] differs",)


def test_a_run_that_could_not_tell_is_no_oracle() -> None:
    assert is_lively(result([1, 2])) is None
    assert "losses repeat" in str(is_lively(result([1, 1])))


def test_exit_0_with_another_result_is_the_worst_there_is() -> None:
    other = Difference({"loss": 0.5})
    wrong, failed, same = (
        Outcome("a", (1, 0), other),
        Outcome("b", (1, 1), other),
        Outcome("c", (0,), SAME),
    )
    row = row_of("r", "what", [wrong, failed, same])
    assert (row.passed, row.total, row.wrong, row.passes) == (1, 3, 1, False)
    assert row.worst["loss"] == 0.5
    assert not Outcome("d", (0,), SAME, left=("process 7",)).passes
    assert Outcome("e", (-9,), SAME, had_finished=True).passes, (
        "a launcher that is killed as it goes"
    )
    assert not Outcome("f", (-9,), other, had_finished=True).passes


def test_kills_that_landed_are_counted_by_phase() -> None:
    row = row_of(
        "r",
        "w",
        [Outcome("a", (0,), phase="save"), Outcome("b", (0,), phase="save", landed=False)],
    )
    assert (row.phases["save"], row.phases["round"]) == (1, 0)


def test_a_row_of_nothing_has_failed() -> None:
    assert not Row("r", "w", 0, 0).passes


def test_every_mutation_applies_to_the_package_as_it_is(tmp_path: Path) -> None:
    assert len(MUTATIONS) >= 12
    copy = copy_package(tmp_path / "copy")
    for patch in MUTATIONS:
        files = {edit.file: (copy / edit.file).read_text() for edit in patch.edits}
        patch.apply(copy)
        for name, text in files.items():
            assert (copy / name).read_text() != text
            compile((copy / name).read_text(), name, "exec")
            (copy / name).write_text(text)


def test_every_point_applies_to_the_package_and_all_of_them_at_once(tmp_path: Path) -> None:
    copy = copy_package(tmp_path / "copy", tuple(point.patch for point in POINTS))
    for file in {point.file for point in POINTS}:
        text = (copy / file).read_text()
        compile(text, file, "exec")
        assert text.count(".reach(") == sum(point.file == file for point in POINTS)
    assert len({point.name for point in POINTS}) == len(POINTS) >= 12
    assert not any("/" in point.name for point in POINTS), (
        "the variable has its parts between slashes"
    )


def test_what_is_timed_applies_to_the_package_as_it_is(tmp_path: Path) -> None:
    copy = copy_package(tmp_path / "copy", PARTS)
    for file in {edit.file for patch in PARTS for edit in patch.edits}:
        compile((copy / file).read_text(), file, "exec")


def test_a_process_dies_where_it_was_told_to_and_once(tmp_path: Path) -> None:
    code = "from tests.chaos.witnesses import reach\nfor name in 'aba': reach(name)"
    environment = {**os.environ, **dies_at("a", 2, tmp_path / "died")}
    for name, status in (("b", 0), ("a", -signal.SIGKILL), ("a", 0)):
        changed = {
            **environment,
            **(dies_at("b", 2, tmp_path / "never") if name == "b" else {}),
        }
        assert (
            subprocess.run([sys.executable, "-c", code], env=changed, check=False).returncode
            == status
        )
    assert (tmp_path / "died").exists() and not (tmp_path / "never").exists()


def test_a_patch_whose_text_is_gone_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for old, count in (("y = 1", 0), ("x = 1", 2)):
        with pytest.raises(
            RunError, match=f"the patch 'p' does not apply: its text is {count} times in a.py"
        ):
            Patch("p", (Edit("a.py", old, ""),)).apply(tmp_path)


def _draws(cursor: int) -> dict[str, Any]:
    return {"cursor": cursor, "gaps": [], "start": 0}


def round_of(*positions: int, cursor: int, surplus: tuple[int, ...] = ()) -> dict[str, object]:
    groups = [{"draw": {"position": position}} for position in positions]
    waiting = [
        {"group": {"draw": {"position": position}}, "teaches": True} for position in surplus
    ]
    return {"groups": groups, "states": [{"draws": _draws(cursor), "leftover_groups": waiting}]}


def test_an_account_of_prompts_is_even_or_says_what_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.chaos.results.is_dull", lambda row: False)
    even = [round_of(0, 1, cursor=3, surplus=(2,)), round_of(2, 3, cursor=4)]
    assert account(even, steps=2, seed=0) == []
    assert account(even, steps=3, seed=0) == ["2 rounds for 3 steps"]
    assert account([round_of(0, 1, cursor=4)], steps=1, seed=0) == [
        "prompts lost, at positions [2, 3]"
    ]
    twice = [round_of(0, 1, cursor=2), round_of(1, cursor=2)]
    assert account(twice, steps=2, seed=0) == ["prompts taken twice, at positions [1]"]
    gaps = {"gaps": [1], "start": 3}
    two: list[dict[str, Any]] = [
        {"draws": {**_draws(1), **gaps}, "leftover_groups": []} for _ in range(2)
    ]
    assert account([{**round_of(0, 2, 1, 3, cursor=0), "states": two}], steps=1, seed=0) == []
    two[0]["draws"]["cursor"] = 2
    assert account([{**round_of(0, 2, 1, 3, cursor=0), "states": two}], steps=1, seed=0) == [
        "prompts lost, at positions [4]"
    ]
    assert [is_dull(row) for row in (0, 1, 3)] == [True, False, True]


def test_flushes_are_counted(tmp_path: Path) -> None:
    log = tmp_path / "flushes.log"
    assert read_flushes(log) == (0, [])
    log.write_text(
        "ok /run/journal/round-1\nnot flushed: /run/checkpoints/checkpoint-2 (a.pt)\n"
    )
    assert read_flushes(log) == (1, ["not flushed: /run/checkpoints/checkpoint-2 (a.pt)"])


def test_a_checkpoint_is_looked_at_with_other_eyes(tmp_path: Path) -> None:
    assert newest_problem(tmp_path) is None
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    (tmp_path / ".saving-checkpoint-4").mkdir()
    assert "no whole manifest" in str(newest_problem(tmp_path))
    (checkpoint / "a").write_bytes(b"a")
    digest = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    (checkpoint / "manifest.json").write_text(
        "{}\n" + json.dumps({"files": {"a": {"bytes": 1, "sha256": digest}}})
    )
    assert newest_problem(tmp_path) is None
    (checkpoint / "a").write_bytes(b"b")
    assert newest_problem(tmp_path) == "checkpoint-2: a is not what was written"


def test_made_up_configurations_reach_both_answers() -> None:
    accepted, failures = check_made_up(300, seed=1)
    assert failures == []
    assert 20 < accepted < 280


def test_the_table_says_everything_and_keeps_the_tiers_apart() -> None:
    good = row_of("kill-x", "killed", [Outcome("a", (1, 0), phase="train")])
    bad = Row("made-up", "made up", 1, 2, failures=tuple(map(str, range(7))))
    table = "\n".join(as_lines([("scripted", [good, bad]), ("vllm", [good])], seed=7))
    assert "ok   kill-x       1/1      killed" in table and "FAIL made-up      1/2" in table
    assert "train 1" in table and "largest difference" in table and "seed 7" in table
    assert "made-up: and 2 more, in the JSON" in table
    card = json.loads(
        json.dumps(as_json([("scripted", [good, bad])], seed=7, seconds=1.0), allow_nan=False)
    )
    assert card["passes"] is False and card["tiers"]["scripted"][1]["failures"] == list(
        "0123456"
    )


def test_a_damaged_round_that_is_taken_fails_whatever_comes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit of a text that nobody trains on changes no result; the promise is broken all the same."""
    (tmp_path / "base" / "journal").mkdir(parents=True)
    (tmp_path / "base" / "journal" / "round-000003-rank-0.json").write_bytes(b"{}")
    monkeypatch.setattr(rows_files, "go_on", lambda *_: rows_files.Going(0, SAME, (), "done"))
    oracle = cast(Oracle, None)
    outcome = rows_files.damage_round(oracle, Setting(tmp_path), tmp_path / "base", "flipped")
    assert not outcome.passes and "a damaged round was taken" in str(outcome)


def test_ranks_share_a_step_and_have_an_engine_each() -> None:
    words = Job(Path("inputs"), ranks=2).words(Path("out"))
    assert {"processes=2", "engine.count=2"} <= set(words)
    assert words[words.index("--per-device-train-batch-size") + 1] == "2"


def test_a_hundred_kills_in_saves_at_full_size() -> None:
    assert [num_kills(moments) for moments in (30, 3, 1)] == [100, 10, 3]


def test_rows_and_engines_that_do_not_exist_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"there is no row 'kill-trainr'; did you mean 'kill-trainer'.*the rows are kill-launcher",
    ):
        run_scorecard(
            ["scripted"],
            names=["kill-trainr"],
            seed=0,
            count=1,
            parallel=1,
            output=None,
            say=print,
        )
    with pytest.raises(ConfigError, match="--engine is scripted, vllm or both; it is 'vlm'"):
        tiers_of("vlm")
    assert set(ROWS["vllm"]) - {"cost"} < set(ROWS["scripted"])
