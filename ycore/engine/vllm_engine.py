"""A stock vLLM server over a unix socket, as an Engine.

Not here: starting and stopping its process (`rollout`, `launch`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ycore.engine import Sampling
from ycore.engine.server import Server
from ycore.engine.sleeping import SleepingEngine, reload_from_disk
from ycore.engine.weights import Manifest, check_read_back, read_manifest
from ycore.errors import SyncError
from ycore.types import Completion

SERVED_POLICY = "policy"
"""The name under which every engine serves its model."""


class VllmEngine:
    """Example: `VllmEngine("rollout-0", folder.socket("rollout-0"), sampling, request_timeout_s=600)`.

    A process that died and was started again gets the weights that the last one had, before it is asked anything.
    `proved` is the share of the tensors sent last that were read back from the engine, and were right. `sleeper` is
    there where the server can sleep; weights for an engine that sleeps are sent when it wakes.
    """

    def __init__(
        self,
        name: str,
        socket: Path,
        sampling: Sampling,
        *,
        request_timeout_s: float,
        restart_timeout_s: float = 900.0,
        sleeps: bool = False,
    ) -> None:
        self.name = name
        self.version = 0
        self.proved = 0.0
        self._sampling = sampling
        self._weights: tuple[Path, Manifest] | None = None
        self._server = Server(
            name,
            socket,
            request_timeout_s=request_timeout_s,
            restart_timeout_s=restart_timeout_s,
            prepare=self._send_weights,
        )
        self.sleeper = SleepingEngine(self._server, socket, refill=self._refill) if sleeps else None

    @property
    def restarts(self) -> int:
        """How often another process has taken the place of the one before."""
        return self._server.restarts

    async def wait_ready(self, *, timeout_s: float) -> None:
        await self._server.wait_ready(timeout_s=timeout_s)

    async def complete(self, prompt_ids: Sequence[int], seed: int, *, greedy: bool = False) -> Completion:
        version = self.version
        request = self._request(prompt_ids, seed) | ({"temperature": 0.0} if greedy else {})
        answer = await self._server.ask("POST", "/v1/completions", request)
        choice = answer["choices"][0]
        return Completion(
            token_ids=tuple(choice["token_ids"]),
            logprobs=tuple(choice["logprobs"]["token_logprobs"]),
            text=choice["text"],
            finish_reason=choice["finish_reason"],
            policy_version=version,
        )

    async def logprobs_of(self, context_ids: Sequence[int], target_ids: Sequence[int]) -> tuple[float, ...]:
        asked = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        request = {"model": SERVED_POLICY, "prompt": [*context_ids, *target_ids], **asked}
        answer = await self._server.ask("POST", "/v1/completions", request)
        told = answer["choices"][0]["prompt_logprobs"][len(context_ids) :]
        return tuple(at[str(token)]["logprob"] for at, token in zip(told, target_ids, strict=True))

    def _request(self, prompt_ids: Sequence[int], seed: int) -> dict[str, Any]:
        sampling = self._sampling
        return {
            "model": SERVED_POLICY,
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
        self._weights = folder, read_manifest(folder, version=version)
        if self._has_room:
            await self._take_weights(version)

    @property
    def _has_room(self) -> bool:
        return self.sleeper is None or self.sleeper.has_weights

    async def _refill(self) -> None:
        """The weights that were sent last, or those of the start where none ever were."""
        if self._weights is None:
            await reload_from_disk(self._server)
        else:
            await self._take_weights(self._weights[1].version)

    async def _take_weights(self, version: int) -> None:
        self._server.forget()
        told = (await self._server.ask("GET", "/weight_info"))["weight_version"]
        if told != str(version):
            raise SyncError(f"{self.name}: holds policy version {told}, not {version}, after the weights were sent")
        self.version = version

    async def _send_weights(self) -> None:
        """Have the process load the weights, and prove that it did: each tensor's sum is read back from the model."""
        if self._weights is None or not self._has_room:
            return
        folder, manifest = self._weights
        call = self._server.call
        reload = {"method": "load_policy", "kwargs": {"weights_path": str(folder)}}
        (read_back,) = (await call("POST", "/collective_rpc", reload))["results"]
        try:
            self.proved = check_read_back(manifest.sums, read_back or ()) / len(manifest.sums)
        except SyncError as error:
            raise SyncError(f"{self.name}: policy version {manifest.version}: {error}") from None
        await call("POST", "/reset_prefix_cache")
        await call("POST", "/update_weight_version", {"new_version": str(manifest.version)})

    async def close(self) -> None:
        await self._server.close()
