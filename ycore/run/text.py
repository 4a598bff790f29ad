"""Text for a person: durations, and text of unknown origin that can do nothing to a terminal."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Say = Callable[[str], None]
"""Shows a line to whoever follows the run."""

_LONGEST = 34  # characters of a setting's value

# Control characters but newline and tab, Unicode's separators, its marks and switches of direction and its tags, which
# nobody sees, and lone surrogates, which cannot be encoded at all.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u206f\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def printable(text: str, *, one_line: bool = False) -> str:
    r"""Make what a model, a dataset or a reward wrote safe to print: control characters become escapes like `\x1b`.

    rich reads `[bold]` and `:smile:` as markup in a plain `str`: pass it `Text(printable(...))`.

    Args:
        text: Any string.
        one_line: Show newlines and tabs as `\n` and `\t` too.
    """
    text = _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
    return text.replace("\n", r"\n").replace("\t", r"\t") if one_line else text


def topic(config: Mapping[str, Any]) -> str:
    """Return the source of a run's prompts: its dataset, or its environments where it has none."""
    return config.get("dataset") or ", ".join(config.get("env") or ())


def setting_in_words(value: Any) -> str:
    """Write a setting as YAML does, and cut a long one."""
    if isinstance(value, float):
        return f"{value:g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def named_first(name: str, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Put the lines beneath each other, and the name before the first."""
    for index, line in enumerate(lines):
        yield "" if index else name, line


def as_duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
