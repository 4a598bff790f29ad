"""Datasets in local files: JSONL, JSON, CSV and Parquet, by suffix; `.gz` after the first three.

The rows of a JSONL file, read where they stand: a process holds the places of the lines, not the lines.

Not here: what a prompt is (`columns`).
"""

import codecs
import csv
import gzip
import io
import json
import mmap
import os
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ycore.data.table import ArrowRows, Table, columns_of
from ycore.errors import DataError, nearest

_BOM = b"\xef\xbb\xbf"


class JsonLines(Sequence[dict[str, Any]]):
    """`rows[i]` parses the i-th line that is not blank; DataError, naming the line, where it is no JSON object.

    Only newlines end a line: the other separators of Unicode may stand inside a text.
    """

    def __init__(self, path: Path, data: bytes | None = None) -> None:
        """`data` is the file's content where it is not the file's bytes (it was compressed)."""
        self._path = path
        self._data = _mapped(path) if data is None else data
        self.lines, self._starts = array("Q"), array("Q")
        for number, start, line in self._all_lines():
            if line.strip():
                self.lines.append(number)
                self._starts.append(start)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        start = self._starts[index]
        return self._parsed(self.lines[index], self._data[start : self._end(start)])

    def _all_lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Number, place and bytes of every line."""
        start = len(_BOM) if self._data[: len(_BOM)] == _BOM else 0
        number = 1
        while start < len(self._data):
            end = self._end(start)
            yield number, start, self._data[start:end]
            number, start = number + 1, end + 1

    def _end(self, start: int) -> int:
        end = self._data.find(b"\n", start)
        return len(self._data) if end < 0 else end

    def _parsed(self, number: int, line: bytes) -> dict[str, Any]:
        place = f"{self._path}, line {number}"
        try:
            return json_object(place, parse_json(place, line.decode("utf-8")))
        except UnicodeDecodeError as problem:
            raise DataError(f"{place}: not UTF-8 text ({problem.reason}); convert the file to UTF-8") from None


def _mapped(path: Path) -> bytes | mmap.mmap:
    with open(path, "rb") as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            return b""


def parse_json(place: str, text: str) -> Any:
    """The value that `text` is; DataError, naming the place, where it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        raise DataError(f"{place}: malformed JSON: {problem.msg} (character {problem.pos + 1}); mend it") from None
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{place}: malformed JSON: {problem}; mend it") from None


def json_object(place: str, entry: Any) -> dict[str, Any]:
    """`entry`, if it is what a row is."""
    if not isinstance(entry, dict):
        raise DataError(f'{place}: a row is a JSON object such as {{"prompt": "..."}}, not {type(entry).__name__}')
    return entry


SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz")
_MAX_CSV_FIELD = 1 << 30


def file_suffix(path: Path) -> str | None:
    """The suffix by which `path` is read, or None where it has none of them."""
    name = path.name.lower()
    return next((suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if name.endswith(suffix)), None)


def file_table(path: Path) -> Table:
    """The rows of the file `path`."""
    suffix = file_suffix(path)
    if os.path.isdir(path):
        raise DataError(f"--dataset {path} is a folder; name one file in it{_such_as(path)}")
    if not os.path.isfile(path):
        known = os.listdir(path.parent) if os.path.isdir(path.parent) else []
        way_out = nearest(path.name, known) or "; give an existing file"
        raise DataError(f"no such dataset file: {path} (looked in {path.absolute().parent}){way_out}")
    if suffix is None:
        raise DataError(f"--dataset {path}: its kind is read from its suffix, one of {', '.join(SUFFIXES)}; rename it")
    try:
        if suffix == ".parquet":
            return _parquet(path)
        data = gzip.decompress(path.read_bytes()) if suffix.endswith(".gz") else None
        if suffix.startswith(".jsonl") or (suffix.startswith(".json") and not _is_array(path, data)):
            return _jsonl(path, data)
        text = _text(path, data)
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"{path} cannot be read: {problem}; check the file") from None
    return _csv(path, text) if suffix.startswith(".csv") else _json(path, text)


def _such_as(folder: Path) -> str:
    found = sorted(entry.name for entry in folder.iterdir() if file_suffix(entry))[:3]
    return f", such as {', '.join(found)}" if found else f" ({', '.join(SUFFIXES)})"


def _is_array(path: Path, data: bytes | None) -> bool:
    """Whether a JSON file is one array of rows, and not a row a line."""
    if data is not None:
        return data.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    with open(path, "rb") as file:
        return _is_array(path, file.read(4096))


def _text(path: Path, data: bytes | None) -> str:
    data = path.read_bytes() if data is None else data
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8 text ({problem.reason}); convert the file to UTF-8") from None


def _jsonl(path: Path, data: bytes | None) -> Table:
    rows = JsonLines(path, data)
    return Table(name=str(path), rows=rows, columns=columns_of(rows), lines=rows.lines)


def _json(path: Path, text: str) -> Table:
    entries = parse_json(str(path), text)
    rows = [json_object(f"{path}, entry {number}", entry) for number, entry in enumerate(entries)]
    return Table(name=str(path), rows=rows, columns=columns_of(rows))


def _csv(path: Path, text: str) -> Table:
    csv.field_size_limit(_MAX_CSV_FIELD)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    records = _csv_records(path, reader)
    _, header = next(records, (1, []))
    if len(set(header)) != len(header) or "" in header:
        raise DataError(f"{path}, line 1: a CSV file begins with a line of distinct column names, not {header}")
    rows, lines = [], []
    for line, record in records:
        if len(record) != len(header):
            raise DataError(
                f"{path}, line {line}: {len(record)} values for the {len(header)} columns of line 1; mend it"
            )
        rows.append(dict(zip(header, record, strict=True)))
        lines.append(line)
    return Table(name=str(path), rows=rows, columns=tuple(header), lines=lines)


def _csv_records(path: Path, reader: Any) -> Iterator[tuple[int, list[str]]]:
    while True:
        line = reader.line_num + 1
        try:
            record = next(reader, None)
        except csv.Error as problem:
            raise DataError(f"{path}, line {line}: malformed CSV: {problem}; mend it") from None
        if record is None:
            return
        if record:
            yield line, record


def _parquet(path: Path) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as problem:
        reason = str(problem).splitlines()[0]
        raise DataError(f"{path} cannot be read as Parquet: {reason}; write the file again") from None
    return Table(name=str(path), rows=ArrowRows(table), columns=tuple(table.column_names))
