"""Rewards that a model scores: from `judge:quality.yaml`, `rm:MODEL` or `teacher:MODEL` to the declaration.

A run carries the whole declaration in the reward's `args`, so `run.json` holds it and a resumed run needs no file.
"""

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import fmean, pstdev
from typing import Literal, Self, TypeVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, ValidationError, model_validator

from ycore.config.problems import declared_error
from ycore.config.recipe_files import SUFFIXES, parse_yaml, read_yaml_file
from ycore.config.schema import (
    AGREES,
    TEACHER,
    RewardConfig,
    RunConfig,
    ScoredConfig,
    Strict,
)
from ycore.errors import ConfigError, RewardError, nearest
from ycore.judge.declaration import POLICY_BASE, Judge, ScoringModel, Served
from ycore.run.files import RunFolder
from ycore.types import JsonObject, Record

JUDGE_PREFIX = "judge:"
REWARD_MODEL_PREFIX = "rm:"
_Declared = TypeVar("_Declared", bound=Strict)
_Scored = TypeVar("_Scored", bound=ScoredConfig)


class RewardModel(ScoringModel):
    """A sequence classifier with one label, or an ensemble: `--reward rm:MODEL` or `rm:A+B`, with these as `args`.

    What the least of several, or their mean less their spread, is good for: Coste et al., arXiv 2310.02743.
    """

    model: str  # a hub id or folder; several with a + between them
    combine: Literal["mean", "min", "lower"] = (
        "mean"  # of several; `lower` is their mean - k * their deviation
    )
    k: NonNegativeFloat = 1.0
    center: float = (
        0.0  # subtracted from the logit; for example its mean over ordinary completions
    )
    multiplier: PositiveFloat = 1.0
    clip: tuple[float, float] | None = None  # the least and the most reward, after both

    @model_validator(mode="after")
    def _check_clip(self) -> Self:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(
                f"clip is the least and the most, in this order; it is {list(self.clip)}"
            )
        return self

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        models = self.models
        if not all(models) or len(set(models)) < len(models):
            raise ValueError(
                f"an ensemble names each of its models once, A+B; it is {self.model}"
            )
        if len(models) == 1 and self.combine != "mean":
            raise ValueError(
                f"combine {self.combine} needs several models, rm:A+B; it is {self.model}"
            )
        return self

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model,) if Path(self.model).is_dir() else tuple(self.model.split("+"))

    def reward(self, *logits: float) -> float:
        """From one logit of each model; the deviation is that of the models themselves (divided by their number)."""
        values = [(logit - self.center) * self.multiplier for logit in logits]
        value = min(values) if self.combine == "min" else fmean(values)
        if self.combine == "lower":
            value -= self.k * pstdev(values)
        return value if self.clip is None else min(max(value, self.clip[0]), self.clip[1])


class Teacher(Served):
    """A model of which the policy learns the probabilities of its own tokens: `teacher:MODEL`, with these as `args`.

    At an address there must be a vLLM server: no other gives the probabilities of a prompt's tokens.
    """

    # Only for rows with these values in these columns, e.g. `{subject: algebra}`; so each row may have its own teacher.
    where: Mapping[str, str] = Field(default_factory=dict)

    def teaches(self, columns: Record) -> bool:
        return all(str(columns.get(name)) == value for name, value in self.where.items())


def with_declarations(config: _Scored) -> _Scored:
    """Read every judge's file into its reward's `args`; RewardError where a declaration cannot work."""
    keys = {"rewards": config.rewards, "eval_rewards": config.eval_rewards}
    return config.model_copy(
        update={key: [_declared(spec) for spec in specs] for key, specs in keys.items()}
    )


def _declared(spec: RewardConfig) -> RewardConfig:
    if spec.kind == REWARD_MODEL_PREFIX:
        reward_model_of(spec)  # only checked: its `args` are all there is
    elif spec.kind == TEACHER:
        teacher_of(spec)
    elif spec.kind in (JUDGE_PREFIX, AGREES):
        name = spec.reward.removeprefix(spec.kind)
        name = Path(name).stem if name.endswith(SUFFIXES) else name
        args = judge_of(spec).model_dump(mode="json", exclude_defaults=True)
        return spec.model_copy(update={"reward": spec.kind + name, "args": args})
    return spec


def judge_of(spec: RewardConfig) -> Judge:
    """The declaration of a `judge:` or `agrees:` reward: its `args`, a file, or ycore's own judges; RewardError."""
    name = spec.reward.removeprefix(spec.kind)
    return _validated(Judge, {**_load_yaml(name, spec.args), **spec.args}, what=f"judge {name}")


def reward_model_of(spec: RewardConfig) -> RewardModel:
    """The declaration of an `rm:` reward; RewardError."""
    name = spec.reward.removeprefix(REWARD_MODEL_PREFIX)
    if not name:
        raise RewardError("rm: needs a model's name: --reward rm:MODEL, a hub id or a folder")
    return _validated(RewardModel, {"model": name, **spec.args}, what=f"reward model {name}")


def teacher_of(spec: RewardConfig) -> Teacher:
    """The declaration of a `teacher:` source; RewardError. The folder of a run stands for the model that it trained."""
    name = spec.reward.removeprefix(TEACHER)
    if not name:
        raise RewardError(
            "teacher: needs a model's name: --teacher MODEL, a hub id, a folder, or the folder of a run"
        )
    run = RunFolder(Path(name).expanduser())
    model = str(run.model) if run.config.is_file() else name
    return _validated(Teacher, {"model": model, **spec.args}, what=f"teacher {name}")


def teachers_of(config: ScoredConfig) -> list[Teacher]:
    return [teacher_of(spec) for spec in config.rewards if spec.kind == TEACHER]


def model_name(judge: Judge, config: RunConfig) -> str:
    """Return the model that a judge asks; the policy's for `policy-base`."""
    return config.model if judge.model == POLICY_BASE else judge.model


def check_picture_judges(config: ScoredConfig, columns: Sequence[str]) -> None:
    """ConfigError where a judge cannot see what is drawn; RewardError where it asks for a column that is missing."""
    for spec in (*config.rewards, *config.eval_rewards):
        if spec.kind != JUDGE_PREFIX:
            continue
        judge = judge_of(spec)
        if judge.base_url is None:
            raise ConfigError(
                f"{spec.reward} would be served here, where judges read text only; give it a base_url"
            )
        if judge.mode != "pointwise":
            raise ConfigError(
                f"{spec.reward} is {judge.mode}, and pictures are judged one by one; say mode: pointwise"
            )
        require_columns(spec.reward, judge, columns)


def require_columns(name: str, judge: Judge, columns: Iterable[str]) -> None:
    """RewardError where the dataset lacks a column that the questions of the judge `name` need."""
    known = sorted(columns)
    for column in sorted(judge.columns - set(known)):
        key = (
            "reference_column"
            if column == judge.reference_column
            else "a field of its messages"
        )
        near = (
            nearest(column, known, limit=1) or f"; the columns are {', '.join(known) or 'none'}"
        )
        raise RewardError(
            f"judge {name}: {key} is {column!r}, which is no column of the dataset{near}"
        )


def _validated(model: type[_Declared], data: Record, *, what: str) -> _Declared:
    try:
        return model.model_validate(data)
    except ValidationError as problem:
        raise RewardError(str(declared_error(problem, data, what=what, model=model))) from None


def _load_yaml(name: str, args: Record) -> JsonObject:
    """The keys of a judge's file, or of a judge that comes with ycore; none where `args` declare it all."""
    shipped = {
        entry.name.removesuffix(".yaml"): entry
        for entry in (files("ycore_recipes") / "judges").iterdir()
    }
    if name.endswith(SUFFIXES):
        way_out = f"ycore's own are {', '.join(f'judge:{known}' for known in sorted(shipped))}"
        text = read_yaml_file(
            Path(name).expanduser(), what="judge", way_out=way_out, error=RewardError
        )
    elif name in shipped:
        text = shipped[name].read_text(encoding="utf-8")
    elif "verdict" in args:
        return {}
    else:
        near = nearest(name, shipped) or f"; ycore's own are {', '.join(sorted(shipped))}"
        raise RewardError(
            f"no judge {name!r}: use judge:FILE.yaml, or write the judge under the reward's args{near}"
        )
    declared = parse_yaml(text, what=f"the judge {name}", example="rubric", error=RewardError)
    declared.pop("description", None)
    return declared
