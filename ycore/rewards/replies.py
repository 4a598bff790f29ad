"""What a reward's process says, read as something that anybody may have written: by its shape alone.

The reward runs in the process that answers for it, so it can write an answer of its own. It gains no more than any
reward can: a number for each completion of this call. Everything else masks the call's items.
"""

import hmac
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from ycore.rewards.loading import Inputs
from ycore.types import Score

MOST_BYTES = 4096
"""Of a reply, besides `BYTES_A_VALUE` for each completion."""

BYTES_A_VALUE = 64
START_BYTES = 64 * 1024
"""Of the first reply, which lists the parameters of every reward."""

_LARGEST = 1e15  # rewards become float32, and their squares are summed
_MOST_TEXT = 300  # characters


class CallFailed(Exception):
    """One call gave no list of rewards; the message is the problem that its items will carry."""


def scores_in(
    line: bytes, *, nonce: str, count: int, bounds: Sequence[tuple[float, float]] = ()
) -> list[Score]:
    """The scores of one call; CallFailed where the reward failed, or where the line is anything else.

    `bounds` has the lowest and the highest reward that the recipe allows, or nothing.
    """
    reply = object_in(line, nonce)
    if set(reply) == {"nonce", "failed"} and isinstance(reply["failed"], str):
        raise CallFailed(plain_text(reply["failed"]))
    if set(reply) != {"nonce", "values", "problems"}:
        raise CallFailed("no answer of a worker: it has other keys")
    values, problems = reply["values"], reply["problems"]
    if (
        not isinstance(values, list)
        or not isinstance(problems, list)
        or not len(values) == len(problems) == count
    ):
        raise CallFailed(f"no answer of a worker: not {count} values and {count} problems")
    return [_score(value, problem, bounds) for value, problem in zip(values, problems, strict=True)]


def inputs_in(line: bytes, *, nonce: str, count: int) -> list[Inputs]:
    """The parameters of each of `count` rewards, once they are loaded; CallFailed where they could not be."""
    reply = object_in(line, nonce)
    if set(reply) == {"nonce", "error"} and isinstance(reply["error"], str):
        raise CallFailed(plain_text(reply["error"], most=2 * _MOST_TEXT))
    ready = reply.get("ready")
    if set(reply) != {"nonce", "ready"} or not isinstance(ready, list) or len(ready) != count:
        raise CallFailed("no answer of a worker: it has other keys")
    return [_inputs(one) for one in ready]


def plain_text(text: str, *, most: int = _MOST_TEXT) -> str:
    """A text of a reward's, in one line that a terminal shows as it is."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])


def object_in(line: bytes, nonce: str) -> dict[str, Any]:
    """The JSON object of a line that answers the request of this nonce; CallFailed where it is anything else."""
    try:
        reply = json.loads(line, parse_constant=_not_finite, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise CallFailed(f"no answer of a worker: {plain_text(str(error), most=80)}") from None
    given = reply.get("nonce") if isinstance(reply, dict) else None
    if not isinstance(given, str) or not hmac.compare_digest(
        given.encode(errors="replace"), nonce.encode()
    ):
        raise CallFailed("no answer of a worker: it does not belong to this call")
    return reply  # type: ignore[no-any-return]


def _score(value: object, problem: object, bounds: Sequence[tuple[float, float]]) -> Score:
    if problem is not None and not isinstance(problem, str):
        raise CallFailed("no answer of a worker: a problem is no text")
    if value is None or problem is not None:
        return Score(None, problem=None if problem is None else plain_text(problem))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CallFailed("no answer of a worker: a value is no number")
    if not -_LARGEST <= value <= _LARGEST:
        return Score(None, problem=f"too large: beyond {_LARGEST:g} either way")
    for lowest, highest in bounds:
        if not lowest <= value <= highest:
            return Score(
                None, problem=f"out of range: {value:g} is not within {lowest:g} and {highest:g}"
            )
    return Score(float(value))


def _inputs(given: object) -> Inputs:
    names = ("required", "optional", "bound")
    if (
        not isinstance(given, dict)
        or set(given) != {*names, "takes_any"}
        or not isinstance(given["takes_any"], bool)
    ):
        raise CallFailed("no answer of a worker: no list of parameters")
    lists = [given[name] for name in names]
    if not all(
        isinstance(one, list) and all(isinstance(name, str) for name in one) for one in lists
    ):
        raise CallFailed("no answer of a worker: no list of parameters")
    required, optional, bound = (tuple(one) for one in lists)
    return Inputs(required=required, optional=optional, bound=bound, takes_any=given["takes_any"])


def _not_finite(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)
