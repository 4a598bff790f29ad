"""Every error that ycore raises on purpose; a programming mistake stays a plain Python exception.

Every message is one line: the rule, the values, the way out.
"""

import difflib
from collections.abc import Iterable


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
