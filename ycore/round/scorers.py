"""From a run's configuration to its Scoring: the reward workers, judges and reward models of this rank.

A reward model as a Scorer: each completion's number, asked for as it ends.

`reference_probability` as a Scorer: the policy is asked how likely the right answer is, after what it wrote.

Not here: starting engines (`launch`), and what a scorer does (`scoring`, `judge_scorer`, `reward_model_scorer`).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ycore.config.schema import RewardConfig, RunConfig
from ycore.engine import Engine
from ycore.engine.judge_engine import JudgeEngine, RemoteJudge, VllmJudge
from ycore.engine.server import Server, restart_timeout_s
from ycore.engine.vllm_engine import VllmRewardModel
from ycore.judge.question import Questioner, break_special_tokens
from ycore.judge.sources import RewardModel, is_judge, is_reward_model, is_rule, judge_of, reward_model_of
from ycore.placement.placement import REWARD_MODEL
from ycore.rewards.answers import without_thinking
from ycore.rewards.loading import reward_names
from ycore.rewards.pool import RewardPool
from ycore.rewards.reference import (
    Reference,
    as_answer,
    before_the_answer,
    is_reference,
    reference_of,
    reference_reward,
)
from ycore.round.judge_scorer import JudgeScorer
from ycore.round.scoring import (
    JudgeMeter,
    Meter,
    RewardModelMeter,
    RuleScorer,
    Scorer,
    Scoring,
    TextOf,
    WorkerMeter,
    Writing,
    as_content,
    plain_text,
    together,
)
from ycore.round.slots import ROLLOUT
from ycore.run.paths import RunFolder
from ycore.run.reports import this_rank
from ycore.types import Completion, Prompt, Score

Encode = Callable[[Prompt, str], list[int]]
"""Prompt and completion as the reward model's own token ids."""


class RewardModelScorer:
    """One reward model; `engines[slot]` are its engines."""

    def __init__(
        self,
        name: str,
        reward_model: RewardModel,
        engines: Sequence[VllmRewardModel],
        *,
        encode: Encode,
        max_model_len: int,
        meter: RewardModelMeter,
        text_of: TextOf = plain_text,
    ) -> None:
        self._name = name
        self._reward_model = reward_model
        self._engines = engines
        self._encode = encode
        self._max_model_len = max_model_len
        self._meter = meter
        self._text_of = text_of

    async def start(self, *, timeout_s: float) -> None:
        await together([engine.wait_ready(timeout_s=timeout_s) for engine in self._engines])

    async def score(self, writing: Writing) -> list[list[Score]]:
        scores = await together([self._one(writing, index) for index in range(len(writing))])
        return [[score] for score in scores]

    async def _one(self, writing: Writing, index: int) -> Score:
        completion = await writing.tasks_G[index]
        token_ids = self._encode(writing.draw.prompt, self._text_of(completion))
        if len(token_ids) > self._max_model_len:
            return self._masked("longer than its context")
        async with writing.turn(REWARD_MODEL) as slot:
            started = time.perf_counter()
            logit = await self._engines[slot].logit(token_ids)
            slot.num_tokens = len(token_ids)
        self._meter.calls += 1
        self._meter.seconds += time.perf_counter() - started
        self._meter.tokens += len(token_ids)
        if not math.isfinite(logit):
            return self._masked("its answer is no finite number")
        return Score(self._reward_model.reward(logit))

    def _masked(self, why: str) -> Score:
        return Score(None, problem=f"reward model {self._name}: {why}")

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()


Tokenize = Callable[[str], list[int]]
"""A text's token ids, without the tokens that begin or end one."""


class ReferenceScorer:
    """`engines[slot]` are the policy's own."""

    def __init__(
        self, reference: Reference, engines: Sequence[Engine], *, tokenize: Tokenize, max_model_len: int
    ) -> None:
        self._reference = reference
        self._engines = engines
        self._tokenize = tokenize
        self._max_model_len = max_model_len

    async def start(self, *, timeout_s: float) -> None:
        """Nothing to wait for: the round waits for its engines."""

    async def score(self, writing: Writing) -> list[list[Score]]:
        answer = as_answer(writing.draw.prompt.columns.get("answer"))
        answer_ids = self._tokenize(answer)
        if not answer_ids:
            return [[Score(None)] for _ in range(len(writing))]  # the row has no answer: it does not apply
        bare = await self._logprobs(writing, "", answer_ids) if self._reference.debias else None
        scores = await together([self._one(writing, index, answer_ids, bare) for index in range(len(writing))])
        return [[score] for score in scores]

    async def _one(self, writing: Writing, index: int, answer_ids: list[int], bare: Sequence[float] | None) -> Score:
        completion = await writing.tasks_G[index]
        logprobs = await self._logprobs(writing, completion.text, answer_ids)
        if logprobs is None or (bare is None and self._reference.debias):
            return Score(None, problem="reference_probability: longer than the engine's context")
        return Score(reference_reward(logprobs, bare))

    async def _logprobs(self, writing: Writing, text: str, answer_ids: list[int]) -> Sequence[float] | None:
        """Of the answer's tokens after the prompt and this text; None where that does not fit."""
        before = before_the_answer(text, bridge=self._reference.bridge if text else "")
        context = [*writing.draw.token_ids, *self._tokenize(before)]
        if len(context) + len(answer_ids) >= self._max_model_len:
            return None
        async with writing.slots.turn(ROLLOUT) as slot:
            return await self._engines[slot].logprobs_of(context, answer_ids)

    async def close(self) -> None:
        """The engines are the round's."""


@dataclass(frozen=True, slots=True)
class ScorerEngines:
    """One model that scores: the reward sources it serves, and its engines, slot by slot."""

    role: str
    sources: Sequence[int]
    engines: Sequence[str]
    model: Path
    max_model_len: int


def build_scoring(
    config: RunConfig, folder: RunFolder, started: Sequence[ScorerEngines], *, policy: "Policy | None" = None
) -> Scoring:
    """Every reward source of the run, ready to be started, with the engines of this rank's own slots."""
    builder = _Builder(config, folder, {source: one for one in started for source in one.sources})
    rules = [source for source, spec in enumerate(config.rewards) if is_rule(spec) and not is_reference(spec)]
    scorers: list[tuple[Sequence[int], Scorer]] = []
    if rules:
        scorers.append((rules, builder.rules([config.rewards[source] for source in rules])))
    for source, spec in enumerate(config.rewards):
        if is_judge(spec):
            scorers.append(((source,), builder.judge(source, spec)))
        elif is_reward_model(spec):
            scorers.append(((source,), builder.reward_model(source, spec)))
        elif is_reference(spec) and policy is not None:
            scorers.append(((source,), policy.scorer(spec)))
    return Scoring(scorers, builder.meters())


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy itself, for the reward that asks it: its engines on this rank's slots, and its tokenizer."""

    engines: Sequence[Engine]
    tokenizer: PreTrainedTokenizerBase
    max_model_len: int

    def scorer(self, spec: RewardConfig) -> ReferenceScorer:
        def tokenize(text: str) -> list[int]:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

        return ReferenceScorer(reference_of(spec), self.engines, tokenize=tokenize, max_model_len=self.max_model_len)


class _Builder:
    """What all scorers of a run share."""

    def __init__(self, config: RunConfig, folder: RunFolder, started: Mapping[int, ScorerEngines]) -> None:
        self._config = config
        self._folder = folder
        self._started = started
        self._names = reward_names(config.rewards)
        self._judges: JudgeMeter | None = None
        self._reward_models: RewardModelMeter | None = None
        self._workers: WorkerMeter | None = None

    def meters(self) -> list[Meter]:
        found: list[Meter | None] = [self._judges, self._reward_models, self._workers]
        return [meter for meter in found if meter is not None]

    def rules(self, specs: Sequence[RewardConfig]) -> RuleScorer:
        config, folder = self._config, self._folder
        log = folder.log("rewards")
        pool = RewardPool(specs, settings=config.reward_workers, log=log, run_id=folder.run_id)
        self._workers = WorkerMeter(lambda: pool.restarts)
        return RuleScorer(pool)

    def judge(self, source: int, spec: RewardConfig) -> JudgeScorer:
        name, judge, timeout_s = self._names[source], judge_of(spec), self._config.engine.request_timeout_s
        self._judges = self._judges or JudgeMeter()
        engines: list[JudgeEngine]
        special: tuple[str, ...] = ()
        if judge.base_url is not None:
            engines = [RemoteJudge(name, judge, request_timeout_s=timeout_s)]
        else:
            engines = [VllmJudge(server) for server in self._servers(source)]
            special = special_tokens(self._tokenizer(source))
        questioner = Questioner(judge, special)
        return JudgeScorer(name, questioner, engines, meter=self._judges, seed=self._config.seed, text_of=text_of(spec))

    def reward_model(self, source: int, spec: RewardConfig) -> RewardModelScorer:
        self._reward_models = self._reward_models or RewardModelMeter()
        return RewardModelScorer(
            self._names[source],
            reward_model_of(spec),
            [VllmRewardModel(server) for server in self._servers(source)],
            encode=reward_model_encoder(self._tokenizer(source)),
            max_model_len=self._started[source].max_model_len,
            meter=self._reward_models,
            text_of=text_of(spec),
        )

    def _servers(self, source: int) -> list[Server]:
        return scorer_servers(self._config, self._folder, self._started[source])

    def _tokenizer(self, source: int) -> PreTrainedTokenizerBase:
        model, trusts = self._started[source].model, self._config.trust_remote_code
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model, trust_remote_code=trusts)
        return tokenizer


def scorer_servers(config: RunConfig, folder: RunFolder, started: ScorerEngines) -> list[Server]:
    """One model's servers on this rank's slots, which are the node's in turn, as its rollout engines are."""
    rank, settings = this_rank(), config.engine
    return [
        Server(
            name,
            folder.socket(name),
            request_timeout_s=settings.request_timeout_s,
            restart_timeout_s=restart_timeout_s(settings),
        )
        for name in started.engines[rank.local :: rank.local_world]
    ]


def text_of(spec: RewardConfig) -> TextOf:
    """What a source looks at: all of a completion, or what follows its thinking."""
    return _after_thinking if spec.strip_thinking else plain_text


def _after_thinking(completion: Completion) -> str:
    return str(without_thinking(completion.text))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Every text that this tokenizer would read as one of its special tokens."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return tuple({*added, *tokenizer.all_special_tokens})


def reward_model_encoder(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """Prompt and completion as TRL's trainers show them to a reward model.

    A chat goes through the reward model's own chat template; a text is followed by the end token, as it is in
    TRL's RewardTrainer. What the policy wrote cannot spell the tokens that end its turn.
    """
    special = special_tokens(tokenizer)

    def encode(prompt: Prompt, completion: str) -> list[int]:
        written = break_special_tokens(completion, special)
        if isinstance(prompt.content, str):
            text = prompt.content + written
            end = str(tokenizer.eos_token or "")
            text = text if end and text.endswith(end) else text + end
        else:
            answer = as_content(written, chat=True)
            assert isinstance(answer, list)
            text = str(tokenizer.apply_chat_template([*prompt.content, *answer], tokenize=False))
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return encode
