"""Check what a run left behind: two runs compared to the bit, prompts accounted for, checkpoints verified.

With dynamic sampling, which prompts are drawn next depends on which group finishes first, so two runs may differ. But
no prompt may be lost or used twice: each drawn prompt was trained on, waits for a later step, or could teach nothing.

Checkpoints are verified here with other code than the product's, which is what is being tested.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.chaos.job import NUM_ROWS, is_dull
from ycore.data.prompts import row_of_order
from ycore.run.files import RunFolder
from ycore.run.metrics import is_evaluation, read_metrics

COMPARED = (
    "loss",
    "grad_norm",
    "reward",
    "learning_rate",
    "entropy",
    "completions/mean_length",
    "ycore/reward",
)
"""Metrics of a step that are compared; the others are times or counts of restarts."""

_WHERE_TOLD = ("ycore/reward",)
"""Metrics of all completions drawn, which a step that is replayed from the journal does not know."""

WEIGHTS = "weights"
_INFINITE = math.inf  # of what is missing on one side


@dataclass(frozen=True, slots=True)
class Result:
    """The rows that a run left, in the order written, its weights, its samples and its rounds."""

    rows: Sequence[Mapping[str, Any]]
    weights: Mapping[str, Any]
    samples: Any = None
    written: Mapping[int, Any] = field(default_factory=dict)
    """By step, the completions of its round in the journal: tokens, who said what, what the environment paid."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest absolute difference by name; `notes` say what no number can."""

    largest: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def is_none(self) -> bool:
        return not self.notes and all(value == 0 for value in self.largest.values())

    def __str__(self) -> str:
        figures = [f"{name} {value:.3g}" for name, value in self.largest.items() if value != 0]
        return ", ".join([*self.notes, *figures]) or "none"


SAME = Difference()


def read_result(folder: RunFolder) -> Result:
    """Read rows and weights of a run that has ended; a missing model has no weights."""
    weights: dict[str, Any] = {}
    for file in sorted(folder.model.glob("*.safetensors")) if folder.model.is_dir() else []:
        weights |= load_file(file)
    samples = folder.samples.read_text(encoding="utf-8") if folder.samples.is_file() else None
    rounds = read_rounds(folder.journal) if folder.journal.is_dir() else []
    written = {round_["step"] + 1: _written(round_) for round_ in rounds}
    steps = [
        row for row in read_metrics(folder.metrics) if not is_evaluation(row)
    ]  # which has a row of its own
    return Result(steps, weights, samples, written)


def _written(round_: Mapping[str, Any]) -> list[Any]:
    """Return each prompt's completions in order, without the times that tools took."""
    return [
        [
            _position(group),
            group["draw"]["token_ids"],
            *(
                [
                    completion["token_ids"],
                    completion["logprobs"],
                    [turn["messages"] for turn in completion["turns"]],
                    completion["earned"],
                ]
                for completion in group["completions"]
            ),
        ]
        for group in sorted(round_["groups"], key=_position)
    ]


def compare(expected: Result, seen: Result) -> Difference:
    """Say how far `seen` is from `expected`; a step that is missing, doubled or out of order is a note.

    Rounds are compared where both journals have them: which are left depends on the checkpoints, and a run that was
    stopped saves one more. A journal that has the first step's was kept, and the other must have all of its rounds.
    """
    notes = [*_steps_note(expected, seen)]
    largest = _differences(expected, seen)
    largest[WEIGHTS] = _weights(expected.weights, seen.weights)
    if not seen.weights:
        notes.append("no model was saved")
    if 1 in expected.written and (
        gone := sorted(expected.written.keys() - seen.written.keys())
    ):
        notes.append(f"the journal has no round of steps {gone}")
    both = sorted(expected.written.keys() & seen.written.keys())
    if differing := [step for step in both if expected.written[step] != seen.written[step]]:
        notes.append(f"what was written for steps {differing} differs")
    if expected.samples != seen.samples:
        notes.append("samples.json differs")
    return Difference(largest, tuple(notes))


def compare_steps(before: Result, after: Result) -> Difference:
    """Say how the steps that a run had reported when it was killed differ from the same steps at its end."""
    ended = {row.get("step"): row for row in after.rows}
    taken = [row for row in before.rows if row.get("step") in ended]
    again = Result([ended[row["step"]] for row in taken], {})
    whole = Result(taken, {})
    notes = (
        [f"steps {[row.get('step') for row in after.rows]}"] if not _is_gapless(after) else []
    )
    return Difference(
        _differences(whole, again),
        (*notes, *([] if after.weights else ["no model was saved"])),
    )


def worst(differences: Iterable[Difference]) -> dict[str, float]:
    """Return the largest of several differences, by name."""
    largest: dict[str, float] = dict.fromkeys((*COMPARED, WEIGHTS), 0.0)
    for difference in differences:
        for name, value in difference.largest.items():
            largest[name] = max(largest.get(name, 0.0), value)
    return largest


def is_lively(result: Result) -> str | None:
    """Say why equality with this run would prove nothing; None where it proves something."""
    losses, norms, rewards = (_column(result, name) for name in ("loss", "grad_norm", "reward"))
    if len(set(losses)) < len(losses):
        return f"losses repeat: {losses}"
    if not all(norm > 0 for norm in norms):
        return f"a gradient is zero: {norms}"
    if len(set(rewards)) < 2:
        return f"every step has the same reward: {rewards}"
    return None


def _is_gapless(result: Result) -> bool:
    return [row.get("step") for row in result.rows] == list(range(1, len(result.rows) + 1))


def _steps_note(expected: Result, seen: Result) -> list[str]:
    expected_steps, seen_steps = (
        [row.get("step") for row in result.rows] for result in (expected, seen)
    )
    return [] if expected_steps == seen_steps else [f"steps {seen_steps} for {expected_steps}"]


def _column(result: Result, name: str) -> list[float]:
    return [float(row[name]) if row.get(name) is not None else math.nan for row in result.rows]


def _largest(expected: Sequence[float], seen: Sequence[float]) -> float:
    if len(expected) != len(seen):
        return _INFINITE
    return max(
        (_apart(first, second) for first, second in zip(expected, seen, strict=True)),
        default=0.0,
    )


def _apart(expected: float, seen: float) -> float:
    if math.isnan(expected) or math.isnan(seen):
        return 0.0 if math.isnan(expected) and math.isnan(seen) else _INFINITE
    return abs(expected - seen)


def _differences(expected: Result, seen: Result) -> dict[str, float]:
    largest = {}
    for name in COMPARED:
        expected_column, seen_column = _column(expected, name), _column(seen, name)
        if name in _WHERE_TOLD and len(expected_column) == len(seen_column):
            known = [
                pair
                for pair in zip(expected_column, seen_column, strict=True)
                if not any(map(math.isnan, pair))
            ]
            expected_column, seen_column = (
                [first for first, _ in known],
                [second for _, second in known],
            )
        largest[name] = _largest(expected_column, seen_column)
    return largest


def _weights(expected: Mapping[str, Any], seen: Mapping[str, Any]) -> float:
    if expected.keys() != seen.keys():
        return _INFINITE
    pairs = ((expected[name], seen[name]) for name in expected)
    return max((_tensor(first, second) for first, second in pairs), default=0.0)


def _tensor(expected: Any, seen: Any) -> float:
    if expected.shape != seen.shape or expected.dtype != seen.dtype:
        return _INFINITE
    if np.array_equal(expected, seen):
        return 0.0
    return float(np.max(np.abs(expected.astype(np.float64) - seen.astype(np.float64))))


Rounds = Sequence[Mapping[str, Any]]


def read_rounds(journal: Path) -> Rounds:
    """Read each step's groups and ranks' states, in order. A file's first line, its label, has the number of ranks."""
    rounds = []
    for first in sorted(journal.glob("round-*-rank-0.json")):
        label = json.loads(first.read_bytes().partition(b"\n")[0])
        files = [
            first.with_name(first.name.replace("rank-0", f"rank-{rank}"))
            for rank in range(label["world"])
        ]
        parts = [json.loads(file.read_bytes().partition(b"\n")[2]) for file in files]
        groups = [group for part in parts for group in part["groups"]]
        rounds.append(
            {
                "step": label["step"],
                "groups": groups,
                "states": [part["state"] for part in parts],
                "stale": parts[0]["metrics"].get("ycore/sampling/stale", 0.0),
            }
        )
    return rounds


def account(rounds: Rounds, *, steps: int, seed: int) -> list[str]:
    """Say what is wrong with the rounds of a run that took so many steps; nothing where the account is even. Pure."""
    if len(rounds) != steps:
        return [f"{len(rounds)} rounds for {steps} steps"]
    states = rounds[-1]["states"]
    taken = Counter(_position(group) for round_ in rounds for group in round_["groups"])
    taken.update(
        _position(item["group"]) for state in states for item in state["leftover_groups"]
    )
    taken.update(
        _position(item) for state in states for item in state.get("unfinished_groups", ())
    )  # not whole yet
    drawn = _drawn(states)
    lost = [
        place
        for place in drawn
        if place not in taken and not is_dull(row_of_order(seed, NUM_ROWS, place))
    ]
    twice = sorted(place for place, count in taken.items() if count > 1)
    unknown = sorted(taken.keys() - set(drawn))
    if len(lost) <= sum(round_.get("stale", 0) for round_ in rounds):
        lost = []  # too old to be trained on, and counted
    problems = {"lost": lost, "taken twice": twice, "never drawn": unknown}
    return [
        f"prompts {problem}, at positions {places}"
        for problem, places in problems.items()
        if places
    ]


def _drawn(states: Sequence[Mapping[str, Any]]) -> list[int]:
    """Positions that will not come. The ranks take turns at the gaps that earlier ranks left, then from `start` on."""
    world, most = len(states), max(state["draws"]["cursor"] for state in states)
    gaps, start = states[0]["draws"]["gaps"], states[0]["draws"]["start"]
    turns = [*gaps, *range(start, start + (most + 1) * world)]
    now = {
        place
        for rank, state in enumerate(states)
        for place in turns[rank::world][: state["draws"]["cursor"]]
    }
    return sorted(now | (set(range(start)) - set(gaps)))


def _position(group: Mapping[str, Any]) -> int:
    return int(group["draw"]["position"])


_PREFIX = "checkpoint-"


def published(checkpoints: Path) -> list[Path]:
    """Return everything that has a checkpoint's name, oldest first."""
    paths = [
        path
        for path in checkpoints.glob(f"{_PREFIX}*")
        if path.name.removeprefix(_PREFIX).isdigit()
    ]
    return sorted(paths, key=lambda path: int(path.name.removeprefix(_PREFIX)))


def newest_problem(checkpoints: Path) -> str | None:
    """Say what is wrong with the newest checkpoint; None where all is right, or there is none yet."""
    paths = published(checkpoints)
    return problem_of(paths[-1]) if paths else None


def problem_of(checkpoint: Path) -> str | None:
    """Name the first file that is missing, of another size or of another content than its manifest says."""
    try:
        _, body = (checkpoint / "manifest.json").read_bytes().splitlines()
        listed = json.loads(body)["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{checkpoint.name}: no whole manifest ({type(error).__name__})"
    for name, expected in listed.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{checkpoint.name}: {name} is missing"
        data = path.read_bytes()
        if (
            len(data) != expected["bytes"]
            or hashlib.sha256(data).hexdigest() != expected["sha256"]
        ):
            return f"{checkpoint.name}: {name} is not what was written"
    return None
