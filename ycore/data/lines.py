"""The rows of a JSONL file, read where they stand: a process holds the places of the lines, not the lines.

So every rank can open the whole dataset and have only its own prompts in memory.

Not here: other kinds of files (`local_files`).
"""

import json
import mmap
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ycore.errors import DataError

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
