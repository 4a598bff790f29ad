"""Folders that only their owner may enter, also where their name can be guessed.

Not here: which of them a run has (`paths`), and when they are made and removed (`prepare`, `launch.reaper`).
"""

import os
import stat
import tempfile
from pathlib import Path

from ycore.errors import RunFolderError
from ycore.run_folder.paths import RunFolder


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
