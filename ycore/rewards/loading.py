"""Load the function of a reward by its name, bind and check its arguments, and read its parameters."""

import functools
import importlib.util
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model

from ycore.config.schema import RewardConfig
from ycore.errors import RewardError, nearest
from ycore.rewards.builtin import (
    BUILTIN,
    CODE,
    ENVIRONMENT,
    LIBRARIES,
    REFERENCE,
    Reward,
    settings_of,
)
from ycore.sandbox.channel import load_named

# What every call offers besides the dataset's columns; TRL's names.
SUPPLIED = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)

IN_THINKING = "in_thinking"  # the column that is True where the prompt opened the thinking

_FORMS = "a reward is a built-in name, file.py:function or package.module:function"


@dataclass(frozen=True)
class Inputs:
    """The parameters of a reward function. `bound` have their arguments already; `takes_any`: it has `**kwargs`."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    bound: tuple[str, ...]
    takes_any: bool

    def accepts(self, name: str) -> bool:
        """Whether a call should pass `name`. A bound argument wins over a column of its name."""
        return name not in self.bound and (
            self.takes_any or name in self.required + self.optional
        )

    def accepted(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a call should pass of what there is."""
        return {name: offered[name] for name in offered if self.accepts(name)}


def load_reward(spec: RewardConfig) -> Reward:
    """Import the function of a reward and bind its `args`; RewardError where one does not fit the other."""
    if ":" in spec.reward:
        return _bind_custom(spec, load_named(spec.reward, kind="reward", error=RewardError))
    return _bind_builtin(spec)


def reward_named(name: str) -> Reward:
    """Return a reward as `load_reward` does, without arguments."""
    return load_reward(RewardConfig(reward=name))


def reward_names(specs: Sequence[RewardConfig]) -> list[str]:
    """Return a short, distinct name per source: the last part of its full name, numbered from its second occurrence on."""
    names: list[str] = []
    for spec in specs:
        name = spec.reward.rpartition(":")[2].rstrip("/").rpartition("/")[2]
        candidates = (
            f"{name}_{number}" if number > 1 else name for number in itertools.count(1)
        )
        names.append(next(candidate for candidate in candidates if candidate not in names))
    return names


def inputs_of(function: Callable[..., Any]) -> Inputs:
    """Read the parameters in the signature; of a partial, the keywords it holds are bound."""
    bound = tuple(function.keywords) if isinstance(function, functools.partial) else ()
    required: list[str] = []
    optional: list[str] = []
    takes_any = False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        elif name not in bound and parameter.kind is not parameter.VAR_POSITIONAL:
            (required if parameter.default is parameter.empty else optional).append(name)
    return Inputs(tuple(required), tuple(optional), bound, takes_any)


def _bind_builtin(spec: RewardConfig) -> Reward:
    name = spec.reward
    if name not in BUILTIN:
        known = (*BUILTIN, REFERENCE, CODE, ENVIRONMENT)
        near = nearest(name, known) or f"; built-in are {', '.join(known)}"
        raise RewardError(f"no built-in reward {name!r}, and {_FORMS}{near}")
    module, install = LIBRARIES.get(name, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        raise RewardError(f"reward {name!r} needs {module}, which is not installed; {install}")
    parameters = inspect.signature(BUILTIN[name]).parameters.values()
    settings: dict[str, Any] = {
        parameter.name: (
            parameter.annotation,
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model: type[BaseModel] = create_model(name, __config__=config, **settings)
    bound = functools.partial(BUILTIN[name], **settings_of(spec, model).model_dump())
    try:
        if settings:  # with no completions, only the settings can be refused
            bound(**{column: [] for column in inputs_of(bound).required})
    except ValueError as error:
        raise RewardError(f"reward {name!r}: {error}") from error
    return bound


def _bind_custom(spec: RewardConfig, function: Reward) -> Reward:
    try:
        inputs = inputs_of(function)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"reward {spec.reward!r} has no signature to call it by; wrap it in a def"
        ) from error
    free = [name for name in (*inputs.required, *inputs.optional) if name not in SUPPLIED]
    for argument in spec.args:
        if argument in SUPPLIED:
            raise RewardError(
                f"argument {argument!r} of reward {spec.reward!r} is given by the run; remove it"
            )
        if not inputs.accepts(argument):
            near = nearest(argument, free) or f"; it takes {', '.join(free) or 'none'}"
            raise RewardError(f"reward {spec.reward!r} takes no argument {argument!r}{near}")
    return functools.partial(function, **spec.args) if spec.args else function


def require_reward_columns(
    reward: str, required: Iterable[str], columns: Iterable[str]
) -> None:
    """Raise RewardError for the first of the parameters that is neither supplied nor a column."""
    known = sorted(set(columns))
    for name in required:
        if name in SUPPLIED or name in known:
            continue
        if name == "answer":
            way_out = "; name the column that holds the right answer with --answer-column"
        else:
            way_out = (
                nearest(name, [*SUPPLIED, *known])
                or "; rename a column, or give the parameter a default"
            )
        listed = ", ".join(known) or "no columns"
        raise RewardError(
            f"reward {reward!r} needs the column {name!r}, and the dataset has {listed}{way_out}"
        )
