"""Rows for supervised fine-tuning: text, prompt and completion, or whole conversations.

Not here: reading the table (`prompts`), and what is held out of it (`examples`).
"""

from collections.abc import Sequence
from typing import Any

from ycore.data.contents import as_turns, cell, is_empty
from ycore.data.left_out import LeftOut
from ycore.data.table import Table
from ycore.errors import DataError

CONVERSATIONS = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "question", "problem", "instruction")
COMPLETIONS = ("completion", "response", "output", "answer", "solution")

Row = dict[str, Any]


def sft_rows(table: Table, *, as_chat: bool, whole: bool, left_out: LeftOut) -> list[Row]:
    """TRL's rows: `messages`, `prompt` and `completion`, or `text`.

    A conversation is cut before its last answer, so that the loss is of that answer and not of what the user said;
    with `whole` it stays in one piece, for TRL's `assistant_only_loss` or a loss over all of it.
    """
    talks = _first(table, CONVERSATIONS)
    asks, answers = _first(table, PROMPTS), _first(table, COMPLETIONS)
    if talks is not None:
        return _kept([_conversation(table, number, talks, whole=whole) for number in _rows(table)], left_out)
    if asks is not None and answers is not None:
        return _kept([_answered(table, number, asks, answers, as_chat=as_chat) for number in _rows(table)], left_out)
    if "text" in table.columns:
        return _kept([_text(table, number, as_chat=as_chat, whole=whole) for number in _rows(table)], left_out)
    raise DataError(
        f"{table.name} has not the columns that sft reads: `messages`, or `prompt` and `completion` "
        f"(or {', '.join(PROMPTS[1:])} and {', '.join(COMPLETIONS[1:])}), or `text`; it has "
        f"{', '.join(table.columns) or 'none'}; name yours, e.g. --set columns.completion={_last(table.columns)}"
    )


def _rows(table: Table) -> range:
    return range(len(table.rows))


def _first(table: Table, names: Sequence[str]) -> str | None:
    return next((name for name in names if name in table.columns), None)


def _last(columns: Sequence[str]) -> str:
    return columns[-1] if columns else "answer"


def _conversation(table: Table, number: int, column: str, *, whole: bool) -> Row | str:
    turns = cell(table, number, column)
    if isinstance(turns, str):
        raise DataError(f"{column!r} is text in {table.place(number)}; it must be a list of {{role, content}} turns")
    if whole and not is_empty(turns):
        return {"messages": turns}
    while turns and turns[-1]["role"] != "assistant":
        turns = turns[:-1]  # nobody answers what was said last
    if is_empty(turns):
        return "no answer"
    return {"prompt": turns[:-1], "completion": turns[-1:]}


def _answered(table: Table, number: int, asks: str, answers: str, *, as_chat: bool) -> Row | str:
    prompt, completion = cell(table, number, asks), cell(table, number, answers)
    extra = table.rows[number].get("input")
    if asks == "instruction" and isinstance(prompt, str) and isinstance(extra, str) and extra.strip():
        prompt = f"{prompt}\n\n{extra}"
    if is_empty(completion):
        return "no answer"
    if as_chat or not (isinstance(prompt, str) and isinstance(completion, str)):
        return {"prompt": as_turns(prompt, "user"), "completion": as_turns(completion, "assistant")}
    return {"prompt": prompt, "completion": completion}


def _text(table: Table, number: int, *, as_chat: bool, whole: bool) -> Row | str:
    content = cell(table, number, "text")
    if is_empty(content):
        return "no text"
    if isinstance(content, str) or not as_chat:
        return {"text": table.rows[number]["text"]}
    return _conversation(table, number, "text", whole=whole)


def _kept(rows: Sequence[Row | str], left_out: LeftOut) -> list[Row]:
    """The rows that can be learned from; of the others, why."""
    left_out.update(row for row in rows if isinstance(row, str))
    return [row for row in rows if not isinstance(row, str)]
