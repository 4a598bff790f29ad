"""The names of generated datasets, `task:addition?digits=1&size=2000` and `gym:chain_sum?size=500`, taken apart.

Also their split: a question belongs to `train` or to `test` by its own hash, so the two never meet, whatever the
seed and the arguments.

Not here: what the names generate (`tasks`, `gym`).
"""

import hashlib
from dataclasses import dataclass
from urllib.parse import parse_qsl

from ycore.errors import DataError, nearest

SPLITS = ("train", "test")
_TEST_SHARE = 5  # about every fifth question is held out
_SALT = "2 "  # chosen so that the smallest tasks hold out a fifth too: 20 of the 100 sums of two digits


@dataclass(frozen=True, slots=True)
class GeneratorName:
    """Example: `task:addition?digits=1` is scheme `task`, generator `addition`, arguments `{"digits": "1"}`."""

    text: str
    generator: str
    arguments: dict[str, str]


def parse(text: str) -> GeneratorName:
    """Take a `scheme:name?key=value&...` apart."""
    generator, _, query = text.partition(":")[2].partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise DataError(f"{text}: arguments are written `?name=value&name=value`, not `?{query}`") from None
    arguments = dict(pairs)
    if len(arguments) != len(pairs):
        raise DataError(f"{text}: an argument is given twice; give each one once")
    return GeneratorName(text=text, generator=generator, arguments=arguments)


def check_split(text: str, split: str) -> None:
    """Generated datasets have two splits."""
    if split not in SPLITS:
        way_out = nearest(split, SPLITS) or "; take one of them"
        raise DataError(f"{text} has the splits {' and '.join(SPLITS)}, not {split!r}{way_out}")


def whole_number(name: GeneratorName, key: str, value: str, *, low: int, high: int) -> int:
    """An argument that must be a whole number from `low` to `high`."""
    if not value.isascii() or not value.isdigit() or not low <= int(value[:12]) <= high:
        raise DataError(f"{name.text}: {key} is a whole number from {low} to {high}, not {value!r}")
    return int(value)


def in_split(key: str, split: str) -> bool:
    """Whether the question known by `key` belongs to `split`."""
    number = int.from_bytes(hashlib.sha256((_SALT + key).encode()).digest()[:8], "big")
    return (number % _TEST_SHARE == 0) == (split == "test")
