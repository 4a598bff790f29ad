"""What a reward function asks for, read from its signature, and what it is given when it is called.

Not here: finding the function (`loading`), and calling it (`worker`).
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ycore.errors import RewardError, nearest

SUPPLIED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What every call offers beside the dataset's columns; TRL's names."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The parameters of one reward function that are not bound to arguments yet."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    bound: tuple[str, ...]
    takes_any: bool

    def accepts(self, name: str) -> bool:
        """Whether a call should pass `name`. A bound argument stands, even where a column has its name."""
        return name not in self.bound and (self.takes_any or name in self.required or name in self.optional)


def inputs_of(function: Callable[..., Any]) -> Inputs:
    """Read from the signature; of a partial, the keywords it holds are bound."""
    bound = tuple(function.keywords) if isinstance(function, functools.partial) else ()
    free = [parameter for name, parameter in inspect.signature(function).parameters.items() if name not in bound]
    named = [parameter for parameter in free if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)]
    return Inputs(
        required=tuple(parameter.name for parameter in named if parameter.default is parameter.empty),
        optional=tuple(parameter.name for parameter in named if parameter.default is not parameter.empty),
        bound=bound,
        takes_any=any(parameter.kind is parameter.VAR_KEYWORD for parameter in free),
    )


def require_columns(inputs: Inputs, columns: Iterable[str], *, reward: str) -> None:
    """Refuse a reward that asks for a column that the dataset does not have."""
    known = sorted(set(columns))
    for name in inputs.required:
        if name in SUPPLIED or name in known:
            continue
        raise RewardError(
            f"reward {reward!r} asks for the column {name!r}, and the dataset has {', '.join(known) or 'no columns'}"
            f"{_way_out(name, known)}"
        )


def call_arguments(inputs: Inputs, request: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of one call, from a worker's request."""
    offered = {
        **request["inputs"],
        "trainer_state": SimpleNamespace(global_step=request["step"]),
        "log_extra": _ignore,
        "log_metric": _ignore,
    }
    return {name: value for name, value in offered.items() if inputs.accepts(name)}


def _way_out(name: str, known: list[str]) -> str:
    if name == "answer":
        return "; name the one that holds the right answer with --answer-column"
    near = nearest(name, [*SUPPLIED, *known])
    return near or "; rename a column, or give the parameter a default"


def _ignore(*_args: Any, **_kwargs: Any) -> None:
    """TRL's `log_extra` and `log_metric`, which rewards may call; a worker keeps no tables."""
