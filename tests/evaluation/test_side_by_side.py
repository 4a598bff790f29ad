"""Several evaluations on the same prompts: what is read from their folders, paired differences, the table."""

import json
from pathlib import Path

import pytest

from ycore.api.functions import Run
from ycore.evaluation.side_by_side import (
    difference,
    read_evaluation,
    table_lines,
)


def folder_of(place: Path, name: str, rewards: list[list[list[float | None]]]) -> Path:
    """Write what `ycore eval` leaves: for each prompt and completion, the rewards of two sources."""
    folder = place / name
    folder.mkdir()
    lines = [
        {
            "row": row,
            "prompt": f"p{row}",
            "completion": f"{name} {index}",
            "finish_reason": "stop",
            "rewards": values,
        }
        for row, of_prompt in enumerate(rewards)
        for index, values in enumerate(of_prompt)
    ]
    (folder / "completions.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    return folder


def test_a_prompts_figures_are_those_of_its_completions(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a", [[[1.0, 0.5], [0.0, None]], [[None, None], [None, None]]])
    answers = read_evaluation(folder, [1.0, 2.0])
    assert (answers[0].reward, answers[0].right) == (1.0, 0.5)
    assert (answers[1].reward, answers[1].right) == (
        None,
        0.0,
    )  # masked: no reward, and not right


def test_a_completion_may_have_unicodes_line_separators(tmp_path: Path) -> None:
    """They end no line of JSON, and JSON's text may have them as they are."""
    folder = folder_of(tmp_path, "a", [[[1.0]], [[0.0]]])
    file = folder / "completions.jsonl"
    said = "\u2028next\u2029and\u0085so"
    file.write_text(file.read_text().replace("a 0", said), encoding="utf-8")
    assert [result.right for result in read_evaluation(folder, [1.0]).values()] == [1.0, 0.0]
    (folder / "run.json").write_text("{}")
    assert {line["completion"] for line in Run(folder).completions} == {said}


def test_of_several_datasets_each_has_its_own_first_reward(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a", [[[None, 1.0], [None, 0.0]]])
    file = folder / "completions.jsonl"
    file.write_text(file.read_text().replace('{"row"', '{"dataset": "sums", "row"'))
    first_of = {"sums": 1}.__getitem__
    assert read_evaluation(folder, [1.0, 1.0], first_of)[0].right == 0.5


def test_differences_are_paired(tmp_path: Path) -> None:
    """Prompts differ by a lot, models by 0.1 on every prompt: apart from each other only in pairs."""
    first = read_evaluation(
        folder_of(tmp_path, "a", [[[n % 2 * 1.0]] for n in range(40)]), [1.0]
    )
    other = read_evaluation(
        folder_of(tmp_path, "b", [[[n % 2 * 1.0 + 0.1]] for n in range(40)]), [1.0]
    )
    gap = difference(first, other)
    assert gap["num_prompts"] == 40
    assert gap["reward"] == pytest.approx(0.1) == gap["reward/low"] == gap["reward/high"]
    assert (gap["pass@1"], gap["pass@1/low"], gap["pass@1/high"]) == (0.0, 0.0, 0.0)
    back = difference(other, first)
    assert back["reward"] == pytest.approx(-0.1)


def test_a_prompt_that_one_could_not_be_scored_on_is_in_no_difference_of_rewards(
    tmp_path: Path,
) -> None:
    first = read_evaluation(folder_of(tmp_path, "a", [[[0.0]], [[None]]]), [1.0])
    other = read_evaluation(folder_of(tmp_path, "b", [[[1.0]], [[1.0]]]), [1.0])
    gap = difference(first, other)
    assert (gap["reward"], gap["pass@1"]) == (1.0, 1.0)
    none = difference({1: first[1]}, other)
    assert "reward" not in none and none["num_prompts"] == 1


def test_the_table_has_a_column_for_each_model_and_a_row_for_each_figure() -> None:
    names = (
        "reward",
        "rewards/ifeval",
        "rewards/ifeval_2",
        "pass@1",
        "cot-pass@1",
        "majority@4",
    )
    summary = {key: value for name in names for key, value in spread_of(name, 0.5).items()}
    gap = {"num_prompts": 9, "reward": 0.1, "reward/low": -0.05, "reward/high": 0.2}
    fewer = {name: value for name, value in summary.items() if not name.startswith("majority")}
    head, *rows = table_lines(
        {"m": fewer | {"cut_off": 0.0}, "n": summary | {"cut_off": 0.25}}, {"n": gap}
    )
    assert head == ["", "m", "n"]
    assert [row[0] for row in rows] == [*names, "reward less the first's", "cut off"]
    assert all(row[1:] == ["0.500 (0.400 to 0.600)"] * 2 for row in rows[:5])
    assert rows[5:] == [
        ["majority@4", "-", "0.500 (0.400 to 0.600)"],
        ["reward less the first's", "", "+0.100 (-0.050 to +0.200)"],
        ["cut off", "0%", "25%"],
    ]


def spread_of(name: str, value: float) -> dict[str, float]:
    return {name: value, f"{name}/low": value - 0.1, f"{name}/high": value + 0.1}
