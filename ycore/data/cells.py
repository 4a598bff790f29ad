"""A dataset's rows as its source gives them, and how one cell is read.

A cell is text or chat turns (lists of turns, JSON in text, dialogues in one text, ShareGPT's names), or has the answers
that a row accepts. Its pictures go into the run's store, with a mark where each stands in the prompt.
"""

import ast
import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from ycore.errors import DataError, nearest
from ycore.run.files import MAX_PICTURE_BYTES, ImageStore, png_of
from ycore.types import IMAGE_MARK, Content, Image, JsonObject, Message, Record


@dataclass(frozen=True)
class Table:
    """Rows by column name; a row may lack a column that another has.

    Attributes:
        lines: The line of each row in its file.
        folder: Where relative paths of pictures begin; None where a row may name no file (a dataset of the hub).
        fills_keys: The objects of a column all have the same keys, with null where a row lacks one, as in Arrow.
        joined: Columns whose text the column `prompt` already holds.
        split: The split that was read; empty where the dataset has none.
    """

    name: str
    rows: Sequence[Record]
    columns: tuple[str, ...]
    lines: Sequence[int] | None = None
    folder: Path | None = None
    fills_keys: bool = False
    joined: tuple[str, ...] = ()
    split: str = ""

    def row(self, number: int) -> "TableRow":
        return TableRow(self.rows[number], self, number)

    def __iter__(self) -> Iterator["TableRow"]:
        for number, values in enumerate(self.rows):
            yield TableRow(values, self, number)

    @property
    def listed_columns(self) -> str:
        return ", ".join(self.columns) or "none"

    def require_column(self, name: str, option: str) -> None:
        """DataError where the table lacks a column that the user named by `option`.

        `reward_model.ground_truth` is a key of the objects in `reward_model`.
        """
        if {name, name.partition(".")[0]}.isdisjoint(self.columns):
            raise DataError(
                f"{self.name} has no column {name!r} ({option}); it has {self.listed_columns}"
                f"{nearest(name, self.columns) or '; take one of them'}"
            )


@dataclass(slots=True)
class TableRow:
    """One row, and its place as error messages name it."""

    values: Record
    table: Table
    number: int

    @property
    def place(self) -> str:
        lines = self.table.lines
        line = "" if lines is None else f" (line {lines[self.number]})"
        return f"row {self.number}{line} of {self.table.name}"

    def cell(self, column: str) -> Any:
        """Return the cell of a column, whose name may have dots; None where the row lacks it."""
        if column in self.values or "." not in column:
            return self.values.get(column)
        value: Any = self.values
        for key in column.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def own_cell(self, column: str) -> Any:
        """Return a cell without the keys that only other rows have."""
        value = self.cell(column)
        return without_nulls(value) if self.table.fills_keys else value


def without_nulls(value: Any) -> Any:
    """Leave out the keys that Arrow fills in with null, where other rows have them."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


# -- cells -------------------------------------------------------------------------------------------------------------

IMAGE_BLOCKS = ("image", "image_url")
IMAGE_COLUMNS = ("image", "images")
ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(
        ("gpt", "chatgpt", "model", "bing", "bard", "bot", "chatbot", "ai"), "assistant"
    ),
    **dict.fromkeys(("function", "observation", "ipython", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
}
"""The role that a dataset's name for a writer stands for."""

GOLD_KEYS = (
    "value",
    "aliases",
    "normalized_value",
    "normalized_aliases",
    "text",
    "answer",
    "answers",
    "ground_truth",
    "target",
)
"""The keys of a mapping under which it has accepted answers."""

_CALLS = ("function_call", "tool_call")
_TURN_KEYS = {"role", "from", "content", "value"}
_WEIGHT_KEYS = {"weight", "train", "training", "trainable", "train_detail", "loss", "loss_mask"}
# The beginning of a turn, or of a list of them: `[{"role":` and `{'value' :`.
_BEGINS_TURN = r"\s*+\[?\s*+\{\s*+['\"](?:role|from|content|value)['\"]\s*+:"
# Keys for what a turn says, and for who says it, such as `"from": "gpt"`; also with a backslash before each quote.
_NAMES_WRITER = (
    r"""(?=(?s:.{0,999}?)['"](?:content|value)\\*['"]\s*+:)"""
    rf"""(?s:.{{0,500}}?)['"](?:role|from)\\*['"]\s*+:[\s'"\\]*+(?:{"|".join(ROLES)})['"\\]"""
)
# `Human:` and the white space before it.
_SPEAKER = r"(?<!\s)(?P<gap>\s*+)(?P<speaker>Human|Assistant):"


def content_of(row: TableRow, column: str, aliases: dict[str, str]) -> Content:
    """Return the cell as text or chat turns, which may be JSON in a text; DataError where it is neither.

    Args:
        aliases: Gets the names of writers that stand for a role, with that role.
    """
    value = listed_cell(row, column)
    if isinstance(value, str):
        if not value.isascii():
            check_characters(value, repr(column), row)
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [
            _turn(turn, f"turn {number} of {column!r}", row, aliases)
            for number, turn in enumerate(value)
        ]
    kind = "null" if value is None else type(value).__name__
    raise DataError(
        f"{column!r} is {kind} in {row.place}; it must be text or a list of {{role, content}} turns: "
        "correct or remove the row"
    )


def listed_cell(row: TableRow, column: str) -> Any:
    """Return a cell as it stands, but turns in a text and a turn without a list as a list."""
    value = row.own_cell(column)
    if isinstance(value, str):
        may_list = value.lstrip().startswith(("[", "{", '"[', '"{', "array("))
        return (may_list and _parse_turns(value, column, row)) or value
    return [value] if _is_turn(value) else value


def parse_literal(text: str) -> Any:
    """Read JSON, or a list as Python writes it, which is what pandas puts into a CSV; ValueError for anything else."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    try:
        return ast.literal_eval(text.strip())
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise ValueError("it is neither JSON nor a value as Python writes it") from None


def _parse_turns(text: str, column: str, row: TableRow) -> list[Any] | None:
    """Return the turns that a text lists; None where it is a text."""
    value = None
    with suppress(ValueError):
        value = parse_literal(text)
        value = parse_literal(value) if isinstance(value, str) else value
    listed = value if isinstance(value, list) else [value]
    if listed and all(map(_is_turn, listed)):
        return listed
    if not (re.match(_NAMES_WRITER, text) or (value is None and re.match(_BEGINS_TURN, text))):
        return None
    raise DataError(
        f"{column!r} holds turns in {row.place}, and cannot be read as JSON that lists them: {text[:40]!r}; "
        "write the cell as JSON, or the dataset as JSONL or Parquet"
    )


def _is_turn(value: Any) -> bool:
    return isinstance(value, Mapping) and (
        "tool_calls" in value or len(_TURN_KEYS & value.keys()) > 1
    )


def _turn(turn: Any, label: str, row: TableRow, aliases: dict[str, str]) -> Message:
    """Read a turn with `role` and `content`, or with `from` and `value` as in ShareGPT files, and all other keys."""
    if not isinstance(turn, Mapping):
        raise DataError(
            f"{label} is {type(turn).__name__} in {row.place}; a turn is an object with role and content"
        )
    name = turn.get("role") or turn.get("from")
    content = turn.get("value") if turn.get("content") is None else turn["content"]
    content = _without_blocks(content, label, row)
    rest = {
        str(key): value
        for key, value in turn.items()
        if key not in _TURN_KEYS and value is not None and value != []
    }
    if not isinstance(name, str) or not name:
        raise DataError(_not_a_turn(turn, label, row))
    role = ROLES.get(name.strip().lower())
    if role is None:
        raise DataError(
            f"{label} has the role {name!r} in {row.place}; the roles are {', '.join(ROLES)}: rename it, or remove the row"
        )
    if role != name:
        aliases[name] = role
    # They take an answer out of the loss; a weight of 1 says nothing.
    for key in _WEIGHT_KEYS & rest.keys():
        weight = rest.pop(key)
        if role == "assistant" and weight not in (1, True, "1"):
            raise DataError(
                f"{label} has {key} {weight!r} in {row.place}, and answers are trained on by their place alone (the last, "
                f"or all with --assistant-only-loss); remove the key {key}, or cut the conversation after its last answer"
            )
    calls = rest.pop("function_call", rest.pop("tool_calls", None))
    if name in _CALLS:
        calls, content = content, ""
    if listed := (calls or name in _CALLS) and _calls(calls, label, row):
        rest["tool_calls"] = listed
    if not isinstance(content, str) and not (content is None and "tool_calls" in rest):
        raise DataError(_not_a_turn(turn, label, row))
    check_characters(content or "", label, row)
    return {"role": role, "content": content, **rest}


def _not_a_turn(turn: Record, label: str, row: TableRow) -> str:
    kinds = ", ".join(f"{key}: {type(item).__name__}" for key, item in turn.items())
    return f"{label} has {kinds or 'nothing'} in {row.place}; a turn has role and content, both text"


def _calls(calls: Any, label: str, row: TableRow) -> list[JsonObject]:
    """Return calls as OpenAI writes them, also of JSON in a text, or of objects with name and arguments alone.

    Arguments that are JSON in a text become an object: most chat templates would write the text in quotes.
    """
    try:
        value = parse_literal(calls) if isinstance(calls, str) else calls
        return [_call(call) for call in (value if isinstance(value, list) else [value])]
    except (ValueError, TypeError, KeyError):
        raise DataError(
            f"{label} is a call in {row.place}, and its value is {calls!r:.60}; it is JSON with name and arguments"
        ) from None


def _call(call: JsonObject) -> JsonObject:
    if "function" not in call:
        function = {"name": call["name"], "arguments": call["arguments"]}
        call = {"type": "function", "function": function}
    function = call["function"]
    if isinstance(text := function.get("arguments"), str):
        with suppress(ValueError):
            return {**call, "function": {**function, "arguments": parse_literal(text)}}
    return call


def _without_blocks(content: Any, label: str, row: TableRow) -> Any:
    """Join the texts of a turn in blocks, with a mark for each picture; other content stays as it is."""
    if isinstance(content, str | bytes) or not isinstance(content, Sequence):
        return content
    kinds = [block.get("type") if isinstance(block, Mapping) else None for block in content]
    if other := [kind for kind in kinds if kind not in ("text", *IMAGE_BLOCKS)]:
        raise DataError(
            f"{label} has a block of type {other[0]!r} in {row.place}; a block is a text or an image"
        )
    texts = [
        block.get("text") if kind == "text" else IMAGE_MARK
        for kind, block in zip(kinds, content, strict=True)
    ]
    return "".join(texts) if texts and all(isinstance(text, str) for text in texts) else content


def check_characters(text: str, label: str, row: TableRow) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{label} holds half of a character (a lone surrogate) in {row.place}; correct or remove the row"
        ) from None


def is_dialogue(text: str) -> bool:
    """Tell whether `text` is a conversation, `Human: ... Assistant: ...`, as in hh-rlhf."""
    if "Human:" not in text:
        return False
    return re.match(r"\n\nHuman:|\s*Human:(?s:.*)\n[ \t]*Assistant:", text) is not None


def to_messages(text: str) -> list[Message]:
    """Split a dialogue into turns without the white space around each. An open last `Assistant:` is no turn."""
    speakers = [(mark, _gap_before(mark)) for mark in re.finditer(_SPEAKER, text)]
    marks = [mark for mark, gap in speakers if gap > 1]
    if len(marks) < 2:
        marks = [mark for mark, gap in speakers if gap]
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    turns: list[Message] = [
        {
            "role": "user" if mark["speaker"] == "Human" else "assistant",
            "content": text[mark.end() : end].strip(),
        }
        for mark, end in zip(marks, ends, strict=True)
    ]
    is_open = turns[-1]["role"] == "assistant" and not turns[-1]["content"]
    return turns[:-1] if is_open else turns


def _gap_before(speaker: re.Match[str]) -> float:
    """Count the line ends in the white space before a speaker: infinite where the text begins, 0 within a line."""
    if not speaker.start():
        return inf
    gap = speaker["gap"]
    return 0 if gap.rpartition("\n")[2].strip(" \t") else gap.count("\n")


def golds_of(answer: Any) -> list[str]:
    """Return the texts that a row accepts as its answer; none where it is empty or NaN.

    `answer` is a text, a number, a list or array of them, or a mapping with `value`, `aliases` (TriviaQA), `text`
    (SQuAD), `answer` or `ground_truth`, also as JSON, Python's or numpy's text of a mapping or of a list of texts. Of a
    worked solution only its result counts: the last box, or what follows the last `####` or is in the last `<answer>`.
    """
    if not isinstance(answer, str):
        if hasattr(answer, "tolist"):  # of numpy, from Parquet
            answer = answer.tolist()
        if isinstance(answer, Mapping):
            answer = [answer[key] for key in GOLD_KEYS if key in answer]
        if isinstance(answer, list | tuple | set):
            return list(dict.fromkeys(gold for item in answer for gold in golds_of(item)))
        if answer is None or answer != answer:
            return []
    text = str(answer)
    text = text.rpartition("</answer>")[0].rpartition("<answer>")[2] or text
    gold = (last_boxed(text) or text).rpartition("####")[2].strip()
    if not gold or gold.lower() == "nan":
        return []
    return [gold, *_listed_golds(gold)] if gold[0] in "[{" else [gold]


def _listed_golds(text: str) -> list[str]:
    """Return the accepted answers that a text lists; none where it is an answer itself, as `[1, 2]`."""
    try:
        # numpy's text has no commas.
        value = parse_literal(re.sub(r"(?<=['\"])\s+(?=['\"])", ", ", text))
    except ValueError:
        return []
    are_texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return golds_of(value) if are_texts or isinstance(value, dict) else []


# `\boxed{` and `\fbox {`.
_BOXED = r"\\(?:boxed|fbox)\s*\{"


def last_boxed(solution: str) -> str | None:
    r"""Return what the last `\boxed{...}` of a worked solution holds; None where there is none, or it stays open."""
    if "box" not in solution:
        return None
    _, *insides = re.split(_BOXED, solution)
    inside = insides[-1] if insides else ""
    depth = 1
    for place, character in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if not depth:
            return inside[:place].strip()
    return None


_HUB_MARK = "<image>"  # in a text, by LLaVA's datasets and others after it
_KEYS = ("image", "path", "url", "image_url", "base64", "bytes")


def images_of(
    row: TableRow, content: Content, column: str | None, store: ImageStore
) -> tuple[Image, ...]:
    """Put the pictures of a row into the store; DataError with the row where a picture is missing or damaged.

    Args:
        content: What `cells.content_of` reads in `column`.
    """
    blocks = blocks_of(listed_cell(row, column)) if column else []
    values = picture_cells(row, blocks)
    if not values and isinstance(content, list):
        places = _count(content, IMAGE_MARK) if blocks else 0
        if not set(IMAGE_COLUMNS).isdisjoint(row.values):
            places = places or _count(content, _HUB_MARK)
        if places:
            raise DataError(
                f"{places} places for an image and no image in {row.place}; add it, or remove the row"
            )
    return tuple(store.put(_bytes_of(value, row), row.place) for value in values)


def picture_cells(row: TableRow, blocks: Sequence[Record]) -> list[Any]:
    """Return the pictures of a row as it has them: those of its columns, or else of these blocks."""
    values = [value for name in IMAGE_COLUMNS for value in _listed(row.values.get(name), row)]
    return values or [
        block[key]
        for block in blocks
        if block["type"] in IMAGE_BLOCKS
        for key in _KEYS
        if block.get(key) is not None
    ]


def with_marks(content: Content, images: Sequence[Image], place: str) -> Content:
    """Mark the place of each picture: where a block or `<image>` has it, else before the first question."""
    if not images:
        return content
    if isinstance(content, str):
        raise DataError(
            f"a picture and plain text in {place}; pictures need chat turns and a model with a chat template"
        )
    if _count(content, _HUB_MARK) and not _count(content, IMAGE_MARK):
        content = [
            {**turn, "content": (turn["content"] or "").replace(_HUB_MARK, IMAGE_MARK)}
            for turn in content
        ]
    elif not _count(content, IMAGE_MARK):
        first = next((turn for turn in content if turn["role"] == "user"), None)
        marks = IMAGE_MARK * len(images)
        content = [
            {**turn, "content": marks + turn["content"]} if turn is first else turn
            for turn in content
        ]
    num_places = _count(content, IMAGE_MARK)
    if num_places != len(images):
        raise DataError(
            f"{len(images)} images for {num_places} places in the turns of {place}; make them as many"
        )
    return content


def _count(content: Sequence[Message], mark: str) -> int:
    return sum((turn["content"] or "").count(mark) for turn in content)


def _listed(value: Any, row: TableRow) -> list[Any]:
    """Return a cell as a list of pictures; an empty cell has none."""
    listed = value if isinstance(value, list | tuple) else [value]
    if len(listed) > 1 and any(picture is None for picture in listed):
        raise DataError(
            f"image {listed.index(None)} is null in {row.place}; add it, or remove its place"
        )
    return [picture for picture in listed if picture is not None and picture != ""]


def blocks_of(turns: Any) -> list[Record]:
    """Return the blocks of a conversation whose turns are written in them."""
    contents = [turn.get("content") for turn in turns] if isinstance(turns, list) else []
    return [block for content in contents if isinstance(content, list) for block in content]


def _bytes_of(value: Any, row: TableRow) -> bytes:
    """Read a picture: bytes, a path beside the dataset, a `data:` URL, datasets' `{bytes, path}`, or an image of PIL."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("url")
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return _read(value, row)
    if hasattr(value, "save") and hasattr(value, "mode"):
        return png_of(value)
    raise DataError(
        f"the image of {row.place} is {type(value).__name__}; give a path, bytes or an image of datasets"
    )


def _read(name: str, row: TableRow) -> bytes:
    """Read a picture by its name: a file beside the dataset, or a `data:` URL."""
    if name.startswith("data:"):
        try:
            return base64.b64decode(name.partition(",")[2], validate=True)
        except binascii.Error as problem:
            raise DataError(
                f"the image of {row.place} is no base64 ({problem}); write it again"
            ) from None
    if "://" in name:
        raise DataError(
            f"the image of {row.place} is at {name:.80}, and URLs are not fetched; give a file"
        )
    if row.table.folder is None:
        raise DataError(
            f"the image of {row.place} is the file {name:.80}; a dataset of the hub brings its own as bytes"
        )
    path = row.table.folder / Path(name).expanduser()
    try:
        with path.open("rb") as file:
            return file.read(MAX_PICTURE_BYTES + 1)
    except (OSError, ValueError) as problem:
        raise DataError(
            f"the image of {row.place} cannot be read: {path} ({getattr(problem, 'strerror', None) or problem}); "
            "correct the path"
        ) from None
