"""The values that pass between rooms: frozen, typed, of the standard library's types.

Axes, as suffixes of names: `_P` prompts of a round, `_G` completions of a group, `_R` reward sources, `_T` tokens.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

Record = Mapping[str, Any]
"""An object of JSON or YAML that is read and not changed: a plan, a header, a recipe's settings."""

JsonObject = dict[str, Any]
"""An object of JSON or YAML that is filled, or taken apart."""

Metrics = dict[str, float]
"""Numbers of a step, a round or an evaluation, by their names in metrics.jsonl or in a summary."""

Message = Record
"""One chat turn: `{"role": ..., "content": ...}`, and what else its row says: `tool_calls`, `reasoning_content`, ...

The content is None only beside `tool_calls`.
"""

Content = str | list[Message]
"""A prompt or a completion as a person sees it: plain text, or chat turns."""

NO_PROMPT: Content = [{"role": "user", "content": ""}]
"""The prompt of a row without one, as in TRL; an environment puts its question at the end."""


THINKING = "<think>\n"
"""The end of a prompt whose completion begins inside the thinking."""

THOUGHT_TAG = re.compile(
    r"</?(?:(?:seed:)?think|thinking|thought|reasoning)>|\[/?THINK\]|\u25c1/?think\u25b7"
    r"|<\|(?:begin|end)_of_thought\|>|<\|(?:START|END)_THINKING\|>"
    r"|<\|channel\|>(?:analysis|final)<\|message\|>"
)
"""The tags around the thinking of the published families."""


def _ends_thinking(tag: str) -> bool:
    return "/" in tag or "end_" in tag.lower() or "final" in tag


def opens_thinking(rendered_prompt: str) -> bool:
    """Whether what follows this prompt, of which the end is enough, begins inside the thinking."""
    tags = THOUGHT_TAG.findall(rendered_prompt)
    return (
        bool(tags)
        and rendered_prompt.rstrip().endswith(tags[-1])
        and not _ends_thinking(tags[-1])
    )


def after_thinking(text: str) -> str:
    """Return what follows the last end of thinking; nothing where the thinking never ends."""
    *_, last = [None, *THOUGHT_TAG.finditer(text)]
    if last is None:
        return text
    return text[last.end() :] if _ends_thinking(last[0]) else ""


IMAGE_MARK = "\ufffc"
"""Where a picture stands in the text of a prompt that has pictures: Unicode's object replacement character."""


class Image(NamedTuple):
    """A picture by reference: the sha256 of its file, which `run.files` keeps, and its size in pixels."""

    sha256: str
    width: int
    height: int


def in_blocks(content: Content) -> list[JsonObject]:
    """Chat turns in blocks of text and images, as processors and TRL take them: `{"type": "image"}` at each mark."""
    turns = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return [{**turn, "content": _blocks(turn["content"] or "")} for turn in turns]


def _blocks(text: str) -> list[JsonObject]:
    parts = re.split(f"({IMAGE_MARK})", text)
    return [
        {"type": "image"} if part == IMAGE_MARK else {"type": "text", "text": part}
        for part in parts
        if part or not text
    ]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the dataset, ready for the policy: `Prompt(row=3, content="2 + 2?", columns={"answer": "4"})`."""

    row: int
    content: Content
    columns: Record = field(default_factory=dict)
    images: tuple[Image, ...] = ()
    """Images in the order of their marks in the content. Without images a mark is an ordinary letter."""
    tools: tuple[Record, ...] = ()
    """Tools that the row lists, which the chat template shows."""
    template_arguments: Record = field(default_factory=dict)
    """The row's own arguments of the chat template, over the run's."""
    dataset: str = ""
    """The name of its dataset, where a run has several."""

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.content, str)


@dataclass(frozen=True, slots=True)
class Draw:
    """A prompt at its place in the run's order: `position` counts every prompt ever drawn."""

    position: int
    prompt: Prompt
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """One reward source's answer for one completion; `value` None means masked, and `problem` says why.

    `logprobs` are a teacher's, of every token of the completion. `verdict` is what a judge of it wrote, cut short.
    `logged` is what a reward function said beside: a number is a metric, and text a column of tables of completions.
    """

    value: float | None
    problem: str | None = None
    logprobs: tuple[float, ...] | None = None
    verdict: str | None = None
    logged: Mapping[str, float | str] = field(default_factory=dict)


def said(message: Record) -> str:
    """Return the text of a chat message, with the tools that it calls."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return "\n".join(
        [
            message.get("content") or "",
            *(f"{call['name']}({call['arguments']})" for call in calls),
        ]
    ).strip()


@dataclass(frozen=True, slots=True)
class Turn:
    """A stretch of a completion's tokens by one writer: the policy, or the tools and environment that answer it.

    `messages` are what TRL's reward functions see of it: the assistant's message, or those of tools or a user. Of the
    environment's turns, `calls` of tools were asked, `failures` of them gave an error, and all took `seconds`.
    `reward` is what an environment paid for a turn of the policy, where it pays for single ones and is asked to.
    One that `starts_new_sequence` is the prompt of another sequence: what follows was written without what came before.
    """

    by_policy: bool
    num_tokens: int
    messages: tuple[Record, ...]
    calls: int = 0
    failures: int = 0
    seconds: float = 0.0
    starts_new_sequence: bool = False
    reward: float | None = None


class TokenSequence(NamedTuple):
    """One of a completion's: what it follows, and where its tokens are in the completion's, `start` to `stop`."""

    prompt_ids: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens after one prompt: the policy's, and between its turns those of an environment.

    `logprobs` are of the policy's tokens under the distribution that was sampled (after temperature and truncation),
    and 0 at the environment's; None where the engine shares the trainer's weights. `text` is the policy's last turn.
    `turns` cover all tokens in order; none where all are the policy's one turn. `earned` is what its environment paid.
    `env_state` has its environment's attributes at its end, as JSON, for reward functions that look at them.
    `prompt_ids` are of a prompt of its own, which an agent wrote; None where it follows its group's.
    `segments` are (end, version) of the tokens that earlier versions wrote; `policy_version` wrote the rest.
    `in_thinking`: its prompt ends with `<think>`, so that it begins inside the thinking.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    text: str
    finish_reason: str
    policy_version: int
    turns: tuple[Turn, ...] = ()
    earned: Score | None = None
    prompt_ids: tuple[int, ...] | None = None
    env_state: str | None = None
    segments: tuple[tuple[int, int], ...] = ()
    in_thinking: bool = False

    @property
    def full_text(self) -> str:
        """The text behind the `<think>` that the prompt opened."""
        return THINKING + self.text if self.in_thinking else self.text

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """(end, version) of all its parts, in order."""
        return (*self.segments, (len(self.token_ids), self.policy_version))

    @property
    def first_version(self) -> int:
        """The oldest of the versions that wrote it."""
        return min(version for _, version in self.versions)

    def with_versions(self, versions: Sequence[tuple[int, int]]) -> "Completion":
        """Return it with these `versions`; neighbours that are the same become one."""
        by_version = itertools.groupby(versions, key=itemgetter(1))
        *segments, (_, last) = [list(parts)[-1] for _, parts in by_version]
        return replace(self, segments=tuple(segments), policy_version=last)

    @property
    def mask(self) -> tuple[int, ...]:
        """1 at each token of the policy, 0 at each of the environment: TRL's `tool_mask`."""
        if not self.turns:
            return (1,) * len(self.token_ids)
        return tuple(int(turn.by_policy) for turn in self.turns for _ in range(turn.num_tokens))

    def sequences(self, prompt_ids: tuple[int, ...]) -> list[TokenSequence]:
        """Return the token sequences, after `prompt_ids` or after prompts of their own: one, or several where an agent
        asked in more than one conversation."""
        sequences = []
        prompt_ids = self.prompt_ids or prompt_ids
        first = 0
        for start, end, turn in self._places():
            if turn.starts_new_sequence:
                sequences.append(TokenSequence(prompt_ids, first, start))
                prompt_ids = self.token_ids[start:end]
                first = end
        return [*sequences, TokenSequence(prompt_ids, first, len(self.token_ids))]

    def _places(self) -> list[tuple[int, int, Turn]]:
        """Return each turn, after where it begins and ends in `token_ids`."""
        ends = itertools.accumulate(turn.num_tokens for turn in self.turns)
        return [
            (end - turn.num_tokens, end, turn)
            for turn, end in zip(self.turns, ends, strict=True)
        ]

    @property
    def rewarded_turns(self) -> list[tuple[int, int, float | None]]:
        """Where the policy's turns are in `token_ids`, and their rewards. The last turn is not there: what is paid for
        it is the outcome's, which all turns share."""
        of_policy = [
            (start, end, turn.reward) for start, end, turn in self._places() if turn.by_policy
        ]
        return of_policy[:-1]

    @property
    def messages(self) -> list[Record]:
        """All turns as chat messages."""
        if not self.turns:
            return [{"role": "assistant", "content": self.text}]
        return [message for turn in self.turns for message in turn.messages]

    @property
    def transcript(self) -> str:
        """The text; of several turns all, each after its speaker. Only speakers' names begin at a line's first column,
        so that none can speak for another."""
        if not self.turns:
            return self.text
        return "\n".join(
            "\n  ".join(f"{message['role']}: {said(message)}".splitlines())
            for message in self.messages
        )


@dataclass(frozen=True, slots=True)
class Group:
    """The completions of one prompt, scored: `scores_GR[g][r]` is reward source `r` on completion `g`.

    `greedy_scores_R` are those of the prompt's greedy completion, which is a baseline and is not trained on; None
    where the run has no such baseline.
    """

    draw: Draw
    completions: tuple[Completion, ...]
    scores_GR: tuple[tuple[Score, ...], ...]
    greedy_scores_R: tuple[Score, ...] | None = None

    def scored(self) -> Iterator[tuple[Completion, tuple[Score, ...]]]:
        """Return each completion with its scores."""
        return zip(self.completions, self.scores_GR, strict=True)

    @property
    def rewards_GR(self) -> list[list[float | None]]:
        """Return each completion's rewards by source; None where a source gave none."""
        return [[score.value for score in scores_R] for scores_R in self.scores_GR]

    @property
    def turn_rewards(self) -> list[list[float | None]]:
        """Rewards of each completion's turns, without its last turn."""
        return [
            [reward for _, _, reward in completion.rewarded_turns]
            for completion in self.completions
        ]

    @property
    def first_version(self) -> int:
        """The oldest of the versions that wrote it."""
        return min(completion.first_version for completion in self.completions)

    @property
    def sequences(self) -> list[TokenSequence]:
        """The token sequences of all completions."""
        return [
            sequence
            for completion in self.completions
            for sequence in completion.sequences(self.draw.token_ids)
        ]

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions, whoever wrote them; a trainer computes on these."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def num_written(self) -> int:
        """The policy's own tokens."""
        return sum(sum(completion.mask) for completion in self.completions)


@dataclass(frozen=True, slots=True)
class Finished:
    """A scored group; `teaches` says whether its rewards give a gradient.

    `stats` is what it tells of its prompt, once (`round.sampling.stats_of`).
    """

    group: Group
    teaches: bool
    stats: tuple[float, float] | None = None


# -- as JSON, in the journal, in checkpoints and between ranks; nothing is pickled --------------------------------------


def to_bytes(value: object) -> bytes:
    """Encode as UTF-8 JSON. A column's value without a JSON type, a date for example, becomes its text."""
    return json.dumps(value, ensure_ascii=False, default=_plain).encode(errors="surrogatepass")


def _plain(value: Any) -> Any:
    """Return a dataclass's fields. `asdict` would copy token ids one by one, ten times the time of all the rest."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return str(value)


def from_bytes(data: bytes) -> Group:
    return from_json(Group, json.loads(data))


def to_json(value: object) -> JsonObject:
    """Return plain JSON values, for a file that holds more than one group."""
    plain: JsonObject = json.loads(to_bytes(value))
    return plain


def from_json(kind: type[T], value: Record) -> T:
    """Return the value of this kind that `to_json` gave."""
    parsed: T = _adapter(kind).validate_python(value)  # type: ignore[arg-type]
    return parsed


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter  # which confined processes do not have

    return TypeAdapter(kind)


def number_from(text: str, *, bits: int = 63) -> int:
    """Return a number of at most 64 bits that looks drawn at random, the same for the same text."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)
