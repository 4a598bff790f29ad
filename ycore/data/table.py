"""A dataset's rows as its source gives them, and how one cell is read as text or chat turns."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ycore.errors import DataError, nearest
from ycore.types import IMAGE_MARK, Content, Message

# The columns that hold a question, in order of preference, where the user names none.
QUESTION_COLUMNS = ("prompt", "question", "problem", "instruction")
IMAGE_BLOCKS = ("image", "image_url")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_SPEAKER_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows by column name; a row may lack a column that another has.

    Attributes:
        lines: The line of each row in its file.
        folder: Where relative paths of pictures begin; None where a row may name no file (a dataset of the hub).
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    columns: tuple[str, ...]
    lines: Sequence[int] | None = None
    folder: Path | None = None

    def row(self, number: int) -> "TableRow":
        line = "" if self.lines is None else f" (line {self.lines[number]})"
        return TableRow(self.rows[number], f"row {number}{line} of {self.name}")

    @property
    def listed_columns(self) -> str:
        return ", ".join(self.columns) or "none"

    def require_column(self, name: str, option: str) -> None:
        """DataError where the table lacks a column that the user named by `option`."""
        if name not in self.columns:
            way_out = nearest(name, self.columns) or "; take one of them"
            raise DataError(
                f"{self.name} has no column {name!r} ({option}); it has {self.listed_columns}{way_out}"
            )


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row, and its place as error messages name it."""

    values: Mapping[str, Any]
    place: str

    def content(self, column: str) -> Content:
        """Return the cell as text or chat turns; DataError where it is neither."""
        value = self.values.get(column)
        if isinstance(value, str):
            self._check_characters(value, repr(column))
            return value
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [
                self._turn(turn, f"turn {number} of {column!r}")
                for number, turn in enumerate(value)
            ]
        kind = "null" if value is None else type(value).__name__
        raise DataError(
            f"{column!r} is {kind} in {self.place}; it must be text or a list of {{role, content}} turns: "
            "correct or remove the row"
        )

    def conversation(self, column: str) -> Content:
        """Return `content`, with a dialogue that is written as one text split into turns."""
        content = self.content(column)
        return (
            to_messages(content)
            if isinstance(content, str) and is_dialogue(content)
            else content
        )

    def _turn(self, turn: Any, label: str) -> Message:
        """Read a turn with `role` and `content`, or with `from` and `value` as in ShareGPT files."""
        if not isinstance(turn, Mapping):
            raise DataError(
                f"{label} is {type(turn).__name__} in {self.place}; a turn is an object with role and content"
            )
        role = turn.get("role", turn.get("from"))
        content = turn.get("content", turn.get("value"))
        content = self._without_blocks(content, label)
        if not isinstance(role, str) or not isinstance(content, str) or not role:
            kinds = ", ".join(f"{key}: {type(item).__name__}" for key, item in turn.items())
            raise DataError(
                f"{label} has {kinds or 'nothing'} in {self.place}; a turn has role and content, both text"
            )
        if turn.get("tool_calls"):
            raise DataError(
                f"{label} calls tools in {self.place}, which ycore does not support yet; remove the row"
            )
        self._check_characters(content, label)
        return {"role": _SHAREGPT_ROLES.get(role, role), "content": content}

    def _without_blocks(self, content: Any, label: str) -> Any:
        """Join the texts of a turn in blocks, with a mark for each picture; other content stays as it is."""
        if not isinstance(content, Sequence) or isinstance(content, str | bytes):
            return content
        kinds = [block.get("type") if isinstance(block, Mapping) else None for block in content]
        if other := [kind for kind in kinds if kind not in ("text", *IMAGE_BLOCKS)]:
            raise DataError(
                f"{label} has a block of type {other[0]!r} in {self.place}; a block is a text or an image"
            )
        texts = [
            block.get("text") if kind == "text" else IMAGE_MARK
            for kind, block in zip(kinds, content, strict=True)
        ]
        return (
            "".join(texts)
            if texts and all(isinstance(text, str) for text in texts)
            else content
        )

    def _check_characters(self, text: str, label: str) -> None:
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise DataError(
                f"{label} holds half of a character (a lone surrogate) in {self.place}; correct or remove the row"
            )


def columns_of(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return every column that some row has, in order of first appearance."""
    return tuple(dict.fromkeys(name for row in rows for name in row))


def is_dialogue(text: str) -> bool:
    """Tell whether `text` is a whole conversation, `Human: ... Assistant: ...`, as in hh-rlhf."""
    return re.match(r"\s*Human:", text) is not None and "\n\nAssistant:" in text


def to_messages(text: str) -> list[Message]:
    """Split a dialogue into turns without the white space around each; an empty turn is kept."""
    marks = list(_SPEAKER.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [
        {"role": _SPEAKER_ROLES[mark[1]], "content": text[mark.end() : end].strip()}
        for mark, end in zip(marks, ends, strict=True)
    ]
