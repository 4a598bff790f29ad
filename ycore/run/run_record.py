"""What the lock file of a run's folder holds: the run's id, and when its last processes began.

The id is random and not made from the folder's path: two mount namespaces (a private /tmp, a container) show two
folders under one path. It stays the folder's from resume to resume, because what a killed run has left is found by it.
A copy of the folder does not have it: the copy's resume would end the original's processes.
"""

import json
import os
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path

LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """`run_id` is 12 hexadecimal digits. `device` and `inode` are the lock file's, by which a copy is known."""

    run_id: str
    began: float
    """When the last run that started processes here did so, in seconds since 1970."""
    device: int
    inode: int


def read_record(lock: Path) -> RunRecord | None:
    """The record in a lock file; None where there is none, or where it is another folder's of which this is a copy."""
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:
        return None
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def keep_record(descriptor: int, *, began: float | None = None) -> RunRecord:
    """The record in a lock file that is held; a new one where there is none, and with another beginning if given."""
    record, status = _read(descriptor), os.fstat(descriptor)
    if record is not None and began is None:
        return record
    run_id = secrets.token_hex(6) if record is None else record.run_id
    record = RunRecord(run_id, began or time.time(), status.st_dev, status.st_ino)
    data = json.dumps(asdict(record)).encode() + b"\n"
    os.pwrite(descriptor, data, 0)  # in place, because the lock is on this very file
    os.ftruncate(descriptor, len(data))
    return record


def _read(descriptor: int) -> RunRecord | None:
    status = os.fstat(descriptor)
    try:
        record = RunRecord(**json.loads(os.pread(descriptor, 4096, 0)))
    except (OSError, ValueError, TypeError):
        return None
    return record if (record.device, record.inode) == (status.st_dev, status.st_ino) else None
