"""A reward model's engine, asked for the number of one text: vLLM's pooling server over a unix socket.

Not here: the server's process (`reward_model`), and who asks (`controller`).
"""

import math
from collections.abc import Sequence
from typing import Protocol

from ycore.errors import EngineError
from ycore.roles.server import Server

SERVED_REWARD_MODEL = "reward-model"
"""The name under which every reward model's engine serves its model."""

_PATH = "/classify"


class RewardModelEngine(Protocol):
    """What a reward model is asked through."""

    name: str

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Return once it answers; EngineError when it does not in time."""

    async def logit(self, token_ids: Sequence[int]) -> float:
        """The classifier's only logit, as it is; NaN where it gives no number."""

    async def close(self) -> None:
        """Let go of connections."""


class VllmRewardModel:
    """Example: `VllmRewardModel(Server("reward-model-0", folder.socket("reward-model-0"), request_timeout_s=600))`."""

    def __init__(self, server: Server) -> None:
        self.name = server.name
        self._server = server

    async def wait_ready(self, *, timeout_s: float) -> None:
        await self._server.wait_ready(timeout_s=timeout_s)

    async def logit(self, token_ids: Sequence[int]) -> float:
        # Without `use_activation: false` vLLM would give the sigmoid of it.
        body = {"model": SERVED_REWARD_MODEL, "input": list(token_ids), "use_activation": False}
        answer = await self._server.ask("POST", _PATH, body)
        try:
            (number,) = answer["data"][0]["probs"]
            return math.nan if number is None else float(number)
        except (KeyError, IndexError, TypeError, ValueError):
            raise EngineError(f"{self.name}: {_PATH} answered {str(answer)[:200]}, not one number") from None

    async def close(self) -> None:
        await self._server.close()
