"""A stock vLLM server over a unix socket, as an Engine.

Not here: starting and stopping its process (`rollout`, `launch`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from ycore.errors import EngineError, SyncError
from ycore.roles.engine import Sampling
from ycore.types import Completion

MODEL = "policy"
"""The name under which every engine serves its model."""


_TRIES = 3

# The server closes a connection that was idle for 5 s, which a training step is; ours are given up well before that.
_LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=1.0)


class VllmEngine:
    """Example: `VllmEngine("rollout-0", folder.socket("rollout-0"), sampling, request_timeout_s=600)`."""

    def __init__(self, name: str, socket: Path, sampling: Sampling, *, request_timeout_s: float) -> None:
        self.name = name
        self.version = 0
        self._socket = socket
        self._sampling = sampling
        self._timeout_s = request_timeout_s
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=_LIMITS),
            base_url=f"http://{name}",
            timeout=httpx.Timeout(request_timeout_s, pool=None),
        )

    async def wait_ready(self, *, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._healthy():
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise EngineError(
                f"{self.name}: not ready after {timeout_s:.0f} s; "
                f"see logs/{self.name}.log, or raise engine.start_timeout_s"
            ) from None

    async def _healthy(self) -> bool:
        if not self._socket.exists():
            return False
        try:
            return (await self._client.get("/health", timeout=5)).status_code == 200
        except httpx.HTTPError:
            return False

    async def complete(self, prompt_ids: Sequence[int], seed: int) -> Completion:
        version = self.version
        answer = await self._call("POST", "/v1/completions", self._request(prompt_ids, seed))
        choice = answer["choices"][0]
        return Completion(
            token_ids=tuple(choice["token_ids"]),
            logprobs=tuple(choice["logprobs"]["token_logprobs"]),
            text=choice["text"],
            finish_reason=choice["finish_reason"],
            policy_version=version,
        )

    def _request(self, prompt_ids: Sequence[int], seed: int) -> dict[str, Any]:
        sampling = self._sampling
        return {
            "model": MODEL,
            "prompt": list(prompt_ids),
            "n": 1,
            "seed": seed,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(sampling.stop_token_ids),
            "logprobs": 0,
            "return_token_ids": True,
        }

    async def load_weights(self, folder: Path, version: int) -> None:
        reload = {"method": "load_policy", "kwargs": {"weights_path": str(folder)}}
        await self._call("POST", "/collective_rpc", reload)
        await self._call("POST", "/reset_prefix_cache")
        await self._call("POST", "/update_weight_version", {"new_version": str(version)})
        told = (await self._call("GET", "/weight_info"))["weight_version"]
        if told != str(version):
            raise SyncError(f"{self.name}: holds policy version {told}, not {version}, after the weights were sent")
        self.version = version

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One request with a deadline; any failure is an EngineError that names the engine and the call."""
        try:
            response = await self._request_again(method, path, body)
        except httpx.TimeoutException:
            raise EngineError(
                f"{self.name}: no answer to {path} within {self._timeout_s:.0f} s (engine.request_timeout_s)"
            ) from None
        except httpx.HTTPError as error:
            raise EngineError(
                f"{self.name}: {path} failed, {error or type(error).__name__}; see logs/{self.name}.log"
            ) from error
        if response.status_code >= 400:
            raise EngineError(f"{self.name}: {path} answered {response.status_code}: {response.text[:300]}")
        try:
            return response.json() if response.content else None
        except ValueError:
            raise EngineError(f"{self.name}: {path} answered {response.text[:300]!r}, which is not JSON") from None

    async def _request_again(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        """The answer, asked again where the connection was closed instead: every call here may be made twice."""
        for _ in range(_TRIES - 1):
            try:
                return await self._client.request(method, path, json=body)
            except httpx.RemoteProtocolError:
                continue
        return await self._client.request(method, path, json=body)

    async def close(self) -> None:
        await self._client.aclose()
