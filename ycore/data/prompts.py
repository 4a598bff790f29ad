"""The prompts of a run with rollouts, with the columns that rewards read, and the order in which a run draws them."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ycore.config.schema import AGREES, RunConfig
from ycore.data.examples import pair_table
from ycore.data.row_images import IMAGE_COLUMNS, images_of, with_marks
from ycore.data.source import read_table
from ycore.data.table import QUESTION_COLUMNS, Table, TableRow
from ycore.errors import DataError
from ycore.run.images import ImageStore
from ycore.types import NO_PROMPT, Content, Image, Message, Prompt

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

PROMPT_COLUMNS = (QUESTION_COLUMNS[0], "messages", *QUESTION_COLUMNS[1:])
RESERVED_COLUMNS = frozenset(
    {"prompt", "prompts", "completion", "completions", "completion_ids"}
)
"""Keywords that every reward function is called with: a column of that name is not passed on."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Every prompt of a run. A prompt of a JSONL, Parquet or hub dataset is read each time it is drawn.

    Attributes:
        columns: The columns that rewards may ask for.
        fingerprint: A digest that changes with any prompt, column or their order.
        shows: The first row with a picture; None where no row has one.
    """

    prompts: Sequence[Prompt]
    columns: tuple[str, ...]
    fingerprint: str
    is_chat: bool
    shows: int | None = None


def load_prompts(
    config: RunConfig, *, as_chat: bool = False, store: ImageStore | None = None
) -> PromptSet:
    """The prompts of `config.dataset`, all of them checked; DataError with the first row that cannot be one.

    `as_chat` makes a text prompt a user's turn, for a model with a chat template. Pictures go into the `store`.
    """
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
    if config.given_pairs or any(reward.reward.startswith(AGREES) for reward in config.rewards):
        table = pair_table(table, config.prompt_column, as_chat=as_chat)
    return to_prompts(table, config, as_chat=as_chat, store=store)


class PromptOrder:
    """A permutation of the rows for each epoch: a pure function of seed, number of rows and position.

    Example: `PromptOrder(seed=0, num_rows=3)` gives `row_at(0..2)` some order of 0, 1, 2 and `row_at(3..5)` another.
    """

    def __init__(self, *, seed: int, num_rows: int) -> None:
        if num_rows < 1 or seed < 0:
            raise ValueError(
                f"an order needs at least one row and a seed from 0: num_rows={num_rows}, seed={seed}"
            )
        self.seed = seed
        self.num_rows = num_rows

    def row_at(self, position: int) -> int:
        """Return the row that the run draws at `position`, which counts from 0 over all epochs."""
        if position < 0:
            raise ValueError(f"a position counts from 0, not {position}")
        epoch, place = divmod(position, self.num_rows)
        return int(_permutation(self.seed, epoch, self.num_rows)[place])


@lru_cache(maxsize=2)  # a round that crosses the end of an epoch reads from both
def _permutation(seed: int, epoch: int, num_rows: int) -> "NDArray[int64]":
    from numpy.random import default_rng  # a dry run does without numpy

    return default_rng([seed, epoch]).permutation(num_rows)


def to_prompts(
    table: Table, config: RunConfig, *, as_chat: bool, store: ImageStore | None = None
) -> PromptSet:
    """Make every row a prompt; the answer column is passed on to rewards under the name `answer`."""
    column = _prompt_column(table, config.prompt_column, optional=bool(config.env))
    answer = config.answer_column
    if len(config.env) > 1:
        _check_environments(table, list(config.environments))
    passed = {
        name: name
        for name in table.columns
        if name not in {*RESERVED_COLUMNS, *IMAGE_COLUMNS, column, answer}
    }
    if answer is not None:
        table.require_column(answer, "--answer-column")
        passed["answer"] = answer
    if any(turn.keys() != {"role", "content"} for turn in config.few_shot):
        raise DataError(
            "few_shot is a list of turns with a role and a content each, e.g. {role: user, content: 'Hi'}"
        )
    before: list[Message] = [
        {str(key): text for key, text in turn.items()} for turn in config.few_shot
    ]
    prompts = PromptRows(
        table,
        column,
        passed,
        system_prompt=config.system_prompt,
        few_shot=before,
        as_chat=as_chat,
        store=store or ImageStore(None),
        fetch=config.fetch_images,
    )
    fingerprint = _fingerprint(prompts)
    columns = (*passed, *(["images"] if prompts.with_images else []))
    shows = min(prompts.with_images, default=None)
    return PromptSet(prompts, columns, fingerprint, is_chat=prompts[0].is_chat, shows=shows)


class PromptRows(Sequence[Prompt]):
    """The prompts of a table, each made when it is read; DataError with the row where it cannot be a prompt.

    Args:
        column: The column with the prompts; None where an environment asks.
        passed: The table's columns, by the names under which rewards get them.
        fetch: Whether pictures at an `http(s)://` address are fetched.

    Attributes:
        with_images: The pictures of each row read so far that has any.
    """

    def __init__(
        self,
        table: Table,
        column: str | None,
        passed: Mapping[str, str],
        *,
        system_prompt: str | None,
        few_shot: Sequence[Message] = (),
        as_chat: bool,
        store: ImageStore,
        fetch: bool,
    ) -> None:
        self.with_images: dict[int, tuple[Image, ...]] = {}
        self._table = table
        self._column = column
        self._passed = passed
        self._store = store
        self._fetch = fetch
        self._system_prompt = system_prompt
        self._few_shot = few_shot
        self._as_chat = as_chat or system_prompt is not None or bool(few_shot)
        self._is_text = isinstance(self._content(table.row(0)), str)

    def __len__(self) -> int:
        return len(self._table.rows)

    def __getitem__(self, index: Any) -> Any:
        number = range(len(self))[index]
        row = self._table.row(number)
        content = self._content(row)
        if isinstance(content, str) != self._is_text:
            kinds = ("text", "chat") if self._is_text else ("chat", "text")
            raise DataError(
                f"the column {self._column!r} mixes text and chat: {kinds[0]} in "
                f"{self._table.row(0).place}, {kinds[1]} in {row.place}; make every prompt the same kind"
            )
        columns = {new: row.values.get(old) for new, old in self._passed.items()}
        if self._as_chat and isinstance(content, str):
            content = [{"role": "user", "content": content}]
        images = self.with_images.get(number, ())
        if not images:
            images = images_of(
                row, content, self._column, self._table.folder, self._store, fetch=self._fetch
            )
        if images:
            self.with_images[number] = images
        content = self._for_policy(with_marks(content, images, row.place))
        return Prompt(row=number, content=content, columns=columns, images=images)

    def _content(self, row: TableRow) -> Content:
        """Return the prompt as the dataset has it."""
        column = self._column
        if column is None:
            return NO_PROMPT
        is_pair = column == "chosen" and _has_pairs(self._table)
        content = _without_answer(row) if is_pair else row.content(column)
        if isinstance(content, str):
            if not content.strip():
                raise DataError(
                    f"the prompt ({column!r}) is empty in {row.place}; correct or remove the row"
                )
            return content
        if content and content[-1]["role"] == "assistant" and column != "prompt":
            content = content[
                :-1
            ]  # a whole conversation: the policy is to write its last answer
        if not content:
            raise DataError(
                f"the prompt ({column!r}) has no turns in {row.place}; correct or remove the row"
            )
        if content[-1]["role"] == "assistant":
            raise DataError(
                f"the prompt ({column!r}) ends with an assistant turn in {row.place}; "
                "remove that turn: the policy writes it"
            )
        for number, turn in enumerate(content):
            if turn["role"] != "system" and not turn["content"].strip():
                raise DataError(
                    f"turn {number} of {column!r} is empty in {row.place}; correct or remove the row"
                )
        return content

    def _for_policy(self, content: Content) -> Content:
        """Add the system prompt and the worked examples, where the run has them."""
        if isinstance(content, str):
            return content
        system = content[:1] if content[0]["role"] == "system" else []
        if self._system_prompt is not None and not system:
            return [
                {"role": "system", "content": self._system_prompt},
                *self._few_shot,
                *content,
            ]
        return [*system, *self._few_shot, *content[len(system) :]]


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


def _prompt_column(table: Table, chosen: str | None, *, optional: bool) -> str | None:
    """Return the column with the prompts; None where there is none and it is `optional`, since an environment asks."""
    if chosen is None:
        candidates = (*PROMPT_COLUMNS, "chosen") if _has_pairs(table) else PROMPT_COLUMNS
        chosen = next((name for name in candidates if name in table.columns), None)
        if chosen is None and optional:
            return None
        if chosen is None:
            raise DataError(
                f"{table.name} has none of the columns {', '.join(PROMPT_COLUMNS)}; it has "
                f"{table.listed_columns}; name the one that holds the prompts with --prompt-column"
            )
    table.require_column(chosen, "--prompt-column")
    return chosen


def _has_pairs(table: Table) -> bool:
    return {"chosen", "rejected"} <= set(table.columns)


def _without_answer(row: TableRow) -> list[Message]:
    """Return a pair's conversation up to its last answer."""
    turns = row.conversation("chosen")
    if isinstance(turns, str):
        raise DataError(
            f"'chosen' is an answer without its conversation in {row.place}; "
            "name the column that holds the prompts with --prompt-column"
        )
    while turns and turns[-1]["role"] == "assistant":
        turns = turns[:-1]
    return turns


def _fingerprint(prompts: Iterable[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        parts = [prompt.content, prompt.columns, *([prompt.images] if prompt.images else [])]
        digest.update(json.dumps(parts, default=_stable_text).encode())
    return digest.hexdigest()


def _stable_text(value: Any) -> str:
    """Write a value that JSON cannot hold; of an object of another kind, only its type's name is stable."""
    if isinstance(value, bytes | date | time | timedelta | Decimal):
        return repr(value)
    return type(value).__qualname__
