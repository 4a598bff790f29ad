"""Clients of vLLM servers over token ids: the policy as an `Engine`, a reward model, and a teacher."""

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import AsyncFileLock

from ycore.engine import Engine, SamplingParams, WeightSource
from ycore.engine.judge_engine import prompt_logprobs, prompt_request
from ycore.engine.server import Server, SleepingEngine, own_socket, reload_from_disk
from ycore.engine.shared_bucket import Bucket
from ycore.engine.sight import Sight
from ycore.engine.vllm_plugin import NOT_LOADED
from ycore.engine.weight_proof import (
    Piece,
    TensorSums,
    check_read_back,
    has_adapters,
    read_manifest,
)
from ycore.errors import EngineError, SyncError
from ycore.placement.placement import REWARD_MODEL, ROLLOUT, TEACHER
from ycore.types import Completion, JsonObject, Prompt, Record

_WEIGHT_INFO = "/weight_info"
_LOAD = "/v1/load_lora_adapter"
_UNLOAD = "/v1/unload_lora_adapter"
_RESET_TRIES = 50
_RESET_WAIT_S = 0.1
_CHUNK_BYTES = 2**20


class _LanguageModel(Server):
    """A vLLM server of a language model, which its requests call `_model`."""

    _model: str

    async def logprobs_of(
        self, context_ids: Sequence[int], target_ids: Sequence[int]
    ) -> tuple[float, ...]:
        request = prompt_request(self._model, context_ids, target_ids)
        answer = await self.request("POST", "/v1/completions", request)
        return prompt_logprobs(answer, context_ids, target_ids)


class VllmTeacher(_LanguageModel):
    _model = TEACHER


class VllmEngine(_LanguageModel, Engine):
    """Example: `VllmEngine("rollout-0", folder.socket("rollout-0"), sampling, request_timeout_s=600)`.

    A restarted process gets the weights that the last one had before its first request. Each rank of a machine has
    clients of all engines. One of them, at the engine's home, sends the weights of a new version. The others check that
    the engine has them. A process that has lost them gets them from whichever client comes first.

    Attributes:
        source: The policy's weights in this process, where they are not sent as files (`engine.sync=ipc`).
        sleeper: Puts the engine to sleep; None without sleep mode. Weights for a sleeping engine are sent as it wakes.
    """

    sleeper: SleepingEngine | None

    def __init__(
        self,
        name: str,
        socket: Path,
        sampling: SamplingParams,
        *,
        request_timeout_s: float,
        restart_timeout_s: float = 900.0,
        sleeps: bool = False,
        min_verified: float = 1.0,
        is_home: bool = True,
        sight: Sight | None = None,
        source: WeightSource | None = None,
    ) -> None:
        super().__init__(
            name,
            socket,
            request_timeout_s=request_timeout_s,
            restart_timeout_s=restart_timeout_s,
        )
        self.sleeper = SleepingEngine(self, refill=self._refill) if sleeps else None
        self.is_home = is_home
        self.source = source
        self._sampling = sampling
        self._sight = sight
        self._min_verified = min_verified
        self._weights: tuple[Path, int] | None = None  # folder, version
        self._request_ids: set[str] = set()  # of completions in flight
        self._model = ROLLOUT  # adapters are a model of their own, named by their version

    async def complete(
        self,
        prompt_ids: Sequence[int],
        seed: int,
        *,
        greedy: bool = False,
        max_tokens: int | None = None,
        prompt: Prompt | None = None,
    ) -> Completion:
        version = self.version
        request_id = uuid.uuid4().hex
        sampling = {**asdict(self._sampling), "seed": seed, "logprobs": 0}
        if greedy:
            sampling["temperature"] = 0.0
        if max_tokens is not None:
            sampling["max_tokens"] = max_tokens
        if prompt is not None:
            return await self._complete_seen(prompt_ids, prompt, sampling, version)
        request = {
            "request_id": request_id,
            "model": self._model,
            "prompt": list(prompt_ids),
            "return_token_ids": True,
            **sampling,
        }
        self._request_ids.add(request_id)
        try:
            answer = await self.request("POST", "/v1/completions", request)
        finally:
            self._request_ids.discard(request_id)
        choice = answer["choices"][0]
        return Completion(
            token_ids=tuple(choice["token_ids"]),
            logprobs=tuple(choice["logprobs"]["token_logprobs"]),
            text=choice["text"],
            finish_reason=choice["finish_reason"],
            policy_version=version,
        )

    async def abort(self) -> None:
        """See `Engine`. A request that vLLM does not have yet goes on, and is aborted by the next call."""
        if self._request_ids:  # vLLM's name of a request, for the only prompt in it
            ids = [f"cmpl-{request_id}-0" for request_id in self._request_ids]
            await self.request("POST", "/abort_requests", {"request_ids": ids})

    async def _complete_seen(
        self,
        prompt_ids: Sequence[int],
        prompt: Prompt,
        sampling: Record,
        version: int,
    ) -> Completion:
        """Sample a completion of a prompt with pictures, which go beside ids that have one token for each."""
        assert self._sight is not None
        urls = [self._sight.store.url(image.sha256) for image in prompt.images]
        request = {
            "model": self._model,
            "token_ids": list(self._sight.short_ids(prompt)),
            "content_parts": [{"type": "image_url", "url": url} for url in urls],
            "sampling_params": {**sampling, "detokenize": False},
            "return_token_ids": True,
        }
        answer = await self.request("POST", "/inference/v1/generate", request)
        if (read_ids := answer["prompt_token_ids"]) != list(prompt_ids):
            raise EngineError(
                f"{self.name} reads row {prompt.row} with its pictures as {len(read_ids)} tokens, which are not the "
                f"{len(prompt_ids)} that the trainer reads; take --engine transformers"
            )
        choice = answer["choices"][0]
        token_ids = tuple(choice["token_ids"])
        return Completion(
            token_ids=token_ids,
            logprobs=tuple(token["logprob"] for token in choice["logprobs"]["content"]),
            text=str(
                self._sight.processor.tokenizer.decode(token_ids, skip_special_tokens=True)
            ),
            finish_reason=choice["finish_reason"],
            policy_version=version,
        )

    async def load_weights(self, folder: Path, version: int) -> None:
        sums = read_manifest(folder, version=version)
        self._weights = folder, version
        self._model = f"{ROLLOUT}-{version}" if has_adapters(sums) else ROLLOUT
        if (
            not self.is_home
        ):  # the next request's preparation checks that the home has sent them
            self.prepare_again()
            self.version = version
        elif self._can_take_weights:
            await self._sync(version)

    @property
    def _can_take_weights(self) -> bool:
        return self.sleeper is None or self.sleeper.has_weights

    async def _refill(self) -> None:
        """Load the weights after a sleep: those that were sent last, or the model's own where none were."""
        if self._weights is None:
            await reload_from_disk(self)
        else:
            await self._sync(self._weights[1])

    async def _sync(self, version: int) -> None:
        """Have the weights sent by the next request's preparation, and check the version by that request."""
        self.prepare_again()
        loaded = (await self.request("GET", _WEIGHT_INFO))["weight_version"]
        if loaded != str(version):
            raise SyncError(
                f"{self.name}: holds policy version {loaded}, not {version}, after the weights were sent"
            )
        self.version = version

    async def prepare(self) -> bool:
        """Have the process load the weights; away from its home, unless it has them."""
        if self._weights is None or not self._can_take_weights:
            return True
        folder, version = self._weights
        async with AsyncFileLock(self.socket.resolve().with_suffix(".loading")):
            if not self._sends_unasked:
                loaded = (await self.request_once("GET", _WEIGHT_INFO))["weight_version"]
                if loaded == str(version):
                    return False
            await self._send(folder, version)
        return True

    @property
    def _sends_unasked(self) -> bool:
        """Whether a new process gets the weights without being asked which it has."""
        return self.is_home

    async def _send(self, folder: Path, version: int) -> None:
        """Have the process load the weights, and compare each tensor's sums with those read back from the model."""
        sums = read_manifest(folder, version=version)
        sums = {name: sums[name] for name in sums if not name.startswith(NOT_LOADED)}
        # What slept may have sums of memory that is lost.
        may_hold = version == 0 and self.sleeper is None
        if not (may_hold and await self._holds(sums)):
            pieces = await self._load(folder, sums)
            try:
                self.verified_share = check_read_back(sums, pieces, at_least=self._min_verified)
            except SyncError as error:
                raise SyncError(f"{self.name}: policy version {version}: {error}") from None
        await self._forget_prefixes()
        if self._sight is not None:  # features of pictures are cached by the pictures' hashes
            await self.request_once("POST", "/reset_mm_cache")
            await self.request_once("POST", "/reset_encoder_cache")
        await self.request_once("POST", "/update_weight_version", {"new_version": str(version)})

    async def _holds(self, sums: Mapping[str, TensorSums]) -> bool:
        """Tell whether the process has all these weights already: it may have read them from the model's folder."""
        with suppress(SyncError):
            self.verified_share = check_read_back(sums, await self._call("held_policy"))
            return True
        return False

    async def _load(self, folder: Path, sums: Mapping[str, TensorSums]) -> list[Piece]:
        """Have the process load the weights; return the sums of what it then holds."""
        if has_adapters(sums):
            await self._load_adapters(await self._path_there(folder))
            return await self._call("held_policy")
        if self.source is not None:
            return await self._load_by_bucket(self.source, folder, sums)
        path = await self._path_there(folder)
        return await self._call("load_policy", weights_path=path)

    async def _forget_prefixes(self) -> None:
        """Drop the keys and values that earlier weights left; vLLM refuses while a request still holds some."""
        for _ in range(_RESET_TRIES):
            answer = await self.request_once("POST", "/reset_prefix_cache")
            if (answer or {}).get("success") is not False:
                return
            await asyncio.sleep(_RESET_WAIT_S)
        raise SyncError(
            f"{self.name} still held keys and values of earlier weights {_RESET_TRIES * _RESET_WAIT_S:g} s after it had "
            f"loaded new ones: /reset_prefix_cache answered {answer}; resume the run"
        )

    async def _call(self, method: str, **arguments: Any) -> list[Piece]:
        """Call a method of the process's workers; return what all return."""
        call = {"method": method, "kwargs": arguments}
        answer = await self.request_once("POST", "/collective_rpc", call)
        return [piece for pieces in answer["results"] for piece in pieces or ()]

    async def _load_by_bucket(
        self, source: WeightSource, folder: Path, sums: Mapping[str, TensorSums]
    ) -> list[Piece]:
        """Have the process copy the weights from the trainer's memory, one bucket after another."""
        bucket = Bucket(source, sums, folder / f"{self.name}.bucket")
        await self._call("open_bucket", handle=bucket.handle, num_bytes=bucket.num_bytes)
        fills = bucket.fill()
        while (entries := await asyncio.to_thread(next, fills, None)) is not None:
            await self._call("load_bucket", entries=entries)
        return await self._call("close_bucket")

    async def _path_there(self, folder: Path) -> str:
        """Return the path at which the engine finds the folder."""
        return str(folder)

    async def _load_adapters(self, path: str) -> None:
        """Under a new name each time: with `load_inplace`, vLLM would read the files again at each step of decoding."""
        models = (await self.request_once("GET", "/v1/models"))["data"]
        for model in models:
            if model["parent"] is not None:
                await self.request_once(
                    "POST", _UNLOAD, {"lora_name": model["id"]}, is_json=False
                )
        await self.request_once(
            "POST", _LOAD, {"lora_name": self._model, "lora_path": path}, is_json=False
        )


class HostEngine(VllmEngine):
    """The policy on another machine, which is sent files of weights.

    While it is lost, the launcher lets its socket lead to another engine, which gets its weights from its own client.
    """

    @property
    def _sends_unasked(self) -> bool:
        return self.is_home and self.socket.readlink() == own_socket(self.socket)

    async def _path_there(self, folder: Path) -> str:
        """Send the folder's files; vLLM's server reads them from a folder of its own."""
        path = ""
        for file in sorted(folder.iterdir()):
            path = await self.request_once("PUT", f"/{file.name}", content=_chunks(file))
        return path


async def _chunks(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            yield chunk


class VllmRewardModel(Server):
    async def logit(self, token_ids: Sequence[int]) -> float:
        """Return the classifier's only logit, without an activation; NaN where it gives no number."""
        # Without `use_activation: false` vLLM returns the logit's sigmoid.
        body: JsonObject = {
            "model": REWARD_MODEL,
            "input": list(token_ids),
            "use_activation": False,
        }
        answer = await self.request("POST", "/classify", body)
        try:
            (number,) = answer["data"][0]["probs"]
            return math.nan if number is None else float(number)
        except (KeyError, IndexError, TypeError, ValueError):
            raise EngineError(
                f"{self.name}: /classify answered {str(answer)[:200]}, not one number"
            ) from None
