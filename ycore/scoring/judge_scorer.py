"""A judge as a scorer: which questions it gets, when, and how its verdicts become the rewards of a group.

A pointwise question is sent when its completion is written, a pairwise one when both are, a ranking when the group is.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ycore.config.schema import AGREES, RewardConfig, RunConfig
from ycore.data.prompts import PromptSet
from ycore.engine.judge_engine import (
    JudgeEngine,
    QuestionRefused,
    RemoteJudge,
    VllmJudge,
    key_header,
)
from ycore.engine.kinds import EngineKind
from ycore.errors import ConfigError, ModelError, RewardError
from ycore.judge.declaration import (
    JUDGE_PREFIX,
    POLICY_BASE,
    JsonVerdict,
    Judge,
    ScoreVerdict,
    judge_of,
    model_name,
    require_columns,
)
from ycore.judge.question import (
    Question,
    Questioner,
    as_text,
    special_tokens,
    verdict_code,
    with_pictures,
)
from ycore.judge.verdict import (
    Reply,
    Unreadable,
    follows_position,
    read_ranking,
    read_value,
    ring_pairs,
    shares_of_rank,
    shuffled_orders,
    win_share,
)
from ycore.models.names import reads_text_only, resolve_model
from ycore.placement.placement import JUDGE
from ycore.run.files import NO_IMAGES, ImageStore
from ycore.run.tasks import together
from ycore.scoring.scoring import (
    PendingGroup,
    RequestMeter,
    Scorer,
    ScorerContext,
    ServedModel,
    TextOf,
    plain_text,
    plan_served_model,
    text_of,
)
from ycore.types import NO_PROMPT, THINKING, Completion, Prompt, Score, number_from

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

V = TypeVar("V")
_MAX_VERDICT = 1000  # characters of a judge's replies that a score keeps


@dataclass
class JudgeMeter(RequestMeter):
    kind = "judge"

    parse_failures: float = 0
    pairs: float = 0
    pairs_by_position: float = 0

    def summary(self) -> Mapping[str, float]:
        metrics = {**super().summary(), "ycore/judge/parse_failures": self.parse_failures}
        if self.pairs:
            metrics["ycore/judge/pairs"] = self.pairs
            metrics["ycore/judge/position_bias"] = self.pairs_by_position / self.pairs
        return metrics


@dataclass(eq=False)
class JudgeScorer(Scorer):
    """A `judge:` reward. `engines` are slot by slot; a judge at an address has one engine, which is on no slot."""

    kind = "judge"
    name: str
    questioner: Questioner
    engines: Sequence[JudgeEngine]
    _: KW_ONLY
    meter: JudgeMeter
    seed: int
    text_of: TextOf = plain_text
    images: ImageStore = NO_IMAGES
    in_thinking: bool = False  # whether the template of the judge opens its thinking

    @classmethod
    def models(cls, spec: RewardConfig, config: RunConfig) -> list[ServedModel]:
        judge = judge_of(spec)
        if judge.base_url is not None:
            return []
        return [
            ServedModel(
                JUDGE,
                model_name(judge, config),
                max_model_len=judge.max_model_len,
                max_new_tokens=judge.max_tokens,
                tensor_parallel=judge.tensor_parallel,
            )
        ]

    @classmethod
    def check_rows(cls, spec: RewardConfig, config: RunConfig, prompts: PromptSet) -> None:
        require_columns(spec.reward.removeprefix(JUDGE_PREFIX), judge_of(spec), prompts.columns)

    @classmethod
    def check_models(
        cls, spec: RewardConfig, config: RunConfig, *, engine: EngineKind
    ) -> list[str]:
        judge = judge_of(spec)
        label = f"judge {spec.reward.removeprefix(JUDGE_PREFIX)}"
        form = f"{judge.mode}, verdict by {judge.verdict.kind}"
        if judge.base_url is not None:
            key_header(judge, name=label)
            return [f"{label}: {judge.model} at {judge.address_line}, {form}"]
        model = model_name(judge, config)
        plan = plan_served_model(
            label, model, config, engine=engine, way_out="give it a base_url, or install vLLM"
        )
        if plan.has_chat_template is False:
            raise ModelError(
                f"{label} is asked in chats, and {model} has no chat template; take an instruct model"
            )
        if (
            judge.max_model_len
            and plan.context_length
            and judge.max_model_len > plan.context_length
        ):
            raise RewardError(
                f"{label}: max_model_len is {judge.max_model_len}, and its model has {plan.context_length}; lower it"
            )
        weights = (
            "the policy's base weights"
            if judge.model == POLICY_BASE
            else f"{model}, {plan.note}"
        )
        return [f"{label}: {weights}, {form}"]

    @classmethod
    def image_problem(cls, spec: RewardConfig, config: RunConfig) -> str | None:
        judge = judge_of(spec)
        model = model_name(judge, config)
        if judge.base_url is not None or not reads_text_only(
            resolve_model(model, trust_remote_code=config.trust_remote_code)
        ):
            return None
        return f"asks {model}, which reads text only; name a model that sees"

    @classmethod
    def compares(cls, spec: RewardConfig) -> bool:
        judge = judge_of(spec)
        return judge.mode == "groupwise" or (
            judge.mode == "pairwise" and judge.against == "sibling"
        )

    @classmethod
    def build(cls, spec: RewardConfig, source: int, context: ScorerContext) -> Scorer:
        judge = judge_of(spec)
        name = context.names[source]
        engines: Sequence[JudgeEngine]
        special: tuple[str, ...] = ()
        in_thinking = False
        if judge.base_url is not None:
            timeout_s = context.config.engine.request_timeout_s
            engines = [RemoteJudge(name, judge, request_timeout_s=timeout_s)]
        else:
            (model,) = context.models_of(source)
            engines = context.servers(model, VllmJudge)
            tokenizer = context.tokenizer(model)
            special = special_tokens(tokenizer)
            rendered = tokenizer.chat_template and tokenizer.apply_chat_template(
                NO_PROMPT, tokenize=False, add_generation_prompt=True
            )
            # Structured output begins with the verdict all the same. Of other tags than this a verdict knows nothing.
            opens_thinking = str(rendered).rstrip().endswith(THINKING.rstrip())
            in_thinking = opens_thinking and hasattr(judge.verdict, "tag")
        return cls(
            name,
            Questioner(judge, special),
            engines,
            meter=context.meter(JudgeMeter),
            seed=context.config.seed,
            text_of=text_of(spec),
            images=ImageStore(context.folder.images),
            in_thinking=in_thinking,
        )

    @property
    def judge(self) -> Judge:
        return self.questioner.judge

    async def score(self, group: PendingGroup) -> list[Score]:
        if self.judge.mode == "groupwise":
            return await self._rank(group)
        if self.judge.mode == "pairwise" and self.judge.against == "sibling":
            return await self._compare_siblings(group)
        return await super().score(group)

    async def score_one(self, group: PendingGroup, index: int) -> Score:
        completion = await group.tasks_G[index]
        replies: list[str] = []
        try:
            share = await self._fraction_of(group, completion, replies)
        except Unreadable as problem:
            return self.masked(str(problem))
        verdict = "\n".join(replies)[:_MAX_VERDICT]
        return Score(self.judge.reward(share), verdict=verdict)

    async def _fraction_of(
        self, group: PendingGroup, completion: Completion, replies: list[str]
    ) -> float:
        """Return the verdict on a completion, or on it against the row's reference, from 0 to 1."""
        prompt = group.draw.prompt
        text = self.text_of(completion)
        key = self._key(group, completion)
        if self.judge.mode == "pairwise":
            reference = as_text(prompt.columns.get(self.judge.reference_column))
            if not reference.strip():
                raise Unreadable("the row has no reference")
            return await self._win_share(group, text, reference, replies, key=key)
        question = self.questioner.question(prompt, text, key=key)
        return await self._fraction(question, group, replies, key=key)

    async def _compare_siblings(self, group: PendingGroup) -> list[Score]:
        pairs = ring_pairs(len(group), self.judge.opponents)
        shares = await together(
            [self._compare(group, first, second) for first, second in pairs]
        )
        shares_by_index: list[list[float]] = [[] for _ in range(len(group))]
        for (first, second), share in zip(pairs, shares, strict=True):
            if share is not None:
                shares_by_index[first].append(share)
                shares_by_index[second].append(1 - share)
        return [self._score(shares, "no pair was judged") for shares in shares_by_index]

    async def _compare(self, group: PendingGroup, first: int, second: int) -> float | None:
        """Return the share of wins of `first` over `second`; None where no verdict can be read."""
        completion = await group.tasks_G[first]
        other = await group.tasks_G[second]
        key = self._key(group, completion, other)
        try:
            return await self._win_share(
                group, self.text_of(completion), self.text_of(other), [], key=key
            )
        except Unreadable:
            return None

    async def _win_share(
        self, group: PendingGroup, text: str, other: str, replies: list[str], *, key: str
    ) -> float:
        """Return the share of wins of `text`, judged in both orders, so that a preference for a position cancels out."""
        verdicts = []
        for number, texts in enumerate([(text, other), (other, text)]):
            order_key = f"{key}/{number}"
            question = self.questioner.question(group.draw.prompt, *texts, key=order_key)
            verdicts.append(self._fraction(question, group, replies, key=order_key))
        when_first, when_second = await together(verdicts)
        self.meter.pairs += 1
        self.meter.pairs_by_position += follows_position(when_first, when_second)
        return win_share(when_first, when_second)

    async def _rank(self, group: PendingGroup) -> list[Score]:
        completions = await group.all()
        key = self._key(group, *completions)
        orders = shuffled_orders(
            len(completions), self.judge.orders, seed=number_from(key, bits=31)
        )
        rankings = [
            self._ranking(group, [completions[index] for index in order], key=f"{key}/{number}")
            for number, order in enumerate(orders)
        ]
        shares_by_index: list[list[float]] = [[] for _ in completions]
        for order, shares in zip(orders, await together(rankings), strict=True):
            for place, share in enumerate(shares or ()):
                shares_by_index[order[place]].append(share)
        return [self._score(shares, "no ranking was read") for shares in shares_by_index]

    async def _ranking(
        self, group: PendingGroup, completions: Sequence[Completion], *, key: str
    ) -> list[float] | None:
        texts = [self.text_of(completion) for completion in completions]
        question = self.questioner.question(group.draw.prompt, *texts, key=key)
        read = partial(read_ranking, self.judge, code=verdict_code(key), count=len(texts))
        try:
            return shares_of_rank(await self._verdict(question, group, key=key, read=read))
        except Unreadable:
            return None

    async def _fraction(
        self, question: Question, group: PendingGroup, replies: list[str], *, key: str
    ) -> float:
        """Return a verdict from 0 to 1, and add the reply that it stands in to the `replies`."""

        def read(reply: Reply) -> float:
            value = read_value(self.judge, reply, code=verdict_code(key))
            replies.append(reply.text)
            return self.judge.fraction(value)

        return await self._verdict(question, group, key=key, read=read)

    async def _verdict(
        self, question: Question, group: PendingGroup, *, key: str, read: Callable[[Reply], V]
    ) -> V:
        """Return the value read from the reply. An unreadable reply is retried; the last one raises Unreadable."""
        urls = [self.images.url(image.sha256) for image in group.draw.prompt.images]
        question = with_pictures(question, urls)
        for attempt in range(1 + self.judge.retries):
            try:
                return read(await self._ask(question, group, key=key, attempt=attempt))
            except QuestionRefused as refusal:
                raise Unreadable(str(refusal)) from None
            except Unreadable:
                self.meter.parse_failures += 1
                if attempt == self.judge.retries:
                    raise
        raise AssertionError("a judge is asked at least once")

    async def _ask(
        self, question: Question, group: PendingGroup, *, key: str, attempt: int
    ) -> Reply:
        seed = number_from(f"{key}/{attempt}", bits=31)
        async with group.turn(JUDGE, at_address=self.judge.base_url is not None) as slot:
            engine = slot.pick(self.engines)
            with self.meter.timed():
                reply = await engine.ask(self.judge, question, seed=seed, again=attempt > 0)
            slot.num_tokens = reply.num_tokens
        self.meter.tokens += reply.num_tokens
        return reply._replace(text=THINKING * self.in_thinking + reply.text)

    def _key(self, group: PendingGroup, *completions: Completion) -> str:
        """Identify what is judged, also in a resumed run. The key depends on the text: no policy can predict it."""
        texts = [
            "-".join(map(str, completion.token_ids)) or completion.text
            for completion in completions
        ]
        digest = hashlib.sha256(",".join(texts).encode()).hexdigest()
        return f"{self.seed}/{self.name}/{group.draw.position}/{digest}"

    def _score(self, shares: Sequence[float], problem: str) -> Score:
        """Return the score of the mean share; it is masked where there are none."""
        if not shares:
            return self.masked(problem)
        return Score(self.judge.reward(sum(shares) / len(shares)))


@dataclass(eq=False)
class AgreementScorer(Scorer):
    """An `agrees:` reward: whether the policy, asked as a judge, prefers the better answer of a pair.

    The reward is 0 where the policy's verdict is unreadable.
    """

    judge: Judge
    _: KW_ONLY
    meter: JudgeMeter
    text_of: TextOf = plain_text

    @classmethod
    def check_rows(cls, spec: RewardConfig, config: RunConfig, prompts: PromptSet) -> None:
        require_columns(spec.reward, agreement_of(spec), prompts.columns)

    @classmethod
    def check_models(
        cls, spec: RewardConfig, config: RunConfig, *, engine: EngineKind
    ) -> list[str]:
        kind = agreement_of(spec).verdict.kind
        return [f"{spec.reward}: the policy is the judge, pairwise, verdict by {kind}"]

    @classmethod
    def build(cls, spec: RewardConfig, source: int, context: ScorerContext) -> Scorer:
        return cls(agreement_of(spec), meter=context.meter(JudgeMeter), text_of=text_of(spec))

    async def score_one(self, group: PendingGroup, index: int) -> Score:
        text = self.text_of(await group.tasks_G[index])
        try:
            return Score(agreement(self.judge, group.draw.prompt.columns[KEY], text))
        except Unreadable:
            self.meter.parse_failures += 1
            return Score(0.0)


# -- a judge that is trained on pairs ----------------------------------------------------------------------------------
#
# `agrees:JUDGE.yaml` asks the policy the judge's question, whole, with its code and marks, so that the trained model
# serves as this judge without a change. The code can be learned: the question tells it, and a verdict copies it. It is no
# secret here, where nobody forges verdicts: order, marks and code follow from the run's seed and the pair, so that each
# pair always has the same question. The reward is whether the verdict is that of the pair, as in J1 (arXiv 2505.10320).

KEY = "verdict_key"
"""The column from which a question's order, marks and code follow."""


def agreement_of(spec: RewardConfig) -> Judge:
    """The judge of an `agrees:` reward; RewardError where its verdict on a pair is not in what it writes."""
    judge = judge_of(spec)
    if judge.mode != "pairwise" or not isinstance(judge.verdict, ScoreVerdict | JsonVerdict):
        raise RewardError(
            f"{AGREES} trains a judge that writes which of two answers is better; {spec.reward} is {judge.mode}, with "
            f"a verdict by {judge.verdict.kind}; say mode: pairwise, and verdict: {{kind: score}} or {{kind: json}}"
        )
    return judge


def judge_questions(
    config: RunConfig, pairs: PromptSet, *, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> PromptSet:
    """Replace each pair of the dataset by the question that the judge of the run's `agrees:` reward is asked about it.

    Special tokens of the policy's tokenizer are broken up in the pairs, as in `Questioner`.
    """
    spec = next(spec for spec in config.rewards if spec.kind == AGREES)
    judge = agreement_of(spec)
    if not {"chosen", "rejected"} <= set(pairs.columns):
        raise ConfigError(
            f"{spec.reward} reads the columns chosen and rejected; --answer-column is {config.answer_column} and "
            f"--prompt-column {config.prompt_column}; leave --answer-column out, and name another --prompt-column"
        )
    special = () if tokenizer is None else special_tokens(tokenizer)
    questions = Questions(pairs.prompts, Questioner(judge, special), seed=config.seed)
    return replace(pairs, prompts=questions, is_chat=True)


@dataclass(frozen=True)
class Questions(Sequence[Prompt]):
    """The judge's question about each pair, with the better answer in the first place or the second, by chance."""

    pairs: Sequence[Prompt]
    questioner: Questioner
    seed: int

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: Any) -> Any:
        pair = self.pairs[index]
        answers = [str(pair.columns[name]) for name in ("chosen", "rejected")]
        identity = json.dumps([self.seed, as_text(pair.content), *answers])
        key = hashlib.sha256(identity.encode()).hexdigest()
        first, second = answers if shows_chosen_first(key) else answers[::-1]
        question = self.questioner.question(pair, first, second, key=key)
        return replace(pair, content=question, columns={**pair.columns, KEY: key})


def shows_chosen_first(key: str) -> bool:
    """For half of all keys."""
    return hashlib.sha256(f"{key}\0order".encode()).digest()[0] % 2 == 0


def agreement(judge: Judge, key: str, text: str) -> float:
    """1 where the verdict prefers the chosen answer, 0 where the other, 0.5 in the middle; Unreadable without any."""
    share = judge.fraction(read_value(judge, Reply(text), code=verdict_code(key)))
    share = share if shows_chosen_first(key) else 1 - share
    return float(share > 0.5) if share != 0.5 else 0.5
