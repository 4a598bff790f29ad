"""Prove that an engine holds the trainer's weights: sums of each tensor in which every number enters with its place.

A sum is a polynomial hash (Karp and Rabin, 1987) modulo 2**64: row r counts B**r times. A second one counts columns.
Permuted rows, swapped parts of a merged matrix and a transposed one have other sums. The sum of a shard that begins
at row r is multiplied by B**r, so the sums of a tensor's shards add up to the tensor's own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate, cycle
from pathlib import Path

import torch

from ycore.errors import SyncError
from ycore.run.files import read_json, write_json_atomic

ROW_BASE, COLUMN_BASE = (
    0x5851F42D4C957F2D,
    0x14057B7EF767814F,
)  # odd, so that no power of them is 0
_MODULUS = 2**64
_MANIFEST = "weights.json"


@dataclass(frozen=True)
class TensorSums:
    """Sums of a tensor of `num_bytes` over words of `width` bytes, by rows and by columns; each from 0 to 2**64 - 1."""

    num_bytes: int
    width: int
    rows: int
    columns: int


Piece = tuple[str, int, int, int, int, int]
"""A part of a tensor in an engine: checkpoint name, first row, first column in words, width, sums of rows, columns."""


def tensor_sums(tensor: torch.Tensor) -> TensorSums:
    """Return the sums of a tensor as a matrix `[rows, words]`; a vector has one column, further dimensions are joined.

    A word has 64 bits, or one number where rows do not fill such words.
    """
    matrix = tensor.detach().contiguous()
    matrix = matrix.view(matrix.size(0), -1) if matrix.dim() > 1 else matrix.view(-1, 1)
    width = 8 if matrix.size(1) * matrix.element_size() % 8 == 0 else matrix.element_size()
    words = matrix.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width])
    sums = [
        int(
            (
                words.sum(dim=1 - dim, dtype=torch.int64)
                * _powers(base, words.size(dim), words.device)
            ).sum()
        )
        for dim, base in enumerate((ROW_BASE, COLUMN_BASE))
    ]
    return TensorSums(matrix.nbytes, width, sums[0] % _MODULUS, sums[1] % _MODULUS)


@lru_cache(maxsize=64)
def _powers(base: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.full((count,), base, dtype=torch.int64, device=device).cumprod(0)


@dataclass(frozen=True)
class Part:
    """Rows of a parameter that are rows, or a shard of the rows, of one of the checkpoint's tensors.

    Attributes:
        rows: The number of these rows.
        whole: The number of that tensor's rows.
        first: The first of these rows in that tensor.
    """

    rows: int
    whole: int
    first: int = 0


PartSums = tuple[Part, TensorSums]


def part_sums(matrix: torch.Tensor, parts: Sequence[Part]) -> list[PartSums]:
    """Return the sums of each part of a matrix; of the whole matrix if the parts are not all of its rows."""
    if sum(part.rows for part in parts) != matrix.size(0):
        parts = [Part(matrix.size(0), matrix.size(0))]
    return list(
        zip(parts, map(tensor_sums, matrix.split([part.rows for part in parts])), strict=True)
    )


def pieces_of(
    names: Sequence[str], parts: Sequence[PartSums], *, column_shard: int = 0
) -> list[Piece]:
    """Name the parts of a parameter as the checkpoint's tensors: one each, or all in one; [] if neither fits.

    Args:
        column_shard: The number of shards as wide as this one to its left.
    """
    if len(names) not in (1, len(parts)):
        return []
    first_rows: Iterable[int] = [0] * len(parts)
    if len(names) == 1:
        first_rows = accumulate((part.whole for part, _ in parts), initial=0)
    return [
        (
            name,
            row + part.first,
            column_shard * sums.num_bytes // sums.width // part.rows,
            sums.width,
            sums.rows,
            sums.columns,
        )
        for name, row, (part, sums) in zip(cycle(names), first_rows, parts, strict=False)
    ]


def write_manifest(folder: Path, version: int, sums: Mapping[str, TensorSums]) -> None:
    tensors = {name: asdict(tensor) for name, tensor in sums.items()}
    write_json_atomic(folder / _MANIFEST, {"version": version, "tensors": tensors})


def begin_weights(folder: Path) -> None:
    """Make the folder, and remove its manifest before the weights change, as it is wrong from then on."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / _MANIFEST).unlink(missing_ok=True)


def read_manifest(folder: Path, *, version: int) -> dict[str, TensorSums]:
    """Return each tensor's sums by its checkpoint name; SyncError where the folder does not hold this version."""
    path = folder / _MANIFEST
    if not path.is_file():
        raise SyncError(
            f"no weights to send: there is no {path}, which the trainer writes after the weights"
        )
    manifest = read_json(path)
    if manifest["version"] != version:
        raise SyncError(
            f"stale weights: {folder} holds policy version {manifest['version']}, and {version} was to be sent"
        )
    return {name: TensorSums(**tensor) for name, tensor in manifest["tensors"].items()}


def has_adapters(sums: Iterable[str]) -> bool:
    """Tell whether these are the names of adapters and their base, and not of merged weights."""
    return any(".lora_" in name for name in sums)


def check_read_back(
    sent: Mapping[str, TensorSums], pieces: Iterable[Piece], *, at_least: float = 1.0
) -> float:
    """Return the verified share of the tensors that were sent: the lesser of the shares by number and by bytes.

    Args:
        pieces: The pieces of all workers of the engine. Pieces of one tensor at one place (a tied head beside its
            embedding, a norm on every worker) must be equal; pieces at different places add up to the tensor.
        at_least: The share that must be verified. An engine may keep some tensors in a form without such a sum.

    Raises:
        SyncError: Some differ, or too few can be verified.
    """
    places: dict[str, dict[tuple[int, int], tuple[int, int]]] = {}
    differ: set[str] = set()
    for name, row, column, width, rows, columns in pieces:
        if name in sent and width == sent[name].width:
            place = places.setdefault(name, {})
            if place.setdefault((row, column), (rows, columns)) != (rows, columns):
                differ.add(name)
    differ |= {
        name
        for name, parts in places.items()
        if _added_up(parts) != (sent[name].rows, sent[name].columns)
    }
    if differ:
        listed = _listed(differ)
        raise SyncError(
            f"{len(differ)} of {len(sent)} tensors are not the trainer's after they were loaded: {listed}"
        )
    num_bytes = sum(tensor.num_bytes for tensor in sent.values())
    by_bytes = sum(sent[name].num_bytes for name in places) / num_bytes if num_bytes else 1.0
    share = min(by_bytes, len(places) / len(sent)) if sent else 0.0
    if share < at_least:
        unknown = _listed(sent.keys() - places.keys())
        raise SyncError(
            f"{len(places)} of {len(sent)} tensors ({by_bytes:.1%} of the bytes) are verified, and engine.min_verified"
            f" is {at_least:g}: the engine does not have {unknown} in the checkpoint's form, and nothing shows whether"
            " it loads them; take --engine transformers"
        )
    return share


def _added_up(parts: Mapping[tuple[int, int], tuple[int, int]]) -> tuple[int, int]:
    rows = sum(pow(ROW_BASE, row, _MODULUS) * sums for (row, _), (sums, _) in parts.items())
    columns = sum(
        pow(COLUMN_BASE, column, _MODULUS) * sums for (_, column), (_, sums) in parts.items()
    )
    return rows % _MODULUS, columns % _MODULUS


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
