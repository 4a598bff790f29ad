"""Where ycore keeps what it builds once for all runs, and how it builds it so that half a build is never used.

Not here: the hub's own cache, which huggingface_hub keeps.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ycore.errors import ModelError


def cache_dir() -> Path:
    """`$YCORE_CACHE`, or `~/.cache/ycore`."""
    chosen = os.environ.get("YCORE_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "ycore"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, built by `build(partial_folder)` unless it stands already; runs that meet here wait for one another.

    The build happens beside `folder` and is renamed into place, so that a folder of this name is always whole.
    """
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                _build(folder, build)
    except OSError as problem:
        raise ModelError(f"cannot write the model cache: {problem}; set YCORE_CACHE to a folder with room") from None
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed build left behind
    partial.mkdir()
    try:
        build(partial)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
