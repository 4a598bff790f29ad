"""A judge as a scorer: which questions it gets, when, and how their verdicts become the rewards of a group.

A pointwise question is sent when its completion is written, a pairwise one when both are, a ranking when the group is.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TypeVar

from ycore.engine.judge_engine import JudgeEngine, QuestionRefused
from ycore.judge.agreement import KEY, agreement
from ycore.judge.declaration import Judge
from ycore.judge.question import Question, Questioner, as_text, verdict_code, with_pictures
from ycore.judge.verdict import (
    Reply,
    Unreadable,
    follows_position,
    mean,
    read_ranking,
    read_value,
    ring_pairs,
    shares_of_rank,
    shuffled_orders,
    win_share,
)
from ycore.placement.placement import JUDGE
from ycore.run.images import ImageStore
from ycore.run.tasks import together
from ycore.scoring.scoring import NO_FOLDER, JudgeMeter, Scorer, TextOf, Writing, plain_text
from ycore.types import Completion, Score

V = TypeVar("V")


@dataclass(eq=False)
class JudgeScorer(Scorer):
    """One judge. `engines` are slot by slot; a judge at an address has one engine, which is on no slot."""

    name: str
    questioner: Questioner
    engines: Sequence[JudgeEngine]
    _: KW_ONLY
    meter: JudgeMeter
    seed: int
    text_of: TextOf = plain_text
    images: ImageStore = NO_FOLDER

    @property
    def judge(self) -> Judge:
        return self.questioner.judge

    async def score(self, writing: Writing) -> list[list[Score]]:
        if self.judge.mode == "groupwise":
            return [[score] for score in await self._ranked(writing)]
        if self.judge.mode == "pairwise" and self.judge.against != "reference":
            return [[score] for score in await self._with_siblings(writing)]
        return await super().score(writing)

    async def score_one(self, writing: Writing, index: int) -> Score:
        try:
            return Score(
                self.judge.reward(await self._value(writing, await writing.tasks_G[index]))
            )
        except Unreadable as problem:
            return self._score(None, otherwise=str(problem))

    async def _value(self, writing: Writing, completion: Completion) -> float:
        """What the judge says of one completion, or of it against the row's reference; from 0 to 1."""
        prompt, text, key = (
            writing.draw.prompt,
            self.text_of(completion),
            self._key(writing, completion),
        )
        if self.judge.mode == "pairwise":
            reference = as_text(prompt.columns.get(self.judge.reference_column))
            if not reference.strip():
                raise Unreadable("the row has no reference")
            return await self._pair(writing, text, reference, key=key)
        question = self.questioner.pointwise(prompt, text, key=key)
        return await self._verdict(question, writing, key=key, read=self._fraction(key))

    async def _with_siblings(self, writing: Writing) -> list[Score]:
        pairs = ring_pairs(len(writing), self.judge.opponents)
        won = await together([self._compare(writing, one, other) for one, other in pairs])
        scores = []
        for index in range(len(writing)):
            shares = [
                share if index == pair[0] else 1 - share
                for pair, share in zip(pairs, won, strict=True)
                if index in pair and share is not None
            ]
            scores.append(self._score(mean(shares), otherwise="no pair was judged"))
        return scores

    async def _compare(self, writing: Writing, one: int, other: int) -> float | None:
        """The share of wins of `one` over `other`, once both are written; None where no verdict can be read."""
        first, second = await writing.tasks_G[one], await writing.tasks_G[other]
        try:
            key = self._key(writing, first, second)
            return await self._pair(writing, self.text_of(first), self.text_of(second), key=key)
        except Unreadable:
            return None

    async def _pair(self, writing: Writing, one: str, other: str, *, key: str) -> float:
        """The share of wins of `one`. The judge sees both orders, so that a preference for a position cancels out."""
        verdicts = []
        for shown, order_key in (((one, other), f"{key}/0"), ((other, one), f"{key}/1")):
            question = self.questioner.pairwise(writing.draw.prompt, *shown, key=order_key)
            verdicts.append(
                self._verdict(question, writing, key=order_key, read=self._fraction(order_key))
            )
        shown_first, shown_second = await together(verdicts)
        self.meter.pairs += 1
        self.meter.pairs_by_position += follows_position(shown_first, shown_second)
        return win_share(shown_first, shown_second)

    async def _ranked(self, writing: Writing) -> list[Score]:
        completions = await writing.all()
        key = self._key(writing, *completions)
        orders = shuffled_orders(len(completions), self.judge.orders, seed=_number(key))
        asked = [
            self._shares(writing, [completions[i] for i in order], key=f"{key}/{n}")
            for n, order in enumerate(orders)
        ]
        shares_by_answer: list[list[float]] = [[] for _ in completions]
        for order, shares in zip(orders, await together(asked), strict=True):
            for place, share in enumerate(shares or ()):
                shares_by_answer[order[place]].append(share)
        means = [mean(shares) for shares in shares_by_answer]
        return [self._score(share, otherwise="no ranking was read") for share in means]

    async def _shares(
        self, writing: Writing, shown: Sequence[Completion], *, key: str
    ) -> list[float] | None:
        texts = [self.text_of(completion) for completion in shown]
        question = self.questioner.groupwise(writing.draw.prompt, texts, key=key)
        read = partial(read_ranking, self.judge, code=verdict_code(key), count=len(texts))
        try:
            return shares_of_rank(await self._verdict(question, writing, key=key, read=read))
        except Unreadable:
            return None

    async def _verdict(
        self, question: Question, writing: Writing, *, key: str, read: Callable[[Reply], V]
    ) -> V:
        """The value read from the reply. An unreadable reply is retried; after the last try Unreadable is raised."""
        question = with_pictures(
            question, [self.images.url(one.sha256) for one in writing.draw.prompt.images]
        )
        problem = ""
        for attempt in range(1 + self.judge.retries):
            try:
                reply = await self._ask(
                    question, writing, seed=_number(f"{key}/{attempt}"), again=attempt > 0
                )
            except QuestionRefused as refusal:
                raise Unreadable(str(refusal)) from None
            try:
                return read(reply)
            except Unreadable as why:
                self.meter.parse_failures += 1
                problem = str(why)
        raise Unreadable(problem)

    async def _ask(self, question: Question, writing: Writing, *, seed: int, again: bool) -> Reply:
        if self.judge.base_url is not None:
            return await self._timed(self.engines[0], question, seed=seed, again=again)
        async with writing.turn(JUDGE) as slot:
            reply = await self._timed(slot.pick(self.engines), question, seed=seed, again=again)
            slot.num_tokens = reply.num_tokens
            return reply

    async def _timed(
        self, engine: JudgeEngine, question: Question, *, seed: int, again: bool
    ) -> Reply:
        started = time.perf_counter()
        self.meter.calls += 1
        try:
            reply = await engine.ask(self.judge, question, seed=seed, again=again)
        finally:
            self.meter.seconds += time.perf_counter() - started
        self.meter.tokens += reply.num_tokens
        return reply

    def _fraction(self, key: str) -> Callable[[Reply], float]:
        """Reads the verdict to the question of this key, as a share of the verdict's range."""
        return lambda reply: self.judge.fraction(
            read_value(self.judge, reply, code=verdict_code(key))
        )

    def _key(self, writing: Writing, *completions: Completion) -> str:
        """Identifies what is judged, also in a resumed run. It depends on the text: no policy can predict it."""
        written = ",".join("-".join(map(str, one.token_ids)) or one.text for one in completions)
        return f"{self.seed}/{self.name}/{writing.draw.position}/{hashlib.sha256(written.encode()).hexdigest()}"

    def _score(self, share: float | None, *, otherwise: str) -> Score:
        """The reward of a share, or a masked score with the reason why there is none."""
        if share is None:
            return Score(None, problem=f"judge {self.name}: {otherwise}")
        return Score(self.judge.reward(share))


@dataclass(eq=False)
class AgreementScorer(Scorer):
    """Whether the policy, asked as a judge, prefers the better answer of a pair; 0 where its verdict is unreadable."""

    judge: Judge
    _: KW_ONLY
    meter: JudgeMeter
    text_of: TextOf = plain_text

    async def score_one(self, writing: Writing, index: int) -> Score:
        completion = await writing.tasks_G[index]
        try:
            return Score(
                agreement(self.judge, writing.draw.prompt.columns[KEY], self.text_of(completion))
            )
        except Unreadable:
            self.meter.parse_failures += 1
            return Score(0.0)


def _number(key: str) -> int:
    """A seed of 31 bits."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") >> 1
