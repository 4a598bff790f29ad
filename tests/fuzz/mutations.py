"""Mutations of bytes, texts and JSON values; every draw comes from a `random.Random`."""

import random
from collections.abc import Callable, Iterator
from typing import Any

HUGE_NUMBERS = (
    -1,
    0,
    2**31 - 1,
    2**32,
    2**53 + 1,
    2**63,
    2**64 - 1,
    10**400,
    1e308,
    -1e-320,
    float("nan"),
    float("inf"),
)
WRONG_TYPES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    0.5,
    "",
    "x",
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"a": {"b": []}},
)
TEXTS = (
    *("", " ", "\n", "\0", "a\0b", "\ud800", "a\udfffb", "\ufeff", "\u202e", "\u2066", "\x1b[2J", "\x1b]0;x\x07"),
    *("\u0301" * 50, "\u0315\u0300" * 50, "\U000e0041", "..", "../../x", "/", "~", "$x", "%s", "{x}", "{{", "[bold]"),
    *("<script>alert(1)</script>", "'\"><img src=x onerror=alert(1)>", "javascript:alert(1)", "$\\frac{$", "_x"),
    *("a" * 5000, "\x9b1m"),
)  # fmt: skip
BYTES = (
    b"\xff",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\0" * 8,
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\r",
    b"\x1a",
)
LENGTHS = tuple(
    value.to_bytes(8, "little")
    for value in (0, 1, 2**16, 2**24 + 1, 2**31, 2**32 - 1, 2**53, 2**63, 2**64 - 1)
)


def bit_flips(data: bytes) -> Iterator[bytes]:
    """Yield `data` with each of its bits turned round, one at a time."""
    for place in range(8 * len(data)):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        yield bytes(changed)


def mutated(data: bytes, chance: random.Random, seeds: tuple[bytes, ...] = ()) -> bytes:
    """Return `data` after one to four accidents or attacks; `seeds` are spliced into it."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        data = chance.choice(_BYTE_CHANGES)(data, chance, seeds)
    return data


def _flip(data: bytes, chance: random.Random, seeds: tuple[bytes, ...]) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 3, 20)) if data else 0):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _truncate(data: bytes, chance: random.Random, seeds: tuple[bytes, ...]) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _cut_out(data: bytes, chance: random.Random, seeds: tuple[bytes, ...]) -> bytes:
    start, end = _part(data, chance)
    return data[:start] + data[end:]


def _repeat(data: bytes, chance: random.Random, seeds: tuple[bytes, ...]) -> bytes:
    start, end = _part(data, chance)
    return data[:end] + data[start:end] * chance.choice((1, 2, 50)) + data[end:]


def _splice(data: bytes, chance: random.Random, seeds: tuple[bytes, ...]) -> bytes:
    other = chance.choice((*seeds, data))
    start, end = _part(other, chance)
    place = chance.randrange(len(data) + 1)
    return data[:place] + other[start:end] + data[place + chance.choice((0, end - start)) :]


def _insert(data: bytes, chance: random.Random, seeds: tuple[bytes, ...]) -> bytes:
    place = chance.randrange(len(data) + 1)
    text = chance.choice(TEXTS).encode("utf-8", "surrogatepass")
    added = chance.choice(
        (
            *BYTES,
            text,
            b"9" * chance.choice((3, 30, 5000)),
            b"-",
            b"NaN",
            b"1e999",
            b"null",
            b'"',
        )
    )
    return data[:place] + added + data[place:]


def _set_length(data: bytes, chance: random.Random, seeds: tuple[bytes, ...]) -> bytes:
    place = chance.randrange(len(data) + 1)
    width = chance.choice((1, 2, 4, 8))
    return data[:place] + chance.choice(LENGTHS)[:width] + data[place + width :]


def _nest(data: bytes, chance: random.Random, seeds: tuple[bytes, ...]) -> bytes:
    opening, closing = chance.choice(
        ((b"[", b"]"), (b'{"a":', b"}"), (b"(", b")"), (b"- ", b""), (b"<", b">"), (b"{", b"}"))
    )
    depth = chance.choice((3, 60, 600, 990, 3000, 30000))
    inner = opening * depth + b"0" + closing * depth
    start, end = _part(data, chance)
    return data[:start] + inner + data[chance.choice((start, end)) :]


def _part(data: bytes, chance: random.Random) -> tuple[int, int]:
    start = chance.randrange(len(data) + 1)
    return start, min(len(data), start + chance.choice((1, 2, 8, 64, len(data) // 2)))


_BYTE_CHANGES: tuple[Callable[[bytes, random.Random, tuple[bytes, ...]], bytes], ...] = (
    *(_flip, _truncate, _cut_out, _repeat, _splice, _insert, _set_length, _nest),
)


def changed_value(value: Any, chance: random.Random) -> Any:
    """Return a JSON value with one to three of its parts replaced, dropped, doubled or nested."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        value = _changed(value, chance)
    return value


def _changed(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        match chance.randrange(8):
            case 0:
                return {name: item for name, item in value.items() if name != key}
            case 1:
                return {**value, chance.choice(TEXTS): value[key]}
            case _:
                return {**value, key: _changed(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        place = chance.randrange(len(value))
        match chance.randrange(8):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return value * chance.choice((2, 30))
            case _:
                return [*value[:place], _changed(value[place], chance), *value[place + 1 :]]
    return _other(value, chance)


def _other(value: Any, chance: random.Random) -> Any:
    match chance.randrange(5):
        case 0:
            return chance.choice(HUGE_NUMBERS)
        case 1:
            return nested(chance.choice((3, 60, 400, 900)), chance.choice((list, dict)))
        case 2:
            return (value if isinstance(value, str) else "") + chance.choice(TEXTS)
        case 3:
            return chance.choice(TEXTS)
        case _:
            return chance.choice(WRONG_TYPES)


def nested(depth: int, kind: type) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value
