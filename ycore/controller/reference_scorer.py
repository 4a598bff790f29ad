"""`reference_probability` as a Scorer: the policy is asked how likely the right answer is, after what it wrote.

One request a completion, as it ends, and one more a group for the answer without any reasoning.

Not here: where the answer goes and what the numbers become (`rewards.reference`).
"""

from collections.abc import Callable, Sequence

from ycore.controller.dispatch import ROLLOUT
from ycore.controller.scoring import Writing, together
from ycore.rewards.reference import Reference, as_answer, before_the_answer, reference_reward
from ycore.roles.engine import Engine
from ycore.types import Score

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
