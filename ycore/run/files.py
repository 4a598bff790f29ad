"""Files that are whole or not there: a reader never sees half a write, also after a kill.

Folders that only their owner may enter, also where their name can be guessed.

Secrets kept out of what a run writes: tokens, keys and passwords become `***`.

Not here: what the files mean (`prepare`, `summary`), folders of several files (`checkpoints`), and line-by-line files,
which grow (`telemetry.metrics`).
"""

import errno
import json
import os
import re
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ycore.errors import RunFolderError
from ycore.run.paths import RunFolder

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


def temporary_folder(folder: RunFolder) -> Path:
    """Where the run's engines put temporary files and sockets of their own; a short path, for the sockets' sake."""
    return Path(tempfile.gettempdir()) / f"ycore-{folder.run_id}"


def make_private(path: Path) -> None:
    """Make `path` a folder of mode 0700; refuse one that is a link or another user's."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise RunFolderError(f"{path} is a link or another user's; remove it, or choose another --output")
    path.chmod(0o700)


HIDDEN = "***"

_NAME = re.compile(
    r"(?:hub|access|auth|api|bearer|hf)_?tokens?$|api_?key$|secret(?:_?key)?$|passw(?:or)?d$", re.IGNORECASE
)
_VALUE = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,})")
_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def redact(value: Any) -> Any:
    """`value` with every secret in it replaced, whatever it is nested in."""
    if isinstance(value, str):
        return _USERINFO.sub(HIDDEN, _VALUE.sub(HIDDEN, value))
    if isinstance(value, Mapping):
        return {key: _under(str(key), item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [redact(item) for item in value]
    return value


def redact_command(command: Sequence[str]) -> list[str]:
    """A command line with its secrets replaced: `--hub-token X`, `--hub-token=X`, `--set trl.hub_token=X`."""
    shown: list[str] = []
    hide_next = False
    for word in command:
        name, equals, _ = word.partition("=")
        secret = _is_secret(name)
        if hide_next:
            shown.append(HIDDEN)
        elif secret and equals:
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(redact(word))
        hide_next = secret and not equals and word.startswith("-")
    return shown


def _under(name: str, value: Any) -> Any:
    if value is not None and _is_secret(name):
        return HIDDEN
    return redact(value)


def _is_secret(name: str) -> bool:
    return _NAME.search(name.replace("-", "_")) is not None
