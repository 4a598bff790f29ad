"""Every error that ycore raises on purpose, in one tree.

Not for programming mistakes: those stay plain Python exceptions, with their traceback.

    YcoreError
    |-- UserError (ValueError)        exit 2: what was typed or given cannot work
    |   |-- ConfigError               an option, key, value, size or recipe
    |   |-- ModelError                a model name, folder or file
    |   |-- DataError                 a dataset, a column, a row
    |   |-- RewardError               a reward's name, file, function or arguments
    |   `-- RunFolderError            an output folder that cannot be used
    |-- RunError (RuntimeError)       exit 1: a run that began and could not go on
    |   |-- PeerError                 another rank that did not come
    |   |-- EngineError               an engine that died, refused or did not answer in time
    |   |-- SyncError                 an engine whose weights are not the trainer's
    |   `-- TrainerError              a trainer process that failed
    `-- Interrupted                   exit 130: the run was stopped on request

Every message is one line: the rule, the values, the way out.
"""

import difflib
from collections.abc import Iterable


class YcoreError(Exception):
    """Base of everything here; `exit_code` is what the command ends with."""

    exit_code = 1


class UserError(YcoreError, ValueError):
    exit_code = 2


class ConfigError(UserError):
    pass


class ModelError(UserError):
    pass


class DataError(UserError):
    pass


class RewardError(UserError):
    pass


class RunFolderError(UserError):
    pass


class RunError(YcoreError, RuntimeError):
    pass


class PeerError(RunError):
    pass


class EngineError(RunError):
    pass


class SyncError(RunError):
    pass


class TrainerError(RunError):
    pass


class Interrupted(YcoreError):
    exit_code = 130


def nearest(name: str, known: Iterable[str], *, limit: int = 3) -> str:
    """The way out of a mistyped name: `"; did you mean 'a' or 'b'?"`, or nothing when none is near."""
    matches = difflib.get_close_matches(name, list(known), n=limit, cutoff=0.55)
    if not matches:
        return ""
    return "; did you mean " + " or ".join(repr(match) for match in matches) + "?"
