"""Rewards from the policy's own side: the probability of the right answer, and what a completion's environment paid."""

from collections.abc import Sequence
from dataclasses import dataclass

from ycore.config.schema import RewardConfig, RunConfig
from ycore.data.prompts import PromptSet
from ycore.placement.placement import ROLLOUT
from ycore.rewards.answers import gold_of
from ycore.rewards.builtin import (
    REFERENCE,
    Reference,
    before_the_answer,
    is_environment,
    is_reference,
    reference_of,
    reference_reward,
)
from ycore.rewards.loading import require_columns
from ycore.run.tasks import together
from ycore.scoring.scoring import PendingGroup, Policy, Scorer, ScorerContext
from ycore.types import Score


@dataclass(eq=False)
class ReferenceScorer(Scorer):
    """`reference_probability`: the policy's own probability of the right answer, after what it wrote."""

    name = REFERENCE
    reference: Reference
    policy: Policy

    @classmethod
    def handles(cls, spec: RewardConfig) -> bool:
        return is_reference(spec)

    @classmethod
    def check_rows(cls, spec: RewardConfig, config: RunConfig, prompts: PromptSet) -> None:
        reference_of(spec)
        require_columns(REFERENCE, ["answer"], prompts.columns)

    @classmethod
    def image_problem(cls, spec: RewardConfig, config: RunConfig) -> str | None:
        return "asks the policy about text only"

    @classmethod
    def build(cls, spec: RewardConfig, source: int, context: ScorerContext) -> Scorer:
        return cls(reference_of(spec), context.policy)

    async def score(self, group: PendingGroup) -> list[list[Score]]:
        answer_ids = self._tokenize(gold_of(group.draw.prompt.columns.get("answer")))
        if not answer_ids:  # the reward does not apply to this row
            return [[Score(None)] for _ in range(len(group))]
        bare = await self._logprobs(group, "", answer_ids) if self.reference.debias else None
        scores = await together(
            [self._score(group, index, answer_ids, bare) for index in range(len(group))]
        )
        return [[score] for score in scores]

    async def _score(
        self, group: PendingGroup, index: int, answer_ids: list[int], bare: Sequence[float] | None
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

    @classmethod
    def handles(cls, spec: RewardConfig) -> bool:
        return is_environment(spec)

    @classmethod
    def build(cls, spec: RewardConfig, source: int, context: ScorerContext) -> Scorer:
        return cls()

    async def score_one(self, group: PendingGroup, index: int) -> Score:
        return (await group.tasks_G[index]).earned or Score(None)
