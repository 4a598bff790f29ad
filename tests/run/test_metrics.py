"""metrics.jsonl and what is read of it: rows, the summary of a run, Wilson's interval and pass@k."""

from contextlib import closing
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.run.metrics import (
    MetricsFollower,
    MetricsWriter,
    number,
    pass_at_k,
    read_metrics,
    summarise,
    wilson_95,
)

BANDS = Path(__file__).resolve().parents[2] / "recipes" / "bands"


def test_rows_come_back_and_nan_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path)) as writer:
        writer.write({"step": 1, "kl": float("nan"), "nested": {"x": [float("inf"), 1.5]}})
        assert read_metrics(path) == [{"step": 1, "kl": None, "nested": {"x": [None, 1.5]}}]


def test_half_a_last_line_is_left_out_and_does_not_spoil_the_next_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    assert read_metrics(path) == [{"step": 1}]
    with closing(MetricsWriter(path)) as writer:
        writer.forget_after(1)
        writer.write({"step": 2})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_a_row_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    with closing(MetricsWriter(path)) as writer:
        writer.forget_after(2)
        writer.write({"step": 3})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_a_kill_in_the_middle_of_a_row_leaves_no_damage_behind(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    with closing(MetricsWriter(path)) as writer:
        writer.forget_after(1)
        writer.write({"step": 2})
    assert len(read_metrics(path, say=said.append)) == 2 and said == []


def test_a_row_that_was_there_without_its_end_is_not_new(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    follower = MetricsFollower(path)
    with closing(MetricsWriter(path)) as writer:
        writer.forget_after(2)
        assert follower.read() == []
        writer.write({"step": 3})
    assert follower.read() == [{"step": 3}]


def damaged(path: Path) -> Path:
    """Write three rows as a run does, then overwrite the second in part."""
    with closing(MetricsWriter(path)) as writer:
        for step in (1, 2, 3):
            writer.write({"step": step, "reward": 0.5})
    path.write_bytes(path.read_bytes().replace(b'"step": 2, "re', b"\0" * 14))
    return path


def test_a_damaged_line_that_is_not_the_last_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    path = damaged(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in read_metrics(path, say=said.append)] == [1, 3]
    assert said == [
        f"line 2 of {path} is damaged (it is not a JSON object with a step); its step is left out"
    ]
    read_metrics(path)
    assert capsys.readouterr().err == f"warning: {said[0]}\n"


def test_a_follower_names_a_damaged_line_once(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path, say=said.append)
    path.write_text('{"step": 1}\n')
    assert len(follower.read()) == 1
    with damaged(path).open("a") as file:
        file.write("[4]\n5]\n")
    assert [row["step"] for row in follower.read()] == [1, 3] and follower.read() == []
    assert [line.split(" of ")[0] for line in said] == ["line 3", "line 5", "line 6"]


def test_the_first_of_several_names_that_is_a_number_counts() -> None:
    row = {"a": None, "b": float("nan"), "c": 2, "d": 3.0}
    assert number(row, "a", "b", "c", "d") == 2.0 and number(row, "a", "x") is None


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


def test_a_follower_goes_on_in_a_file_that_was_cut_and_tells_no_row_twice(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    path.write_text('{"step": 1}\n{"step": 2, "took": 5}\n')
    assert len(follower.read()) == 2
    path.write_text('{"step": 1}\n')
    assert follower.read() == []
    path.write_text('{"step": 1}\n{"step": 2, "took": 6}\n')
    assert follower.read() == [{"step": 2, "took": 6}]


def test_a_resumed_run_shows_the_steps_that_it_takes(tmp_path: Path) -> None:
    """Launcher and trainer do it so: the follower opens first, then later rows are dropped and taken again."""
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path)) as writer:
        for step in range(1, 5):
            writer.write({"step": step, "took": 1.0})
    follower = MetricsFollower(path)
    assert follower.read() == []
    with closing(MetricsWriter(path)) as writer:
        writer.forget_after(2)
        assert follower.read() == []
        for step in range(3, 7):
            writer.write({"step": step, "took": 2.0})
    assert [row["step"] for row in follower.read()] == [3, 4, 5, 6]
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5, 6]


def test_rewards_are_means_of_the_first_and_last_five_steps() -> None:
    metrics = [{"step": step, "reward": step / 10} for step in range(1, 13)]
    assert summarise(metrics) == {
        "steps": 12,
        "reward_first": 0.3,
        "reward_last": 1.0,
    }


def test_a_run_without_steps_has_no_rewards() -> None:
    summary = summarise([])
    assert (summary["steps"], summary["reward_first"], summary["reward_last"]) == (
        0,
        None,
        None,
    )


def test_rows_without_a_reward_do_not_count() -> None:
    metrics = [
        {"step": 1, "reward": 1.0},
        {"step": 2, "reward": None},
        {"step": 2, "train_loss": 0.1},
    ]
    summary = summarise(metrics)
    assert (summary["steps"], summary["reward_last"]) == (2, 1.0)


def test_the_ends_of_a_short_run_do_not_overlap() -> None:
    rows = [{"step": step, "ycore/reward": step / 4} for step in range(1, 5)]
    summary = summarise(rows)
    assert (summary["reward_first"], summary["reward_last"]) == (0.375, 0.875)


def test_the_summary_has_the_ends_of_the_loss() -> None:
    rows = [{"step": step, "loss": 1.0 / step} for step in range(1, 7)]
    summary = summarise(rows, measure="loss")
    assert summary == {
        "steps": 6,
        "loss_first": round((1 + 1 / 2 + 1 / 3) / 3, 6), "loss_last": round((1 / 4 + 1 / 5 + 1 / 6) / 3, 6),
    }  # fmt: skip
    assert summarise([], measure="loss")["loss_first"] is None


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (50, 100, 0.4038, 0.5962),
    ],
)
def test_known_values(right: int, total: int, low: float, high: float) -> None:
    assert wilson_95(right, total) == pytest.approx((low, high), abs=1e-4)


@given(
    st.integers(1, 500).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total)))
)
def test_it_holds_the_share_and_is_its_own_mirror(case: tuple[int, int]) -> None:
    right, total = case
    low, high = wilson_95(right, total)
    assert 0 <= low <= right / total <= high <= 1
    mirrored = wilson_95(total - right, total)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high))
    wide, narrow = wilson_95(right, total), wilson_95(4 * right, 4 * total)
    assert narrow[1] - narrow[0] < wide[1] - wide[0]


def test_what_is_no_share_is_refused() -> None:
    for right, total in ((1, 0), (3, 2), (-1, 4)):
        with pytest.raises(ValueError, match="a share needs"):
            wilson_95(right, total)


@pytest.mark.parametrize("n", range(1, 8))
def test_it_is_the_share_of_subsets_that_hold_a_right_one(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations(range(n), k))
            holding = sum(any(member < c for member in subset) for subset in subsets)
            assert pass_at_k(n, c, k) == pytest.approx(holding / len(subsets), abs=1e-12)


def test_many_completions_stay_exact() -> None:
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)
    assert pass_at_k(2000, 0, 1000) == 0.0
    assert pass_at_k(2000, 1500, 501) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize("step", ['"x"', "1e400", "-1", "1.5", "[1]", "1" + "0" * 400, "NaN"])
def test_a_foreign_row_is_left_out_and_named(step: str, tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{{"step": {step}}}\n{{"step": 3}}\n')
    assert read_metrics(path, say=said.append) == [{"step": 1}, {"step": 3}]
    assert len(said) == 1 and said[0].startswith(f"line 2 of {path} is damaged")
