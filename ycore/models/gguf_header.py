"""The metadata of a GGUF file, read in a fraction of a second.

Not here: its tensors; `gguf` turns those into safetensors.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ycore.errors import ModelError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_STRING = 1 << 26
_MAX_ITEMS = 1 << 24


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata by key. Arrays are left out but for their length (`sizes`), except those asked for by name."""

    values: dict[str, Any]
    sizes: dict[str, int]

    @property
    def context_length(self) -> int | None:
        value = self.values.get(f"{self.values.get('general.architecture')}.context_length")
        return int(value) if value else None

    @property
    def chat_template(self) -> str | None:
        return self.values.get("tokenizer.chat_template")


def read_header(path: Path, *, arrays: tuple[str, ...] = ()) -> GgufHeader:
    """Read the metadata of `path`; a file that is not GGUF, or is cut short, is refused."""
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ModelError(f"{path} is not a GGUF file (it does not begin with 'GGUF'); download or export it again")
        try:
            return _read(file, arrays)
        except (struct.error, UnicodeDecodeError, EOFError, KeyError) as problem:
            raise ModelError(f"{path} is a damaged GGUF file ({problem}); download or export it again") from None


def _read(file: BinaryIO, arrays: tuple[str, ...]) -> GgufHeader:
    (version,) = _unpack(file, "I")
    if version not in (2, 3):
        raise EOFError(f"version {version}; 2 and 3 can be read")
    _num_tensors, num_values = _unpack(file, "QQ")
    header = GgufHeader(values={}, sizes={})
    for _ in range(num_values):
        key = _string(file)
        (kind,) = _unpack(file, "I")
        if kind == _ARRAY:
            items = _array(file)
            header.sizes[key] = len(items)
            if key in arrays:
                header.values[key] = items
        else:
            header.values[key] = _value(file, kind)
    return header


def _array(file: BinaryIO) -> list[Any]:
    kind, count = _unpack(file, "IQ")
    if count > _MAX_ITEMS:
        raise EOFError(f"an array of {count} values")
    if kind in _SCALARS:
        return list(_unpack(file, f"{count}{_SCALARS[kind]}"))
    return [_value(file, kind) for _ in range(count)]


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        return _array(file)
    return _unpack(file, _SCALARS[kind])[0]


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    if length > _MAX_STRING:
        raise EOFError(f"a text of {length} bytes")
    return _bytes(file, length).decode()


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    layout = "<" + layout
    return struct.unpack(layout, _bytes(file, struct.calcsize(layout)))


def _bytes(file: BinaryIO, length: int) -> bytes:
    data = file.read(length)
    if len(data) != length:
        raise EOFError("it is cut short")
    return data
