"""Rows of preferences: two answers to one prompt, the better one known; or one answer with a label.

A pair comes with its prompt, or as two whole conversations that part at their last answer, as hh-rlhf has them.

How many rows are left out, and why: real preference files have pairs that say nothing, and a run tells so.

Rows for supervised fine-tuning: text, prompt and completion, or whole conversations.

Not here: reading the table (`prompts`), and what is held out of it (`examples`).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ycore.data.columns import as_turns, cell, is_empty
from ycore.data.table import Table
from ycore.errors import DataError
from ycore.types import Content, Message

LeftOut = Counter[str]
"""Reason -> rows."""


def in_words(left_out: LeftOut) -> str:
    """`3 left out (2 no answer, 1 answers equal)`, or nothing."""
    if not left_out:
        return ""
    listed = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
    return f"{left_out.total()} left out ({listed})"


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


_LABELS = {"true": True, "1": True, "false": False, "0": False}
_ANSWER = "\n\nAssistant:"


def pair_rows(table: Table, *, as_chat: bool, left_out: LeftOut) -> list[Row]:
    """TRL's rows `prompt`, `chosen`, `rejected`, and `margin` where the table has it."""
    _need(table, ("chosen", "rejected"), "chosen and rejected, with or without prompt")
    made = [_pair(table, number, as_chat=as_chat) for number in range(len(table.rows))]
    left_out.update(row for row in made if isinstance(row, str))
    return [row for row in made if not isinstance(row, str)]


def labelled_rows(table: Table, *, as_chat: bool, left_out: LeftOut) -> list[Row]:
    """TRL's rows `prompt`, `completion`, `label`; a pair is two of them."""
    if "label" not in table.columns and {"chosen", "rejected"} <= set(table.columns):
        pairs = pair_rows(table, as_chat=as_chat, left_out=left_out)
        return [
            {"prompt": pair["prompt"], "completion": pair[column], "label": label}
            for pair in pairs
            for column, label in (("chosen", True), ("rejected", False))
        ]
    _need(table, ("prompt", "completion", "label"), "prompt, completion and label, or the columns of pairs")
    made = [_labelled(table, number, as_chat=as_chat) for number in range(len(table.rows))]
    left_out.update(row for row in made if isinstance(row, str))
    rows = [row for row in made if not isinstance(row, str)]
    if len({row["label"] for row in rows}) == 1:
        raise DataError(
            f"kto compares good answers with bad ones, and every label of {table.name} is {rows[0]['label']}; "
            "add answers of the other kind, or train with `ycore sft`"
        )
    return rows


def _pair(table: Table, number: int, *, as_chat: bool) -> Row | str:
    chosen, rejected = cell(table, number, "chosen"), cell(table, number, "rejected")
    if is_empty(chosen) or is_empty(rejected):
        return "no answer"
    if chosen == rejected:
        return "answers equal"
    asks = next((name for name in PROMPTS if name in table.columns), None)
    if asks is not None:
        row: Row | None = _explicit(cell(table, number, asks), chosen, rejected, as_chat=as_chat)
    elif isinstance(chosen, str) or isinstance(rejected, str) or not as_chat:
        row = _implicit_text(*(_as_written(table, number, name) for name in ("chosen", "rejected")))
    else:
        row = _implicit_turns(chosen, rejected)
    if row is None:
        return "conversations part before the last answer"
    margin = table.rows[number].get("margin")
    return {**row, "margin": float(margin)} if isinstance(margin, int | float) else row


def _explicit(prompt: Content, chosen: Content, rejected: Content, *, as_chat: bool) -> Row:
    contents = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    if not as_chat and all(isinstance(content, str) for content in contents.values()):
        return contents
    turns = as_turns(prompt, "user")
    return {"prompt": turns, **{name: _answer(contents[name], turns) for name in ("chosen", "rejected")}}


def _answer(content: Content, prompt: Sequence[Message]) -> list[Message]:
    """The turns after the prompt, also where the column repeats it."""
    turns = as_turns(content, "assistant")
    return turns[len(prompt) :] if turns[: len(prompt)] == list(prompt) and len(turns) > len(prompt) else turns


def _implicit_turns(chosen: Sequence[Message], rejected: Sequence[Message]) -> Row | None:
    same = len(chosen) == len(rejected) and list(chosen[:-1]) == list(rejected[:-1])
    if not same or len(chosen) < 2 or chosen[-1]["role"] != "assistant" or rejected[-1]["role"] != "assistant":
        return None
    return {"prompt": list(chosen[:-1]), "chosen": list(chosen[-1:]), "rejected": list(rejected[-1:])}


def _implicit_text(chosen: str, rejected: str) -> Row | None:
    """Cut where the assistant's last turn begins, else at the last blank before the two part."""
    same = next((place for place, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other), 0)
    common = chosen[: same or min(len(chosen), len(rejected))]
    end = common.rfind(_ANSWER) + len(_ANSWER) if _ANSWER in common else common.rfind(" ")
    if end <= 0 or not chosen[end:].strip() or not rejected[end:].strip():
        return None
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def _as_written(table: Table, number: int, column: str) -> str:
    value = table.rows[number].get(column)
    if not isinstance(value, str):
        raise DataError(
            f"{column!r} is chat turns in {table.place(number)}, and the other answer is text, or the model has no "
            "chat template; make them the same kind, or give an instruct model"
        )
    return value


def _labelled(table: Table, number: int, *, as_chat: bool) -> Row | str:
    prompt, completion = cell(table, number, "prompt"), cell(table, number, "completion")
    if is_empty(completion):
        return "no answer"
    label = _label(table, number)
    if as_chat or not (isinstance(prompt, str) and isinstance(completion, str)):
        turns = as_turns(prompt, "user")
        return {"prompt": turns, "completion": _answer(completion, turns), "label": label}
    return {"prompt": prompt, "completion": completion, "label": label}


def _label(table: Table, number: int) -> bool:
    value: Any = table.rows[number].get("label")
    known = _LABELS.get(str(value).strip().lower())
    if known is None:
        raise DataError(f"'label' is {value!r} in {table.place(number)}; a label is true or false, or 1 or 0")
    return known


def _need(table: Table, wanted: Sequence[str], in_words: str) -> None:
    missing = [name for name in wanted if name not in table.columns]
    if missing:
        raise DataError(
            f"{table.name} has no column {' and no '.join(missing)}; wanted are {in_words}; it has "
            f"{', '.join(table.columns) or 'none'}; name yours, e.g. --set columns.{missing[0]}="
            f"{table.columns[-1] if table.columns else 'answer'}"
        )
