"""A reward model as a Scorer: each completion's number, asked for as it ends.

Not here: the request (`roles.reward_model_engine`), and how the number becomes a reward (`judging.reward_model`).
"""

import math
import time
from collections.abc import Callable, Sequence

from ycore.controller.meters import RewardModelMeter
from ycore.controller.scoring import TextOf, Writing, plain_text, together
from ycore.judging.reward_model import RewardModel
from ycore.placement.placement import REWARD_MODEL
from ycore.roles.reward_model_engine import RewardModelEngine
from ycore.types import Prompt, Score

Encode = Callable[[Prompt, str], list[int]]
"""Prompt and completion as the reward model's own token ids."""


class RewardModelScorer:
    """One reward model; `engines[slot]` are its engines."""

    def __init__(
        self,
        name: str,
        reward_model: RewardModel,
        engines: Sequence[RewardModelEngine],
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
