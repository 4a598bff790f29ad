"""The id of a run, which the lock file of its folder keeps.

The id is random and not made from the folder's path: two mount namespaces (a private /tmp, a container) show two
folders under one path. It stays the folder's from resume to resume, because what a killed run has left is found by it.
A copy of the folder does not have it: the copy's resume would end the original's processes.
"""

import json
import os
import secrets
from pathlib import Path
from typing import Any

LOCK = ".lock"


def read_run_id(lock: Path) -> str | None:
    """Return the id in a lock file; None where there is none, or where the file is a copy of another folder's."""
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:
        return None
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def keep_run_id(descriptor: int) -> str:
    """Return the id in an open lock file, and write a new one where there is none."""
    run_id = _read(descriptor)
    if run_id is None:
        run_id = secrets.token_hex(6)
        data = json.dumps({"run_id": run_id, **_file_of(descriptor)}).encode() + b"\n"
        os.pwrite(descriptor, data, 0)  # in place, because the lock is on this very file
        os.ftruncate(descriptor, len(data))
    return run_id


def _read(descriptor: int) -> str | None:
    try:
        record: dict[str, Any] = json.loads(os.pread(descriptor, 4096, 0))
        run_id = str(record.pop("run_id"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return run_id if record == _file_of(descriptor) else None


def _file_of(descriptor: int) -> dict[str, int]:
    """Identify the file itself: a copy has another inode."""
    status = os.fstat(descriptor)
    return {"device": status.st_dev, "inode": status.st_ino}
