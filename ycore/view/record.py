"""RunRecord: everything that a run's folder tells of it, read once.

Where every device second of a run went, and what a group that taught something cost. Pure.

Several runs at equal device seconds: the reward that each had reached by then, with an interval. Pure.

Not here: what is made of it (`spent`, `compare`, `figures`, `page`).
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ycore.errors import RunFolderError
from ycore.run.files import read_json
from ycore.run.metrics import read_metrics
from ycore.run.paths import RunFolder
from ycore.run.resuming import read_round, round_file, rounds_in
from ycore.run.trace import ROUND, SWAP, Span, busy_stretches, read_trace

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Written:
    """A completion of the run's last rounds, with the sum of its rewards; None where a reward was not given."""

    prompt: str
    completion: str
    reward: float | None
    num_tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run; what it has not written yet is empty."""

    root: Path
    name: str
    config: Row
    command: Sequence[str]
    versions: Row
    started: str
    summary: Row
    metrics: Sequence[Row]
    samples: Row
    written: Sequence[Written]
    num_slots: int
    judging: float
    """The share of its engines' busy seconds that judges and reward models took (`spent.judging_share`)."""

    timeline: Path | None
    problems: Sequence[str] = ()
    """Files of the run that are damaged, so that what they held is missing here."""

    @property
    def is_finished(self) -> bool:
        return self.summary.get("status") == "finished"


def read_run(root: Path) -> RunRecord:
    """The run in `root`; RunFolderError where there is none, or none that has begun a step."""
    folder = RunFolder(root)
    if not folder.config.is_file():
        raise RunFolderError(f"{root} has no run.json, so it is no run's folder; name the folder that --output named")
    told = read_json(folder.config)
    problems: list[str] = []
    metrics = read_metrics(folder.metrics, say=problems.append)
    if not metrics:
        raise RunFolderError(f"{root} has no step yet: {folder.metrics} is missing or empty; wait for the first step")
    timeline = root / "timeline.png"
    return RunRecord(
        root=root,
        name=root.resolve().name,
        config=told.get("config", {}),
        command=tuple(told.get("command", ())),
        versions=told.get("versions", {}),
        started=str(told.get("started", "")),
        summary=_optional(folder.summary),
        metrics=metrics,
        samples=_optional(folder.samples),
        written=_last_written(folder, told.get("config", {}), problems),
        num_slots=_num_slots(folder),
        judging=judging_share(read_trace(root / "trace.json")),
        timeline=timeline if timeline.is_file() else None,
        problems=problems,
    )


def _optional(file: Path) -> Row:
    try:
        found: Row = read_json(file)
    except (OSError, ValueError):
        return {}
    return found


def _num_slots(folder: RunFolder) -> int:
    """Slots of the run; a trainer that generates by itself is one."""
    told = _optional(folder.root / "engines.json")
    rollout = [name for name in told.get("engines", []) if isinstance(name, str)]
    return max(1, len(rollout))


def _last_written(folder: RunFolder, config: Row, problems: list[str]) -> list[Written]:
    """The completions of the journal's newest round, of every rank; none where no journal is kept."""
    rounds = rounds_in(folder.journal)
    if not rounds:
        return []
    step = max(rounds)
    weights = [float(reward.get("weight", 1.0)) for reward in config.get("rewards", [])]
    written = []
    for rank in sorted(rounds[step]):
        try:
            _, told = read_round(round_file(folder.journal, step, rank))
        except RunFolderError as error:
            problems.append(str(error))
            continue
        written += [one for group in told["groups"] for one in _of_group(group, weights)]
    return written


def _of_group(group: Row, weights: Sequence[float]) -> list[Written]:
    prompt = as_text(group["draw"]["prompt"]["content"])
    return [
        Written(
            prompt, wrote["text"], _total(scores, weights), len(wrote["token_ids"]), str(wrote.get("finish_reason", ""))
        )
        for wrote, scores in zip(group["completions"], group["scores_GR"], strict=True)
    ]


def _total(scores: Sequence[Row], weights: Sequence[float]) -> float | None:
    values = [score["value"] for score in scores]
    given = [value * weight for value, weight in zip(values, weights, strict=True) if value is not None]
    return sum(given) if len(given) == len(values) else None


def as_text(content: Any) -> str:
    """A prompt as a line or two: a chat's last turn."""
    if isinstance(content, str):
        return content
    return str(content[-1].get("content", "")) if content else ""


PARTS = (
    "useful tokens",
    "cut off at the limit",
    "groups not trained on",
    "judging",
    "swaps",
    "idle",
    "weight sync",
    "training",
    "other",
)
_WRITES = "rollout"  # the role whose turns are completions; the others score them


@dataclass(frozen=True, slots=True)
class Spent:
    """Device seconds of a run, by what they went into, in the order of PARTS."""

    seconds: Mapping[str, float]
    informative_groups: float
    num_slots: int

    @property
    def total(self) -> float:
        return math.fsum(self.seconds.values())

    @property
    def per_informative_group(self) -> float | None:
        """Device seconds for each group with a gradient; None where there was none."""
        return self.total / self.informative_groups if self.informative_groups > 0 else None


def judging_share(spans: Iterable[Span]) -> float:
    """Of the seconds with requests in flight, slot by slot and role by role, those of judges and reward models.

    Where a judge and a rollout are in flight on one slot at once, both count.
    """
    lanes: dict[tuple[int, int, str], list[Span]] = {}
    for span in spans:
        if span.name not in (SWAP, ROUND):
            lanes.setdefault((span.rank, span.slot, span.name), []).append(span)
    busy = {lane: math.fsum(seconds for _, seconds in busy_stretches(own)) for lane, own in lanes.items()}
    whole = math.fsum(busy.values())
    return math.fsum(seconds for (*_, role), seconds in busy.items() if role != _WRITES) / whole if whole else 0.0


def spent(metrics: Sequence[Row], *, prompts_per_step: int, num_slots: int, judging: float = 0.0) -> Spent:
    """The sum over the run's steps; every slot is counted for the whole of every step.

    `judging` is the run's `judging_share`, taken as that of every step.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    informative = 0.0
    for row in metrics:
        if "ycore/time/step" not in row and "step_time" not in row:
            continue
        for part, value in _step(row, prompts_per_step, judging).items():
            seconds[part] += value * num_slots
        informative += prompts_per_step * (1 - _number(row, "frac_reward_zero_std"))
    return Spent(seconds, informative, num_slots)


def _step(row: Row, prompts: int, judging_share: float) -> dict[str, float]:
    """One step's seconds, by part."""
    whole = _number(row, "ycore/time/step", _number(row, "step_time"))
    sync, in_round, train = (_number(row, f"ycore/time/{name}") for name in ("sync", "round", "train"))
    idle = in_round * min(1.0, _number(row, "ycore/idle_share"))
    swaps = min(_number(row, "ycore/swap_s"), in_round - idle)
    judging = (in_round - idle - swaps) * judging_share
    writing = in_round - idle - swaps - judging
    drawn = max(_number(row, "ycore/sampling/drawn", prompts), 1.0)
    taught = min(1.0, prompts * (1 - _number(row, "frac_reward_zero_std")) / drawn)
    cut = min(1.0, _number(row, "completions/clipped_ratio"))
    return {
        "useful tokens": writing * taught * (1 - cut),
        "cut off at the limit": writing * taught * cut,
        "groups not trained on": writing * (1 - taught),
        "judging": judging,
        "swaps": swaps,
        "idle": idle,
        "weight sync": sync,
        "training": train,
        "other": max(0.0, whole - sync - in_round - train),
    }


def _number(row: Row, name: str, otherwise: float = 0.0) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else otherwise


SHARES = (0.25, 0.5, 0.75, 1.0)
_WINDOW = 10  # steps


@dataclass(frozen=True, slots=True)
class Reached:
    """A run's reward after some device seconds: the mean of the last `steps` steps, and the half width of its 95 %
    interval (Student's t, steps taken as independent; None with fewer than three)."""

    device_s: float
    step: int
    reward: float
    half_width: float | None
    steps: int


def reward_curve(metrics: Sequence[Row], *, num_slots: int) -> list[tuple[float, int, float]]:
    """`(device seconds, step, reward)` of every step that tells all three."""
    found = [row for row in metrics if _step_s(row) is not None and _reward(row) is not None]
    seconds = accumulate((_step_s(row) or 0.0) * num_slots for row in found)
    return [(at, int(row["step"]), _reward(row) or 0.0) for at, row in zip(seconds, found, strict=True)]


def at_equal_seconds(curves: Sequence[Sequence[tuple[float, int, float]]]) -> list[list[Reached]]:
    """For each run, what it had reached at SHARES of the device seconds that all of them have; none if one is empty."""
    if not curves or any(not curve for curve in curves):
        return [[] for _ in curves]
    common = min(curve[-1][0] for curve in curves)
    return [[reached for share in SHARES if (reached := _at(curve, common * share))] for curve in curves]


def _at(curve: Sequence[tuple[float, int, float]], device_s: float) -> Reached | None:
    before = [point for point in curve if point[0] <= device_s * (1 + 1e-9)]
    if not before:
        return None
    window = [reward for _, _, reward in before[-_WINDOW:]]
    return Reached(device_s, before[-1][1], statistics.fmean(window), half_width(window), len(window))


def half_width(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of the mean."""
    if len(values) < 3:
        return None
    return _T_975[min(len(values) - 1, len(_T_975) - 1)] * statistics.stdev(values) / math.sqrt(len(values))


# Student's t, 97.5 % quantile, by degrees of freedom from 0 (none) to 9, the most that a window has.
_T_975 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def _step_s(row: Row) -> float | None:
    return _finite(row.get("ycore/time/step", row.get("step_time")))


def _reward(row: Row) -> float | None:
    return _finite(row.get("ycore/reward", row.get("reward")))


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
