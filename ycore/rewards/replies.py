"""Read what a reward worker says as something that anybody may have written: by its shape alone.

The reward runs in the process that answers for it, so it can write an answer of its own. It gains no more than any
reward can: a number for each completion of this call. Everything else masks the call's items.
"""

from typing import Any

from ycore.rewards.loading import Inputs
from ycore.sandbox.confined_worker import CallFailed, foreign_line, reply_in
from ycore.types import Score

MAX_BYTES = 4096
"""Bytes of a reply, besides `BYTES_PER_VALUE` for each completion."""

BYTES_PER_VALUE = 64
_LARGEST = 1e15  # rewards become float32, and their squares are summed
_MAX_ERROR = 600  # characters


def scores_in(
    line: bytes, *, nonce: str, count: int, allowed_range: tuple[float, float] | None = None
) -> list[Score]:
    """Return the scores of one call; CallFailed where the reward failed, or where the line is anything else.

    `allowed_range` is the lowest and the highest reward that the recipe allows.
    """
    reply = reply_in(line, nonce)
    if set(reply) == {"nonce", "failed"} and isinstance(reply["failed"], str):
        raise CallFailed(foreign_line(reply["failed"]))
    if set(reply) != {"nonce", "values", "problems"}:
        raise CallFailed("no answer of a worker: it has other keys")
    values = reply["values"]
    problems = reply["problems"]
    if (
        not isinstance(values, list)
        or not isinstance(problems, list)
        or not len(values) == len(problems) == count
    ):
        raise CallFailed(f"no answer of a worker: not {count} values and {count} problems")
    return [
        _score(value, problem, allowed_range)
        for value, problem in zip(values, problems, strict=True)
    ]


def inputs_in(line: bytes, *, nonce: str, count: int) -> list[Inputs]:
    """Return the parameters of each of `count` rewards, once they are loaded; CallFailed where they could not be."""
    reply = reply_in(line, nonce)
    if set(reply) == {"nonce", "error"} and isinstance(reply["error"], str):
        raise CallFailed(foreign_line(reply["error"], max_characters=_MAX_ERROR))
    ready = reply.get("ready")
    if set(reply) != {"nonce", "ready"} or not isinstance(ready, list) or len(ready) != count:
        raise CallFailed("no answer of a worker: it has other keys")
    return [_inputs(parameters) for parameters in ready]


def _score(value: object, problem: object, allowed_range: tuple[float, float] | None) -> Score:
    if problem is not None and not isinstance(problem, str):
        raise CallFailed("no answer of a worker: a problem is no text")
    if problem is not None:
        return Score(None, problem=foreign_line(problem))
    if value is None:
        return Score(None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CallFailed("no answer of a worker: a value is no number")
    if not -_LARGEST <= value <= _LARGEST:
        return Score(None, problem=f"too large: beyond {_LARGEST:g} either way")
    if allowed_range is not None and not allowed_range[0] <= value <= allowed_range[1]:
        return Score(
            None,
            problem=f"out of range: {value:g} is not within {allowed_range[0]:g} and {allowed_range[1]:g}",
        )
    return Score(float(value))


def _inputs(parameters: Any) -> Inputs:
    names = ("required", "optional", "bound")
    if not isinstance(parameters, dict) or set(parameters) != {*names, "takes_any"}:
        raise CallFailed("no answer of a worker: no list of parameters")
    lists = [parameters[name] for name in names]
    is_text = all(
        isinstance(values, list) and all(isinstance(value, str) for value in values)
        for values in lists
    )
    if not is_text or not isinstance(parameters["takes_any"], bool):
        raise CallFailed("no answer of a worker: no list of parameters")
    required, optional, bound = (tuple(values) for values in lists)
    return Inputs(required, optional, bound, parameters["takes_any"])
