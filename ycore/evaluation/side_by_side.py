"""Evaluations of several models on the same prompts, side by side: figures, paired differences, prompt by prompt.

A difference is that of the means over the prompts that both have a figure for. Its interval is the paired bootstrap's
(Efron 1979): prompts are drawn again, each with both models' figures, and the middle 95 % of 1000 such differences is
kept. Where the interval is above 0 or below it, the models differ by more than the choice of prompts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ycore.evaluation.evaluator import mean
from ycore.evaluation.held_out import RIGHT_FROM, with_interval
from ycore.run.files import write_bytes_atomic
from ycore.scoring.group_rewards import weighted_sum

COMPARISON, DIFFERENCES = "comparison.json", "differences.jsonl"


@dataclass(frozen=True, slots=True)
class Answered:
    """One prompt's completions by one model: the mean reward (None if none was scored), the share that is right."""

    prompt: Any
    completions: tuple[str, ...]
    reward: float | None
    right: float


def read_answers(folder: Path, weights: Sequence[float]) -> dict[int, Answered]:
    """Row of the dataset -> what `ycore eval` wrote in `completions.jsonl`, with these weights of the rewards."""
    by_row: dict[int, list[dict[str, Any]]] = {}
    for line in (folder / "completions.jsonl").read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        by_row.setdefault(one["row"], []).append(one)
    return {
        row: Answered(
            prompt=written[0]["prompt"],
            completions=tuple(one["completion"] for one in written),
            reward=mean(weighted_sum(one["rewards"], weights) for one in written),
            right=sum((one["rewards"][0] or 0.0) >= RIGHT_FROM for one in written) / len(written),
        )
        for row, written in by_row.items()
    }


def difference(first: Mapping[int, Answered], other: Mapping[int, Answered]) -> dict[str, Any]:
    """`other` less `first`: `reward` and `pass@1`, each with `/low` and `/high`; `num_prompts` that both have."""
    rows = sorted(first.keys() & other.keys())
    found: dict[str, Any] = {"num_prompts": len(rows)}
    for name, values in {
        "reward": [
            theirs - ours
            for row in rows
            if (ours := first[row].reward) is not None and (theirs := other[row].reward) is not None
        ],
        "pass@1": [other[row].right - first[row].right for row in rows],
    }.items():
        found |= with_interval(name, np.array(values), np.ones(len(values)))
    return found


def write_differences(answers: Mapping[str, Mapping[int, Answered]], file: Path) -> None:
    """One line of JSON a prompt with every model's reward and completions, those first on which they differ most."""
    rows = set.intersection(*(set(of_model) for of_model in answers.values()))

    def spread(row: int) -> float:
        rewards = [
            known for of_model in answers.values() if (known := of_model[row].reward) is not None
        ]
        return max(rewards) - min(rewards) if rewards else 0.0

    lines = []
    for row in sorted(rows, key=lambda row: (-spread(row), row)):
        models = {
            name: {
                "reward": of_model[row].reward,
                "right": of_model[row].right,
                "completions": of_model[row].completions,
            }
            for name, of_model in answers.items()
        }
        prompt = next(iter(answers.values()))[row].prompt
        lines.append(
            json.dumps(
                {"row": row, "spread": spread(row), "prompt": prompt, "models": models},
                ensure_ascii=False,
            )
        )
    write_bytes_atomic(file, "".join(line + "\n" for line in lines).encode())


def table_lines(
    summaries: Mapping[str, Mapping[str, Any]], differences: Mapping[str, Mapping[str, Any]]
) -> list[list[str]]:
    """The table: a column for each model, a row for each figure with an interval, and for each difference."""

    def cell(values: Mapping[str, Any], name: str, sign: str = "") -> str:
        if name not in values:
            return "" if sign else "-"
        return f"{values[name]:{sign}.3f} ({values[f'{name}/low']:{sign}.3f} to {values[f'{name}/high']:{sign}.3f})"

    measured = dict.fromkeys(
        name for one in summaries.values() for name in one if f"{name}/low" in one
    )
    compared = [
        name for name in ("reward", "pass@1") if any(name in one for one in differences.values())
    ]
    return [
        ["", *summaries],
        *([name, *(cell(one, name) for one in summaries.values())] for name in measured),
        *(
            [
                f"{name} less the first's",
                *(cell(differences.get(model, {}), name, "+") for model in summaries),
            ]
            for name in compared
        ),
        ["cut off", *(f"{one['cut_off']:.0%}" for one in summaries.values())],
    ]
