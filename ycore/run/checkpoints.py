"""Checkpoints on disk: whole or not there. Written beside, flushed, listed in a manifest, then renamed into place.

checkpoints/.saving-checkpoint-8/       being written; cleared at the next start
checkpoints/checkpoint-8/manifest.json  written last: every file with its size and sha256
checkpoints/damaged-checkpoint-6/       did not verify; passed over, never deleted
"""

import hashlib
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ycore.errors import RunError, RunFolderError
from ycore.run.files import read_json, sync, write_json_atomic
from ycore.run.text import Say

SCHEMA = 1
MIN_KEPT = 2  # checkpoints that are kept whatever the settings say: one may turn out damaged

_MANIFEST = "manifest.json"
_PREFIX = "checkpoint-"
_SAVING = ".saving-"
_DROPPING = ".dropping-"


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / f"{_PREFIX}{step}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def checkpoints_in(folder: Path) -> list[Path]:
    """Every published checkpoint, oldest first; none of them is read or verified."""
    found = [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()]
    return sorted(found, key=step_of)


def staging(folder: Path, step: int) -> Path:
    """The folder in which to write `checkpoint-STEP` before it is published."""
    return folder / f"{_SAVING}{_PREFIX}{step}"


def publish(folder: Path, step: int, extra: dict[str, Any]) -> Path:
    """Add the manifest to what was staged and give it its name: from here on the checkpoint exists.

    A checkpoint of the same step is replaced: the run went back behind it and came here again.

    Args:
        folder: the run's checkpoints.
        step: optimizer steps taken.
        extra: more keys for the manifest, such as `world`, the number of ranks.

    Returns:
        The checkpoint's folder.
    """
    staged, place = staging(folder, step) / f"{_PREFIX}{step}", checkpoint_of(folder, step)
    files = sorted(path for path in staged.rglob("*") if path.is_file() and path.name != _MANIFEST)
    for path in files:
        sync(path)
    names = [str(path.relative_to(staged)) for path in files]
    listed = dict(zip(names, _fingerprints(files), strict=True))
    write_json_atomic(staged / _MANIFEST, {"schema": SCHEMA, "step": step, **extra, "files": listed})
    for inner in {path.parent for path in files} | {staged}:
        sync(inner)
    if place.is_dir():
        _drop(place)
    os.rename(staged, place)
    sync(folder)
    staged.parent.rmdir()
    return place


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest's keys; RunFolderError where there is none, or it has another schema."""
    manifest = read_json(checkpoint / _MANIFEST)
    if not isinstance(manifest, dict) or (manifest.get("schema"), type(manifest.get("files"))) != (SCHEMA, dict):
        raise RunFolderError(f"{checkpoint / _MANIFEST} is not a manifest of schema {SCHEMA}; was another ycore here?")
    return manifest


def problem_of(checkpoint: Path) -> str | None:
    """Why a checkpoint does not verify, in a few words; None where every file is there, whole and unchanged."""
    if not (checkpoint / _MANIFEST).is_file():
        return "it has no manifest.json, which is written last"
    try:
        manifest = read_manifest(checkpoint)
    except RunFolderError as error:
        return str(error)
    if manifest.get("step") != step_of(checkpoint):
        return f"its manifest is of step {manifest.get('step')}"
    expected: dict[str, dict[str, Any]] = manifest["files"]
    paths = {name: checkpoint / name for name in expected}
    for name, path in paths.items():
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected[name]["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, {expected[name]['bytes']} were written"
    for name, found in zip(paths, _fingerprints(paths.values()), strict=True):
        if found != expected[name]:
            return f"{name} has changed: its sha256 is not the one that was written"
    return None


def newest_whole(folder: Path, *, say: Say) -> Path | None:
    """The latest checkpoint that verifies; None where no checkpoint was ever saved.

    Args:
        say: takes a line for each damaged checkpoint, which is moved aside and passed over.

    Raises:
        RunFolderError: all checkpoints are damaged.
    """
    reasons = []
    for checkpoint in reversed(checkpoints_in(folder)):
        problem = problem_of(checkpoint)
        if problem is None:
            return checkpoint
        moved = _move(checkpoint, "damaged-")
        say(f"{checkpoint.name} is damaged ({problem}); passed over, and kept as {moved.name}")
        reasons.append(f"{checkpoint.name}: {problem}")
    if reasons:
        raise RunFolderError(
            f"no checkpoint in {folder} verifies ({'; '.join(reasons)}); "
            "begin again with --resume-from 0, or choose another --output"
        )
    return None


def newest_for(folder: Path, *, world: int, say: Say) -> Path | None:
    """Like `newest_whole`, after what a killed save left is cleared away; RunError where another `world` saved it."""
    clear_leftovers(folder)
    newest = newest_whole(folder, say=say)
    if newest is not None and (saved := read_manifest(newest).get("world")) != world:
        raise RunError(
            f"{newest.name} was saved by {saved} ranks, and this run has {world}; each rank saves its own state, "
            f"so go on with --processes {saved}"
        )
    return newest


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Move the checkpoints of later steps out of the way: the run goes on from this one."""
    return [_move(checkpoint, "aside-") for checkpoint in checkpoints_in(folder) if step_of(checkpoint) > step]


def drop_oldest(folder: Path, *, keep: int | None) -> list[Path]:
    """Remove all but the newest `keep` checkpoints (at least two; None keeps all); return those that are left."""
    if keep is not None:
        for old in checkpoints_in(folder)[: -max(keep, MIN_KEPT)]:
            _drop(old)
    return checkpoints_in(folder)


def clear_leftovers(folder: Path) -> list[str]:
    """Remove what a killed save or a killed removal left; return the names."""
    left = [path for prefix in (_SAVING, _DROPPING) for path in folder.glob(f"{prefix}*")]
    for path in left:
        shutil.rmtree(path)
    return [path.name for path in left]


def size_of(checkpoint: Path) -> int:
    """The size of all its files, in bytes."""
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


def _drop(checkpoint: Path) -> None:
    """Rename, then remove: half a checkpoint never has a checkpoint's name."""
    dying = checkpoint.with_name(f"{_DROPPING}{checkpoint.name}")
    shutil.rmtree(dying, ignore_errors=True)
    os.rename(checkpoint, dying)
    shutil.rmtree(dying)


def _move(checkpoint: Path, prefix: str) -> Path:
    place, count = checkpoint.with_name(prefix + checkpoint.name), 1
    while place.exists():
        count += 1
        place = checkpoint.with_name(f"{prefix}{checkpoint.name}-{count}")
    os.rename(checkpoint, place)
    sync(checkpoint.parent)
    return place


def _fingerprints(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Size and sha256 of each; hashing releases the interpreter, so several files go at once."""

    def fingerprint(path: Path) -> dict[str, Any]:
        with path.open("rb") as file:
            return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(fingerprint, files))
