"""An `Engine` for machines without vLLM: transformers generates in the trainer's process, with the trainer's model.

It is slower. It needs no weights sent, and reports no logprobs: they are the trainer's own.
"""

import asyncio
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from transformers import GenerationConfig

from ycore.engine import Engine, SamplingParams
from ycore.engine.sight import Sight
from ycore.types import Completion, Prompt

R = TypeVar("R")


class Batches(Generic[R]):
    """Collects requests, and writes their completions in a thread, one batch at a time.

    Args:
        write: Returns the completions of a batch, in its order.
        kind: Returns a request's kind; only requests of one kind share a batch.
        most: Largest number of requests of a batch.
        wait_s: Seconds from a request to its batch, for more to join; 0 is one turn of the event loop.
    """

    def __init__(
        self,
        write: Callable[[Sequence[R]], list[Completion]],
        *,
        kind: Callable[[R], Hashable],
        most: int,
        wait_s: float = 0,
    ) -> None:
        self.lock = asyncio.Lock()
        """Held while a batch is written."""
        self._write = write
        self._kind = kind
        self._most = most
        self._wait_s = wait_s
        self._waiting: list[tuple[R, asyncio.Future[Completion]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def ask(self, request: R) -> Completion:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._work())
        return await answer

    async def _work(self) -> None:
        while self._waiting:
            await asyncio.sleep(self._wait_s)
            batch = self._take()
            try:
                async with self.lock:
                    completions = await asyncio.to_thread(
                        self._write, [request for request, _ in batch]
                    )
            except Exception as error:  # noqa: BLE001 -- handed to everyone who waits for this batch
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), completion in zip(batch, completions, strict=True):
                if not answer.done():
                    answer.set_result(completion)

    def _take(self) -> list[tuple[R, "asyncio.Future[Completion]"]]:
        """Take the request that has waited longest, and those of its kind."""
        kind = self._kind(self._waiting[0][0])
        same_kind = [entry for entry in self._waiting if self._kind(entry[0]) == kind]
        other_kinds = [entry for entry in self._waiting if self._kind(entry[0]) != kind]
        self._waiting = same_kind[self._most :] + other_kinds
        return same_kind[: self._most]


MAX_BATCH = 64


@contextmanager
def plain_generation(model: Any) -> Iterator[None]:
    """Keep the sampling settings of the model folder's generation_config.json from `generate`, all but the end tokens.

    vLLM's engines leave them out too (`--generation-config vllm`): a run samples as its own settings say.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    of_folder = base.generation_config
    base.generation_config = GenerationConfig(
        bos_token_id=of_folder.bos_token_id,
        eos_token_id=of_folder.eos_token_id,
        pad_token_id=of_folder.pad_token_id,
    )
    try:
        yield
    finally:
        base.generation_config = of_folder


class _Request(NamedTuple):
    prompt_ids: Sequence[int]
    seed: int
    greedy: bool
    max_tokens: int
    prompt: Prompt | None


class TransformersEngine(Engine):
    """Collects simultaneous requests into batches for `model.generate`.

    Args:
        is_half: Whether the trainer computes in bfloat16, in which it may not keep the weights.
    """

    name = "transformers"

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        sampling: SamplingParams,
        sight: Sight | None = None,
        *,
        is_half: bool = False,
    ) -> None:
        self._sight = sight
        self._model = model
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._is_half = is_half
        self._batches = Batches[_Request](
            self._generate,
            kind=lambda request: (request.greedy, request.prompt is not None),  # has pictures
            most=MAX_BATCH,
        )

    async def complete(
        self,
        prompt_ids: Sequence[int],
        seed: int,
        *,
        greedy: bool = False,
        max_tokens: int | None = None,
        prompt: Prompt | None = None,
    ) -> Completion:
        limit = max_tokens or self._sampling.max_tokens
        return await self._batches.ask(_Request(prompt_ids, seed, greedy, limit, prompt))

    async def logprobs_of(
        self, context_ids: Sequence[int], target_ids: Sequence[int]
    ) -> tuple[float, ...]:
        async with (
            self._batches.lock
        ):  # one use of the model at a time, as each has its own thread
            return await asyncio.to_thread(self._score, list(context_ids), list(target_ids))

    def _score(self, context_ids: list[int], target_ids: list[int]) -> tuple[float, ...]:
        ids = torch.tensor([[*context_ids, *target_ids]], device=self._model.device)
        with self._inference():
            logits = self._model(input_ids=ids, use_cache=False).logits[
                0, len(context_ids) - 1 : -1
            ]
        chosen = (
            logits.float().log_softmax(-1).gather(1, ids[0, len(context_ids) :].unsqueeze(1))
        )
        return tuple(chosen.squeeze(1).tolist())

    def _generate(self, batch: Sequence[_Request]) -> list[Completion]:
        inputs = self._inputs(batch).to(self._model.device)
        sampling = self._sampling
        greedy = batch[0].greedy or sampling.temperature == 0
        # Without `devices`, fork_rng would touch every device on each rank.
        devices = [self._model.device] if self._model.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices=devices),
            self._inference(),
            plain_generation(self._model),
        ):
            torch.manual_seed(
                batch[0].seed
            )  # one generator, seeded by the batch's first request
            outputs = self._model.generate(
                **inputs,
                max_new_tokens=max(request.max_tokens for request in batch),
                do_sample=not greedy,
                temperature=None if greedy else sampling.temperature,
                top_p=None if greedy else sampling.top_p,
                top_k=None if greedy else sampling.top_k,
                min_p=sampling.min_p or None,
                repetition_penalty=sampling.repetition_penalty,
                eos_token_id=list(sampling.stop_token_ids) or None,
                pad_token_id=self._tokenizer.pad_token_id,
                use_cache=True,
            )
        rows = outputs[:, inputs["input_ids"].size(1) :].tolist()
        return [
            self._completion(row[: request.max_tokens])
            for row, request in zip(rows, batch, strict=True)
        ]

    def _inputs(self, batch: Sequence[_Request]) -> Any:
        """Return token ids padded left, with the pixels of prompts that have pictures."""
        prompts = [request.prompt for request in batch if request.prompt is not None]
        if not prompts:
            ids = [list(request.prompt_ids) for request in batch]
            return self._tokenizer.pad(
                {"input_ids": ids}, padding_side="left", return_tensors="pt"
            )
        assert self._sight is not None, "a prompt with pictures, and a model that does not see"
        return self._sight.inputs(prompts)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        """Use evaluation mode without gradients, and autocast as the trainer, which keeps what it trains in float32."""
        was_training = self._model.training
        self._model.eval()
        try:
            with (
                torch.no_grad(),
                torch.autocast(
                    self._model.device.type, dtype=torch.bfloat16, enabled=self._is_half
                ),
            ):
                yield
        finally:
            self._model.train(was_training)

    def _completion(self, tokens: list[int]) -> Completion:
        ends = [
            position
            for position, token in enumerate(tokens)
            if token in self._sampling.stop_token_ids
        ]
        kept = tokens[: ends[0] + 1] if ends else tokens
        return Completion(
            token_ids=tuple(kept),
            logprobs=None,
            text=self._tokenizer.decode(kept, skip_special_tokens=True),
            finish_reason="stop" if ends else "length",
            policy_version=self.version,
        )
