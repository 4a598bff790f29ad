"""The gate through which text and JSON that are not ours enter: of tools, environments, agents, judges, servers, rows.

It imports the standard library alone, since confined processes read what servers say by it too. What passes is valid
Unicode, of bounded length and depth. Honest text comes out as it is.
"""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

MAX_DEPTH = 64
"""Levels of lists and objects; templates, JSON and comparisons of deeper ones end in a RecursionError."""
LARGEST_REWARD = 1e15  # rewards become float32, and their squares are summed
_MAX_LINE = 300  # characters


class ForeignRefused(ValueError):
    """A foreign value that cannot be let in; the message says why in a few words."""


def foreign_text(text: str, *, max_characters: int | None = None) -> str:
    """Return the text as valid Unicode, cut to `max_characters`: halves of characters become U+FFFD."""
    text = text[:max_characters]
    try:
        text.encode()
    except UnicodeEncodeError:  # two halves that belong together are one character
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def foreign_value(value: Any, *, max_depth: int = MAX_DEPTH) -> Any:
    """Return a JSON value with each text in it as `foreign_text` makes it; ForeignRefused where it nests too deep."""
    if isinstance(value, str):
        return foreign_text(value)
    if not isinstance(value, list | tuple | Mapping):
        return value
    if not max_depth:
        raise ForeignRefused(f"it nests too deep: {MAX_DEPTH} levels are read")
    if isinstance(value, Mapping):
        return {
            foreign_text(key) if isinstance(key, str) else key: foreign_value(
                item, max_depth=max_depth - 1
            )
            for key, item in value.items()
        }
    items = [foreign_value(item, max_depth=max_depth - 1) for item in value]
    return tuple(items) if isinstance(value, tuple) else items


def foreign_json(data: str | bytes, *, strict: bool = False) -> Any:
    """Parse JSON and let it through the gate.

    Args:
        strict: Refuse NaN, infinities and repeated keys.

    Raises:
        ForeignRefused: it is no JSON, or nests too deep.
    """
    try:
        value = json.loads(
            data,
            parse_constant=_refuse_constant if strict else None,
            object_pairs_hook=_refuse_repeated_keys if strict else None,
        )
    except (ValueError, RecursionError) as problem:
        raise ForeignRefused(foreign_line(str(problem), max_characters=80)) from None
    return foreign_value(value)


def foreign_reward(value: object) -> float | None:
    """Return a number that can be a reward; None for anything else, such as text, NaN or 1e300."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -LARGEST_REWARD <= value <= LARGEST_REWARD else None


def foreign_word(value: object, what: str) -> str:
    """Return a text that must be there; TypeError for anything else. `what` names it, such as `a function's name`."""
    if not isinstance(value, str):
        raise TypeError(f"{what} is text")
    return value


def read_tool(source: Any) -> dict[str, Any]:
    """Return a tool with all that templates write, and its keys in their order; TypeError or KeyError for no tool."""
    function = dict(source["function"])
    parameters = dict(function.get("parameters") or {})
    parameters.setdefault("type", "object")
    properties = parameters.setdefault("properties", {})
    function.setdefault("description", "")
    function["parameters"] = parameters
    foreign_word(function["name"], "a function's name")
    foreign_word(function["description"], "a function's description")
    if not isinstance(properties, dict) or not all(
        isinstance(schema, dict) for schema in properties.values()
    ):
        raise TypeError("a function's properties are an object of objects")
    return {"type": "function", "function": function}


def foreign_line(text: str, *, max_characters: int = _MAX_LINE) -> str:
    """Return the beginning of a text in one line of words that can do nothing to a terminal."""
    line = " ".join(text[:max_characters].split())
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)
