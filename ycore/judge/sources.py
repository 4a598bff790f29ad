"""From a reward's name, `judge:quality.yaml` or `rm:MODEL`, to its declaration.

A run carries the whole declaration in the reward's `args`: `run.json` tells it, a resumed run is held to it, and the
file is not needed again.

A reward model as it is declared: a sequence classifier with one number, and how that number becomes a reward.

Not here: what a declaration says (`declaration`, `reward_model`).
"""

from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from ycore.config.problems import declared_error
from ycore.config.recipe_files import SUFFIXES, parse_yaml, read_yaml_file
from ycore.config.schema import Positive, RewardConfig, RunConfig, Strict
from ycore.errors import RewardError, nearest
from ycore.judge.declaration import Judge


class RewardModel(Strict):
    """`--reward rm:MODEL`; these are its `args`."""

    model: str
    """A hub id or folder of a sequence classifier with one label."""

    center: float = 0.0
    """Taken from the model's number: its mean over ordinary completions, say."""

    multiplier: Annotated[float, Field(gt=0)] = 1.0
    clip: tuple[float, float] | None = None
    """The least and the most that it may give, after both."""

    max_model_len: Positive | None = None
    """Longest prompt plus completion, in tokens; None is the model's own context, 4096 at most."""

    @model_validator(mode="after")
    def _clips_a_range(self) -> Self:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip is the least and the most, in this order; it is {list(self.clip)}")
        return self

    def reward(self, logit: float) -> float:
        value = (logit - self.center) * self.multiplier
        return value if self.clip is None else min(max(value, self.clip[0]), self.clip[1])


JUDGE_PREFIX, REWARD_MODEL_PREFIX = "judge:", "rm:"


def is_judge(spec: RewardConfig) -> bool:
    return spec.reward.startswith(JUDGE_PREFIX)


def is_reward_model(spec: RewardConfig) -> bool:
    return spec.reward.startswith(REWARD_MODEL_PREFIX)


def is_rule(spec: RewardConfig) -> bool:
    """Whether it is a plain function, for the worker processes."""
    return not is_judge(spec) and not is_reward_model(spec)


def with_declarations(config: RunConfig) -> RunConfig:
    """The run with every judge's file read into its `args`; RewardError where a declaration cannot work."""
    return config.model_copy(update={"rewards": [_with_declaration(spec) for spec in config.rewards]})


def judge_of(spec: RewardConfig) -> Judge:
    """The judge of a `judge:` reward."""
    name = spec.reward.removeprefix(JUDGE_PREFIX)
    data = {**_told_elsewhere(name, spec.args), **spec.args}
    try:
        return Judge.model_validate(data)
    except ValidationError as problem:
        raise RewardError(str(declared_error(problem, data, what=f"judge {name}", model=Judge))) from None


def reward_model_of(spec: RewardConfig) -> RewardModel:
    """The reward model of an `rm:` reward."""
    name = spec.reward.removeprefix(REWARD_MODEL_PREFIX)
    if not name:
        raise RewardError("rm: needs a model's name: --reward rm:MODEL, a hub id or a folder")
    data = {"model": name, **spec.args}
    try:
        return RewardModel.model_validate(data)
    except ValidationError as problem:
        raise RewardError(str(declared_error(problem, data, what=f"reward model {name}", model=RewardModel))) from None


def require_columns(name: str, judge: Judge, columns: Iterable[str]) -> None:
    """RewardError when a question needs a column that the dataset has not."""
    known = sorted(columns)
    for column in sorted(judge.columns - set(known)):
        what = "reference_column" if column == judge.reference_column else "a field of its messages"
        near = nearest(column, known, limit=1) or f"; the columns are {', '.join(known) or 'none'}"
        raise RewardError(f"judge {name}: {what} is {column!r}, which is no column of the dataset{near}")


def _with_declaration(spec: RewardConfig) -> RewardConfig:
    if is_rule(spec):
        return spec
    if is_reward_model(spec):
        reward_model_of(spec)
        return spec
    told: Strict = judge_of(spec)
    name = spec.reward.removeprefix(JUDGE_PREFIX)
    name = Path(name).stem if name.endswith(SUFFIXES) else name
    args = told.model_dump(mode="json", exclude_defaults=True)
    return spec.model_copy(update={"reward": JUDGE_PREFIX + name, "args": args})


def _told_elsewhere(name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says, or a judge that comes with ycore; nothing where the reward's `args` say it all."""
    shipped = {entry.name.removesuffix(".yaml"): entry for entry in (files("ycore_recipes") / "judges").iterdir()}
    if name.endswith(SUFFIXES):
        way_out = f"with ycore come {', '.join(f'judge:{one}' for one in sorted(shipped))}"
        text = read_yaml_file(Path(name).expanduser(), what="judge", way_out=way_out, error=RewardError)
        return _parsed(name, text)
    if name in shipped:
        return _parsed(name, shipped[name].read_text(encoding="utf-8"))
    if "verdict" in args:
        return {}
    near = nearest(name, shipped) or f"; with ycore come {', '.join(sorted(shipped))}"
    raise RewardError(f"no judge {name!r}: say judge:FILE.yaml, or write the judge under the reward's args{near}")


def _parsed(name: str, text: str) -> dict[str, Any]:
    told = parse_yaml(text, what=f"the judge {name}", example="rubric", error=RewardError)
    told.pop("description", None)
    return told
