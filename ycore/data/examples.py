"""The examples of a run without rollouts, as TRL's trainers take them: what is trained on, held out and left out.

Rows are text, prompt and completion, or whole conversations (sft); pairs of a better and a worse answer (dpo, reward);
or answers with a label (kto). A pair comes with its prompt, or as two conversations that differ in their last answer.
"""

import gc
import hashlib
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ycore.config.schema import ExperimentalConfig, TuneConfig
from ycore.data.cells import (
    Table,
    TableRow,
    blocks_of,
    images_of,
    listed_cell,
    picture_cells,
    with_marks,
)
from ycore.data.rows import (
    CONVERSATIONS,
    SYSTEM_COLUMNS,
    TEMPLATE_COLUMNS,
    RoleOrders,
    Row,
    RowNeeds,
    RowReader,
    last_text,
    renamed,
)
from ycore.data.source import read_table
from ycore.errors import ConfigError, DataError
from ycore.run.files import NO_IMAGES, ImageStore
from ycore.types import Content, Image, JsonObject, Record, in_blocks

SIGHTED = ("sft", "dpo")
"""The algorithms whose rows may have pictures."""

Example = dict[str, Any]  # one row of TRL's: its columns depend on the trainer

SOFT_LABEL = "soft_label"
"""The column with the chance, from 0 to 1, that `chosen` is the better answer."""

_ANSWER_OPTIONS = "--prompt-column NAME --answer-column NAME"
_HELD_OUT_SHARE = 10
_MAX_HELD_OUT = 256
_LABEL = re.compile(r"(?i)\s*(?:(true|1|1\.0)|false|0|0\.0)\s*")


@dataclass(frozen=True, slots=True)
class ExampleSet:
    """Shuffled examples. The held-out ones share no prompt with the others; `left_out` counts skipped rows by reason.

    Attributes:
        reading: What was read from which column, for the plan.
        samples: The first example of each order of roles, by its row's place, for the plan to try its template on.
    """

    train: Sequence[Example]
    held_out: Sequence[Example]
    left_out: Counter[str]
    reading: Record
    samples: Mapping[str, Example]

    @property
    def is_chat(self) -> bool:
        return any(
            isinstance(value, list) for name, value in self.train[0].items() if name != "images"
        )

    @property
    def shows(self) -> bool:
        """Tell whether rows have pictures."""
        return "images" in self.train[0]

    @property
    def identity(self) -> str:
        """Return the words by which a resumed run knows its rows and their order again."""
        digest = hashlib.sha256()
        for example in (*self.train, *self.held_out):
            digest.update(repr(example).encode("utf-8", "surrogatepass"))
        return (
            f"{len(self.train)} + {len(self.held_out)} rows, sha256 {digest.hexdigest()[:16]}"
        )

    @property
    def overlap(self) -> int:
        """Count the held-out examples whose prompt, or whole text without a prompt, is also trained on."""
        return num_overlapping(map(_prompt_of, self.held_out), map(_prompt_of, self.train))

    @property
    def left_out_note(self) -> str:
        """`3 left out (1 answers equal, 2 no answer)`, or nothing."""
        listed = ", ".join(
            f"{count} {reason}" for reason, count in sorted(self.left_out.items())
        )
        return f"{self.left_out.total()} left out ({listed})" if self.left_out else ""


@contextmanager
def _uncollected() -> Iterator[None]:
    """Spare the collector of cycles, which rows have none of, from looking at all of them again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@_uncollected()
def load_examples(
    config: TuneConfig, *, as_chat: bool, store: ImageStore = NO_IMAGES
) -> ExampleSet:
    """Return the examples of `config.dataset`; DataError where a row is malformed, or none is left.

    Where any row has pictures, each has a list of `images` (`types.Image`, kept in the `store`), and turns in blocks.
    Examples are shuffled by the seed here: kto's trainer reads its rows in order, and pairs that were split in two
    would come with every good answer first.

    Args:
        as_chat: Make texts chat turns, for a model with a chat template.
    """
    whole = _read_examples(config, config.dataset, config.split, as_chat=as_chat, store=store)
    examples = list(whole.train)
    chance = random.Random(config.seed)
    if config.eval_dataset is not None or config.eval_split is not None:
        name = config.eval_dataset or config.dataset
        split = config.eval_split or config.split
        apart = _read_examples(config, name, split, as_chat=as_chat, store=store)
        chance.shuffle(examples)
        held_out = [*apart.train[: config.held_out]]
        if whole.shows and not apart.shows:
            held_out = [{**example, "images": []} for example in held_out]
        elif held_out and apart.shows and not whole.shows:
            raise DataError(
                f"the held-out rows of {name} have pictures, and the rows of {config.dataset} have none, so nothing would "
                "see them; train on pictures too, or hold out other rows"
            )
        return replace(
            whole,
            train=examples,
            held_out=held_out,
            reading={
                **whole.reading,
                "apart": {"dataset": name, "split": apart.reading["split"]},
            },
            samples={**whole.samples, **apart.samples},
        )
    count = (
        min(len(examples) // _HELD_OUT_SHARE, _MAX_HELD_OUT)
        if config.held_out is None
        else config.held_out
    )
    train, held_out = hold_out(examples, count, chance)
    if not train:
        raise DataError(
            f"{config.held_out} held-out rows of {len(examples)} leave none to train on; lower --held-out"
            if config.held_out
            else f"the rows of {config.dataset} all have one prompt; pass --held-out 0"
        )
    return replace(whole, train=train, held_out=held_out)


def hold_out(
    examples: Sequence[Example], count: int, chance: random.Random
) -> tuple[list[Example], list[Example]]:
    """Split into train and held-out examples, shuffled. Examples of one prompt stay together."""
    groups: dict[str, list[Example]] = {}
    for example in examples:
        groups.setdefault(_key(_prompt_of(example)), []).append(example)
    shuffled = list(groups.values())
    chance.shuffle(shuffled)
    held_out: list[Example] = []
    while shuffled and len(held_out) < count:
        held_out += shuffled.pop()
    train = [example for group in shuffled for example in group]
    chance.shuffle(train)
    return train, held_out


def num_overlapping(held_out: Iterable[Any], train: Iterable[Any]) -> int:
    """Count the held-out prompts or texts that are also trained on; white space makes no difference."""
    trained = set(map(_key, train))
    return sum(_key(prompt) in trained for prompt in held_out)


def _prompt_of(example: Example) -> Any:
    if "prompt" not in example:
        return example
    return [example["prompt"], example["images"]] if "images" in example else example["prompt"]


def _key(value: Any) -> str:
    """Return a text that is equal for values that differ in white space, or in the order of keys, alone."""
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, dict):
        pairs = [f"{name}\0{_key(value[name])}" for name in sorted(value)]
        return "{" + "\0".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + "\0".join([_key(item) for item in value]) + "]"
    return repr(value)


def _read_examples(
    config: TuneConfig, name: str, split: str, *, as_chat: bool, store: ImageStore
) -> ExampleSet:
    """Return the examples of a dataset in the order of its rows, none of them held out."""
    table = read_table(name, split=split, seed=config.seed, limit=config.limit)
    reader = _row_reader(config, renamed(table, config.columns), as_chat=as_chat)
    left_out = Counter[str]()
    examples: list[Example] = []
    pictures = {}
    orders = RoleOrders()
    samples = {}
    for row in reader.table:
        example = _to_example(reader, row)
        if isinstance(example, str):
            left_out[example] += 1
            continue
        if images := _images_of(config, reader, row, example, store):
            pictures[len(examples)] = images
        if orders.is_new(*example.values()):
            samples[row.place] = example
        examples.append(example)
    if not examples:
        raise DataError(
            f"no row of {table.name} can be learned from ({', '.join(left_out)}); give another dataset"
        )
    if isinstance(config, ExperimentalConfig):
        lost = TEMPLATE_COLUMNS if config.writes else ("tools",)
        _refuse_lost(table, examples, lost, by=f"trainer of ycore {config.algorithm}")
    if pictures:
        _check_shown(config, table, examples)
        for number, example in enumerate(examples):
            for name, content in example.items():
                example[name] = in_blocks(content) if isinstance(content, list) else content
            example["images"] = list(pictures.get(number, ()))
    if reader.needs.kind == "labelled":
        examples = _labelled(table, examples)
    num_lacking = sum("margin" not in example for example in examples)
    if 0 < num_lacking < len(examples):
        reader.notes["pairs without a margin count as margin 0"] = num_lacking
    _fill(table, examples)
    return ExampleSet(examples, [], left_out, reader.summary(), samples)


def _row_reader(config: TuneConfig, table: Table, *, as_chat: bool) -> RowReader:
    """Return the reader of a table; DataError where it lacks the columns that the command reads."""
    kind = config.algorithm_row.rows
    assert kind is not None
    whole = kind == "answers" and (
        bool(config.trl.get("assistant_only_loss"))
        or config.trl.get("completion_only_loss") is False
    )
    reader = RowReader(
        table, RowNeeds(kind, as_chat, config.prompt_column, config.answer_column, whole)
    )
    if kind == "answers":
        takes_text = not config.algorithm_row.experimental
        if reader.form is None and not (takes_text and "text" in table.columns):
            wanted = "messages, or prompt and completion" + ", or text" * takes_text
            raise _lacks(table, wanted, _ANSWER_OPTIONS)
    elif kind == "labelled" and ("label" in table.columns or not reader.has_pairs):
        has_answer = reader.answer is not None or reader.form in CONVERSATIONS
        if reader.form is None or not has_answer or "label" not in table.columns:
            wanted = "prompt, completion and label, or unlabelled prompt, chosen and rejected"
            raise _lacks(table, wanted, f"{_ANSWER_OPTIONS} --set columns.label=NAME")
    else:
        if config.answer_column is not None:
            raise DataError(
                f"--answer-column {config.answer_column} names one answer, and {config.algorithm} learns from `chosen` and "
                f"`rejected`; say --set columns.chosen={config.answer_column}"
            )
        _require_pairs(table)
        if config.algorithm_row.trains_reward_model:
            reader.labels = (SOFT_LABEL,)
    return reader


def _to_example(reader: RowReader, row: TableRow) -> Example | str:
    said = reader.read(row)
    if isinstance(said, str):
        return said
    example: Example = {} if said.question is None else {"prompt": said.question}
    example |= said.answers
    if tools := reader.tools(row):
        example["tools"] = json.dumps(tools)
    if arguments := reader.template_arguments(row):
        example["chat_template_kwargs"] = arguments
    if reader.needs.kind == "pairs":
        if (margin := _number(row, "margin")) is not None:
            example["margin"] = margin
        soft_label = _number(row, SOFT_LABEL, most=1.0) if reader.labels else None
        if soft_label is not None:
            example |= _with_soft_label(example, soft_label, place=row.place)
    elif reader.needs.kind == "labelled" and not reader.reads_pairs:
        example["label"] = _label(row)
    return example


def _number(row: TableRow, column: str, *, most: float | None = None) -> float | None:
    """Return the number of a cell, from 0 to `most` where that is given; None where the row does not say."""
    value = row.cell(column)
    if value is None or not str(value).strip():
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    is_outside = most is not None and not 0.0 <= number <= most
    if isinstance(value, bool) or not math.isfinite(number) or is_outside:
        bounds = "" if most is None else f" from 0 to {most:g}"
        raise DataError(
            f"{column!r} is {value!r:.60} in {row.place}; it is a number{bounds}, or empty for none: correct the cell"
        )
    return number


def _with_soft_label(example: Example, chance: float, *, place: str) -> Example:
    """Return a pair whose `chosen` is the likelier one, with the chance that it is better."""
    if "margin" in example:
        raise DataError(
            f"{place} has a margin, {example['margin']:g}, and a {SOFT_LABEL}, {chance:g}, two ways to say how much better "
            "an answer is; remove one of the columns"
        )
    if chance < 0.5:
        chosen, rejected = example["rejected"], example["chosen"]
        return {"chosen": chosen, "rejected": rejected, SOFT_LABEL: 1.0 - chance}
    return {SOFT_LABEL: chance}


def _label(row: TableRow) -> bool:
    value = row.cell("label")
    label = _LABEL.fullmatch(str(value))
    if label is None:
        raise DataError(
            f"'label' is {value!r} in {row.place}; a label is true or false, or 1 or 0: correct the cell, or remove the row"
        )
    return label[1] is not None


def _fill(table: Table, examples: list[Example]) -> None:
    """Give every example the columns that any of them has; DataError where texts are mixed with chats.

    TRL decides by the first row what all of them are.
    """
    optional: JsonObject = {
        "margin": 0.0,
        SOFT_LABEL: 1.0,
        "tools": None,
        "chat_template_kwargs": {},
    }
    kinds = {
        tuple([(key, type(value)) for key, value in row.items() if key not in optional])
        for row in examples
    }
    if len(kinds) > 1:
        raise DataError(f"{table.name} mixes text and chats; make every row the same kind")
    for name, default in optional.items():
        if any(name in example for example in examples):
            for example in examples:
                example.setdefault(name, default)


_NOT_OF_PICTURES = (
    "packing",
    "padding_free",
    "pad_to_multiple_of",
    "assistant_only_loss",
    "precompute_ref_log_probs",
)
"""Fields that TRL refuses beside pictures, most of them when the model is loaded."""


def _check_shown(config: TuneConfig, table: Table, examples: Sequence[Example]) -> None:
    """DataError or ConfigError for what TRL does not do, or leaves out without a word, where rows have pictures."""
    lost = TEMPLATE_COLUMNS if config.algorithm == "sft" else ("tools",)
    _refuse_lost(table, examples, lost, by="collator of pictures")
    fields = config.trl
    refused = [name for name in _NOT_OF_PICTURES if fields.get(name)]
    cuts = fields.get("max_length", 1) is not None
    if cuts and fields.get("truncation_mode") == "keep_end":
        refused.append("truncation_mode")
    if refused:
        name = refused[0]
        raise ConfigError(
            f"{name} is {fields[name]}, and {table.name} has pictures, for which TRL does not have it; leave it out, or "
            "remove the pictures"
        )


def _refuse_lost(
    table: Table, examples: Sequence[Example], columns: Sequence[str], *, by: str
) -> None:
    for column in columns:
        if any(example.get(column) for example in examples):
            raise DataError(
                f"{table.name} has the column {column!r}, which TRL's {by} leaves out, and the model would learn answers "
                "without it; remove the column, or take another command"
            )


def _images_of(
    config: TuneConfig, reader: RowReader, row: TableRow, example: Example, store: ImageStore
) -> tuple[Image, ...]:
    """Return the pictures of a row, and mark their places in the example."""
    question = "prompt" if "prompt" in example else "messages"
    turns = example.get(question) or ""
    if not reader.may_show(turns):
        return ()
    images = images_of(row, turns, reader.prompt_column, store)
    if not images:
        return ()
    if config.algorithm not in SIGHTED:
        raise ConfigError(
            f"{row.place} has a picture, and ycore {config.algorithm} reads text only; "
            f"take ycore {' or '.join(SIGHTED)}, or remove the columns image and images"
        )
    example[question] = with_marks(turns, images, row.place)
    return images


def pair_table(table: Table, prompt_column: str | None, *, as_chat: bool) -> Table:
    """Return the pairs with `prompt`, `chosen` and `rejected` as texts; DataError where none is left."""
    _require_pairs(table)
    reader = RowReader(table, RowNeeds("pairs", as_chat, prompt_column))
    joined = (*SYSTEM_COLUMNS, "history") if prompt_column in (None, "prompt") else ()
    rows = []
    numbers = []
    for row in table:
        pair = reader.read(row)
        if isinstance(pair, Row):
            answers = {
                name: _one_text(answer, name, row) for name, answer in pair.answers.items()
            }
            blocks = blocks_of(listed_cell(row, reader.prompt_column or "prompt"))
            pictures = picture_cells(row, blocks)
            shown = {"image": None, "images": pictures} if pictures else {}
            rows.append({**row.values, **shown, "prompt": pair.question, **answers})
            numbers.append(row.number)
    if not rows:
        raise DataError(
            f"no row of {table.name} has two answers that differ; give another dataset"
        )
    return replace(
        table,
        rows=rows,
        columns=tuple(dict.fromkeys(("prompt", *table.columns))),
        lines=table.lines and [table.lines[number] for number in numbers],
        joined=joined,
    )


def _one_text(answer: Content, name: str, row: TableRow) -> str:
    """Return an answer as the text that is scored; DataError where it is more than that."""
    if not isinstance(answer, str) and (len(answer) > 1 or answer[0].get("tool_calls")):
        raise DataError(
            f"{name!r} calls tools or has several turns in {row.place}, and the answers of scored pairs are texts; "
            "remove the row, or write the answer as one text"
        )
    return last_text(answer)


def _labelled(table: Table, examples: list[Example]) -> list[Example]:
    """Make each pair two labelled examples; both labels must occur."""
    if "chosen" in examples[0]:
        examples = [
            {
                "prompt": pair["prompt"],
                "completion": pair[column],
                "label": label,
                **{name: pair[name] for name in TEMPLATE_COLUMNS if name in pair},
            }
            for pair in examples
            for column, label in (("chosen", True), ("rejected", False))
        ]
    if len({example["label"] for example in examples}) == 1:
        raise DataError(
            f"kto compares good answers with bad ones, and every label of {table.name} is {examples[0]['label']}; "
            "add answers of the other kind, or train with `ycore sft`"
        )
    return examples


def _require_pairs(table: Table) -> None:
    if not {"chosen", "rejected"}.issubset(table.columns):
        wanted = "chosen and rejected, with or without prompt"
        raise _lacks(table, wanted, "--set columns.chosen=NAME --set columns.rejected=NAME")


def _lacks(table: Table, wanted: str, options: str) -> DataError:
    return DataError(
        f"{table.name} lacks the columns {wanted}; it has {table.listed_columns}; name yours: {options}"
    )
