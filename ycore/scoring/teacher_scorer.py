"""A teacher of `ycore distill` as a scorer: its log-probabilities of the policy's tokens."""

import contextlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import httpx

from ycore.config.schema import RewardConfig, RunConfig
from ycore.engine.judge_engine import Refused, RemoteTeacher, key_header
from ycore.engine.vllm_engine import VllmTeacher
from ycore.errors import ConfigError
from ycore.judge.sources import Teacher, is_teacher, teacher_of
from ycore.models.folder import read_json
from ycore.models.names import resolve_model
from ycore.placement.placement import TEACHER
from ycore.scoring.judge_scorer import check_api_key
from ycore.scoring.scoring import (
    PendingGroup,
    RequestMeter,
    Scorer,
    ScorerContext,
    ServedModel,
    plan_served_model,
)
from ycore.types import Completion, Score

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
    engines: Sequence[VllmTeacher | RemoteTeacher]
    _: KW_ONLY
    max_model_len: int
    meter: TeacherMeter

    @classmethod
    def handles(cls, spec: RewardConfig) -> bool:
        return is_teacher(spec)

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
    def check_models(cls, spec: RewardConfig, config: RunConfig, *, engine: str) -> list[str]:
        teacher = teacher_of(spec)
        label = f"teacher {teacher.model}"
        policy = resolve_model(config.model, trust_remote_code=config.trust_remote_code)
        if teacher.base_url is not None:
            if config.teaches_exactly:
                raise ConfigError(
                    f"{label}: distill.divergence={config.distill.divergence} needs the teacher's weights, and it is "
                    f"at {teacher.base_url}; leave distill.divergence out, or base_url"
                )
            check_api_key(label, teacher)
            if policy.ready and policy.folder is not None:
                check_tokens_at(policy.folder, teacher)
            return [f"{label}: at {teacher.base_url}, the probability of each token"]
        plan = plan_served_model(
            label,
            teacher.model,
            config,
            engine="vllm" if config.teaches_exactly else engine,
            way_out="install vLLM, or hold it in the trainer: --set distill.divergence=reverse-kl",
        )
        if plan.ready and plan.folder is not None and policy.ready and policy.folder is not None:
            check_same_tokens(policy.folder, plan.folder, name=teacher.model)
        if config.teaches_exactly:
            return [f"{label}: {plan.note}, {config.distill.divergence}, exact, in the trainer"]
        return [f"{label}: {plan.note}, the probability of each token"]

    @classmethod
    def build(cls, spec: RewardConfig, source: int, context: ScorerContext) -> Scorer:
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
        except Refused as refusal:
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
        async with contextlib.AsyncExitStack() as stack:
            engine = self.engines[0]
            if self.teacher.base_url is None:
                slot = await stack.enter_async_context(group.turn(TEACHER))
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
    for teacher in map(teacher_of, filter(is_teacher, config.rewards)):
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
        answer = httpx.post(
            f"{address}/tokenize",
            json={"model": teacher.model, "prompt": text, "add_special_tokens": False},
            headers=key_header(teacher, name=label),
            timeout=_ANSWER_S,
        )
        teacher_ids = answer.raise_for_status().json()["tokens"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as problem:
        raise ConfigError(
            f"{label}: {address}/tokenize gives no tokens to compare with the policy's ({problem}); "
            "base_url is that of a vLLM server, with /v1"
        ) from None
    if policy_ids != teacher_ids:
        pairs = enumerate(zip(policy_ids, teacher_ids, strict=False))
        place = next((place for place, (ours, theirs) in pairs if ours != theirs), 0)
        raise ConfigError(
            f"{label} at {teacher.base_url} has another tokenizer than the policy: "
            f"{tokenizer.id_to_token(policy_ids[place])!r} is {policy_ids[place]} in the policy's, and it reads "
            f"{teacher_ids[place : place + 1]}; take one of the same family"
        )


def _token_ids(folder: Path) -> Mapping[str, int] | None:
    """Return every token's id from a tokenizer.json; None where the folder has none."""
    content = read_json(folder / "tokenizer.json")
    vocab = content.get("model", {}).get("vocab")
    if isinstance(vocab, list):  # a Unigram model has pairs of a token and its score
        vocab = {token: index for index, (token, *_) in enumerate(vocab)}
    if vocab is None:
        return None
    return {
        **vocab,
        **{token["content"]: token["id"] for token in content.get("added_tokens") or ()},
    }
