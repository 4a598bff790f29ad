"""Scorers: what every source of rewards has in common, reward functions in workers, all sources of a run side by side.

A scorer receives a group while it is still being written. A scorer that looks at completions one by one starts as each
ends, so that scoring overlaps with generation; a scorer that compares completions waits for those that it compares.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

from ycore.config.schema import (
    RewardConfig,
    RunConfig,
    ScoredConfig,
    Width,
)
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
from ycore.rewards.builtin import similarity
from ycore.rewards.loading import IN_THINKING, Inputs
from ycore.rewards.worker_client import RewardWorker, check_reward, reward_confinement
from ycore.run.files import NO_IMAGES, ImageStore, RunFolder
from ycore.run.metrics import CountMeter, Meter
from ycore.run.tasks import together
from ycore.sandbox.confined_worker import CallFailed
from ycore.sandbox.level import LEVEL_NUMBERS, choose_level
from ycore.types import THINKING, Completion, Draw, Prompt, Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

S = TypeVar("S", bound=Server)
M = TypeVar("M", bound=Meter)

TextOf = Callable[[Completion], str]  # the part of a completion that a reward source looks at
plain_text: TextOf = attrgetter("transcript")


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
    """A reward source in a run.

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
    def compares(cls, spec: RewardConfig) -> bool:
        """Return whether a completion's score is its place among those of its group."""
        return False

    @classmethod
    def build(cls, spec: RewardConfig, source: int, context: ScorerContext) -> "Scorer":
        """Build the scorer of the reward at index `source`; nothing is started yet."""
        return cls()

    async def start(self, *, timeout_s: float) -> None:
        await together([engine.wait_ready(timeout_s=timeout_s) for engine in self.engines])

    async def score(self, group: PendingGroup) -> list[Score]:
        """Return the score of each completion. One that cannot be scored is masked.

        Here: they are scored one by one as each is written.
        """
        return await together([self.score_one(group, index) for index in range(len(group))])

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
    """All scorers of a run, in the order of its reward sources."""

    def __init__(
        self,
        scorers: Sequence[Scorer],
        meters: Sequence[Meter] = (),
        unscored: Mapping[str, set[int]] = MappingProxyType({}),
    ) -> None:
        self._unscored = unscored
        self.meters = meters
        self._scorers = scorers

    async def start(self, *, timeout_s: float) -> None:
        await together([scorer.start(timeout_s=timeout_s) for scorer in self._scorers])

    async def score(self, group: PendingGroup) -> list[list[Score]]:
        """Return `scores_GR`: a score for each completion and reward source."""
        unscored = self._unscored.get(group.draw.prompt.dataset, set())
        scores_RG = [[Score(None)] * len(group) for _ in self._scorers]
        called = [source for source in range(len(self._scorers)) if source not in unscored]
        parts = await together([self._scorers[source].score(group) for source in called])
        for source, scores_G in zip(called, parts, strict=True):
            scores_RG[source] = scores_G
        return [list(scores_R) for scores_R in zip(*scores_RG, strict=True)]

    async def close(self) -> None:
        await asyncio.gather(*(scorer.close() for scorer in self._scorers))


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


class _Caller(NamedTuple):
    """The workers that call a reward, of which the idle ones wait, and its index among their rewards."""

    idle: asyncio.Queue[RewardWorker]
    source: int


class RewardPool:
    """Example: `pool = RewardPool(config, folder, specs)`, `await pool.score(0, offered, step=1)`, `await pool.close()`.

    Belongs to one event loop; its workers end with the thread that runs it. They see the run's images, and nothing else
    of it. Rewards that may see or reach different things are never in one process.
    """

    def __init__(
        self, config: ScoredConfig, folder: RunFolder, specs: Sequence[RewardConfig]
    ) -> None:
        """Start nothing yet. `specs` are those of the run's rewards that the workers call."""
        settings = config.reward_workers
        self._deadline_s = settings.deadline_s
        self._workers: list[RewardWorker] = []
        self._starting = asyncio.Lock()
        self._restarts_reported = 0
        self.level = choose_level(config.sandbox.level).level
        self._callers: dict[int, _Caller] = {}
        groups: dict[str, list[int]] = {}  # that the recipe allows the same
        for source, spec in enumerate(specs):
            groups.setdefault(spec.sandbox.model_dump_json(), []).append(source)
        for number, sources in enumerate(groups.values()):
            group = [specs[source] for source in sources]
            idle = asyncio.Queue[RewardWorker]()
            confinement = reward_confinement(
                group,
                settings=settings,
                sandbox=config.sandbox,
                run_folder=folder.root,
                run_id=folder.run_id,
            )
            for slot in range(settings.workers):
                worker = RewardWorker(
                    group, confinement, log=folder.log("rewards"), name=f"{number}.{slot}"
                )
                self._workers.append(worker)
                idle.put_nowait(worker)
            for index, source in enumerate(sources):
                self._callers[source] = _Caller(idle, index)

    def take(self) -> Sequence[float]:
        """Return how many workers were started since the last call in place of one that hung or ended."""
        restarts = sum(worker.restarts for worker in self._workers) - self._restarts_reported
        self._restarts_reported += restarts
        return [float(restarts)]

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        """Return the restarts, and the sandbox level: 2 namespaces, 1 Landlock, 0 nothing."""
        level = LEVEL_NUMBERS[self.level]
        return {"ycore/reward_restarts": sums[0], "ycore/sandbox_level": level}

    async def start(self) -> None:
        """Start every worker now, not at its first call; RewardError when the rewards cannot be loaded."""
        async with self._starting:
            await together([worker.ready() for worker in self._workers])

    async def close(self) -> None:
        """Kill the workers, whatever they are doing; the pool cannot be used again."""
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def score(
        self, source: int, offered: Mapping[str, Sequence[Any]], *, step: int
    ) -> list[Score]:
        """Score completions together; a call that fails is repeated item by item, so that only the guilty are masked.

        Args:
            source: the reward's place among `specs`.
            offered: what its function may take, by name, one value per completion.
            step: the training step, which rewards see as `trainer_state.global_step`.
        """
        caller = self._callers[source]
        size = len(offered["completions"])
        worker = await caller.idle.get()
        try:
            inputs = (await worker.ready())[caller.source]
            return await worker.ask(
                caller.source,
                {"step": step, "inputs": _taken(inputs, offered)},
                count=size,
                deadline_s=self._deadline_s,
            )
        except CallFailed as failure:
            if size == 1:
                return [Score(None, problem=str(failure))]
        finally:
            caller.idle.put_nowait(worker)
        items = [
            {name: [values[index]] for name, values in offered.items()} for index in range(size)
        ]
        scores = await together([self.score(source, item, step=step) for item in items])
        return [score for (score,) in scores]


def _taken(inputs: Inputs, offered: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Return what a reward takes and JSON can carry (no image, no date); CallFailed where it lacks something."""
    taken = {IN_THINKING: offered[IN_THINKING]} if IN_THINKING in offered else {}
    for name in filter(inputs.accepts, offered):
        try:
            json.dumps(offered[name])
            taken[name] = offered[name]
        except (TypeError, ValueError) as error:
            if name in inputs.required:
                raise CallFailed(
                    f"column {name!r} cannot be sent to a worker: {error}"
                ) from error
    return taken


@dataclass(eq=False)
class RuleScorer(Scorer):
    """A reward function in worker processes. It receives whole groups, since it may compare completions."""

    pool: RewardPool
    source: int  # its place in the pool
    images: ImageStore = NO_IMAGES

    @classmethod
    def check_rows(cls, spec: RewardConfig, config: RunConfig, prompts: PromptSet) -> None:
        check_reward(
            spec,
            [*prompts.columns, *(["environments"] if config.env else [])],
            settings=config.reward_workers,
            sandbox=config.sandbox,
            run_folder=Path(config.output),
        )

    @classmethod
    def image_problem(cls, spec: RewardConfig, config: RunConfig) -> str | None:
        return None

    @classmethod
    def compares(cls, spec: RewardConfig) -> bool:
        return spec.reward == similarity.__name__

    async def start(self, *, timeout_s: float) -> None:
        await self.pool.start()

    async def score(self, group: PendingGroup) -> list[Score]:
        completions = await group.all()
        prompt = group.draw.prompt
        num = len(completions)
        if prompt.is_chat:
            contents: list[Any] = [completion.messages for completion in completions]
        else:
            contents = [completion.text for completion in completions]
        offered = {
            **{name: [value] * num for name, value in prompt.columns.items()},
            **self.extra_columns(prompt, completions),
            "prompts": [prompt.content] * num,
            "completions": contents,
            "completion_ids": [list(completion.token_ids) for completion in completions],
        }
        return await self.pool.score(self.source, offered, step=group.step)

    def extra_columns(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> dict[str, list[Any]]:
        """Return what functions may ask for beside the dataset's columns and the completions themselves."""
        columns: dict[str, list[Any]] = {}
        if any(completion.in_thinking for completion in completions):
            columns[IN_THINKING] = [completion.in_thinking for completion in completions]
        if prompt.images:
            files = [str(self.images.path(image.sha256)) for image in prompt.images]
            columns["images"] = [files] * len(completions)
        if any(completion.env_state is not None for completion in completions):
            columns["environments"] = [completion.env_state for completion in completions]
        return columns

    async def close(self) -> None:
        await self.pool.close()


def rule_scorers(
    config: ScoredConfig,
    folder: RunFolder,
    specs: Mapping[int, RewardConfig],
    kind: type[RuleScorer] = RuleScorer,
) -> dict[int, RuleScorer]:
    """Return a scorer of each reward function. All share workers."""
    if not specs:
        return {}
    pool = RewardPool(config, folder, list(specs.values()))
    images = ImageStore(folder.images)
    return {source: kind(pool, place, images) for place, source in enumerate(specs)}
