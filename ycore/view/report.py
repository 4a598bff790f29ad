"""The report of one run or several: read their folders, count where the seconds went, advise, and write a page.

The page holds everything that it shows.
"""

import base64
import io
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from statistics import fmean, variance
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ycore.config.schema import RunConfig
from ycore.errors import RunFolderError
from ycore.run.claim import is_held
from ycore.run.files import RunFolder, read_json
from ycore.run.metrics import EVALUATION, REWARD, STEP_SECONDS, Row, number, read_metrics
from ycore.run.resuming import read_round, round_file, rounds_in
from ycore.run.text import as_duration, printable, topic
from ycore.scoring.group_rewards import weighted_sum
from ycore.types import IMAGE_MARK, Group, JsonObject, Record, said
from ycore.view.pictures import new_figure, points, smooth, style


class ScoredCompletion(NamedTuple):
    """A completion, and the weighted sum of its rewards; None where none was given.

    `turns` are the speakers and what each said, of a completion in several turns.
    """

    prompt: str
    completion: str
    reward: float | None
    turns: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class RecordedRun:
    """One run; what it has not written yet is empty.

    Attributes:
        completions: those of the newest round in the journal.
        pictures: of a model that draws, before and after.
        problems: files of the run that are damaged, so that what they held is missing here.
    """

    root: Path
    name: str
    description: "_Description"
    summary: Row
    metrics: Sequence[Row]
    samples: Row
    completions: Sequence[ScoredCompletion]
    spent: "DeviceSeconds"
    pictures: Path | None = None
    problems: Sequence[str] = ()

    @property
    def status(self) -> str:
        """How the run ended, or whether it goes on."""
        without_summary = "running" if is_held(RunFolder(self.root)) else "killed"
        return str(self.summary.get("status", without_summary))


# -- files -------------------------------------------------------------------------------------------------------------


class _Checked(BaseModel):
    """The keys that a report reads from a file of a run, which may be damaged. Other keys are ignored."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, coerce_numbers_to_str=True)


class _Reward(_Checked):
    weight: float = 1.0


class _Settings(_Checked):
    algorithm: str = ""
    model: str = ""
    dataset: str | None = None
    env: list[str] = []
    steps: int | None = None
    prompts_per_step: int = Field(default=1, ge=1, le=1_000_000)
    rewards: list[_Reward] = []


class _Description(_Checked):
    config: _Settings = _Settings()
    command: list[str] = []
    versions: dict[str, str | None] = {}
    started: str = ""


class _Engines(_Checked):
    engines: list[str] = []


class _Summary(_Checked):
    status: str = ""
    steps: int = 0
    wall_s: float = 0.0
    error: str = ""
    reward_first: float | None = None
    reward_last: float | None = None


class _Turn(_Checked):
    content: str | None = None  # a turn that only calls tools


class _Sample(_Checked):
    prompt: str | list[_Turn]
    images: list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = []
    completion: str


class _Samples(_Checked):
    before: list[_Sample] = []
    after: list[_Sample] = []


class _Round(_Checked):
    groups: list[Group]


_File = TypeVar("_File", bound=_Checked)


def read_run(root: Path) -> RecordedRun:
    """Read what a report shows of a run, finished or not; RunFolderError where no step is finished."""
    folder = RunFolder(root)
    description = read_description(folder)
    config = description.config
    problems: list[str] = []
    metrics = read_metrics(folder.metrics, say=problems.append)
    if not metrics:
        raise RunFolderError(
            f"{root} has no step yet: {folder.metrics} is missing or empty; wait for the first step"
        )
    engines = _read_optional(_Engines, folder.engines, problems).get("engines", ())
    weights = [reward.weight for reward in config.rewards]
    return RecordedRun(
        root=root,
        name=root.resolve().name,
        description=description,
        summary=_read_optional(_Summary, folder.summary, problems),
        metrics=metrics,
        samples=_read_optional(_Samples, folder.samples, problems),
        completions=_read_completions(folder, weights, problems),
        spent=count_device_seconds(
            metrics,
            prompts_per_step=config.prompts_per_step,
            num_slots=max(1, len(engines)),  # a trainer that generates itself is one
        ),
        pictures=folder.pictures if folder.pictures.is_file() else None,
        problems=problems,
    )


def read_description(folder: RunFolder) -> _Description:
    return _check(_Description, read_json(folder.config), folder.config)


def read_summary(folder: RunFolder) -> _Summary:
    return _check(_Summary, read_json(folder.summary), folder.summary)


def _check(kind: type[_File], value: Any, file: Path) -> _File:
    try:
        return kind.model_validate(value)
    except ValidationError as problem:
        first = problem.errors()[0]
        place = ".".join(str(part)[:50] for part in first["loc"]) or "the whole"
        reason = f"{place}: {first['msg'][:200]}"
    except RecursionError:
        reason = "the whole: nested too deeply"
    raise RunFolderError(f"{file} holds what ycore does not write ({reason})")


def _read_optional(kind: type[_Checked], file: Path, problems: list[str]) -> Row:
    """Read a file that may be missing; where it is damaged, it counts as empty and as a problem."""
    if file.is_file():
        try:
            return _check(kind, read_json(file), file).model_dump(exclude_unset=True)
        except RunFolderError as problem:
            problems.append(str(problem))
    return {}


def _read_completions(
    folder: RunFolder, weights: Sequence[float], problems: list[str]
) -> list[ScoredCompletion]:
    """Read the last round of every rank; none where no journal is kept."""
    rounds = rounds_in(folder.journal)
    step = max(rounds, default=0)
    completions: list[ScoredCompletion] = []
    for rank in sorted(rounds.get(step, ())):
        try:
            completions += _completions_in(round_file(folder.journal, step, rank), weights)
        except RunFolderError as error:
            problems.append(str(error))
    return completions


def _completions_in(file: Path, weights: Sequence[float]) -> list[ScoredCompletion]:
    completions = []
    for group in _check(_Round, read_round(file)[1], file).groups:
        prompt = content_text(group.draw.prompt.content)
        for completion, scores in zip(group.completions, group.scores_GR, strict=False):
            values = [score.value for score in scores]
            is_whole = len(values) == len(weights)
            reward = weighted_sum(values, weights) if is_whole else None
            turns = tuple(
                (message["role"], said(message))
                for turn in completion.turns
                for message in turn.messages
            )
            completions.append(ScoredCompletion(prompt, completion.text, reward, turns))
    return completions


def content_text(content: Any) -> str:
    """Return a prompt as a line or two: a chat's last turn, with `[picture]` where one stands."""
    if not isinstance(content, str):
        content = content[-1].get("content", "") if content else ""
    return str(content).replace(IMAGE_MARK, "[picture]")


# -- device seconds ----------------------------------------------------------------------------------------------------

PARTS = (
    "groups that taught",
    "groups not trained on",
    "swaps",
    "idle",
    "weight sync",
    "training",
    "other",
)


class DeviceSeconds(NamedTuple):
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
        """Return the part's share of the whole, from 0 to 1."""
        return self.seconds[part] / self.total if self.total else 0.0


def count_device_seconds(
    metrics: Sequence[Row], *, prompts_per_step: int, num_slots: int
) -> DeviceSeconds:
    """Sum over the run's steps, each of them with every slot."""
    seconds = dict.fromkeys(PARTS, 0.0)
    informative = 0.0
    for row in metrics:
        if number(row, *STEP_SECONDS) is None:
            continue
        for part, value in _step_parts(row, prompts_per_step).items():
            seconds[part] += value * num_slots
        informative += _informative_groups(row, prompts_per_step)
    return DeviceSeconds(seconds, informative, num_slots)


def _step_parts(row: Row, num_prompts: int) -> dict[str, float]:
    """Divide one step's seconds; what a round was busy is divided by groups, with the scoring of each."""
    sync = _or_zero(row, "ycore/time/sync")
    whole_round = _or_zero(row, "ycore/time/round")
    train = _or_zero(row, "ycore/time/train")
    idle = whole_round * min(1.0, _or_zero(row, "ycore/idle_share"))
    swaps = min(_or_zero(row, "ycore/swap_s"), whole_round - idle)
    busy = whole_round - idle - swaps
    drawn = number(row, "ycore/sampling/drawn")
    num_drawn = max(num_prompts if drawn is None else drawn, 1.0)
    taught = min(1.0, _informative_groups(row, num_prompts) / num_drawn)
    return {
        "groups that taught": busy * taught,
        "groups not trained on": busy * (1 - taught),
        "swaps": swaps,
        "idle": idle,
        "weight sync": sync,
        "training": train,
        "other": max(0.0, _or_zero(row, *STEP_SECONDS) - sync - whole_round - train),
    }


def _informative_groups(row: Row, num_prompts: int) -> float:
    return num_prompts * (1 - _or_zero(row, "frac_reward_zero_std"))


def _or_zero(row: Row, *names: str) -> float:
    return number(row, *names) or 0.0


# -- advice ------------------------------------------------------------------------------------------------------------

_MIN_STEPS = 12  # a third of fewer steps has no spread to speak of
_ENOUGH_TEACH = (
    0.1  # of the groups drawn: below this share the prompts are to blame, not the rate
)


def advice(metrics: Sequence[Row], config: RunConfig) -> str | None:
    """Return a sentence where the reward did not rise from the first third of the steps to the last; None where it did.

    A change counts where it is more than two standard errors of the difference of the two means. Nothing is said of
    short runs, and of runs whose rewards do not show what was learned: from a teacher; with constraints, which may cost
    reward; with a curriculum, whose prompts become harder.
    """
    rows = [row for row in metrics if number(row, *REWARD) is not None]
    if config.algorithm == "distill" or config.has_constraints or config.sampling.curriculum:
        return None
    if len(rows) < _MIN_STEPS:
        return None
    rewards = [_or_zero(row, *REWARD) for row in rows]
    third = len(rewards) // 3
    early = rewards[:third]
    late = rewards[-third:]
    change = fmean(late) - fmean(early)
    error = math.sqrt((variance(early) + variance(late)) / third)
    if change > 2 * error:
        return None
    ends = f"{fmean(early):.3f} -> {fmean(late):.3f}, first and last third of the steps"
    rate = max(_or_zero(row, "learning_rate") for row in rows)
    if change < -2 * error:
        way_out = (
            f"--learning-rate {rate / 4:.1e}, or --beta 0.05 to stay near the first policy"
        )
        return f"the reward fell ({ends}): try {way_out}"
    flat = f"the reward did not rise ({ends})"
    size = config.prompts_per_step
    num_drawn = sum(number(row, "ycore/sampling/drawn") or size for row in rows)
    num_taught = num_drawn  # where a completion teaches by itself
    if not config.teaches_alone:
        num_taught = sum(_informative_groups(row, size) for row in rows)
    if num_taught < _ENOUGH_TEACH * num_drawn:
        return (
            f"{flat}: rewards differ within only {num_taught:.0f} of {num_drawn:.0f} groups; "
            "try prompts that the model solves sometimes, or a larger --group-size"
        )
    return f"{flat}, although groups taught: try --learning-rate {4 * rate:.1e}, and then more --steps"


# -- the page ----------------------------------------------------------------------------------------------------------

RUN_COLOURS = (
    "#2456a6",
    "#c2571a",
    "#3f8f5f",
    "#8a4fa3",
    "#b03a48",
    "#4a9aa8",
    "#77622a",
    "#5c6470",
)
"""Colours of runs, in their order; more runs begin again."""

_PANELS = (
    ("reward", REWARD),
    ("reward on held-out prompts", (f"{EVALUATION}reward",)),
    ("loss on held-out rows", (f"{EVALUATION}loss",)),
    ("completion length, tokens", ("completions/mean_length",)),
    ("share of groups without variance", ("frac_reward_zero_std",)),
    ("share cut off at the limit", ("completions/clipped_ratio",)),
    ("entropy, nats", ("entropy",)),
    ("gradient norm", ("grad_norm",)),
    ("KL to the reference", ("kl",)),
    ("logprob gap, engine to trainer", ("ycore/logprob_gap",)),
    ("tokens per second", ("ycore/tokens_per_s",)),
    ("seconds a step", STEP_SECONDS),
    ("idle share of the slots", ("ycore/idle_share",)),
    ("round over its bound", ("ycore/bound_ratio",)),
)


_MAX_PICTURE_BYTES = 1 << 20
_NUM_CHOSEN = 12  # completions of the last round


def make_report(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Give the runs different names."""
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.name} ({place})") if names.count(run.name) > 1 else run
        for place, run in enumerate(runs, 1)
    ]


def write_report(runs: Sequence[RecordedRun], page: Path) -> Path:
    """Write the page, and return its path."""
    page.parent.mkdir(parents=True, exist_ok=True)
    partial = page.with_name(f".{page.name}")
    partial.write_text(render_page(runs), encoding="utf-8")
    return partial.replace(page)


def report_json(runs: Sequence[RecordedRun]) -> JsonObject:
    """Return the report's numbers, as JSON values."""
    return {
        "runs": [
            {
                "name": run.name,
                "folder": str(run.root),
                "status": run.status,
                "summary": dict(run.summary),
                "slots": run.spent.num_slots,
                "device_seconds": dict(run.spent.seconds),
                "device_seconds_per_informative_group": run.spent.per_informative_group,
                "problems": list(run.problems),
            }
            for run in runs
        ]
    }


def render_page(runs: Sequence[RecordedRun]) -> str:
    """Return HTML that needs no network and no other file; whatever a model wrote is shown as text."""
    from jinja2 import Environment

    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_as_data
    )
    environment.filters |= {
        "short": _short,
        "topic": topic,
        "duration": as_duration,
        "shell": shlex.join,
        "prompt": content_text,
        "beside": zip,
        "chosen": chosen,
        "seen": _pictures_of,
        "base64": lambda file: base64.b64encode(file.read_bytes()).decode(),
    }
    source = files("ycore.view").joinpath("page.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        runs=runs,
        colours=RUN_COLOURS,
        curves=draw_curves(runs),
        parts=[part for part in PARTS if any(run.spent.seconds[part] for run in runs)],
    )


def chosen(completions: Sequence[ScoredCompletion]) -> list[ScoredCompletion]:
    """Choose a few, evenly from the lowest reward to the highest, and one without a reward."""
    scored = [completion for completion in completions if completion.reward is not None]
    masked = [completion for completion in completions if completion.reward is None]
    scored.sort(key=lambda completion: completion.reward or 0.0)
    last = len(scored) - 1
    places = {last * number // (_NUM_CHOSEN - 1) for number in range(_NUM_CHOSEN)}
    return [scored[place] for place in sorted(places) if scored] + masked[:1]


def _pictures_of(sample: Record, run: RecordedRun) -> list[Path]:
    """Return the files of the pictures that a prompt shows, of those that are small enough for a page."""
    images = [RunFolder(run.root).images / name for name in sample.get("images", ())]
    return [
        file for file in images if file.is_file() and file.stat().st_size <= _MAX_PICTURE_BYTES
    ]


def _as_data(value: Any) -> Any:
    """Make text printable; the pictures, which are markup, are ours."""
    return printable(value) if type(value) is str else value


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "?" if value is None else str(value)


# -- figures -----------------------------------------------------------------------------------------------------------


def draw_curves(runs: Sequence[RecordedRun]) -> str | None:
    """Draw a panel for each measure that some run has, a colour a run; None without any.

    The picture is an `<svg>` element, which a page can hold without another file.
    """
    panels = [
        (title, [points(run.metrics, *names) for run in runs]) for title, names in _PANELS
    ]
    panels = [panel for panel in panels if any(steps for steps, _ in panel[1])]
    if not panels:
        return None
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(4.2 * columns, 2.5 * rows)
    for place, (title, series) in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, place)
        for index, (steps, values) in enumerate(series):
            colour = RUN_COLOURS[index % len(RUN_COLOURS)]
            axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35)
            axes.plot(steps, smooth(values), color=colour, linewidth=2)
        axes.set_title(title, fontsize=10, loc="left")
        style(axes)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    whole = text.getvalue()
    return whole[whole.index("<svg") :]
