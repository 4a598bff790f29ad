"""From a table's rows to prompts: which column asks, what is text and what is chat, and every row that cannot be asked.

Conversations written as one text, `\n\nHuman: ... \n\nAssistant: ...`, as the hh-rlhf pairs are; taken apart.

One cell of a dataset as a trainer reads it: text or chat turns, checked, and joined to prompt and answer.

Not here: reading the rows (`local_files`, `tasks`, `gym`, `hub`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ycore.data.table import Table
from ycore.errors import DataError, nearest
from ycore.types import Content, Message, Prompt

_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_dialogue(text: str) -> bool:
    """Whether `text` begins as one side speaking to an assistant."""
    return re.match(r"\s*Human:", text) is not None and "\n\nAssistant:" in text


def to_messages(text: str) -> list[Message]:
    """The turns, in order, each stripped of the blanks around it; a turn of nothing is kept as an empty one."""
    marks = list(_SPEAKER.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [
        {"role": _ROLES[mark[1]], "content": text[mark.end() : end].strip()}
        for mark, end in zip(marks, ends, strict=True)
    ]


_CONTENTS_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}


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
    return {"role": _CONTENTS_ROLES.get(role, role), "content": content}


PROMPT_COLUMNS = ("prompt", "messages", "question", "problem", "instruction")
_PAIR = ("chosen", "rejected")
"""Pairs of whole conversations ask with what stands before the last answer."""

RESERVED = frozenset({"prompt", "prompts", "completion", "completions", "completion_ids"})
"""What a reward function is called with besides the columns: a column of that name is not passed on."""

Wrap = Callable[[Content], Content]


class PromptRows(Sequence[Prompt]):
    """The prompts of a table, each made when it is asked for; DataError, naming the row, where one cannot be asked."""

    def __init__(self, table: Table, asking: str, renamed: Mapping[str, str], *, wrap: Wrap) -> None:
        self._table, self._asking, self._renamed, self._wrap = table, asking, renamed, wrap
        self._is_text = isinstance(_content(table, 0, table.rows[0].get(asking), asking), str)

    def __len__(self) -> int:
        return len(self._table.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        row = self._table.rows[number]
        content = _content(self._table, number, row.get(self._asking), self._asking)
        if isinstance(content, str) != self._is_text:
            raise DataError(self._mixed(number))
        columns = {new: row.get(old) for new, old in self._renamed.items()}
        return Prompt(row=number, content=self._wrap(content), columns=columns)

    def _mixed(self, number: int) -> str:
        kinds = ("text", "chat") if self._is_text else ("chat", "text")
        return (
            f"the column {self._asking!r} mixes text and chat: {kinds[0]} in {self._table.place(0)}, {kinds[1]} in "
            f"{self._table.place(number)}; make every prompt the same kind"
        )


def to_prompts(
    table: Table, *, prompt_column: str | None, answer_column: str | None, system_prompt: str | None, as_chat: bool
) -> tuple[PromptRows, tuple[str, ...]]:
    """The prompts, and the columns that rewards may ask for. `answer_column` takes the place of any `answer`."""
    if not table.rows:
        raise DataError(f"the dataset {table.name} is empty; a run needs at least one row")
    asking = _prompt_column(table, prompt_column)
    renamed = _renamed(table, answer_column, asking)

    def wrap(content: Content) -> Content:
        if isinstance(content, str) and (as_chat or system_prompt is not None):
            content = [{"role": "user", "content": content}]
        return content if system_prompt is None else _with_system(content, system_prompt)

    return PromptRows(table, asking, renamed, wrap=wrap), tuple(renamed)


def _prompt_column(table: Table, chosen: str | None) -> str:
    if chosen is None:
        pair = _PAIR[:1] if _is_of_pairs(table) else ()
        chosen = next((name for name in (*PROMPT_COLUMNS, *pair) if name in table.columns), None)
        if chosen is None:
            raise DataError(
                f"{table.name} has none of the columns {', '.join(PROMPT_COLUMNS)}; it has "
                f"{', '.join(table.columns) or 'none'}; say which one asks with --prompt-column"
            )
    if chosen not in table.columns:
        raise DataError(_no_column(table, chosen, "--prompt-column"))
    return chosen


def _is_of_pairs(table: Table) -> bool:
    return set(_PAIR) <= set(table.columns)


def _no_column(table: Table, name: str, option: str) -> str:
    way_out = nearest(name, table.columns) or "; take one of them"
    return f"{table.name} has no column {name!r} ({option}); it has {', '.join(table.columns) or 'none'}{way_out}"


def _renamed(table: Table, answer_column: str | None, asking: str) -> dict[str, str]:
    """What rewards see of a row: new name to old."""
    if answer_column is not None and answer_column not in table.columns:
        raise DataError(_no_column(table, answer_column, "--answer-column"))
    kept = {name: name for name in table.columns if name not in RESERVED and name not in (asking, answer_column)}
    if answer_column is not None:
        kept["answer"] = answer_column
    return kept


def _content(table: Table, number: int, value: Any, column: str) -> Content:
    if column == _PAIR[0] and _is_of_pairs(table):
        value = _before_the_answer(table, number, value)
    if isinstance(value, str):
        _check_text(table, number, value, f"the prompt ({column!r})")
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return _chat(table, number, value, column)
    found = "null" if value is None else type(value).__name__
    raise DataError(
        f"the prompt ({column!r}) is {found} in {table.place(number)}; "
        "a prompt is text or a list of {role, content} turns: mend or remove the row"
    )


def _before_the_answer(table: Table, number: int, value: Any) -> Any:
    """The conversation of a preferred answer without it."""
    turns = to_messages(value) if isinstance(value, str) and is_dialogue(value) else value
    if isinstance(turns, str):
        raise DataError(
            f"'chosen' is an answer without its conversation in {table.place(number)}; a prompt is needed: say which "
            "column asks with --prompt-column"
        )
    while isinstance(turns, list) and turns and isinstance(turns[-1], Mapping) and turns[-1].get("role") == "assistant":
        turns = turns[:-1]
    return turns


def _chat(table: Table, number: int, value: Sequence[Any], column: str) -> list[Message]:
    turns = [_columns_turn(table, number, turn, place) for place, turn in enumerate(value)]
    if turns and turns[-1]["role"] == "assistant" and column != "prompt":
        turns.pop()  # a whole conversation: its last answer is what the policy is to write
    if not turns:
        raise DataError(f"the prompt ({column!r}) has no turns in {table.place(number)}; mend or remove the row")
    if turns[-1]["role"] == "assistant":
        raise DataError(
            f"the prompt ({column!r}) ends with an assistant turn in {table.place(number)}; "
            "remove that turn: the policy writes it"
        )
    return turns


def _columns_turn(table: Table, number: int, turn: Any, place: int) -> Message:
    where = f"turn {place} of {table.place(number)}"
    if not isinstance(turn, Mapping):
        raise DataError(f"{where} is {type(turn).__name__}; a turn is an object with role and content")
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str) or not isinstance(content, str) or not role:
        found = ", ".join(f"{key}: {type(item).__name__}" for key, item in turn.items())
        raise DataError(f"{where} has {found or 'nothing'}; a turn has role and content, both text")
    if turn.get("tool_calls"):
        raise DataError(f"{where} calls tools, which prompts cannot do yet; remove the row")
    if role != "system":
        _check_text(table, number, content, f"turn {place}")
    return {"role": role, "content": content}


def _check_text(table: Table, number: int, text: str, what: str) -> None:
    if not text.strip():
        raise DataError(f"{what} is empty in {table.place(number)}; mend or remove the row")
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise DataError(f"{what} holds half of a character (a lone surrogate) in {table.place(number)}; mend the row")


def _with_system(content: Content, system_prompt: str) -> Content:
    if isinstance(content, str) or content[0]["role"] == "system":
        return content
    return [{"role": "system", "content": system_prompt}, *content]
