"""JSON files that are whole or not there: a reader never sees half a write, also after a kill.

Not here: what the files mean (`prepare`, `summary`), and line-by-line files, which grow (`telemetry.metrics`).
"""

import json
import os
from pathlib import Path
from typing import Any

from ycore.errors import RunFolderError


def write_json_atomic(path: Path, value: Any) -> None:
    """Write `value` beside `path`, bring it to the disk, then rename it into place; readable by its owner only."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(path.parent)


def read_json(path: Path) -> Any:
    """The value in `path`; RunFolderError when it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(f"no such file: {path}; is this a run's folder?") from None
    except ValueError as error:
        raise RunFolderError(f"{path} is not JSON ({error}); it was not written by ycore, or was changed") from None


def _sync_folder(folder: Path) -> None:
    """A rename lasts only when the folder that holds the name is on the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
