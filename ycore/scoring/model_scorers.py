"""Scores from models: reward models, teachers, the policy itself, and the environment of a completion."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ycore.config.schema import RewardConfig, RunConfig
from ycore.data.cells import golds_of
from ycore.data.prompts import PromptSet
from ycore.engine.judge_engine import QuestionRefused, RemoteTeacher, key_header
from ycore.engine.kinds import VLLM, EngineKind
from ycore.errors import ConfigError, ModelError
from ycore.foreign import ForeignRefused, foreign_json
from ycore.judge.declaration import (
    RewardModel,
    Teacher,
    reward_model_of,
    teacher_of,
    teachers_of,
)
from ycore.judge.question import break_special_tokens, special_tokens
from ycore.models.names import read_settings, resolve_model
from ycore.placement.placement import REWARD_MODEL, ROLLOUT, TEACHER
from ycore.rewards.builtin import (
    REFERENCE,
    Reference,
    before_the_answer,
    reference_reward,
    settings_of,
)
from ycore.rewards.loading import require_reward_columns
from ycore.run.address import AddressFailed, fetch_answer
from ycore.run.tasks import together
from ycore.scoring.scoring import (
    PendingGroup,
    Policy,
    RequestMeter,
    Scorer,
    ScorerContext,
    ServedModel,
    TextOf,
    plain_text,
    plan_served_model,
    text_of,
)
from ycore.types import Completion, Prompt, Record, Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ycore.engine.vllm_engine import VllmRewardModel, VllmTeacher


class RewardModelMeter(RequestMeter):
    kind = "reward_model"


class EnsembleMember(NamedTuple):
    """A model of an ensemble; its `engines` are slot by slot."""

    engines: "Sequence[VllmRewardModel]"
    encode: Callable[[Prompt, str], list[int]]
    max_model_len: int


@dataclass(eq=False)
class RewardModelScorer(Scorer):
    """An `rm:` reward: a model, or an ensemble, that is asked for a number as each completion ends."""

    kind = "reward model"
    name: str
    reward_model: RewardModel
    members: Sequence[EnsembleMember]
    _: KW_ONLY
    meter: RewardModelMeter
    text_of: TextOf = plain_text

    def __post_init__(self) -> None:
        self.engines = [engine for member in self.members for engine in member.engines]

    @classmethod
    def models(cls, spec: RewardConfig, config: RunConfig) -> list[ServedModel]:
        declared = reward_model_of(spec)
        return [
            ServedModel(
                REWARD_MODEL,
                name,
                max_model_len=declared.max_model_len,
                tensor_parallel=declared.tensor_parallel,
            )
            for name in declared.models
        ]

    @classmethod
    def check_models(
        cls, spec: RewardConfig, config: RunConfig, *, engine: EngineKind
    ) -> list[str]:
        way_out = "install vLLM, or score with a function: --reward FILE.py:FUNCTION"
        lines = []
        for model in reward_model_of(spec).models:
            label = f"reward model {model}"
            plan = plan_served_model(label, model, config, engine=engine, way_out=way_out)
            if plan.config is not None:
                _check_classifier(model, plan.config)
            lines.append(f"{label}: {plan.note}, one number a completion")
        return lines

    @classmethod
    def build(cls, spec: RewardConfig, source: int, context: ScorerContext) -> Scorer:
        from ycore.engine.vllm_engine import VllmRewardModel  # it imports torch

        members = [
            EnsembleMember(
                context.servers(model, VllmRewardModel),
                reward_model_encoder(context.tokenizer(model)),
                model.max_model_len,
            )
            for model in context.models_of(source)
        ]
        return cls(
            context.names[source],
            reward_model_of(spec),
            members,
            meter=context.meter(RewardModelMeter),
            text_of=text_of(spec),
        )

    async def score_one(self, group: PendingGroup, index: int) -> Score:
        text = self.text_of(await group.tasks_G[index])
        inputs = [(member, member.encode(group.draw.prompt, text)) for member in self.members]
        if any(len(token_ids) > member.max_model_len for member, token_ids in inputs):
            return self.masked("longer than its context")
        async with group.turn(REWARD_MODEL) as slot:
            with self.meter.timed():
                logits = await together(
                    [slot.pick(member.engines).logit(token_ids) for member, token_ids in inputs]
                )
            slot.num_tokens = sum(len(token_ids) for _, token_ids in inputs)
        self.meter.tokens += slot.num_tokens
        if not all(map(math.isfinite, logits)):
            return self.masked("its answer is no finite number")
        return Score(self.reward_model.reward(*logits))


def reward_model_encoder(
    tokenizer: "PreTrainedTokenizerBase",
) -> Callable[[Prompt, str], list[int]]:
    """Return a function from a prompt and a completion to the token ids that TRL's trainers give a reward model.

    As in the run that trained it: with a chat template a text is a user's turn, and without one a text is followed by
    the end token and has the tokens that the tokenizer adds. Special tokens that the policy spelled out are broken up,
    so that it cannot end its own turn.
    """
    special = special_tokens(tokenizer)

    def encode(prompt: Prompt, completion: str) -> list[int]:
        completion = break_special_tokens(completion, special)
        if tokenizer.chat_template is None:
            text = _only_text(prompt) + completion
            end = str(tokenizer.eos_token or "")
            if not (end and text.endswith(end)):
                text += end
            return list(tokenizer(text)["input_ids"])
        turns = prompt.content
        if isinstance(turns, str):
            turns = [{"role": "user", "content": turns}]
        answer = {"role": "assistant", "content": completion}
        text = str(
            tokenizer.apply_chat_template(
                [*turns, answer],
                tools=list(prompt.tools) or None,
                tokenize=False,
                **prompt.template_arguments,
            )
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return encode


def _only_text(prompt: Prompt) -> str:
    """Return the text of a prompt of one turn, for a model without a chat template; ConfigError for a conversation."""
    if isinstance(prompt.content, str):
        return prompt.content
    if len(prompt.content) > 1:
        raise ConfigError(
            f"the prompt of row {prompt.row} is a conversation of {len(prompt.content)} turns, and the reward model's "
            "tokenizer has no chat template; take a reward model with one, or prompts of one turn"
        )
    return str(prompt.content[0]["content"])


def _check_classifier(name: str, model_config: Record) -> None:
    """ModelError unless a config.json is that of a sequence classifier with one label, which vLLM can serve."""
    architectures = [
        str(architecture) for architecture in model_config.get("architectures") or []
    ]
    suffix = "ForSequenceClassification"
    if not any(architecture.endswith(suffix) for architecture in architectures):
        raise ModelError(
            f"rm:{name} must be a sequence classifier with one label (...ForSequenceClassification); its architectures "
            f"are {', '.join(architectures) or 'none'}; train one with TRL's RewardTrainer, or use the model as a "
            "judge: --reward judge:FILE.yaml"
        )
    # transformers' default is 2
    num_labels = model_config.get("num_labels") or len(model_config.get("id2label") or {}) or 2
    if num_labels != 1:
        raise ModelError(
            f"rm:{name} must give one number, and has {num_labels} labels; take a model with num_labels=1"
        )


_ANSWER_S = 20.0
_MAX_ADDED_TOKENS = 64  # compared with an address's tokenizer


class TeacherMeter(RequestMeter):
    kind = "teacher"


@dataclass(eq=False)
class TeacherScorer(Scorer):
    """A `teacher:` source whose model is in engines of the run, or at an address.

    A score's value is the mean of log p_teacher - log p_policy over the policy's tokens: minus the estimate k1 of the
    reverse KL of a token, in nats. Where the policy's engine gives no log-probabilities it is the mean of log p_teacher.
    `engines` are slot by slot; an address has one.
    """

    kind = "teacher"
    name: str
    teacher: Teacher
    engines: "Sequence[VllmTeacher | RemoteTeacher]"
    _: KW_ONLY
    max_model_len: int
    meter: TeacherMeter

    @classmethod
    def models(cls, spec: RewardConfig, config: RunConfig) -> list[ServedModel]:
        teacher = teacher_of(spec)
        if config.teaches_exactly or teacher.base_url is not None:
            return []
        return [
            ServedModel(
                TEACHER,
                teacher.model,
                max_model_len=teacher.max_model_len,
                tensor_parallel=teacher.tensor_parallel,
            )
        ]

    @classmethod
    def check_models(
        cls, spec: RewardConfig, config: RunConfig, *, engine: EngineKind
    ) -> list[str]:
        teacher = teacher_of(spec)
        label = f"teacher {teacher.model}"
        policy = resolve_model(config.model, trust_remote_code=config.trust_remote_code)
        if teacher.base_url is not None:
            if config.teaches_exactly:
                raise ConfigError(
                    f"{label}: distill.divergence={config.teacher_divergence} needs the teacher's weights, and it is "
                    f"at {teacher.base_url}; leave distill.divergence out, or base_url"
                )
            key_header(teacher, name=label)
            if policy.ready_folder is not None:
                check_tokens_at(policy.ready_folder, teacher)
            return [f"{label}: at {teacher.address_line}, the probability of each token"]
        plan = plan_served_model(
            label,
            teacher.model,
            config,
            engine=VLLM if config.teaches_exactly else engine,
            way_out="install vLLM, or hold it in the trainer: --set distill.divergence=reverse-kl",
        )
        if plan.ready_folder is not None and policy.ready_folder is not None:
            check_same_tokens(policy.ready_folder, plan.ready_folder, name=teacher.model)
        if config.teaches_exactly:
            return [f"{label}: {plan.note}, {config.teacher_divergence}, exact, in the trainer"]
        return [f"{label}: {plan.note}, the probability of each token"]

    @classmethod
    def build(cls, spec: RewardConfig, source: int, context: ScorerContext) -> Scorer:
        from ycore.engine.vllm_engine import VllmTeacher  # it imports torch

        teacher = teacher_of(spec)
        if context.config.teaches_exactly:
            return TrainerTeacherScorer(teacher)
        name = context.names[source]
        engines: Sequence[VllmTeacher | RemoteTeacher]
        if teacher.base_url is not None:
            timeout_s = context.config.engine.request_timeout_s
            engines = [RemoteTeacher(name, teacher, request_timeout_s=timeout_s)]
            max_model_len = teacher.max_model_len or sys.maxsize
        else:
            (model,) = context.models_of(source)
            engines = context.servers(model, VllmTeacher)
            max_model_len = model.max_model_len
        meter = context.meter(TeacherMeter)
        return cls(name, teacher, engines, max_model_len=max_model_len, meter=meter)

    async def score_one(self, group: PendingGroup, index: int) -> Score:
        completion = await group.tasks_G[index]
        if not self.teacher.teaches(group.draw.prompt.columns):
            return Score(None)
        sequences = completion.sequences(group.draw.token_ids)
        sizes = [len(prompt_ids) + stop - start for prompt_ids, start, stop in sequences]
        if max(sizes) >= self.max_model_len:  # vLLM writes a token behind those that it scores
            return self.masked("longer than its context")
        try:
            logprobs = await self._logprobs(group, completion, num_tokens=sum(sizes))
        except QuestionRefused as refusal:
            return self.masked(str(refusal))
        policy_logprobs = completion.logprobs or (0.0,) * len(completion.token_ids)
        gaps = [
            log_p - log_q
            for log_p, log_q, by_policy in zip(
                logprobs, policy_logprobs, completion.mask, strict=True
            )
            if by_policy
        ]
        value = math.fsum(gaps) / max(1, len(gaps))
        if not math.isfinite(value):
            return self.masked("a log-probability is not finite")
        return Score(value, logprobs=logprobs)

    async def _logprobs(
        self, group: PendingGroup, completion: Completion, *, num_tokens: int
    ) -> tuple[float, ...]:
        """Return the teacher's log-probability of each token; 0 at the prompts of later sequences."""
        logprobs = [0.0] * len(completion.token_ids)
        async with group.turn(TEACHER, at_address=self.teacher.base_url is not None) as slot:
            slot.num_tokens = num_tokens
            engine = slot.pick(self.engines)
            with self.meter.timed():
                for prompt_ids, start, stop in completion.sequences(group.draw.token_ids):
                    targets = completion.token_ids[start:stop]
                    logprobs[start:stop] = await engine.logprobs_of(prompt_ids, targets)
        self.meter.tokens += num_tokens
        return tuple(logprobs)


@dataclass(eq=False)
class TrainerTeacherScorer(Scorer):
    """A teacher that the trainer holds: score 0 where the teacher applies, else None."""

    teacher: Teacher

    async def score_one(self, group: PendingGroup, index: int) -> Score:
        await group.tasks_G[index]
        return Score(0.0 if self.teacher.teaches(group.draw.prompt.columns) else None)


def check_teachers(config: RunConfig, policy: Path, fetch: Callable[[str], Path]) -> None:
    """ConfigError where a teacher has another tokenizer than the policy. `fetch` makes a model's name its folder."""
    for teacher in teachers_of(config):
        if teacher.base_url is None:
            check_same_tokens(policy, fetch(teacher.model), name=teacher.model)
        else:
            check_tokens_at(policy, teacher)


def check_same_tokens(policy: Path, teacher: Path, *, name: str) -> None:
    """ConfigError where the two tokenizers give a token other ids: a teacher is asked for the policy's ids."""
    policy_ids = _token_ids(policy)
    teacher_ids = _token_ids(teacher)
    if policy_ids is None or teacher_ids is None or policy_ids == teacher_ids:
        return
    differing = {token for token, _ in policy_ids.items() ^ teacher_ids.items()}
    token = min(differing, key=lambda token: policy_ids.get(token, len(policy_ids)))
    raise ConfigError(
        f"teacher {name} has another tokenizer than the policy: {token!r} is {policy_ids.get(token, 'no token')} in "
        f"the policy's and {teacher_ids.get(token, 'no token')} in the teacher's; take a teacher of the same family of "
        "models"
    )


def check_replayed_tokens(policy: Path, before: Path) -> None:
    """ConfigError where tokens of `before`, the model of a replayed run, have other ids in the policy's tokenizer."""
    ids_before = _token_ids(before)
    ids = _token_ids(policy)
    if ids is None or ids_before is None:
        return
    if others := dict(ids_before.items() - ids.items()):
        token = min(others, key=lambda token: others[token])
        raise ConfigError(
            f"--replay learns from tokens of {before}, and {len(others)} have other ids in {policy}, e.g. {token!r}; "
            "leave --model out, or take a model with the same tokenizer"
        )


def check_tokens_at(policy: Path, teacher: Teacher) -> None:
    """ConfigError where a teacher's address reads a text as other tokens than the policy's tokenizer, or reads none.

    The text has 256 tokens from all over the policy's vocabulary, and its added tokens.
    """
    from tokenizers import Tokenizer

    file = policy / "tokenizer.json"
    if teacher.base_url is None or not file.is_file():
        return
    tokenizer = Tokenizer.from_file(str(file))
    step = max(1, tokenizer.get_vocab_size() // 256)
    sample = list(range(0, tokenizer.get_vocab_size(), step))[:256]
    added = [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    text = tokenizer.decode(sample, skip_special_tokens=False)
    text += "".join(added[:_MAX_ADDED_TOKENS])
    policy_ids = tokenizer.encode(text, add_special_tokens=False).ids
    address = teacher.base_url.rstrip("/").removesuffix("/v1")
    label = f"teacher {teacher.model}"
    try:
        answer = fetch_answer(
            f"{address}/tokenize",
            {"model": teacher.model, "prompt": text, "add_special_tokens": False},
            headers=key_header(teacher, name=label),
            timeout_s=_ANSWER_S,
            max_bytes=2**20,
        )
        teacher_ids = foreign_json(answer.data)["tokens"]
    except (AddressFailed, ForeignRefused, KeyError, TypeError) as problem:
        raise ConfigError(
            f"{label}: {address}/tokenize gives no tokens to compare with the policy's ({problem}); "
            "base_url is that of a vLLM server, with /v1"
        ) from None
    if policy_ids != teacher_ids:
        raise ConfigError(
            f"{label} at {teacher.base_url} has another tokenizer than the policy: it reads a text of the policy's "
            "tokens as others; take one of the same family"
        )


def _token_ids(folder: Path) -> Mapping[str, int] | None:
    """Return every token's id from a tokenizer.json; None where the folder has none."""
    content = read_settings(folder / "tokenizer.json")
    vocab = content.get("model", {}).get("vocab")
    if isinstance(vocab, list):  # a Unigram model has pairs of a token and its score
        vocab = {token: index for index, (token, *_) in enumerate(vocab)}
    if vocab is None:
        return None
    return {
        **vocab,
        **{token["content"]: token["id"] for token in content.get("added_tokens") or ()},
    }


@dataclass(eq=False)
class ReferenceScorer(Scorer):
    """`reference_probability`: the policy's own probability of the right answer, after what it wrote."""

    name = REFERENCE
    reference: Reference
    policy: Policy

    @classmethod
    def check_rows(cls, spec: RewardConfig, config: RunConfig, prompts: PromptSet) -> None:
        settings_of(spec, Reference)
        require_reward_columns(REFERENCE, ["answer"], prompts.columns)

    @classmethod
    def build(cls, spec: RewardConfig, source: int, context: ScorerContext) -> Scorer:
        return cls(settings_of(spec, Reference), context.policy)

    async def score(self, group: PendingGroup) -> list[Score]:
        golds = golds_of(group.draw.prompt.columns.get("answer"))
        answer_ids = self._tokenize(golds[0]) if golds else []
        if not answer_ids:  # the reward does not apply to this row
            return [Score(None)] * len(group)
        bare = await self._logprobs(group, "", answer_ids) if self.reference.debias else None
        return await together(
            [self._score(group, index, answer_ids, bare) for index in range(len(group))]
        )

    async def _score(
        self,
        group: PendingGroup,
        index: int,
        answer_ids: list[int],
        bare: Sequence[float] | None,
    ) -> Score:
        completion = await group.tasks_G[index]
        logprobs = await self._logprobs(group, completion.text, answer_ids)
        if logprobs is None or (bare is None and self.reference.debias):
            return self.masked("longer than the engine's context")
        return Score(reference_reward(logprobs, bare))

    async def _logprobs(
        self, group: PendingGroup, text: str, answer_ids: list[int]
    ) -> Sequence[float] | None:
        """Return those of the answer's tokens after the prompt and this text; None where the context is too short."""
        reasoning = before_the_answer(text, bridge=self.reference.bridge if text else "")
        context = [*group.draw.token_ids, *self._tokenize(reasoning)]
        if len(context) + len(answer_ids) >= self.policy.max_model_len:
            return None
        async with group.slots.turn(ROLLOUT) as slot:
            return await slot.pick(self.policy.engines).logprobs_of(context, answer_ids)

    def _tokenize(self, text: str) -> list[int]:
        return list(self.policy.tokenizer(text, add_special_tokens=False)["input_ids"])


class EnvironmentScorer(Scorer):
    """`environment`: what a completion's own environment paid at its end."""

    async def score_one(self, group: PendingGroup, index: int) -> Score:
        return (await group.tasks_G[index]).earned or Score(None)
