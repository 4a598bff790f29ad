"""Compare evaluations of several models on the same prompts: figures and paired differences.

A difference is that of the means over the prompts that both have a figure for. Its interval is the paired bootstrap's
(Efron 1979): prompts are drawn again, each with both models' figures, and the middle 95 % of 1000 such differences is
kept. Where the interval is above 0 or below it, the models differ by more than the choice of prompts.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ycore.evaluation.held_out import RIGHT_FROM, mean_of_known, with_interval
from ycore.scoring.group_rewards import weighted_sum
from ycore.types import JsonObject, Record

COMPARISON = "comparison.json"


class PromptResult(NamedTuple):
    """One prompt's completions by one model: the mean reward (None if none was scored), the share that is right."""

    reward: float | None
    right: float


Results = Mapping[int, PromptResult]
"""By row of the dataset."""


def read_evaluation(
    folder: Path,
    weights: Sequence[float],
    first_of: Callable[[str], int] = lambda _: 0,
) -> Results:
    """Read what `ycore eval` wrote in `completions.jsonl`, with these weights of the rewards.

    Args:
        first_of: returns the index of the reward that says what is right, for a dataset of several.
    """
    by_row: dict[int, list[Record]] = {}
    with (folder / "completions.jsonl").open(encoding="utf-8") as file:
        for line in file:
            completion = json.loads(line)
            by_row.setdefault(completion["row"], []).append(completion)
    return {
        row: _summarise(completions, weights, first_of(completions[0].get("dataset", "")))
        for row, completions in by_row.items()
    }


def _summarise(
    completions: Sequence[Record], weights: Sequence[float], first: int
) -> PromptResult:
    rewards = [completion["rewards"] for completion in completions]
    num_right = sum((values[first] or 0.0) >= RIGHT_FROM for values in rewards)
    return PromptResult(
        reward=mean_of_known(weighted_sum(values, weights) for values in rewards),
        right=num_right / len(completions),
    )


def difference(first: Results, second: Results) -> JsonObject:
    """Return `second` less `first`: `reward` and `pass@1`, each with `/low` and `/high`, and `num_prompts` of both."""
    rows = sorted(first.keys() & second.keys())
    rewards = [(first[row].reward, second[row].reward) for row in rows]
    values = {
        "reward": [b - a for a, b in rewards if a is not None and b is not None],
        "pass@1": [second[row].right - first[row].right for row in rows],
    }
    result: JsonObject = {"num_prompts": len(rows)}
    for name, differences in values.items():
        result |= with_interval(name, np.array(differences), np.ones(len(differences)))
    return result


def table_lines(
    summaries: Mapping[str, Record], differences: Mapping[str, Record]
) -> list[list[str]]:
    """Return a table: a column for each model, a row for each figure with an interval, and for each difference."""
    table = [["", *summaries]]
    figures = dict.fromkeys(
        name for summary in summaries.values() for name in summary if f"{name}/low" in summary
    )
    for name in figures:
        table.append([name, *(_cell(summary, name) or "-" for summary in summaries.values())])
    for name in ("reward", "pass@1"):
        if any(name in difference for difference in differences.values()):
            cells = [_cell(differences.get(model, {}), name, "+") for model in summaries]
            table.append([f"{name} less the first's", *cells])
    table.append(["cut off", *(f"{summary['cut_off']:.0%}" for summary in summaries.values())])
    return table


def _cell(values: Record, name: str, sign: str = "") -> str:
    if name not in values:
        return ""
    mean, low, high = (
        format(values[f"{name}{end}"], f"{sign}.3f") for end in ("", "/low", "/high")
    )
    return f"{mean} ({low} to {high})"
