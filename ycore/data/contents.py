"""One cell of a dataset as a trainer reads it: text or chat turns, checked, and joined to prompt and answer.

Not here: which columns those are (`sft_rows`, `pairs`), and prompts to generate from (`columns`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ycore.data.dialogue import is_dialogue, to_messages
from ycore.data.table import Table
from ycore.errors import DataError
from ycore.types import Content, Message

_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}


def cell(table: Table, number: int, column: str) -> Content:
    """Text or turns; a dialogue that is written as one text becomes turns. DataError names the row."""
    value = table.rows[number].get(column)
    if isinstance(value, str):
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise DataError(f"{column!r} holds half of a character (a lone surrogate) in {table.place(number)}")
        return to_messages(value) if is_dialogue(value) else value
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_turn(table, number, turn, column) for turn in value]
    found = "null" if value is None else type(value).__name__
    raise DataError(
        f"{column!r} is {found} in {table.place(number)}; it must be text or a list of {{role, content}} turns: "
        "mend or remove the row"
    )


def is_empty(content: Content) -> bool:
    """Nothing to learn from: no turns, blank text, or a last turn that is blank."""
    last = content if isinstance(content, str) else content[-1]["content"] if content else ""
    return not last.strip()


def as_turns(content: Content, role: str) -> list[Message]:
    """Chat turns; a text becomes one turn of that role."""
    return [{"role": role, "content": content}] if isinstance(content, str) else list(content)


def _turn(table: Table, number: int, turn: Any, column: str) -> Message:
    """A turn with `role` and `content`, or `from` and `value` as ShareGPT writes them."""
    where = f"a turn of {column!r} in {table.place(number)}"
    if not isinstance(turn, Mapping):
        raise DataError(f"{where} is {type(turn).__name__}; a turn is an object with role and content")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        found = ", ".join(f"{key}: {type(item).__name__}" for key, item in turn.items())
        raise DataError(f"{where} has {found or 'nothing'}; a turn has role and content, both text")
    if turn.get("tool_calls"):
        raise DataError(f"{where} calls tools, which ycore does not train on yet; remove the row")
    return {"role": _ROLES.get(role, role), "content": content}
