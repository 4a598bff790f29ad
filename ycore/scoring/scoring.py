"""Scorers: what every source of rewards has in common, and all sources of a run side by side.

A scorer receives a group while it is still being written. A scorer that looks at completions one by one starts as each
ends, so that scoring overlaps with generation; a scorer that compares completions waits for those that it compares.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, TypeVar

from ycore.config.schema import RewardConfig, RunConfig, Width
from ycore.data.prompts import PromptSet
from ycore.engine import Engine
from ycore.engine.commands import EngineSpec
from ycore.engine.kinds import EngineKind
from ycore.engine.server import Server, restart_timeout_s
from ycore.errors import ConfigError, ModelError
from ycore.models.names import ModelPlan, resolve_model
from ycore.placement.placement import ROLLOUT
from ycore.placement.slots import SlotLease, Slots
from ycore.rewards.answers import without_thinking
from ycore.run.images import ImageStore
from ycore.run.metrics import CountMeter, Meter
from ycore.run.paths import RunFolder
from ycore.run.tasks import together
from ycore.types import THINKING, Completion, Draw, Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

S = TypeVar("S", bound=Server)
M = TypeVar("M", bound=Meter)

TextOf = Callable[[Completion], str]  # the part of a completion that a reward source looks at
plain_text: TextOf = attrgetter("transcript")
NO_IMAGES = ImageStore(None)


@dataclass(frozen=True)
class ServedModel:
    """A model with engines on every slot: the policy, or a model that scores for the reward sources at these positions.

    `width` and `engines` follow from the machine (`device_memory`, `engines`).
    """

    role: str
    name: str
    sources: tuple[int, ...] = ()
    max_model_len: int | None = None  # tokens; None is the model's own context
    max_new_tokens: int = 0  # tokens that a scorer writes after the policy's completion
    tensor_parallel: Width = "auto"
    width: int = 1  # devices that an engine spans
    engines: tuple[EngineSpec, ...] = ()  # slot by slot, as many on each

    def option(self, key: str) -> str:
        """Return the name of an engine setting in messages."""
        return f"engine.{key}" if self.role == ROLLOUT else f"{key} of {self.name}"


@dataclass(frozen=True)
class ScorerEngines:
    """A model that scores: the indices of the reward sources it serves, and its engines' names, slot by slot."""

    role: str
    sources: Sequence[int]
    engines: Sequence[str]
    model: Path
    max_model_len: int


class Policy(NamedTuple):
    """The policy as a scorer sees it: its engines, its tokenizer, its context in tokens."""

    engines: Sequence[Engine]
    tokenizer: "PreTrainedTokenizerBase"
    max_model_len: int


@dataclass(frozen=True)
class PendingGroup:
    """A group while it is written. `tasks_G[g]` ends when completion `g` is written."""

    draw: Draw
    tasks_G: Sequence[asyncio.Task[Completion]]
    step: int
    slots: Slots

    def __len__(self) -> int:
        return len(self.tasks_G)

    async def all(self) -> list[Completion]:
        return list(await asyncio.gather(*self.tasks_G))

    @asynccontextmanager
    async def turn(self, role: str, *, at_address: bool = False) -> AsyncIterator[SlotLease]:
        """Hold a slot for a scorer's request; a model at an address needs none.

        Where slots are shared in time, first wait for the whole group.
        """
        if at_address:
            yield SlotLease(0)
            return
        if self.slots.gathers:
            await self.all()
        async with self.slots.turn(role) as turn:
            yield turn


class ScorerEngine(Protocol):
    """The client of an engine, or of an address, that a scorer asks."""

    async def wait_ready(self, *, timeout_s: float) -> None: ...

    async def close(self) -> None: ...


@dataclass
class ScorerContext:
    """The parts of a run that scorers are built from. `names` are those of the reward sources."""

    config: RunConfig
    folder: RunFolder
    policy: Policy
    started: Sequence[ScorerEngines]
    names: Sequence[str]
    meters: dict[type[Meter], Meter] = field(default_factory=dict)

    def meter(self, kind: type[M]) -> M:
        """Return the run's only meter of this class."""
        meter = self.meters.setdefault(kind, kind())
        assert isinstance(meter, kind)
        return meter

    def models_of(self, source: int) -> list[ScorerEngines]:
        return [model for model in self.started if source in model.sources]

    def tokenizer(self, model: ScorerEngines) -> "PreTrainedTokenizerBase":
        from transformers import AutoTokenizer

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model.model, trust_remote_code=self.config.trust_remote_code
        )
        return tokenizer

    def servers(self, model: ScorerEngines, kind: type[S]) -> list[S]:
        return scorer_servers(self.config, self.folder, model, kind)


class Scorer:
    """A reward source in a run, or several of one kind.

    The class methods answer before the run what its rewards need. `scorers.SCORERS` lists the classes. `engines` are those
    that the scorer waits for and closes.
    """

    kind: ClassVar[str] = ""
    name: str
    engines: Sequence[ScorerEngine] = ()

    @classmethod
    def models(cls, spec: RewardConfig, config: RunConfig) -> list[ServedModel]:
        """Return the models that the run must serve in engines; models of the same role and name share theirs."""
        return []

    @classmethod
    def check_rows(cls, spec: RewardConfig, config: RunConfig, prompts: PromptSet) -> None:
        """Raise UserError where the dataset lacks what the reward reads."""

    @classmethod
    def check_models(
        cls, spec: RewardConfig, config: RunConfig, *, engine: EngineKind
    ) -> list[str]:
        """Return a line for each model; UserError where a model cannot score the run. `engine` is the policy's."""
        return []

    @classmethod
    def image_problem(cls, spec: RewardConfig, config: RunConfig) -> str | None:
        """Return why the reward cannot be used for prompts with images; None where it can."""
        return "reads text only"

    @classmethod
    def build(cls, spec: RewardConfig, source: int, context: ScorerContext) -> "Scorer":
        """Build the scorer of the reward at index `source`; nothing is started yet."""
        raise NotImplementedError

    async def start(self, *, timeout_s: float) -> None:
        await together([engine.wait_ready(timeout_s=timeout_s) for engine in self.engines])

    async def score(self, group: PendingGroup) -> list[list[Score]]:
        """Return scores by completion and by the scorer's sources. A completion that cannot be scored is masked.

        Here: one source, whose completions are scored one by one as each is written.
        """
        scores = await together([self.score_one(group, index) for index in range(len(group))])
        return [[score] for score in scores]

    async def score_one(self, group: PendingGroup, index: int) -> Score:
        """Return the score of one completion, for scorers that do not compare completions."""
        raise NotImplementedError

    def masked(self, problem: str) -> Score:
        label = f"{self.kind} {self.name}".strip()
        return Score(None, problem=f"{label}: {problem}"[:300])

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()


class Scoring:
    """All scorers of a run, each with the indices of the reward sources that it serves.

    Example: `Scoring([((0, 2), RuleScorer(pool)), ((1,), judge)])`: of three sources, the second is a judge.
    """

    def __init__(
        self,
        scorers: Sequence[tuple[Sequence[int], Scorer]],
        meters: Sequence[Meter] = (),
        unscored: Mapping[str, set[int]] = MappingProxyType({}),
    ) -> None:
        self._unscored = unscored
        self.meters = meters
        self._scorers = scorers
        self._num_sources = sum(len(sources) for sources, _ in scorers)

    async def start(self, *, timeout_s: float) -> None:
        await together([scorer.start(timeout_s=timeout_s) for _, scorer in self._scorers])

    async def score(self, group: PendingGroup) -> list[list[Score]]:
        """Return `scores_GR`: a score for each completion and reward source."""
        unscored = self._unscored.get(group.draw.prompt.dataset, set())
        scorers = [pair for pair in self._scorers if not unscored.issuperset(pair[0])]
        parts = await together([scorer.score(group) for _, scorer in scorers])
        scores_GR = [[Score(None)] * self._num_sources for _ in range(len(group))]
        for (sources, _), part in zip(scorers, parts, strict=True):
            for scores_R, new_scores in zip(scores_GR, part, strict=True):
                for source, score in zip(sources, new_scores, strict=True):
                    scores_R[source] = score
        return scores_GR

    async def close(self) -> None:
        await asyncio.gather(*(scorer.close() for _, scorer in self._scorers))


def scorer_servers(
    config: RunConfig, folder: RunFolder, model: ScorerEngines, kind: type[S]
) -> list[S]:
    """Return clients of a model's servers, slot by slot."""
    return [
        kind(
            name,
            folder.socket(name),
            request_timeout_s=config.engine.request_timeout_s,
            restart_timeout_s=restart_timeout_s(config.engine),
        )
        for name in model.engines
    ]


def plan_served_model(
    label: str, model: str, config: RunConfig, *, engine: EngineKind, way_out: str
) -> ModelPlan:
    """Resolve the model of a scorer; UserError where it is unknown, or the run has no vLLM to serve it."""
    if not engine.has_servers:
        raise ConfigError(
            f"{label} runs in a vLLM engine, and this run generates with {engine.name}; {way_out}"
        )
    try:
        return resolve_model(model, trust_remote_code=config.trust_remote_code)
    except ModelError as problem:
        raise ModelError(f"{label}: {problem}") from None


def text_of(spec: RewardConfig) -> TextOf:
    return text_without_thinking if spec.strip_thinking else plain_text


def text_without_thinking(completion: Completion) -> str:
    """Return the transcript with only what follows the thinking in each of the policy's turns."""
    thinking = THINKING if completion.in_thinking else ""
    turns = []
    for turn in completion.turns:
        if turn.by_policy:
            messages = tuple(
                {
                    **message,
                    "content": without_thinking(thinking + (message.get("content") or "")),
                }
                for message in turn.messages
            )
            turn = replace(turn, messages=messages)
        turns.append(turn)
    text = str(without_thinking(completion.full_text))
    return replace(completion, text=text, turns=tuple(turns)).transcript


@dataclass
class RequestMeter(CountMeter):
    """Requests to all models of one kind. `seconds` are those of the requests, without the wait for a slot."""

    calls: float = 0
    seconds: float = 0
    tokens: float = 0

    kind: ClassVar[str]

    @contextmanager
    def timed(self) -> Iterator[None]:
        self.calls += 1
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started

    def summary(self) -> Mapping[str, float]:
        return {
            f"ycore/{self.kind}/calls": self.calls,
            f"ycore/{self.kind}/latency_s": self.seconds / max(1, self.calls),
            f"ycore/{self.kind}/tokens": self.tokens,
        }
