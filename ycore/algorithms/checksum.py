"""Whether an engine's weights are the trainer's: one sum a tensor, written beside the weights and read back.

A tensor's bytes are added up as 64-bit words, modulo 2^64. The sum of rows laid one after another is the sum of their
sums, and rows of zeros add nothing. So it survives what engines do to a checkpoint: `q_proj`, `k_proj` and `v_proj`
become one matrix, a vocabulary is padded. A tensor that was skipped, half loaded or is of an earlier version has
another sum. It is no defence against somebody who wants the sums to be equal.

Not here: reading the sums back in the engine (`roles.vllm_worker`) and asking for them (`roles.vllm_engine`). Torch is
imported by the one function that needs it: the launcher imports this file by way of the engine's client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ycore.errors import SyncError
from ycore.run_folder.files import read_json, write_json_atomic

if TYPE_CHECKING:
    import torch

MANIFEST = "weights.json"
_WORDS = 2**64
_NAMED = 3  # tensors that an error names, of all that differ

ReadBack = Sequence[tuple[Sequence[str], int]]
"""What an engine holds: the checkpoint's names that one of its parameters is made of, and that parameter's sum."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Of which version the weights in a folder are, and each tensor's sum by its checkpoint name."""

    version: int
    sums: Mapping[str, int]


def byte_sum(tensor: "torch.Tensor") -> int:
    """The sum of a contiguous tensor's bytes, as signed words; of the width of one number where rows need it.

    Vectors are always added up number by number: biases that become one need not each fill whole words.
    """
    import torch

    flat = tensor.detach().contiguous()
    width = flat.element_size()
    by_words = flat.dim() > 1 and flat.size(-1) * width % 8 == 0
    words = torch.int64 if by_words else {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    return int(flat.view(-1).view(words).sum(dtype=torch.int64))


def write_manifest(folder: Path, version: int, sums: Mapping[str, int]) -> None:
    """Say what the folder's weights are; written after them, so that it never speaks of weights that are not there."""
    write_json_atomic(folder / MANIFEST, {"version": version, "sums": dict(sums)})


def read_manifest(folder: Path, *, version: int) -> Manifest:
    """The manifest of these weights; SyncError where there is none, or they are of another version."""
    path = folder / MANIFEST
    if not path.is_file():
        raise SyncError(f"no weights to send: there is no {path}, which the trainer writes after the weights")
    told = read_json(path)
    if told["version"] != version:
        raise SyncError(f"stale weights: {folder} holds policy version {told['version']}, and {version} was to be sent")
    return Manifest(told["version"], told["sums"])


def check_read_back(sums: Mapping[str, int], told: ReadBack) -> int:
    """How many of the tensors are proved to be loaded, and equal; SyncError naming those that are not.

    A tensor of which the engine says nothing is not an error by itself: a model may keep it in a form that has no
    such sum (fused experts). That it says nothing of any is.
    """
    differ: set[str] = set()  # a tied head is told of beside its embedding, by the same name
    proved: set[str] = set()
    for names, held in told:
        if not all(name in sums for name in names):
            continue
        proved |= set(names)
        if (sum(sums[name] for name in names) - held) % _WORDS:
            differ |= set(names)
    if differ:
        listed = ", ".join(sorted(differ)[:_NAMED]) + (", ..." if len(differ) > _NAMED else "")
        raise SyncError(f"{len(differ)} of {len(sums)} tensors are not the trainer's after they were loaded: {listed}")
    if not proved:
        raise SyncError(
            f"it named none of the {len(sums)} tensors that were sent, so nothing proves that they are there"
        )
    return len(proved)
