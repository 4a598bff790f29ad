"""The prompts of a run with rollouts, with the columns that rewards read, and the order in which a run draws them."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ycore.config.schema import MixturePart, RunConfig
from ycore.data.cells import IMAGE_COLUMNS, Table, TableRow, images_of, with_marks
from ycore.data.examples import pair_table
from ycore.data.rows import FORMS, RoleOrders, RowNeeds, RowReader, renamed
from ycore.data.source import read_table
from ycore.errors import DataError
from ycore.run.files import NO_IMAGES, ImageStore
from ycore.types import NO_PROMPT, Content, Image, Prompt, Record

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

RESERVED_COLUMNS = ("prompt", "prompts", "completion", "completions", "completion_ids")
"""Keywords that every reward function is called with: a column of that name is not passed on."""


@dataclass(frozen=True)
class PromptSet:
    """Every prompt of a run. A prompt of a JSONL, Parquet or hub dataset is read each time it is drawn.

    Attributes:
        columns: The columns that rewards may ask for.
        digest: Returns a digest that changes with any prompt, column or their order.
        shows: The first row with a picture; None where no row has one.
        reading: What was read from which column, for the plan.
        samples: The first row of each order of roles, by its place in the file, for the plan to try its template on.
        parts: The prompts of each dataset, where there are several.
    """

    prompts: Sequence[Prompt]
    columns: tuple[str, ...]
    digest: Callable[[], str]
    is_chat: bool
    shows: int | None = None
    reading: Record = field(default_factory=dict)
    samples: Mapping[str, int] = field(default_factory=dict)
    parts: Mapping[str, "PromptSet"] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Return the words by which a resumed run knows its rows again."""
        return f"{len(self.prompts)} rows, sha256 {self.digest()[:16]}"


def load_prompts(
    config: RunConfig, *, as_chat: bool = False, store: ImageStore = NO_IMAGES
) -> PromptSet:
    """The prompts of `config.dataset`, all of them checked; DataError with the first row that cannot be one.

    `as_chat` makes a text prompt a user's turn, for a model with a chat template. Pictures go into the `store`.
    """
    if config.mixture:
        return _mixed(config, as_chat=as_chat, store=store)
    if config.dataset or not config.env:
        table = read_table(
            config.dataset, split=config.split, seed=config.seed, limit=config.limit
        )
    else:
        names = config.environments if len(config.env) > 1 else ()
        rows = [{"environment": name} for name in names] or [{}]
        table = Table("no dataset", rows, tuple(rows[0]))
    table = renamed(table, config.columns)
    if config.given_pairs or config.trains_a_judge:
        table = pair_table(table, config.prompt_column, as_chat=as_chat)
    return to_prompts(table, config, as_chat=as_chat, store=store)


def _mixed(config: RunConfig, **reading: Any) -> PromptSet:
    """Read every dataset by its own columns, and lay them end to end."""
    parts = {}
    for part in config.mixture:
        settings = part.model_dump(
            exclude_defaults=True, exclude={"share", "rewards", "environment"}
        )
        if part.environment is not None:  # then no row names its own
            settings["env"] = [*filter(None, [config.environments.get(part.environment)])]
        settings["mixture"] = []
        parts[part.name] = load_prompts(config.model_copy(update=settings), **reading)
    if len({part.is_chat for part in parts.values()}) > 1:
        raise DataError(
            "some datasets of the run are chats and some are text; make them alike, or take a model with a chat template"
        )
    rows = MixedRows(config.mixture, parts)
    columns = [name for part in parts.values() for name in part.columns]
    return PromptSet(
        rows,
        tuple(dict.fromkeys(columns)),
        rows.digest,
        is_chat=rows[0].is_chat,
        shows=next((part.shows for part in parts.values() if part.shows is not None), None),
        parts=parts,
    )


class MixedRows(Sequence[Prompt]):
    """The rows of several datasets, one after the other."""

    def __init__(self, mixture: Sequence[MixturePart], parts: Mapping[str, PromptSet]) -> None:
        self._parts = parts
        whole = sum(part.share for part in mixture)
        self.sizes = [len(part.prompts) for part in parts.values()]
        self.counts = [max(1, round(100 * part.share / whole)) for part in mixture]

    def digest(self) -> str:
        return " ".join(part.digest() for part in self._parts.values())

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, index: Any) -> Any:
        row = place = range(len(self))[index]
        for name, part in self._parts.items():
            if place < len(part.prompts):
                return replace(part.prompts[place], row=row, dataset=name)
            place -= len(part.prompts)


def row_at(prompts: Sequence[Prompt], seed: int, position: int) -> int:
    """Return the row that a run draws at `position`. Of several datasets each has its percent of every hundred."""
    if not isinstance(prompts, MixedRows):
        return row_of_order(seed, len(prompts), position)
    cycle, place = divmod(position, sum(prompts.counts))
    slot = int(_permutation(seed, cycle, sum(prompts.counts))[place])
    first = 0
    for size, count in zip(prompts.sizes, prompts.counts, strict=True):
        if slot < count:
            break
        slot -= count
        first += size
    return first + row_of_order(seed, size, cycle * count + slot)


def row_of_order(seed: int, num_rows: int, position: int) -> int:
    """Return the row at `position`, which counts from 0 over all epochs: each epoch has a permutation of its own.

    Example: of 3 rows the positions 0 to 2 give some order of 0, 1, 2, and 3 to 5 another.
    """
    epoch, place = divmod(position, num_rows)
    return int(_permutation(seed, epoch, num_rows)[place])


@lru_cache(maxsize=16)  # a round that crosses the end of an epoch reads from both
def _permutation(seed: int, epoch: int, num_rows: int) -> "NDArray[int64]":
    from numpy.random import default_rng  # a dry run does without numpy

    return default_rng([seed, epoch]).permutation(num_rows)


def to_prompts(
    table: Table, config: RunConfig, *, as_chat: bool, store: ImageStore = NO_IMAGES
) -> PromptSet:
    """Make every row a prompt; the answer column is passed on to rewards under the name `answer`."""
    if len(config.env) > 1:
        _check_environments(table, list(config.environments))
    needs = RowNeeds(
        "prompts",
        as_chat=as_chat or config.system_prompt is not None or bool(config.few_shot),
        prompt_column=config.prompt_column,
        answer_column=config.answer_column,
    )
    reader = RowReader(table, needs)
    if reader.form is None and not reader.has_pairs and not config.env:
        raise DataError(
            f"{table.name} has none of the columns {', '.join(form.question for form in FORMS[:-1])}; it has "
            f"{table.listed_columns}; name the one that holds the prompts with --prompt-column"
        )
    prompts = PromptRows(reader, config, store)
    prompts.check()
    reading = reader.summary()  # before any row is read again, and its notes are counted twice
    columns = (*prompts.passed, *(["images"] if prompts.with_images else []))
    return PromptSet(
        prompts,
        columns,
        prompts.digest,
        is_chat=prompts[0].is_chat,
        shows=min(prompts.with_images, default=None),
        reading=reading,
        samples={table.row(number).place: number for number in prompts.samples},
    )


class PromptRows(Sequence[Prompt]):
    """The prompts of a table, each made when it is read; DataError with the row where it cannot be a prompt.

    Attributes:
        passed: The table's columns, by the names under which rewards get them.
        with_images: The pictures of each row read so far that has any.
        samples: The first row of each order of roles, once `check` has read them all.
    """

    def __init__(self, reader: RowReader, config: RunConfig, store: ImageStore) -> None:
        self.with_images: dict[int, tuple[Image, ...]] = {}
        self.samples: list[int] = []
        self._reader = reader
        self._table = reader.table
        self._column = reader.prompt_column
        self._store = store
        self._system = []
        if config.system_prompt is not None:
            self._system.append({"role": "system", "content": config.system_prompt})
        self._few_shot = [turn.model_dump() for turn in config.few_shot]
        self._is_text: bool | None = None
        hidden = {*RESERVED_COLUMNS, *IMAGE_COLUMNS, self._column, reader.needs.answer_column}
        self.passed = {name: name for name in self._table.columns if name not in hidden}
        if reader.answer is not None:
            self.passed["answer"] = reader.answer

    def check(self) -> None:
        """Read every row once."""
        orders = RoleOrders()
        for row in self._table:
            content, _ = self._content_and_images(row)
            if orders.is_new(content):
                self.samples.append(row.number)
            self._reader.note_gold(row)

    def digest(self) -> str:
        """Return a digest of what the prompts are made of."""
        needs = self._reader.needs
        digest = hashlib.sha256(repr([needs, self._system, self._few_shot]).encode())
        for row in self._table:
            read = repr((row.values, self.with_images.get(row.number, ())))
            digest.update(read.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._table.rows)

    def __iter__(self) -> Iterator[Prompt]:
        return map(self._prompt, self._table)

    def __getitem__(self, index: Any) -> Any:
        return self._prompt(self._table.row(range(len(self))[index]))

    def _prompt(self, row: TableRow) -> Prompt:
        content, images = self._content_and_images(row)
        reader = self._reader
        return Prompt(
            row=row.number,
            content=content,
            columns={
                name: reader.gold(row) if name == "answer" else row.values.get(column)
                for name, column in self.passed.items()
            },
            images=images,
            tools=tuple(reader.tools(row)),
            template_arguments=reader.template_arguments(row),
        )

    def _content_and_images(self, row: TableRow) -> tuple[Content, tuple[Image, ...]]:
        content = NO_PROMPT if self._column is None else self._checked(row)
        is_text = isinstance(content, str)
        if self._is_text is None:
            self._is_text = is_text
        if is_text != self._is_text:
            raise DataError(
                f"the column {self._column!r} mixes text and chat: {'chat' if is_text else 'text'} in "
                f"{self._table.row(0).place}, {'text' if is_text else 'chat'} in {row.place}; make all the same kind"
            )
        images: tuple[Image, ...] = ()
        if self._reader.may_show(content):
            images = self.with_images.get(row.number) or images_of(
                row, content, self._column, self._store
            )
            content = with_marks(content, images, row.place)
        if images:
            self.with_images[row.number] = images
        if isinstance(content, str):
            return content, images
        if self._system or self._few_shot:
            first = content[:1] if content[0]["role"] == "system" else []
            if first and self._system and first[0]["content"] != self._system[0]["content"]:
                self._reader.notes[
                    "rows keep their own system prompt, not --system-prompt"
                ] += 1
            content = [*(first or self._system), *self._few_shot, *content[len(first) :]]
        return content, images

    def _checked(self, row: TableRow) -> Content:
        """Return the prompt as the dataset has it."""
        content = self._reader.prompt(row)
        if isinstance(content, str) and content.strip():
            return content
        if not content or isinstance(content, str):
            raise DataError(
                f"the prompt ({self._column!r}) is empty in {row.place}; correct or remove the row"
            )
        if content[-1]["role"] == "assistant":
            raise DataError(
                f"the prompt ({self._column!r}) ends with an assistant turn in {row.place}; "
                "remove that turn: the policy writes it"
            )
        for number, turn in enumerate(content):
            says = (turn["content"] or "").strip() or turn.get("tool_calls")
            if not says and turn["role"] != "system":
                raise DataError(
                    f"turn {number} of {self._column!r} is empty in {row.place}; correct or remove the row"
                )
        return content


def _check_environments(table: Table, names: Sequence[str]) -> None:
    rule = f"of several environments, a row names its own in the column 'environment': one of {', '.join(names)}"
    if "environment" not in table.columns:
        raise DataError(
            f"{rule}; {table.name} has {table.listed_columns}; add the column, or give one --env"
        )
    for row in table:
        if (name := row.values.get("environment")) not in names:
            raise DataError(f"{rule}; it is {name!r:.80} in {row.place}; correct the row")
