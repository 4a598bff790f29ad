"""Judges, reward models, teachers and reference answers as scorers, and the scoring of a run built from its config."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ycore.config.schema import RewardConfig, RunConfig, ScoredConfig
from ycore.engine import Engine
from ycore.engine.judge_engine import (
    JudgeEngine,
    QuestionRefused,
    RemoteJudge,
    RemoteTeacher,
    VllmJudge,
)
from ycore.engine.server import Server, restart_timeout_s
from ycore.engine.vllm_engine import VllmRewardModel, VllmTeacher
from ycore.judge.agreement import agreement_of
from ycore.judge.question import Questioner, break_special_tokens, special_tokens
from ycore.judge.sources import (
    RewardModel,
    Teacher,
    is_agreement,
    is_judge,
    is_reward_model,
    is_rule,
    is_teacher,
    judge_of,
    reward_model_of,
    teacher_of,
)
from ycore.placement.placement import REWARD_MODEL, ROLLOUT, TEACHER
from ycore.rewards.answers import gold_of, without_thinking
from ycore.rewards.builtin import (
    Reference,
    before_the_answer,
    is_code,
    is_environment,
    is_reference,
    reference_of,
    reference_reward,
)
from ycore.rewards.loading import reward_names
from ycore.run.images import ImageStore
from ycore.run.meter import Meter
from ycore.run.paths import RunFolder
from ycore.run.tasks import together
from ycore.sandbox.level import LEVEL_NUMBERS
from ycore.scoring.code_scorer import CodeMeter, code_scorer
from ycore.scoring.judge_scorer import AgreementScorer, JudgeScorer
from ycore.scoring.reward_pool import RewardPool
from ycore.scoring.scoring import (
    JudgeMeter,
    RewardModelMeter,
    RuleScorer,
    Scorer,
    Scoring,
    TeacherMeter,
    TextOf,
    WorkerMeter,
    Writing,
    plain_text,
)
from ycore.types import Completion, Prompt, Score, TokenSequence, Turn

S = TypeVar("S", bound=Server)


@dataclass(frozen=True, slots=True)
class ScorerEngines:
    """One model that scores: the indices of the reward sources it serves, and its engines' names, slot by slot."""

    role: str
    sources: Sequence[int]
    engines: Sequence[str]
    model: Path
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy as a scorer sees it: its engines, its tokenizer, its context in tokens."""

    engines: Sequence[Engine]
    tokenizer: PreTrainedTokenizerBase
    max_model_len: int


def build_scoring(
    config: RunConfig,
    folder: RunFolder,
    started: Sequence[ScorerEngines],
    *,
    policy: Policy | None = None,
) -> Scoring:
    """Every reward source of the run, with clients for the machine's engines. Call `start` before use.

    `started` are the engines of judges and reward models. `policy` is what `reference_probability` asks.
    """
    names = reward_names(config.rewards)
    ensembles = [[one for one in started if source in one.sources] for source in range(len(names))]
    rules = [
        source
        for source, spec in enumerate(config.rewards)
        if is_rule(spec) and not is_reference(spec)
    ]
    judges, reward_models, teachers, code = (
        JudgeMeter(),
        RewardModelMeter(),
        TeacherMeter(),
        CodeMeter(),
    )
    scorers: list[tuple[Sequence[int], Scorer]] = []
    kinds: list[tuple[Callable[[RewardConfig], bool], Meter]] = [
        (_is_read, judges),
        (is_reward_model, reward_models),
    ]
    kinds += (
        [(is_code, code)] if config.teaches_exactly else [(is_teacher, teachers), (is_code, code)]
    )
    meters: list[Meter] = [meter for kind, meter in kinds if any(map(kind, config.rewards))]
    if rules:
        pool = pool_of(config, folder, [config.rewards[source] for source in rules])
        scorers.append((rules, RuleScorer(pool, ImageStore(folder.images))))
        meters.append(WorkerMeter(lambda: pool.restarts, LEVEL_NUMBERS[pool.level]))
    for source, spec in enumerate(config.rewards):
        trusts = config.trust_remote_code
        tokenizers = [
            AutoTokenizer.from_pretrained(one.model, trust_remote_code=trusts)
            for one in ensembles[source]
        ]
        model, tokenizer = next(iter(ensembles[source]), None), next(iter(tokenizers), None)
        if is_judge(spec):
            judge = judge_of(spec)
            engines: Sequence[JudgeEngine]
            if model is None:
                engines = [
                    RemoteJudge(
                        names[source], judge, request_timeout_s=config.engine.request_timeout_s
                    )
                ]
            else:
                engines = scorer_servers(config, folder, model, VllmJudge)
            questioner = Questioner(judge, () if tokenizer is None else special_tokens(tokenizer))
            text = text_of(spec)
            how: Any = {
                "meter": judges,
                "seed": config.seed,
                "text_of": text,
                "images": ImageStore(folder.images),
            }
            one: Scorer = JudgeScorer(names[source], questioner, engines, **how)
        elif is_agreement(spec):
            one = AgreementScorer(agreement_of(spec), meter=judges, text_of=text_of(spec))
        elif is_reward_model(spec):
            assert model is not None, "the launcher starts every reward model"
            members = [
                Member(
                    scorer_servers(config, folder, one, VllmRewardModel),
                    reward_model_encoder(own),
                    one.max_model_len,
                )
                for one, own in zip(ensembles[source], tokenizers, strict=True)
            ]
            text = text_of(spec)
            one = RewardModelScorer(
                names[source], reward_model_of(spec), members, meter=reward_models, text_of=text
            )
        elif is_teacher(spec) and config.teaches_exactly:
            one = OwnTeacherScorer(teacher_of(spec))
        elif is_teacher(spec):
            one = _teacher_scorer(config, folder, teacher_of(spec), model, names[source], teachers)
        elif is_reference(spec) and policy is not None:
            one = ReferenceScorer(reference_of(spec), policy)
        elif is_environment(spec):
            one = EnvironmentScorer()
        elif is_code(spec):
            one = code_scorer(config, folder, spec, name=names[source], meter=code)
        else:
            continue
        scorers.append(((source,), one))
    return Scoring(scorers, meters)


def _is_read(spec: RewardConfig) -> bool:
    return is_judge(spec) or is_agreement(spec)


def _teacher_scorer(
    config: RunConfig,
    folder: RunFolder,
    teacher: Teacher,
    model: ScorerEngines | None,
    name: str,
    meter: TeacherMeter,
) -> "TeacherScorer":
    if model is not None:
        servers = scorer_servers(config, folder, model, VllmTeacher)
        return TeacherScorer(name, teacher, servers, max_model_len=model.max_model_len, meter=meter)
    remote = RemoteTeacher(name, teacher, request_timeout_s=config.engine.request_timeout_s)
    return TeacherScorer(
        name, teacher, [remote], max_model_len=teacher.max_model_len or sys.maxsize, meter=meter
    )


def pool_of(config: ScoredConfig, folder: RunFolder, specs: Sequence[RewardConfig]) -> RewardPool:
    """The workers of these reward functions; they see the run's pictures, and nothing else of it."""
    return RewardPool(
        specs,
        settings=config.reward_workers,
        log=folder.log("rewards"),
        run_id=folder.run_id,
        sandbox=config.sandbox,
        run_folder=folder.root,
    )


def scorer_servers(
    config: RunConfig, folder: RunFolder, model: ScorerEngines, kind: type[S]
) -> list[S]:
    """Clients of one model's servers, slot by slot."""
    settings = config.engine
    return [
        kind(
            name,
            folder.socket(name),
            request_timeout_s=settings.request_timeout_s,
            restart_timeout_s=restart_timeout_s(settings),
        )
        for name in model.engines
    ]


def text_of(spec: RewardConfig) -> TextOf:
    """What a source looks at: all of a completion, or what follows its thinking."""
    return after_thinking if spec.strip_thinking else plain_text


def after_thinking(completion: Completion) -> str:
    """The transcript with only what follows the thinking in each of the policy's turns."""

    def after(turn: Turn) -> Turn:
        said = (
            {**one, "content": without_thinking(one.get("content") or "")} for one in turn.messages
        )
        return replace(turn, messages=tuple(said)) if turn.by_policy else turn

    turns = tuple(map(after, completion.turns))
    return replace(completion, text=str(without_thinking(completion.text)), turns=turns).transcript


def reward_model_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Prompt, str], list[int]]:
    """From a prompt and a completion to the same token ids that TRL's trainers give a reward model.

    A chat goes through the reward model's own chat template. A text is followed by the end token, as in TRL's
    RewardTrainer. Special tokens that the policy spelled out are removed, so that it cannot end its own turn.
    """
    special = special_tokens(tokenizer)

    def encode(prompt: Prompt, completion: str) -> list[int]:
        written = break_special_tokens(completion, special)
        if isinstance(prompt.content, str):
            text = prompt.content + written
            end = str(tokenizer.eos_token or "")
            text = text if end and text.endswith(end) else text + end
        else:
            answer = {"role": "assistant", "content": written}
            text = str(tokenizer.apply_chat_template([*prompt.content, answer], tokenize=False))
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return encode


class Member(NamedTuple):
    """A model of an ensemble; its `engines` are slot by slot."""

    engines: Sequence[VllmRewardModel]
    encode: Callable[[Prompt, str], list[int]]
    max_model_len: int


@dataclass(eq=False)
class RewardModelScorer(Scorer):
    """A reward model, or several that are combined, asked for a number as each completion ends."""

    name: str
    reward_model: RewardModel
    members: Sequence[Member]
    _: KW_ONLY
    meter: RewardModelMeter
    text_of: TextOf = plain_text

    def __post_init__(self) -> None:
        self.engines = [engine for member in self.members for engine in member.engines]

    async def score_one(self, writing: Writing, index: int) -> Score:
        completion = await writing.tasks_G[index]
        text, prompt = self.text_of(completion), writing.draw.prompt
        asked = [(member, member.encode(prompt, text)) for member in self.members]
        if any(len(token_ids) > member.max_model_len for member, token_ids in asked):
            return self._masked("longer than its context")
        async with writing.turn(REWARD_MODEL) as slot:
            started = time.perf_counter()
            logits = await together(
                [slot.pick(member.engines).logit(token_ids) for member, token_ids in asked]
            )
            slot.num_tokens = sum(len(token_ids) for _, token_ids in asked)
        self.meter.count(seconds=time.perf_counter() - started, tokens=slot.num_tokens)
        if not all(map(math.isfinite, logits)):
            return self._masked("its answer is no finite number")
        return Score(self.reward_model.reward(*logits))

    def _masked(self, why: str) -> Score:
        return Score(None, problem=f"reward model {self.name}: {why}")


@dataclass(eq=False)
class TeacherScorer(Scorer):
    """A teacher's log-probabilities of each completion. Its value is the mean of log p_teacher - log p_policy over the
    policy's tokens: minus the estimate k1 of the reverse KL of a token, in nats. Where the policy's engine gives no
    log-probabilities it is the mean of log p_teacher. `engines` are slot by slot; of an address there is one."""

    name: str
    teacher: Teacher
    engines: Sequence[VllmTeacher | RemoteTeacher]
    _: KW_ONLY
    max_model_len: int
    meter: TeacherMeter

    async def score_one(self, writing: Writing, index: int) -> Score:
        completion = await writing.tasks_G[index]
        own = completion.logprobs or (0.0,) * len(completion.token_ids)
        parts = completion.sequences(writing.draw.token_ids)
        sizes = [len(one.prompt_ids) + one.stop - one.start for one in parts]
        if not self.teacher.teaches(writing.draw.prompt.columns):
            return Score(None)
        if (
            max(sizes) >= self.max_model_len
        ):  # vLLM has to write a token behind those that it scores
            return Score(None, problem=f"teacher {self.name}: longer than its context")
        try:
            logprobs = await self._logprobs(writing, completion, parts, num_tokens=sum(sizes))
        except QuestionRefused as refusal:
            return Score(None, problem=f"teacher {self.name}: {refusal}")
        gaps = [
            log_p - log_q
            for log_p, log_q, ours in zip(logprobs, own, completion.mask, strict=True)
            if ours
        ]
        value = math.fsum(gaps) / max(1, len(gaps))
        if not math.isfinite(value):
            return Score(None, problem=f"teacher {self.name}: a log-probability is not finite")
        return Score(value, logprobs=logprobs)

    async def _logprobs(
        self,
        writing: Writing,
        completion: Completion,
        parts: Sequence[TokenSequence],
        *,
        num_tokens: int,
    ) -> tuple[float, ...]:
        found = [0.0] * len(
            completion.token_ids
        )  # also at the prompts of other sequences than the first
        async with contextlib.AsyncExitStack() as stack:
            engine = self.engines[0]
            if self.teacher.base_url is None:
                slot = await stack.enter_async_context(writing.turn(TEACHER))
                engine, slot.num_tokens = slot.pick(self.engines), num_tokens
            started = time.perf_counter()
            for context, start, stop in parts:
                found[start:stop] = await engine.logprobs_of(
                    context, completion.token_ids[start:stop]
                )
        self.meter.count(seconds=time.perf_counter() - started, tokens=num_tokens)
        return tuple(found)


@dataclass(eq=False)
class OwnTeacherScorer(Scorer):
    """Which completions a teacher has, whose divergence the trainer itself computes: 0, or nothing."""

    teacher: Teacher

    async def score_one(self, writing: Writing, index: int) -> Score:
        await writing.tasks_G[index]
        return Score(0.0 if self.teacher.teaches(writing.draw.prompt.columns) else None)


class EnvironmentScorer(Scorer):
    """`environment`: what a completion's own environment paid at its end."""

    async def score_one(self, writing: Writing, index: int) -> Score:
        return (await writing.tasks_G[index]).earned or Score(None)


@dataclass(eq=False)
class ReferenceScorer(Scorer):
    """`reference_probability`: the policy's own probability of the right answer, after what it wrote."""

    reference: Reference
    policy: Policy

    async def score(self, writing: Writing) -> list[list[Score]]:
        answer_ids = self._tokenize(gold_of(writing.draw.prompt.columns.get("answer")))
        if not answer_ids:
            return [
                [Score(None)] for _ in range(len(writing))
            ]  # without an answer the reward does not apply
        bare = await self._logprobs(writing, "", answer_ids) if self.reference.debias else None
        scores = await together(
            [self._one(writing, index, answer_ids, bare) for index in range(len(writing))]
        )
        return [[score] for score in scores]

    async def _one(
        self, writing: Writing, index: int, answer_ids: list[int], bare: Sequence[float] | None
    ) -> Score:
        completion = await writing.tasks_G[index]
        logprobs = await self._logprobs(writing, completion.text, answer_ids)
        if logprobs is None or (bare is None and self.reference.debias):
            return Score(None, problem="reference_probability: longer than the engine's context")
        return Score(reference_reward(logprobs, bare))

    async def _logprobs(
        self, writing: Writing, text: str, answer_ids: list[int]
    ) -> Sequence[float] | None:
        """Of the answer's tokens after the prompt and this text; None where they do not fit the context."""
        before = before_the_answer(text, bridge=self.reference.bridge if text else "")
        context = [*writing.draw.token_ids, *self._tokenize(before)]
        if len(context) + len(answer_ids) >= self.policy.max_model_len:
            return None
        async with writing.slots.turn(ROLLOUT) as slot:
            return await slot.pick(self.policy.engines).logprobs_of(context, answer_ids)

    def _tokenize(self, text: str) -> list[int]:
        return list(self.policy.tokenizer(text, add_special_tokens=False)["input_ids"])
