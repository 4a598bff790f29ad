"""Record what real processes do to a folder as a list of operations: `recorder.c` is preloaded into them."""

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ycore.errors import RunError

Kind = Literal["create", "size", "write", "rename", "link", "unlink", "mkdir", "rmdir", "flush"]

_KINDS: dict[str, Kind] = {
    "C": "create", "T": "size", "W": "write", "R": "rename", "L": "link", "U": "unlink", "M": "mkdir", "D": "rmdir",
    "S": "flush",
}  # fmt: skip
_HEADER = struct.Struct("<IIiIIIqQ")
_MAGIC = 0x79636F72
IGNORED = ("logs", "sockets")
"""Parts of a run folder of which nothing is promised."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call that succeeded. Paths are relative to the recorded folder, "" being the folder itself.

    `offset` is where a write begins, the size after `size`, and the size of a file at its flush (-1 of a folder).
    """

    kind: Kind
    path: str
    pid: int
    other: str = ""
    offset: int = 0
    data: bytes = b""


def build_recorder(folder: Path) -> Path:
    """Compile the library into `folder`; RunError where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RunError("recording needs a C compiler, gcc or cc; install one")
    library = folder / "recorder.so"
    source = Path(__file__).with_name("recorder.c")
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    if done.returncode != 0:
        raise RunError(f"the recorder does not compile: {done.stderr.strip()}")
    return library


def recording_environment(library: Path, root: Path, log: Path) -> dict[str, str]:
    """Return the variables with which a process, and all that it starts, is recorded."""
    return {
        "LD_PRELOAD": str(library),
        "YCORE_RECORD_ROOT": os.path.realpath(root),
        "YCORE_RECORD_LOG": str(log),
    }


def read_log(log: Path, root: Path) -> list[Operation]:
    """Return every operation in order; RunError where something happened that cannot be recorded."""
    return list(_operations(log.read_bytes(), os.path.realpath(root)))


def _operations(data: bytes, root: str) -> Iterator[Operation]:
    at = 0
    while at < len(data):
        magic, kind, pid, first, second, _, offset, length = _HEADER.unpack_from(data, at)
        if magic != _MAGIC:
            raise RunError(f"the record is damaged at byte {at}")
        at += _HEADER.size
        path, other = (
            data[at : at + first].decode(),
            data[at + first : at + first + second].decode(),
        )
        at += first + second
        content = data[at : at + length]
        at += length
        path = path[len(root) + 1 :]
        if is_ignored(path):
            continue
        if chr(kind) not in _KINDS:
            raise RunError(f"{path}: {other} cannot be recorded")
        yield Operation(_KINDS[chr(kind)], path, pid, other[len(root) + 1 :], offset, content)


def is_ignored(path: str) -> bool:
    """Whether the run's folder, which is directly below the recorded one, ignores the path."""
    return path.split("/")[1:2] != [] and path.split("/")[1] in IGNORED
