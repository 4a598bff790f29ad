"""Read a dataset by its name: a local file, a generated dataset, or a dataset of the hub.

A dataset of the hub is `owner/name`, `owner/name:config`, or `owner/name:folder/file.jsonl` for one file of it.
"""

import codecs
import csv
import gzip
import io
import json
import os
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from ycore.data.cells import Table
from ycore.data.generated import gym_table, task_table
from ycore.errors import DataError, nearest
from ycore.models.names import ANSWER_WITHIN_S, ask_hub, first_line
from ycore.types import JsonObject, Record

_NO_HUB_NEEDED = "give a local file (.jsonl, .csv, .parquet), `task:addition` or another task, which need no hub"


def read_table(name: str, *, split: str, seed: int, limit: int | None) -> Table:
    """Return the first `limit` rows of a dataset, at least one.

    Args:
        split: For generated datasets and the hub's; local files have no splits.
        seed: For generated datasets.
    """
    path = Path(os.path.expanduser(name))
    hub_name, colon, _ = name.partition(":")
    is_path = name.startswith((".", "~", "/")) or hub_name.count("/") > 1
    is_path |= file_suffix(path) is not None and not (colon and "/" in hub_name)
    if not name.strip():
        raise DataError(
            "--dataset is empty; give a file, a hub id or a task such as task:addition"
        )
    if name.startswith("task:"):
        table = task_table(name, split=split, seed=seed)
    elif name.startswith("gym:"):
        table = gym_table(name, split=split, seed=seed)
    elif any(os.path.isfile(path / file) for file in ("dataset_dict.json", "state.json")):
        table = _saved_table(path, split)
    elif is_path or os.path.exists(path):
        table = file_table(path)
    else:
        _refuse_mistyped_schemes(name)
        table = _hub_table(name, split)
    if not table.rows:
        raise DataError(f"the dataset {table.name} is empty; a run needs at least one row")
    if limit is None or limit >= len(table.rows):
        return table
    return replace(table, rows=[table.rows[number] for number in range(limit)])


def _saved_table(path: Path, split: str) -> Table:
    from datasets import DatasetDict, load_from_disk

    try:
        rows = load_from_disk(path, keep_in_memory=True)  # as of local files, nothing is mapped
    except (OSError, ValueError, KeyError) as problem:
        raise DataError(
            f"{path} cannot be read: {first_line(problem)}; write it again with save_to_disk"
        ) from None
    if isinstance(rows, DatasetDict):
        if split not in rows:
            raise DataError(
                f"{path} has the splits {', '.join(rows)}, not {split!r}; take one of them"
            )
        return replace(_as_table(str(path), rows[split]), split=split)
    return _as_table(str(path), rows)


def _refuse_mistyped_schemes(name: str) -> None:
    scheme, colon, rest = name.partition(":")
    if colon and "/" not in scheme and (near := nearest(scheme, ("task", "gym"), limit=1)):
        near = near.split("'")[1]
        raise DataError(f"no dataset {name!r}; did you mean {f'{near}:{rest}'!r}?")


def _hub_table(text: str, split: str) -> Table:
    """Return the rows of one split of a hub dataset; a hub that does not answer within three seconds is offline."""
    name, _, config = text.partition(":")
    answer = ask_hub(lambda api: api.dataset_info(name, timeout=ANSWER_WITHIN_S))
    if answer.state in ("absent", "refused"):
        raise DataError(
            f"no dataset file and no hub dataset {name!r} that can be loaded: {answer.problem}; {_NO_HUB_NEEDED}"
        )
    if file_suffix(Path(config)) is not None:
        return replace(
            file_table(_hub_file(name, config, unreachable=answer.problem)), name=text
        )
    rows = _load(name, config, split, unreachable=answer.problem)
    return replace(_as_table(text, rows), split=split)


def _hub_file(name: str, file: str, *, unreachable: str) -> Path:
    """Return a file of a hub dataset in the hub's cache.

    Args:
        unreachable: Why the hub cannot be reached; empty where it can.
    """
    import httpx
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(
            hf_hub_download(name, file, repo_type="dataset", local_files_only=bool(unreachable))
        )
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as problem:
        raise DataError(
            f"no file {file} of the hub dataset {name}: {unreachable or first_line(problem)}; {_NO_HUB_NEEDED}"
        ) from None


def _as_table(name: str, rows: Any) -> Table:
    """Return rows of the datasets library, with their pictures as bytes, which `cells` decodes by its own rules."""
    from datasets import Image, List

    for column, feature in rows.features.items():
        if isinstance(feature, Image):
            rows = rows.cast_column(column, Image(decode=False))
        elif isinstance(feature, List) and isinstance(feature.feature, Image):
            rows = rows.cast_column(column, List(Image(decode=False)))
    return Table(name, rows.with_format(None), tuple(rows.column_names), fills_keys=True)


def _load(name: str, config: str, split: str, *, unreachable: str) -> Any:
    """Load a split of a hub dataset; `unreachable` as in `_hub_file`."""
    import datasets
    from datasets.exceptions import DatasetsError
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if unreachable:  # else the library tries the hub again, and waits far longer
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(name, config or None, split=split)
    except (DatasetsError, ValueError, RuntimeError, OSError) as problem:
        reason = " ".join(str(problem).split())[:300]
        if unreachable:
            in_cache = (
                "" if isinstance(problem, ConnectionError) else f"in its cache: {reason}; "
            )
            raise DataError(
                f"no dataset file {name!r}, and the hub cannot be reached to look for one: {unreachable}; "
                f"{in_cache}{_NO_HUB_NEEDED}"
            ) from None
        raise DataError(
            f"the hub dataset {name}{f':{config}' if config else ''}, split {split}: {reason}"
        ) from None
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


# -- local files: JSONL, JSON, CSV, TSV and Parquet, by suffix; all but the last also by gzip ------------------------------
#
# The datasets library is not used: this names the line of a damaged row, and starts without a long import. No file is
# memory-mapped, because somebody may edit it while a run reads it: a mapping shows the edit, and reading beyond the new
# end kills the process with SIGBUS.


_IN_MEMORY_BYTES = 16 * 2**20
"""Size of the largest JSONL file that a process keeps in memory; it reads a larger one row by row."""

_BLOCK_BYTES = 1 << 18
"""Bytes that are read at once where all rows are read in turn."""

_TEXTS = (".jsonl", ".json", ".csv", ".tsv")
_SUFFIXES = (*_TEXTS, ".parquet", *(f"{suffix}.gz" for suffix in _TEXTS))

_UNPACKED_BYTES = 64 << 20
"""Size that a .gz may have in memory however small it is."""


def file_suffix(path: Path) -> str | None:
    """Return the suffix that decides how `path` is read, or None."""
    name = path.name.lower()
    return next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)


def file_table(path: Path) -> Table:
    suffix = file_suffix(path)
    if os.path.isdir(path):
        datasets = sorted(entry.name for entry in path.iterdir() if file_suffix(entry))[:3]
        example = (
            f", such as {', '.join(datasets)}" if datasets else f" ({', '.join(_SUFFIXES)})"
        )
        raise DataError(f"--dataset {path} is a folder; name one file in it{example}")
    if not os.path.isfile(path):
        known = os.listdir(path.parent) if os.path.isdir(path.parent) else []
        raise DataError(
            f"no such dataset file: {path} (looked in {path.absolute().parent})"
            f"{nearest(path.name, known) or '; give an existing file'}"
        )
    if suffix is None:
        raise DataError(
            f"--dataset {path}: the suffix says how a file is read; rename it to one of {', '.join(_SUFFIXES)}"
        )
    try:
        return _read_parquet(path) if suffix == ".parquet" else _read_text(path, suffix)
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"{path} cannot be read: {problem}; check the file") from None


def _read_text(path: Path, suffix: str) -> Table:
    is_zipped = suffix.endswith(".gz")
    if suffix.startswith(".jsonl") and not is_zipped and path.stat().st_size > _IN_MEMORY_BYTES:
        return _lines_table(JsonLines(path, open(path, "rb")))
    data = _unpacked(path) if is_zipped else path.read_bytes()
    is_array = data[:4096].removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    if suffix.startswith((".csv", ".tsv")):
        signs = "\t,;" if suffix.startswith(".tsv") else ",\t;"
        return _parse_csv(path, _decoded(str(path), data), signs)
    if suffix.startswith(".jsonl") or not is_array:
        return _lines_table(JsonLines(path, io.BytesIO(data)))
    entries = _parse_json(str(path), data)
    objects = [
        _json_object(f"{path}, entry {number}", entry) for number, entry in enumerate(entries)
    ]
    return Table(
        str(path),
        objects,
        tuple(dict.fromkeys(name for row in objects for name in row)),
        folder=path.parent,
    )


def _lines_table(rows: "JsonLines") -> Table:
    return Table(str(rows.path), rows, rows.columns, lines=rows.lines, folder=rows.path.parent)


def _unpacked(path: Path) -> bytes:
    """Unpack a .gz, to 40 times its size at most: a few kilobytes may stand for more than the memory holds."""
    num_bytes = path.stat().st_size
    limit = max(_UNPACKED_BYTES, 40 * num_bytes)
    with gzip.open(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise DataError(
            f"{path} holds more than {limit >> 20} MB, and has {num_bytes} bytes itself; "
            "if that is right, unpack it with gunzip: a plain file may have any size"
        )
    return data


def _decoded(place: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(
            f"{place}: not UTF-8 text ({problem.reason}, byte {problem.start}); convert it to UTF-8"
        ) from None


class JsonLines(Sequence[Record]):
    """The rows of a JSONL file, parsed when they are read: a process keeps the offsets of the lines, not the rows.

    Of a file too large for memory it keeps a hash of each line, and raises DataError where a line has changed.
    Blank lines are skipped. Only newlines end a line: Unicode's other separators may be part of a text.

    Attributes:
        columns: Every column that some row has, in order of first appearance.
    """

    def __init__(self, path: Path, source: io.BytesIO | io.BufferedReader) -> None:
        self.path = path
        self.lines = array("Q")
        self._source = source
        self._memory = source.getbuffer() if isinstance(source, io.BytesIO) else None
        self._starts = array("Q")
        self._lengths = array("Q")
        self._hashes = array("q")
        last_values = {}
        start = 0
        for number, line in enumerate(source, start=1):
            row = _quickly_parsed(line)
            if row or line.removeprefix(codecs.BOM_UTF8).strip():
                last_values.update(row or self._parsed(line, number))
                self.lines.append(number)
                self._starts.append(start)
                self._lengths.append(len(line))
                if self._memory is None:
                    self._hashes.append(hash(line))
            start += len(line)
        self.columns = tuple(last_values)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Record]:
        stop = 0
        while (index := stop) < len(self):
            start = self._starts[index]
            stop = bisect_left(self._starts, start + _BLOCK_BYTES, lo=index + 1)
            block = self._read(start, self._starts[stop - 1] + self._lengths[stop - 1] - start)
            for number in range(index, stop):
                begin = self._starts[number] - start
                yield self._checked(block[begin : begin + self._lengths[number]], number)

    def __getitem__(self, index: Any) -> Any:
        return self._checked(self._read(self._starts[index], self._lengths[index]), index)

    def _checked(self, line: bytes, index: int) -> JsonObject:
        if self._memory is None and hash(line) != self._hashes[index]:
            raise DataError(
                f"{self.path}, line {self.lines[index]}: the file was changed while it was in use; bring back what it was, "
                "and resume"
            )
        return _quickly_parsed(line) or self._parsed(line, self.lines[index])

    def _read(self, start: int, length: int) -> bytes:
        if self._memory is not None:
            return bytes(self._memory[start : start + length])
        return os.pread(self._source.fileno(), length, start)

    def _parsed(self, line: bytes, number: int) -> JsonObject:
        place = f"{self.path}, line {number}"
        return _json_object(place, _parse_json(place, line))


def _quickly_parsed(line: bytes) -> JsonObject | None:
    """Parse an object; None for half of a character, which `json` reads, and for errors, which it words better."""
    try:
        row = from_json(line, cache_strings="keys")
    except ValueError:
        return None
    return row if type(row) is dict else None


def _parse_json(place: str, data: bytes) -> Any:
    text = _decoded(place, data)
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        raise DataError(
            f"{place}: malformed JSON: {problem.msg} (character {problem.pos + 1}); correct it"
        ) from None
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{place}: malformed JSON: {problem}; correct it") from None


def _json_object(place: str, entry: Any) -> JsonObject:
    if not isinstance(entry, dict):
        raise DataError(
            f'{place}: a row is a JSON object such as {{"prompt": "..."}}, not {type(entry).__name__}'
        )
    return entry


def _parse_csv(path: Path, text: str, signs: str) -> Table:
    """Read records that are separated by the sign of `signs` that the first line has most of, the first of equals."""
    csv.field_size_limit(1 << 30)  # characters; 2**17 by default
    records = _csv_records(path, text, max(signs, key=text.partition("\n")[0].count))
    _, header = next(records, (1, []))
    header = [name.strip() for name in header]
    if header[:1] == [""]:
        header = ["Unnamed: 0", *header[1:]]  # pandas' index, by the name that pandas gives it
    if len(set(header)) != len(header) or "" in header:
        raise DataError(
            f"{path}, line 1: a CSV file begins with a line of distinct column names, not {header}; rename one of them"
        )
    rows = []
    lines = []
    for line, record in records:
        if len(record) != len(header):
            raise DataError(
                f"{path}, line {line}: {len(record)} values for the {len(header)} columns of line 1; correct it"
            )
        rows.append(dict(zip(header, record, strict=True)))
        lines.append(line)
    return Table(str(path), rows, tuple(header), lines, folder=path.parent)


def _csv_records(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each record with the number of the line on which it begins; blank lines are skipped."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = 1
    try:
        for record in reader:
            if record:
                yield line, record
            line = reader.line_num + 1
    except csv.Error as problem:
        raise DataError(f"{path}, line {line}: malformed CSV: {problem}; correct it") from None


class _ParquetRows(Sequence[Record]):
    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        (row,) = self._table.slice(range(len(self))[index], 1).to_pylist()
        return row


def _read_parquet(path: Path) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as problem:
        raise DataError(
            f"{path} cannot be read as Parquet: {first_line(problem)}; write the file again"
        ) from None
    rows = _ParquetRows(table)
    return Table(
        str(path), rows, tuple(table.column_names), folder=path.parent, fills_keys=True
    )
