"""The examples of a run without rollouts, as TRL's trainers take them: what is trained on, held out and left out.

Rows are text, prompt and completion, or whole conversations (sft); pairs of a better and a worse answer (dpo, reward);
or answers with a label (kto). A pair comes with its prompt, or as two conversations that differ in their last answer.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ycore.config.algorithms import find_algorithm
from ycore.config.schema import TuneConfig
from ycore.data.row_images import images_of, with_marks
from ycore.data.source import read_table
from ycore.data.table import QUESTION_COLUMNS, Table, TableRow
from ycore.errors import ConfigError, DataError
from ycore.run.images import ImageStore
from ycore.types import Content, Image, Message, in_blocks

SIGHTED = ("sft", "dpo")
"""The algorithms whose rows may have pictures."""

Example = dict[str, Any]  # one row of TRL's: its columns depend on the trainer
ToExample = Callable[
    [TableRow], Example | str
]  # the example of a row, or why nothing can be learned from it

CONVERSATION_COLUMNS = ("messages", "conversations", "conversation")
COMPLETION_COLUMNS = ("completion", "response", "output", "answer", "solution")

_HELD_OUT_SHARE = 10
_MAX_HELD_OUT = 256
_LABELS = {"true": True, "1": True, "false": False, "0": False}
_ANSWER_MARK = "\n\nAssistant:"


@dataclass(frozen=True, slots=True)
class ExampleSet:
    """Shuffled examples. The held-out ones share no prompt with the others; `left_out` counts skipped rows by reason."""

    train: Sequence[Example]
    held_out: Sequence[Example]
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def is_chat(self) -> bool:
        return any(isinstance(value, list) for value in self.train[0].values())

    @property
    def shows(self) -> bool:
        """Tell whether rows have pictures."""
        return "images" in self.train[0]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.train[0])

    @property
    def fingerprint(self) -> str:
        """A digest that changes with any example and with their order."""
        digest = hashlib.sha256()
        for example in (*self.train, *self.held_out):
            digest.update(json.dumps(example).encode())
        return digest.hexdigest()

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


def load_examples(
    config: TuneConfig, *, as_chat: bool, store: ImageStore | None = None
) -> ExampleSet:
    """Return the examples of `config.dataset`; DataError where a row is malformed, or none is left.

    Where any row has pictures, each has a list of `images` (`types.Image`, kept in the `store`), and turns in blocks.
    Examples are shuffled by the seed here: kto's trainer reads its rows in order, and pairs that were split in two
    would come with every good answer first.

    Args:
        as_chat: Make texts chat turns, for a model with a chat template.
    """
    store = store or ImageStore(None)
    examples, left_out = _read_examples(
        config, config.dataset, config.split, as_chat=as_chat, store=store
    )
    chance = random.Random(config.seed)
    if config.eval_dataset is not None or config.eval_split is not None:
        name = config.eval_dataset or config.dataset
        split = config.eval_split or config.split
        held_out, _ = _read_examples(config, name, split, as_chat=as_chat, store=store)
        chance.shuffle(examples)
        return ExampleSet(examples, held_out[: config.held_out], left_out)
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
    return ExampleSet(train, held_out, left_out)


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
    return [example["prompt"], example.get("images")] if "prompt" in example else example


def _key(value: Any) -> str:
    return json.dumps(_with_single_spaces(value), sort_keys=True)


def _with_single_spaces(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, Mapping):
        return {key: _with_single_spaces(item) for key, item in value.items()}
    return list(map(_with_single_spaces, value)) if isinstance(value, list | tuple) else value


def _read_examples(
    config: TuneConfig, name: str, split: str, *, as_chat: bool, store: ImageStore
) -> tuple[list[Example], Counter[str]]:
    table = _rename_columns(
        read_table(name, split=split, seed=config.seed, limit=config.limit), config.columns
    )
    to_example = _converter(config, table, as_chat)
    made = [to_example(table.row(number)) for number in range(len(table.rows))]
    _add_pictures(config, table, made, store)
    left_out = Counter(example for example in made if isinstance(example, str))
    examples = [example for example in made if not isinstance(example, str)]
    if not examples:
        raise DataError(
            f"no row of {table.name} can be learned from ({', '.join(left_out)}); give another dataset"
        )
    if find_algorithm(config.algorithm).rows == "labelled":
        examples = _labelled(table, examples)
    # TRL decides by the first row whether all of them are chats.
    kinds = {
        frozenset((key, type(value)) for key, value in row.items() if key != "margin")
        for row in examples
    }
    if len(kinds) > 1:
        raise DataError(f"{table.name} mixes text and chats; make every row the same kind")
    return examples, left_out


def _add_pictures(
    config: TuneConfig, table: Table, made: Sequence[Example | str], store: ImageStore
) -> None:
    """Give the examples the pictures of their rows, where any row has some."""
    candidates = (*CONVERSATION_COLUMNS, *QUESTION_COLUMNS)
    column = next((name for name in candidates if name in table.columns), None)
    examples: list[tuple[Example, TableRow, tuple[Image, ...]]] = []
    for number, example in enumerate(made):
        if not isinstance(example, str):
            row = table.row(number)
            turns = example.get("prompt") or example.get("messages") or ""
            images = images_of(
                row, turns, column, table.folder, store, fetch=config.fetch_images
            )
            examples.append((example, row, images))
    first = next((row for _, row, images in examples if images), None)
    if first is None:
        return
    if config.algorithm not in SIGHTED:
        raise ConfigError(
            f"{first.place} has a picture, and ycore {config.algorithm} reads text only; "
            f"take ycore {' or '.join(SIGHTED)}, or remove the columns image and images"
        )
    for example, row, images in examples:
        question = "prompt" if "prompt" in example else "messages"
        if question not in example:
            raise DataError(
                f"a picture and plain text in {row.place}; make it a question and an answer"
            )
        example[question] = with_marks(example[question], images, row.place)
        for name, content in example.items():
            example[name] = in_blocks(content) if isinstance(content, list) else content
        example["images"] = list(images)


def _rename_columns(table: Table, columns: dict[str, str]) -> Table:
    """Give columns the trainer's names in place of the user's; `columns` maps the former to the latter."""
    for new_name, old_name in columns.items():
        table.require_column(old_name, f"columns.{new_name}")
    if not columns:
        return table
    names = {old_name: new_name for new_name, old_name in columns.items()}
    hidden = set(columns) - set(names)  # columns that had one of these names before
    rows = [
        {names.get(name, name): value for name, value in row.items() if name not in hidden}
        for row in table.rows
    ]
    kept = tuple(names.get(name, name) for name in table.columns if name not in hidden)
    return replace(table, rows=rows, columns=kept)


def _converter(config: TuneConfig, table: Table, as_chat: bool) -> ToExample:
    question = next((name for name in QUESTION_COLUMNS if name in table.columns), None)
    rows = find_algorithm(config.algorithm).rows
    if rows == "answers":
        whole = (
            bool(config.trl.get("assistant_only_loss"))
            or config.trl.get("completion_only_loss") is False
        )
        return _sft_converter(table, question, as_chat=as_chat, whole=whole)
    has_pairs = {"chosen", "rejected"} <= set(table.columns)
    if rows == "labelled" and ("label" in table.columns or not has_pairs):
        _require_columns(table, ("prompt", "completion", "label"), "or the columns of pairs")
        return lambda row: _labelled_example(row, as_chat=as_chat)
    _require_columns(table, ("chosen", "rejected"), "with or without prompt")
    return lambda row: _pair_example(row, question, as_chat=as_chat)


def _sft_converter(
    table: Table, question: str | None, *, as_chat: bool, whole: bool
) -> ToExample:
    conversation = next((name for name in CONVERSATION_COLUMNS if name in table.columns), None)
    completion = next((name for name in COMPLETION_COLUMNS if name in table.columns), None)
    if conversation is not None:
        return lambda row: _conversation_example(row, conversation, whole=whole)
    if question is not None and completion is not None:
        return lambda row: _completion_example(row, question, completion, as_chat=as_chat)
    if "text" in table.columns:
        return lambda row: _text_example(row, as_chat=as_chat, whole=whole)
    raise DataError(
        f"{table.name} lacks the columns that sft reads: `messages`, or `prompt` and `completion` "
        f"(or {', '.join(QUESTION_COLUMNS[1:])} and {', '.join(COMPLETION_COLUMNS[1:])}), or `text`; "
        f"{_has(table, 'completion')}"
    )


def _conversation_example(row: TableRow, column: str, *, whole: bool) -> Example | str:
    """Cut before the last answer, so that the loss is of that answer and not of what the user said.

    With `whole` it stays in one piece, for TRL's `assistant_only_loss` or a loss over all of it.
    """
    turns = row.conversation(column)
    if isinstance(turns, str):
        raise DataError(
            f"{column!r} is text in {row.place}; it must be a list of {{role, content}} turns"
        )
    if whole and not _is_empty(turns):
        return {"messages": turns}
    while turns and turns[-1]["role"] != "assistant":
        turns = turns[:-1]  # nobody answers these last turns
    return "no answer" if _is_empty(turns) else {"prompt": turns[:-1], "completion": turns[-1:]}


def _completion_example(
    row: TableRow, question: str, completion: str, *, as_chat: bool
) -> Example | str:
    prompt = row.conversation(question)
    answer = row.conversation(completion)
    extra = row.values.get("input")  # Alpaca's second column of the question
    if (
        question == "instruction"
        and isinstance(prompt, str)
        and isinstance(extra, str)
        and extra.strip()
    ):
        prompt = f"{prompt}\n\n{extra}"
    if _is_empty(answer):
        return "no answer"
    if as_chat or not (isinstance(prompt, str) and isinstance(answer, str)):
        return {"prompt": _turns(prompt, "user"), "completion": _turns(answer, "assistant")}
    return {"prompt": prompt, "completion": answer}


def _text_example(row: TableRow, *, as_chat: bool, whole: bool) -> Example | str:
    content = row.conversation("text")
    if _is_empty(content):
        return "no text"
    if isinstance(content, str) or not as_chat:
        return {"text": row.values["text"]}
    return _conversation_example(row, "text", whole=whole)


def _pair_example(row: TableRow, question: str | None, *, as_chat: bool) -> Example | str:
    """`prompt`, `chosen`, `rejected`, and `margin` where the table has it."""
    chosen = row.conversation("chosen")
    rejected = row.conversation("rejected")
    if _is_empty(chosen) or _is_empty(rejected):
        return "no answer"
    if chosen == rejected:
        return "answers equal"
    if question is not None:
        pair: Example | None = _with_prompt(
            row.conversation(question), as_chat, chosen=chosen, rejected=rejected
        )
    elif isinstance(chosen, str) or isinstance(rejected, str) or not as_chat:
        pair = _split_texts(_raw_text(row, "chosen"), _raw_text(row, "rejected"))
    else:
        differ_last = len(chosen) > 1 and chosen[:-1] == rejected[:-1]
        are_answers = chosen[-1]["role"] == rejected[-1]["role"] == "assistant"
        split = {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}
        pair = split if differ_last and are_answers else None
    if pair is None:
        return "conversations part before the last answer"
    margin = row.values.get("margin")
    return {**pair, "margin": float(margin)} if isinstance(margin, int | float) else pair


def pair_table(table: Table, prompt_column: str | None, *, as_chat: bool) -> Table:
    """Return the pairs with `prompt`, `chosen` and `rejected` as texts; DataError where none is left."""
    way_out = f"it has {table.listed_columns}; rename a column in the dataset"  # such a run has no setting for it
    _require_columns(table, ("chosen", "rejected"), "with or without prompt", way_out=way_out)
    question = prompt_column or next(
        (name for name in QUESTION_COLUMNS if name in table.columns), None
    )
    if question is not None:
        table.require_column(question, "--prompt-column")
    rows: list[dict[str, Any]] = []
    for number in range(len(table.rows)):
        pair = _pair_example(table.row(number), question, as_chat=as_chat)
        if not isinstance(pair, str):
            answers = {name: _text_of(pair[name]) for name in ("chosen", "rejected")}
            rows.append({**table.rows[number], "prompt": pair["prompt"], **answers})
    if not rows:
        raise DataError(
            f"no row of {table.name} has two answers that differ; give another dataset"
        )
    return Table(table.name, rows, tuple(dict.fromkeys(("prompt", *table.columns))))


def _text_of(answer: Content) -> str:
    return answer if isinstance(answer, str) else answer[-1]["content"]


def _split_texts(chosen: str, rejected: str) -> Example | None:
    """Cut where the assistant's last turn begins, else at the last space of the common beginning."""
    differing = (
        place
        for place, letters in enumerate(zip(chosen, rejected, strict=False))
        if letters[0] != letters[1]
    )
    common = chosen[: next(differing, min(len(chosen), len(rejected)))]
    end = (
        common.rfind(_ANSWER_MARK) + len(_ANSWER_MARK)
        if _ANSWER_MARK in common
        else common.rfind(" ")
    )
    if end <= 0 or not chosen[end:].strip() or not rejected[end:].strip():
        return None
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def _raw_text(row: TableRow, column: str) -> str:
    value = row.values.get(column)
    if not isinstance(value, str):
        raise DataError(
            f"{column!r} is chat turns in {row.place}, and the other answer is text, or the model has no "
            "chat template; make them the same kind, or give an instruct model"
        )
    return value


def _labelled_example(row: TableRow, *, as_chat: bool) -> Example | str:
    prompt = row.conversation("prompt")
    completion = row.conversation("completion")
    if _is_empty(completion):
        return "no answer"
    value = row.values.get("label")
    label = _LABELS.get(str(value).strip().lower())
    if label is None:
        raise DataError(
            f"'label' is {value!r} in {row.place}; a label is true or false, or 1 or 0"
        )
    return {**_with_prompt(prompt, as_chat, completion=completion), "label": label}


def _labelled(table: Table, examples: list[Example]) -> list[Example]:
    """Make each pair two labelled examples; both labels must occur."""
    if "chosen" in examples[0]:
        examples = [
            {"prompt": pair["prompt"], "completion": pair[column], "label": label}
            for pair in examples
            for column, label in (("chosen", True), ("rejected", False))
        ]
    if len({example["label"] for example in examples}) == 1:
        raise DataError(
            f"kto compares good answers with bad ones, and every label of {table.name} is {examples[0]['label']}; "
            "add answers of the other kind, or train with `ycore sft`"
        )
    return examples


def _with_prompt(prompt: Content, as_chat: bool, **answers: Content) -> Example:
    """Return prompt and answers as texts, or all as chat turns; answers that repeat the prompt lose it."""
    if not as_chat and all(isinstance(content, str) for content in (prompt, *answers.values())):
        return {"prompt": prompt, **answers}
    before = _turns(prompt, "user")
    example: Example = {"prompt": before}
    for column, content in answers.items():
        turns = _turns(content, "assistant")
        repeats = len(turns) > len(before) and turns[: len(before)] == before
        example[column] = turns[len(before) :] if repeats else turns
    return example


def _is_empty(content: Content) -> bool:
    """Tell whether there is nothing to learn from: no turns, blank text, or a last turn that is blank."""
    last = content if isinstance(content, str) else content[-1]["content"] if content else ""
    return not last.strip()


def _turns(content: Content, role: str) -> list[Message]:
    return [{"role": role, "content": content}] if isinstance(content, str) else content


def _require_columns(
    table: Table, required: Sequence[str], note: str, *, way_out: str = ""
) -> None:
    missing = [name for name in required if name not in table.columns]
    if missing:
        raise DataError(
            f"{table.name} has no column {' and no '.join(missing)}; wanted are {' and '.join(required)}, {note}; "
            f"{way_out or _has(table, missing[0])}"
        )


def _has(table: Table, wanted: str) -> str:
    last = table.columns[-1] if table.columns else "answer"
    return f"it has {table.listed_columns}; name yours, e.g. --set columns.{wanted}={last}"
