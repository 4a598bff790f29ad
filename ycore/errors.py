"""Every error that ycore raises on purpose; a programming mistake stays a plain Python exception.

Every message is one line: the rule, the values, the way out.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class YcoreError(Exception):
    """Base of everything here; `exit_code` is what the command ends with."""

    exit_code = 1


class UserError(YcoreError, ValueError):
    """The command or its input cannot work as it was given."""

    exit_code = 2


class ConfigError(UserError):
    """An option, key, value, size or recipe."""


class ModelError(UserError):
    """A model's name, folder or file."""


class DataError(UserError):
    """A dataset, a column, a row."""


class RewardError(UserError):
    """A reward's name, file, function or arguments."""


class RunFolderError(UserError):
    """An output folder that cannot be used."""


class RunError(YcoreError, RuntimeError):
    """A run that began and could not go on."""


class MachineLost(RunError):
    """Another machine of the run that is gone, and may come back."""


class PeerError(RunError):
    """Another rank that did not come."""


class EngineError(RunError):
    """An engine that died, refused or did not answer in time."""


class SyncError(RunError):
    """An engine whose weights are not the trainer's."""


class TrainerError(RunError):
    """A trainer process that failed."""


class Interrupted(YcoreError):
    """The run was stopped on request."""

    exit_code = 130


def nearest(name: str, known: Iterable[str], *, limit: int = 3) -> str:
    """The way out of a mistyped name: `"; did you mean 'a' or 'b'?"`, or nothing when none is near.

    Near are names with most of its letters in order, or with one of three letters another, or with its beginning.
    """
    bare_name = name.lstrip("-")
    known_names = {option.lstrip("-"): option for option in known}
    as_long = [other for other in known_names if len(other) == len(bare_name)]
    matches = (
        difflib.get_close_matches(bare_name, known_names, n=limit, cutoff=0.7)
        or difflib.get_close_matches(bare_name, as_long, n=limit, cutoff=0.66)
        or [other for other in known_names if bare_name and other.startswith(bare_name)][:limit]
    )
    if not matches:
        return ""
    return f"; did you mean {' or '.join(repr(known_names[match]) for match in matches)}?"


_RULES: Mapping[str, str] = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "finite_number": "a finite number",
    "string_type": "text",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "list_type": "a list",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a mapping"),
    "none_required": "none",
    "extra_forbidden": "left out",
    "missing": "given",
    "greater_than": "greater than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "text of the form {pattern}",
    "too_short": "a list of {min_length} or more",
}


def must_be(name: str, details: "Sequence[ErrorDetails]") -> str:
    """Say of a value that pydantic refused, in one line, what it must be, what it is, and the nearest word."""
    rules = list(dict.fromkeys(map(_rule, details)))
    rule = " or ".join([rule for rule in rules if rule != "none"] or rules)
    value = details[-1]["input"]
    text = repr(value)
    if len(text) > 300:
        text = f"{text[:200]}... ({len(text)} characters)"
    hint = nearest(str(value), re.findall(r"'([^']+)'", rule), limit=1)
    return f"{name} must be {rule}; it is {text}{hint}"


def _rule(detail: "ErrorDetails") -> str:
    template = _RULES.get(detail["type"])
    if template is None:
        return detail["msg"][:1].lower() + detail["msg"][1:]
    return template.format(**detail.get("ctx", {}))
