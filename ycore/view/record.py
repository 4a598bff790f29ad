"""A run's folder, read once for a report: its settings, numbers and completions, where its device seconds went, and
whether its rewards rose."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ycore.config.learner_rules import teaches_alone
from ycore.config.schema import RunConfig
from ycore.errors import RunFolderError
from ycore.run.files import read_json
from ycore.run.metrics import REWARD, STEP_SECONDS, Row, number, read_metrics
from ycore.run.paths import RunFolder
from ycore.run.resuming import read_round, round_file, rounds_in
from ycore.run.trace import ROUND, SWAP, Span, busy_intervals, read_trace
from ycore.types import IMAGE_MARK, Group, said


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    """A completion, and the weighted sum of its rewards; None where one of them was not given.

    `turns` are the speakers and what each said, of a completion in several turns.
    """

    prompt: str
    completion: str
    reward: float | None
    turns: Sequence[tuple[str, str]] = ()


RewardCurve = Sequence[tuple[float, int, float]]
"""(device seconds, step, reward), in the order of steps."""


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
    completions: Sequence[ScoredCompletion]
    """Those of the newest round in the journal."""

    spent: "Spent"
    reward_curve: RewardCurve
    timeline: Path | None
    pictures: Path | None = None
    """Of a model that draws: before and after."""

    problems: Sequence[str] = ()
    """Files of the run that are damaged, so that what they held is missing here."""

    reached: Sequence["Reached"] = ()


class _Read(BaseModel):
    """What a report takes from a file of a run; other keys pass."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, coerce_numbers_to_str=True)


class _Reward(_Read):
    weight: float = 1.0


class _Settings(_Read):
    prompts_per_step: int = Field(default=1, ge=1, le=1_000_000)
    rewards: list[_Reward] = []


class _Description(_Read):
    config: _Settings = _Settings()
    command: list[str] = []
    versions: dict[str, str | None] = {}
    started: str = ""


class _Engines(_Read):
    engines: list[str] = []


class _Planned(_Read):
    what: str
    unit: str
    planned: float
    measured: float
    error: float
    planned_before: float | None = None


class _Summary(_Read):
    status: str = ""
    steps: int = 0
    wall_s: float = 0.0
    reward_first: float | None = None
    reward_last: float | None = None
    plan_and_measured: list[_Planned] = []


class _Turn(_Read):
    content: str


class _Sample(_Read):
    prompt: str | list[_Turn]
    images: list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = []
    completion: str


class _Samples(_Read):
    before: list[_Sample] = []
    after: list[_Sample] = []


class _Function(_Read):
    name: str
    arguments: Any = None


class _Call(_Read):
    function: _Function


class _Message(_Read):
    role: str
    content: str | None = None
    tool_calls: list[_Call] = []


class _Round(_Read):
    groups: list[Group]


_File = TypeVar("_File", bound=_Read)


def read_run(root: Path) -> RunRecord:
    """What a report shows of the run in `root`, finished or not; RunFolderError where no step is finished."""
    folder = RunFolder(root)
    if not folder.config.is_file():
        raise RunFolderError(
            f"{root} has no run.json, so it is no run's folder; name the folder that --output named"
        )
    description, problems = (
        _checked(_Description, read_json(folder.config), folder.config),
        list[str](),
    )
    metrics = read_metrics(folder.metrics, say=problems.append)
    if not metrics:
        raise RunFolderError(
            f"{root} has no step yet: {folder.metrics} is missing or empty; wait for the first step"
        )
    config, engines = description.config, _optional(_Engines, folder.engines, problems)
    num_slots = max(1, len(engines.engines))  # a trainer that generates itself is one
    prompts, judging = config.prompts_per_step, judging_share(read_trace(folder.trace))
    return RunRecord(
        root=root,
        name=root.resolve().name,
        config=config.model_dump(exclude_unset=True),
        command=tuple(description.command),
        versions=description.versions,
        started=description.started,
        summary=_optional(_Summary, folder.summary, problems).model_dump(exclude_unset=True),
        metrics=metrics,
        samples=_optional(_Samples, folder.samples, problems).model_dump(exclude_unset=True),
        completions=_last_completions(
            folder, [reward.weight for reward in config.rewards], problems
        ),
        spent=spent(metrics, prompts_per_step=prompts, num_slots=num_slots, judging=judging),
        reward_curve=reward_curve(metrics, num_slots=num_slots),
        timeline=folder.timeline if folder.timeline.is_file() else None,
        pictures=folder.pictures if folder.pictures.is_file() else None,
        problems=problems,
    )


def _checked(kind: type[_File], value: Any, file: Path) -> _File:
    try:
        return kind.model_validate(value)
    except (ValidationError, RecursionError) as problem:
        first = (
            problem.errors()[0]
            if isinstance(problem, ValidationError)
            else {"loc": (), "msg": "nested too deeply"}
        )
        where = ".".join(str(part)[:50] for part in first["loc"]) or "the whole"
        raise RunFolderError(
            f"{file} holds what ycore does not write ({where}: {first['msg'][:200]})"
        ) from None


def _optional(kind: type[_File], file: Path, problems: list[str]) -> _File:
    """A file that may be missing; where it is damaged, it counts as empty and as a problem."""
    if file.is_file():
        try:
            return _checked(kind, read_json(file), file)
        except RunFolderError as problem:
            problems.append(str(problem))
    return kind()


def _last_completions(
    folder: RunFolder, weights: Sequence[float], problems: list[str]
) -> list[ScoredCompletion]:
    """Of every rank; none where no journal is kept."""
    rounds = rounds_in(folder.journal)
    step = max(rounds, default=0)
    found: list[ScoredCompletion] = []
    for rank in sorted(rounds.get(step, ())):
        try:
            found += _completions_in(round_file(folder.journal, step, rank), weights)
        except RunFolderError as error:
            problems.append(str(error))
    return found


def _completions_in(file: Path, weights: Sequence[float]) -> list[ScoredCompletion]:
    found = []
    for group in _checked(_Round, read_round(file)[1], file).groups:
        prompt = as_text(group.draw.prompt.content)
        for completion, scores in zip(group.completions, group.scores_GR, strict=False):
            values = [score.value for score in scores]
            given = [
                value * weight
                for value, weight in zip(values, weights, strict=False)
                if value is not None
            ]
            reward = sum(given) if len(given) == len(values) else None
            messages = [
                _checked(_Message, one, file) for turn in completion.turns for one in turn.messages
            ]
            turns = tuple((one.role, said(one.model_dump())) for one in messages)
            found.append(ScoredCompletion(prompt, completion.text, reward, turns))
    return found


def as_text(content: Any) -> str:
    """A prompt as a line or two: a chat's last turn, with `[picture]` where one stands."""
    last = (
        content if isinstance(content, str) else content[-1].get("content", "") if content else ""
    )
    return str(last).replace(IMAGE_MARK, "[picture]")


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

    def share(self, part: str) -> float:
        """Of the whole, from 0 to 1."""
        return self.seconds[part] / self.total if self.total else 0.0


def spent(
    metrics: Sequence[Row], *, prompts_per_step: int, num_slots: int, judging: float = 0.0
) -> Spent:
    """The sum over the run's steps, each of them with every slot and with the run's `judging_share`."""
    seconds, informative = dict.fromkeys(PARTS, 0.0), 0.0
    for row in metrics:
        if number(row, *STEP_SECONDS) is None:
            continue
        for part, value in _step_parts(row, prompts_per_step, judging).items():
            seconds[part] += value * num_slots
        informative += prompts_per_step * (1 - _or_zero(row, "frac_reward_zero_std"))
    return Spent(seconds, informative, num_slots)


def _step_parts(row: Row, prompts: int, judging_share: float) -> dict[str, float]:
    """One step's seconds, by part."""
    whole = _or_zero(row, *STEP_SECONDS)
    sync, in_round, train = (
        _or_zero(row, f"ycore/time/{name}") for name in ("sync", "round", "train")
    )
    idle = in_round * min(1.0, _or_zero(row, "ycore/idle_share"))
    swaps = min(_or_zero(row, "ycore/swap_s"), in_round - idle)
    judging = (in_round - idle - swaps) * judging_share
    writing = in_round - idle - swaps - judging
    drawn = number(row, "ycore/sampling/drawn")
    informative = prompts * (1 - _or_zero(row, "frac_reward_zero_std"))
    useful = min(1.0, informative / max(prompts if drawn is None else drawn, 1.0))
    cut = min(1.0, _or_zero(row, "completions/clipped_ratio"))
    return {
        "useful tokens": writing * useful * (1 - cut),
        "cut off at the limit": writing * useful * cut,
        "groups not trained on": writing * (1 - useful),
        "judging": judging,
        "swaps": swaps,
        "idle": idle,
        "weight sync": sync,
        "training": train,
        "other": max(0.0, whole - sync - in_round - train),
    }


def _or_zero(row: Row, *names: str) -> float:
    return number(row, *names) or 0.0


def judging_share(spans: Iterable[Span]) -> float:
    """Of the seconds with requests in flight, summed over slots and roles, those of judges and reward models."""
    lanes: dict[tuple[int, int, str], list[Span]] = {}
    for span in spans:
        if span.name not in (SWAP, ROUND):
            lanes.setdefault((span.rank, span.slot, span.name), []).append(span)
    busy = {
        lane: math.fsum(seconds for _, seconds in busy_intervals(own))
        for lane, own in lanes.items()
    }
    whole = math.fsum(busy.values())
    return (
        math.fsum(seconds for (*_, role), seconds in busy.items() if role != "rollout") / whole
        if whole
        else 0.0
    )


@dataclass(frozen=True, slots=True)
class Reached:
    """A run's reward after some device seconds: the mean of the last ten steps, with its `half_width`."""

    device_s: float
    step: int
    reward: float
    half_width: float | None
    steps: int


def reward_curve(metrics: Sequence[Row], *, num_slots: int) -> RewardCurve:
    """The reward over device seconds, of every step that has both."""
    found = [
        (number(row, *STEP_SECONDS), int(number(row, "step") or 0), number(row, *REWARD))
        for row in metrics
    ]
    known = [
        (seconds, step, reward)
        for seconds, step, reward in found
        if seconds is not None and reward is not None
    ]
    times = accumulate(seconds * num_slots for seconds, _, _ in known)
    return [(at, step, reward) for at, (_, step, reward) in zip(times, known, strict=True)]


def at_equal_seconds(curves: Sequence[RewardCurve]) -> list[list[Reached]]:
    """What each run had reached at quarters of the device seconds that all of them have; none if one is empty."""
    if not curves or any(not curve for curve in curves):
        return [[] for _ in curves]
    common = min(curve[-1][0] for curve in curves)
    marks = [common * share for share in (0.25, 0.5, 0.75, 1.0)]
    return [
        [reached for device_s in marks if (reached := _at(curve, device_s))] for curve in curves
    ]


def _at(curve: RewardCurve, device_s: float) -> Reached | None:
    before = [point for point in curve if point[0] <= device_s * (1 + 1e-9)][-10:]
    if not before:
        return None
    rewards = [reward for _, _, reward in before]
    return Reached(
        device_s, before[-1][1], statistics.fmean(rewards), half_width(rewards), len(rewards)
    )


# Student's t, 97.5 % quantile, by degrees of freedom from 0 (none) to 9, the most that a window has.
_T_975 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def half_width(values: Sequence[float]) -> float | None:
    """Half the 95 % interval of the mean (Student's t, values taken as independent); None with fewer than three."""
    if len(values) < 3:
        return None
    return (
        _T_975[min(len(values) - 1, len(_T_975) - 1)]
        * statistics.stdev(values)
        / math.sqrt(len(values))
    )


_LEAST_STEPS = 12  # a third of fewer steps has no spread to speak of
_ENOUGH = (
    0.1  # of the groups that were drawn: below this share the prompts are to blame, not the rate
)


def advice(metrics: Sequence[Row], config: RunConfig) -> str | None:
    """One sentence where the reward did not rise from the first third of the steps to the last; None where it did.

    A change counts where it is more than two standard errors of the difference of the two means. Nothing is said of
    short runs, and of runs whose rewards do not show what was learned: from a teacher; with constraints, which may cost
    reward; with a curriculum, whose prompts become harder.
    """
    rows = [row for row in metrics if number(row, *REWARD) is not None]
    is_constrained = any(reward.constraint for reward in config.rewards)
    if (
        len(rows) < _LEAST_STEPS
        or config.algorithm == "distill"
        or is_constrained
        or config.sampling.curriculum
    ):
        return None
    rewards = [_or_zero(row, *REWARD) for row in rows]
    early, late = rewards[: len(rows) // 3], rewards[-(len(rows) // 3) :]
    change, error = statistics.fmean(late) - statistics.fmean(early), _standard_error(early, late)
    if change > 2 * error:
        return None
    ends = f"{statistics.fmean(early):.3f} -> {statistics.fmean(late):.3f}, first and last third of the steps"
    rate = max(_or_zero(row, "learning_rate") for row in rows)
    if change < -2 * error:
        lower = f"--learning-rate {rate / 4:.1e}"
        return (
            f"the reward fell ({ends}): try {lower}, or --beta 0.05 to stay near the first policy"
        )
    taught, drawn = _groups(rows, config)
    flat = f"the reward did not rise ({ends})"
    if taught < _ENOUGH * drawn:
        few = f"rewards differ within only {taught:.0f} of {drawn:.0f} groups"
        return (
            f"{flat}: {few}; try prompts that the model solves sometimes, or a larger --group-size"
        )
    return (
        f"{flat}, although groups taught: try --learning-rate {4 * rate:.1e}, and then more --steps"
    )


def _standard_error(early: Sequence[float], late: Sequence[float]) -> float:
    return float(
        (statistics.variance(early) / len(early) + statistics.variance(late) / len(late)) ** 0.5
    )


def _groups(rows: Sequence[Row], config: RunConfig) -> tuple[float, float]:
    """How many groups taught, and how many were drawn; all of them where a completion teaches by itself."""
    size = config.prompts_per_step
    drawn = sum(number(row, "ycore/sampling/drawn") or size for row in rows)
    if teaches_alone(config):
        return drawn, drawn
    return sum(size * (1 - _or_zero(row, "frac_reward_zero_std")) for row in rows), drawn
