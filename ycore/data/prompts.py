"""The prompts of a run with rollouts, with the columns that rewards read, and the order in which a run draws them."""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ycore.config.schema import AGREES, RunConfig
from ycore.data.cells import IMAGE_COLUMNS, Table, TableRow
from ycore.data.examples import pair_table
from ycore.data.row_images import images_of, with_marks
from ycore.data.rows import FORMS, RoleOrders, RowNeeds, RowReader, renamed
from ycore.data.source import read_table
from ycore.errors import DataError
from ycore.run.images import ImageStore
from ycore.types import NO_PROMPT, Content, Image, Message, Prompt

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

RESERVED_COLUMNS = frozenset(
    {"prompt", "prompts", "completion", "completions", "completion_ids"}
)
"""Keywords that every reward function is called with: a column of that name is not passed on."""


@dataclass(frozen=True, slots=True)
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
    reading: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[str, int] = field(default_factory=dict)
    parts: Mapping[str, "PromptSet"] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Return the words by which a resumed run knows its rows again."""
        return f"{len(self.prompts)} rows, sha256 {self.digest()[:16]}"


def load_prompts(
    config: RunConfig, *, as_chat: bool = False, store: ImageStore | None = None
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
    elif len(config.env) > 1:
        table = Table(
            "no dataset",
            [{"environment": name} for name in config.environments],
            ("environment",),
        )
    else:
        table = Table("no dataset", [{}], ())
    table = renamed(table, config.columns)
    if config.given_pairs or any(reward.reward.startswith(AGREES) for reward in config.rewards):
        table = pair_table(table, config.prompt_column, as_chat=as_chat)
    return to_prompts(table, config, as_chat=as_chat, store=store)


def _mixed(config: RunConfig, **reading: Any) -> PromptSet:
    """Read every dataset by its own columns, and lay them end to end."""
    parts = {}
    for part in config.mixture:
        settings = part.model_dump(
            exclude_defaults=True, exclude={"share", "rewards", "environment"}
        )
        if part.environment is not None:
            settings["env"] = [f"{part.environment}={config.environments[part.environment]}"]
        alone = config.model_copy(update={**settings, "mixture": []})
        parts[part.name] = load_prompts(alone, **reading)
    if len({part.is_chat for part in parts.values()}) > 1:
        kinds = [f"{name} {'chat' if part.is_chat else 'text'}" for name, part in parts.items()]
        raise DataError(
            f"the datasets of a run must all be chat or all be text, and they are {', '.join(kinds)}; change one"
        )
    rows = MixedRows(config, parts)
    shown = [start + part.shows for start, part in rows.starts() if part.shows is not None]
    return PromptSet(
        rows,
        rows.columns,
        rows.digest,
        is_chat=next(iter(parts.values())).is_chat,
        shows=min(shown, default=None),
        parts=parts,
    )


class MixedRows(Sequence[Prompt]):
    """The rows of several datasets, one after the other, each with the columns of all; the ones that it lacks are None."""

    def __init__(self, config: RunConfig, parts: Mapping[str, PromptSet]) -> None:
        self.columns = tuple(
            dict.fromkeys(name for part in parts.values() for name in part.columns)
        )
        self._parts = list(parts.values())
        self._mixture = config.mixture
        self._unscored = [config.unscored(part) for part in config.mixture]
        self._lacking = dict.fromkeys(name for name in self.columns if name != "images")
        self._ends = list(accumulate(len(part.prompts) for part in self._parts))

    def starts(self) -> Iterator[tuple[int, PromptSet]]:
        return zip([0, *self._ends], self._parts, strict=False)

    def digest(self) -> str:
        read = [part.digest() for part in self._parts]
        return hashlib.sha256(repr(read).encode()).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        row = range(len(self))[index]
        number = bisect_right(self._ends, row)
        part, rows = self._mixture[number], self._parts[number].prompts
        prompt = rows[row - self._ends[number] + len(rows)]
        columns = {**self._lacking, **prompt.columns}
        if part.environment is not None:
            columns["environment"] = part.environment
        return replace(
            prompt, row=row, columns=columns, dataset=part.name, unscored=self._unscored[number]
        )

    def order(self, seed: int) -> "MixedOrder":
        sizes = tuple(len(part.prompts) for part in self._parts)
        return MixedOrder(seed, sizes, tuple(Fraction(part.share) for part in self._mixture))


def order_of(prompts: Sequence[Prompt], seed: int) -> "PromptOrder | MixedOrder":
    """Return the order in which a run draws its prompts."""
    if isinstance(prompts, MixedRows):
        return prompts.order(seed)
    return PromptOrder(seed=seed, num_rows=len(prompts))


_BLOCK = 32  # positions in which datasets come in random order


@dataclass(frozen=True, slots=True)
class MixedOrder:
    """The order of several datasets: of the first `n` positions each has its share, to within one and a block.

    A pure function of its fields and the position. A dataset's own rows come in the order of `PromptOrder`.
    """

    seed: int
    sizes: tuple[int, ...]
    shares: tuple[Fraction, ...]

    def row_at(self, position: int) -> int:
        block, place = divmod(position, _BLOCK)
        number = block * _BLOCK + int(_permutation(self.seed, block, _BLOCK)[place])
        end, index = number + 1, len(self.sizes)
        before, before_end = 0, 1
        # Of `number` draws from the datasets up to one, a fixed part is from those before it.
        while before != before_end:
            index -= 1
            kept = sum(self.shares[:index]) / sum(self.shares[: index + 1])
            before, before_end = math.floor(number * kept), math.floor(end * kept)
            if before != before_end:
                number, end = before, before_end
        rows = PromptOrder(seed=self.seed, num_rows=self.sizes[index])
        return sum(self.sizes[:index]) + rows.row_at(number - before)


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """A permutation of the rows for each epoch: a pure function of seed, number of rows and position.

    Example: `PromptOrder(seed=0, num_rows=3)` gives `row_at(0..2)` some order of 0, 1, 2 and `row_at(3..5)` another.
    """

    seed: int
    num_rows: int

    def row_at(self, position: int) -> int:
        """Return the row that the run draws at `position`, which counts from 0 over all epochs."""
        epoch, place = divmod(position, self.num_rows)
        return int(_permutation(self.seed, epoch, self.num_rows)[place])


@lru_cache(maxsize=16)  # a round that crosses the end of an epoch reads from both
def _permutation(seed: int, epoch: int, num_rows: int) -> "NDArray[int64]":
    from numpy.random import default_rng  # a dry run does without numpy

    return default_rng([seed, epoch]).permutation(num_rows)


def to_prompts(
    table: Table, config: RunConfig, *, as_chat: bool, store: ImageStore | None = None
) -> PromptSet:
    """Make every row a prompt; the answer column is passed on to rewards under the name `answer`."""
    if len(config.env) > 1:
        _check_environments(table, list(config.environments))
    before: list[Message] = [
        {str(key): text for key, text in turn.items()} for turn in config.few_shot
    ]
    if any(turn.keys() != {"role", "content"} for turn in config.few_shot):
        raise DataError(
            "few_shot is a list of turns with a role and a content each, e.g. {role: user, content: 'Hi'}"
        )
    needs = RowNeeds(
        "prompts",
        as_chat=as_chat or config.system_prompt is not None or bool(before),
        prompt_column=config.prompt_column,
        answer_column=config.answer_column,
    )
    reader = RowReader(table, needs)
    if reader.form is None and not reader.has_pairs and not config.env:
        raise DataError(
            f"{table.name} has none of the columns {', '.join(form.question for form in FORMS[:-1])}; it has "
            f"{table.listed_columns}; name the one that holds the prompts with --prompt-column"
        )
    prompts = PromptRows(
        reader,
        system_prompt=config.system_prompt,
        few_shot=before,
        store=store or ImageStore(None),
    )
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

    def __init__(
        self,
        reader: RowReader,
        *,
        system_prompt: str | None,
        few_shot: Sequence[Message] = (),
        store: ImageStore,
    ) -> None:
        self.with_images: dict[int, tuple[Image, ...]] = {}
        self.samples: list[int] = []
        self._reader = reader
        self._table = reader.table
        self._column = reader.prompt_column
        self._store = store
        self._system = (
            [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        )
        self._few_shot = few_shot
        self._is_text: bool | None = None
        hidden = {*RESERVED_COLUMNS, *IMAGE_COLUMNS, self._column, reader.needs.answer_column}
        self.passed = {name: name for name in self._table.columns if name not in hidden}
        if reader.answer is not None:
            self.passed["answer"] = reader.answer

    def check(self) -> None:
        """Read every row once."""
        orders = RoleOrders()
        for number, values in enumerate(self._table.rows):
            row = TableRow(values, self._table, number)
            content, _ = self._content_and_images(row)
            if orders.is_new(content):
                self.samples.append(number)
            self._reader.note_gold(row)

    def digest(self) -> str:
        """Return a digest of what the prompts are made of."""
        needs = self._reader.needs
        digest = hashlib.sha256(repr([needs, self._system, self._few_shot]).encode())
        for number, values in enumerate(self._table.rows):
            read = repr((values, self.with_images.get(number, ())))
            digest.update(read.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._table.rows)

    def __iter__(self) -> Iterator[Prompt]:
        for number, values in enumerate(self._table.rows):
            yield self._prompt(TableRow(values, self._table, number))

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
            kinds = ("chat", "text") if is_text else ("text", "chat")
            raise DataError(
                f"the column {self._column!r} mixes text and chat: {kinds[0]} in {self._table.row(0).place}, "
                f"{kinds[1]} in {row.place}; make every prompt the same kind"
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
            content = [*(first or self._system), *self._few_shot, *content[len(first) :]]
        return content, images

    def _checked(self, row: TableRow) -> Content:
        """Return the prompt as the dataset has it."""
        column = self._column
        content = self._reader.prompt(row)
        if isinstance(content, str):
            if content.strip():
                return content
            content = []
        if not content:
            raise DataError(
                f"the prompt ({column!r}) is empty in {row.place}; correct or remove the row"
            )
        if content[-1]["role"] == "assistant":
            raise DataError(
                f"the prompt ({column!r}) ends with an assistant turn in {row.place}; "
                "remove that turn: the policy writes it"
            )
        for number, turn in enumerate(content):
            says = (turn["content"] or "").strip() or turn.get("tool_calls")
            if not says and turn["role"] != "system":
                raise DataError(
                    f"turn {number} of {column!r} is empty in {row.place}; correct or remove the row"
                )
        return content


def _check_environments(table: Table, names: Sequence[str]) -> None:
    rule = f"of several environments, a row names its own in the column 'environment': one of {', '.join(names)}"
    if "environment" not in table.columns:
        raise DataError(
            f"{rule}; {table.name} has {table.listed_columns}; add the column, or give one --env"
        )
    for number in range(len(table.rows)):
        row = table.row(number)
        if (name := row.values.get("environment")) not in names:
            raise DataError(f"{rule}; it is {name!r:.80} in {row.place}; correct the row")
