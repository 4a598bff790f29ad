"""Scorers: what every source of rewards has in common, the class of each, and all sources of a run side by side.

A scorer receives a group while it is still being written. A scorer that looks at completions one by one starts as each
ends, so that scoring overlaps with generation; a scorer that compares completions waits for those that it compares.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from ycore.config.algorithms import load_reference
from ycore.config.schema import RewardConfig, RunConfig, ScoredConfig, Width
from ycore.data.prompts import PromptSet
from ycore.engine import Engine
from ycore.engine.commands import EngineSpec
from ycore.engine.kinds import EngineKind
from ycore.engine.server import Server, restart_timeout_s
from ycore.errors import ConfigError, ModelError, RewardError
from ycore.judge.sources import is_agreement, is_judge, is_reward_model, is_teacher, teacher_of
from ycore.models.names import ModelPlan, resolve_model
from ycore.placement.placement import JUDGE, ROLLOUT, check_placement, in_order, parse_placement
from ycore.placement.slots import SlotLease, Slots
from ycore.rewards.answers import without_thinking
from ycore.rewards.builtin import is_code, is_environment, is_reference
from ycore.rewards.loading import reward_names
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


@dataclass(frozen=True)
class Policy:
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

    The class methods answer before the run what its rewards need. `SCORERS` lists the classes. `engines` are those
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
        self, scorers: Sequence[tuple[Sequence[int], Scorer]], meters: Sequence[Meter] = ()
    ) -> None:
        self.meters = meters
        self._scorers = scorers
        self._num_sources = sum(len(sources) for sources, _ in scorers)

    async def start(self, *, timeout_s: float) -> None:
        await together([scorer.start(timeout_s=timeout_s) for _, scorer in self._scorers])

    async def score(self, group: PendingGroup) -> list[list[Score]]:
        """Return `scores_GR`: a score for each completion and reward source."""
        parts = await together([scorer.score(group) for _, scorer in self._scorers])
        scores_GR = [[Score(None)] * self._num_sources for _ in range(len(group))]
        for (sources, _), part in zip(self._scorers, parts, strict=True):
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


def check_api_key(label: str, variable: str | None) -> None:
    """RewardError where the environment lacks the variable with an address's key."""
    if variable is not None and not os.environ.get(variable):
        raise RewardError(
            f"{label}: the environment variable {variable} (api_key_env) is not set; export it"
        )


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


# -- which class scores a reward, and the scoring of a run -------------------------------------------------------------


SCORERS: dict[Callable[[RewardConfig], bool], str] = {
    is_judge: "ycore.scoring.judge_scorer:JudgeScorer",
    is_agreement: "ycore.scoring.judge_scorer:AgreementScorer",
    is_reward_model: "ycore.scoring.model_scorers:RewardModelScorer",
    is_teacher: "ycore.scoring.model_scorers:TeacherScorer",
    is_reference: "ycore.scoring.model_scorers:ReferenceScorer",
    is_environment: "ycore.scoring.model_scorers:EnvironmentScorer",
    is_code: "ycore.scoring.code_scorer:CodeScorer",
}
"""The rewards that are no functions in worker processes; a class is imported for a run that has such a reward."""


def scorer_class(spec: RewardConfig) -> type[Scorer]:
    """Import the class that scores the reward."""
    references = (reference for handles, reference in SCORERS.items() if handles(spec))
    scorer: type[Scorer] = load_reference(
        next(references, "ycore.scoring.reward_pool:RuleScorer")
    )
    return scorer


def is_rule(spec: RewardConfig) -> bool:
    """Return whether the reward is a plain function, for the worker processes."""
    return not any(handles(spec) for handles in SCORERS)


def runs_unknown_code(config: ScoredConfig) -> bool:
    """Return whether a reward runs code that ycore did not bring: a function of the user's, or what the policy wrote."""
    return any(
        is_code(spec) or (is_rule(spec) and ":" in spec.reward) for spec in config.rewards
    )


def trains_a_judge(config: RunConfig) -> bool:
    return any(map(is_agreement, config.rewards))


def served_models(config: RunConfig) -> list[ServedModel]:
    """Return the policy, then every model that scores this run in an engine of ycore's.

    Rewards that use the same model in the same role share its engines. A model with a `base_url` needs none.
    """
    policy = ServedModel(
        ROLLOUT,
        config.model,
        max_model_len=config.engine.max_model_len,
        tensor_parallel=config.engine.tensor_parallel,
    )
    models = {(ROLLOUT, config.model): policy}
    for source, spec in enumerate(config.rewards):
        for model in scorer_class(spec).models(spec, config):
            key = (model.role, model.name)
            model = replace(model, sources=(source,))
            models[key] = _merge(models[key], model) if key in models else model
    return list(models.values())


def first_scorer(models: Sequence[ServedModel]) -> ServedModel | None:
    """Return the first model after the policy; a judge comes before any other."""
    return min(models[1:], key=lambda model: model.role != JUDGE, default=None)


def own_teachers(config: RunConfig) -> list[str]:
    """Return the teachers that every rank of the trainer holds itself."""
    if not config.teaches_exactly:
        return []
    return [teacher_of(spec).model for spec in config.rewards if is_teacher(spec)]


def check_run_placement(
    config: RunConfig, models: Sequence[ServedModel], *, num_slots: int | None = None
) -> None:
    """ConfigError where the models' roles cannot be placed so on `num_slots`, None where these are not known yet."""
    placement = parse_placement(config.placement)
    roles = in_order([model.role for model in models])
    check_placement(
        placement,
        roles=roles,
        num_slots=sum(placement.shares) if num_slots is None else num_slots,
    )


def _merge(model: ServedModel, other: ServedModel) -> ServedModel:
    lengths = [model.max_model_len, other.max_model_len]
    widths = [
        width for width in (model.tensor_parallel, other.tensor_parallel) if width != "auto"
    ]
    return replace(
        model,
        sources=model.sources + other.sources,
        max_model_len=None if None in lengths else max(filter(None, lengths)),
        max_new_tokens=max(model.max_new_tokens, other.max_new_tokens),
        tensor_parallel=max(widths, default="auto"),
    )


def check_rows(config: RunConfig, prompts: PromptSet) -> None:
    """Raise UserError where a reward cannot be loaded, or the dataset lacks what it reads."""
    for spec in config.rewards:
        scorer_class(spec).check_rows(spec, config, prompts)


def check_models(config: RunConfig, *, engine: EngineKind) -> list[str]:
    """Return a line for each model that scores; nothing is started. UserError where one cannot score this run."""
    lines = []
    for spec in config.rewards:
        lines += scorer_class(spec).check_models(spec, config, engine=engine)
    return lines


def check_images(config: RunConfig) -> None:
    """ConfigError where a part of the run would not see the images of its prompts, and would judge without them."""
    problems = {
        spec.reward: problem
        for spec in config.rewards
        if (problem := scorer_class(spec).image_problem(spec, config)) is not None
    }
    if config.has_turns:
        problems["a run with tools, an environment or an agent"] = "writes prompts of text"
    if config.sampling.oversample > 1:
        problems["a run with --oversample"] = "goes on with what was written after text only"
    if config.algorithm not in ("grpo", "rloo", "eval"):
        problems[f"ycore {config.algorithm}"] = (
            "has parts that read text only; take ycore grpo or ycore rloo"
        )
    for part, problem in problems.items():
        raise ConfigError(
            f"the prompts have pictures, and {part} {problem}; leave it out, or remove the pictures"
        )


def build_scoring(
    config: RunConfig, folder: RunFolder, started: Sequence[ScorerEngines], *, policy: Policy
) -> Scoring:
    """Build the scorers of all rewards, with clients for the machine's engines. Call `start` before use.

    `started` are the engines of judges, reward models and teachers.
    """
    from ycore.scoring.reward_pool import RuleScorer, reward_pool

    context = ScorerContext(config, folder, policy, started, reward_names(config.rewards))
    scorers: list[tuple[Sequence[int], Scorer]] = []
    meters: list[Meter] = []
    rules = [source for source, spec in enumerate(config.rewards) if is_rule(spec)]
    if rules:
        pool = reward_pool(config, folder, [config.rewards[source] for source in rules])
        scorers.append((rules, RuleScorer(pool, ImageStore(folder.images))))
        meters.append(pool)
    for source, spec in enumerate(config.rewards):
        if source not in rules:
            scorers.append(((source,), scorer_class(spec).build(spec, source, context)))
    return Scoring(scorers, [*meters, *context.meters.values()])
