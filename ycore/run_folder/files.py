"""Files that are whole or not there: a reader never sees half a write, also after a kill.

Not here: what the files mean (`prepare`, `summary`), folders of several files (`checkpoints`), and line-by-line files,
which grow (`telemetry.metrics`).
"""

import errno
import json
import os
from pathlib import Path
from typing import Any

from ycore.errors import RunFolderError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_IN_WORDS = ("No space left on device", "StorageFull", "Disk quota exceeded", "File too large")


def write_json_atomic(path: Path, value: Any) -> None:
    """Write `value` beside `path`, bring it to the disk, then rename it into place; readable by its owner only."""
    write_bytes_atomic(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """The same for bytes."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def read_json(path: Path) -> Any:
    """The value in `path`; RunFolderError when it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(f"no such file: {path}; is this a run's folder?") from None
    except ValueError as error:
        raise RunFolderError(f"{path} is not JSON ({error}); it was not written by ycore, or was changed") from None


def sync_file(path: Path) -> None:
    """Bring a file that somebody else has written to the disk."""
    _sync(path)


def sync_folder(folder: Path) -> None:
    """A rename lasts only when the folder that holds the name is on the disk too."""
    _sync(folder)


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed for want of room; libraries wrap the system's error, or tell it only in words."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return True
        if any(words in str(seen) for words in _FULL_IN_WORDS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
