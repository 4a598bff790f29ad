"""Generation by transformers, in the trainer's own process and with its own weights, as an Engine.

For machines without vLLM: slower, same completions' shape. It has no weights to be sent, so a sync is nothing, and it
reports no logprobs: the trainer's own are the ones it sampled with.

Not here: training.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ycore.engine import Sampling
from ycore.types import Completion

MAX_BATCH = 64


class _Ask(NamedTuple):
    prompt_ids: Sequence[int]
    seed: int
    greedy: bool
    answer: "asyncio.Future[Completion]"


class TransformersEngine:
    """Gathers what is asked at once into batches for `model.generate`."""

    name = "transformers"

    def __init__(self, model: Any, tokenizer: Any, sampling: Sampling) -> None:
        self.version = 0
        self._model = model
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._waiting: list[_Ask] = []
        self._worker: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # one use of the model at a time, whichever thread it is on

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Nothing to wait for."""

    async def load_weights(self, folder: Path, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        """Nothing to let go of."""

    async def complete(self, prompt_ids: Sequence[int], seed: int, *, greedy: bool = False) -> Completion:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Ask(prompt_ids, seed, greedy, answer))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._work())
        return await answer

    async def _work(self) -> None:
        await asyncio.sleep(0)  # everything that is asked in this turn of the loop goes into one batch
        while self._waiting:
            alike = [ask for ask in self._waiting if ask.greedy == self._waiting[0].greedy]
            others = [ask for ask in self._waiting if ask.greedy != alike[0].greedy]
            batch, self._waiting = alike[:MAX_BATCH], alike[MAX_BATCH:] + others
            try:
                async with self._turn:
                    completions = await asyncio.to_thread(self._generate, batch)
            except Exception as error:  # noqa: BLE001 -- handed to everyone who waits for this batch
                for ask in batch:
                    if not ask.answer.done():
                        ask.answer.set_exception(error)
                continue
            for ask, completion in zip(batch, completions, strict=True):
                if not ask.answer.done():
                    ask.answer.set_result(completion)

    async def logprobs_of(self, context_ids: Sequence[int], target_ids: Sequence[int]) -> tuple[float, ...]:
        async with self._turn:
            return await asyncio.to_thread(self._score, list(context_ids), list(target_ids))

    def _score(self, context_ids: list[int], target_ids: list[int]) -> tuple[float, ...]:
        ids = torch.tensor([[*context_ids, *target_ids]], device=self._model.device)
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad(), self._autocast():
                logits = self._model(input_ids=ids, use_cache=False).logits[0, len(context_ids) - 1 : -1]
        finally:
            self._model.train(was_training)
        chosen = logits.float().log_softmax(-1).gather(1, ids[0, len(context_ids) :].unsqueeze(1))
        return tuple(chosen.squeeze(1).tolist())

    def _generate(self, batch: Sequence[_Ask]) -> list[Completion]:
        inputs = self._tokenizer.pad(
            {"input_ids": [list(ask.prompt_ids) for ask in batch]}, padding_side="left", return_tensors="pt"
        ).to(self._model.device)
        was_training = self._model.training
        self._model.eval()
        try:
            # One generator serves the batch: its first seed stands for all of them.
            with torch.random.fork_rng(), torch.no_grad(), self._autocast():
                torch.manual_seed(batch[0].seed)
                outputs = self._model.generate(**inputs, **self._arguments(greedy=batch[0].greedy))
        finally:
            self._model.train(was_training)
        return [self._completion(row) for row in outputs[:, inputs["input_ids"].size(1) :].tolist()]

    def _autocast(self) -> torch.autocast:
        """Adapters are kept in float32 beside a bfloat16 base; the trainer's own passes compute them so too."""
        is_half = self._model.dtype == torch.bfloat16
        return torch.autocast(self._model.device.type, dtype=torch.bfloat16, enabled=is_half)

    def _arguments(self, *, greedy: bool) -> dict[str, Any]:
        sampling = self._sampling
        greedy = greedy or sampling.temperature == 0
        return {
            "max_new_tokens": sampling.max_tokens,
            "do_sample": not greedy,
            "temperature": None if greedy else sampling.temperature,
            "top_p": None if greedy else sampling.top_p,
            "top_k": None if greedy else sampling.top_k,
            "min_p": sampling.min_p or None,
            "repetition_penalty": sampling.repetition_penalty,
            "eos_token_id": list(sampling.stop_token_ids) or None,
            "pad_token_id": self._tokenizer.pad_token_id,
            "use_cache": True,
        }

    def _completion(self, tokens: list[int]) -> Completion:
        ends = [position for position, token in enumerate(tokens) if token in self._sampling.stop_token_ids]
        kept = tokens[: ends[0] + 1] if ends else tokens
        return Completion(
            token_ids=tuple(kept),
            logprobs=None,
            text=self._tokenizer.decode(kept, skip_special_tokens=True),
            finish_reason="stop" if ends else "length",
            policy_version=self.version,
        )
