"""Whether a run that goes on is the run that began: its settings, and the content of its rows, model and rewards.

Not here: what is refused and how it is said (`prepare`, `roles.identity`).
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
