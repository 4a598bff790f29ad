"""Best-of-n in a server of vLLM's: it writes n answers to a request, and sends the one that a reward prefers.

The reward `similarity` prefers the answer that is most like the others (minimum Bayes risk, arXiv 2311.05263).
"""

import math
import os
from typing import Any

import httpx

from ycore.errors import RewardError
from ycore.foreign import ForeignRefused, foreign_json
from ycore.rewards.loading import inputs_of, reward_named

MIDDLEWARE = f"{__name__}.BestOf"
"""The middleware by the name that vLLM's server imports it by."""

NUM_ANSWERS = "YCORE_BEST_OF"
CHOOSER = "YCORE_BEST_BY"
_INPUTS = ("prompts", "completions")
_PATHS = ("/v1/chat/completions", "/v1/completions")


def best_of_environment(num_answers: int, chooser: str) -> dict[str, str]:
    """Return the environment of a server; RewardError for a reward that needs more than the answers."""
    reward = reward_named(chooser)
    lacking = [name for name in inputs_of(reward).required if name not in _INPUTS]
    if lacking:
        raise RewardError(
            f"reward {chooser!r} needs {', '.join(lacking)}, and a request has {' and '.join(_INPUTS)} alone; take "
            "--best-by similarity, or a file.py:function of these"
        )
    return {NUM_ANSWERS: str(num_answers), CHOOSER: chooser}


class BestOf:
    """Middleware of a server that was started with `best_of_environment`."""

    def __init__(self, app: Any) -> None:
        self._num_answers = int(os.environ[NUM_ANSWERS])
        self._reward = reward_named(os.environ[CHOOSER])
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request
        from starlette.responses import JSONResponse

        if scope["type"] != "http" or scope["path"] not in _PATHS:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)

        async def app(inner: Any, receive: Any, send: Any) -> None:
            await self._app({**scope, **inner}, receive, send)  # with the server's own state

        key = request.headers.get("authorization")
        server = httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://server",
            headers={"authorization": key} if key else {},
            timeout=None,
        )
        try:
            body = foreign_json(await request.body())
            if not isinstance(body, dict):
                raise ForeignRefused("the body is no JSON object")
            status, answer = await self._answer(server, scope["path"], body)
        except (ForeignRefused, RewardError) as problem:
            status = 400 if isinstance(problem, ForeignRefused) else 500
            answer = {"error": {"message": str(problem), "code": status}}
        await JSONResponse(answer, status_code=status)(scope, receive, send)

    async def _answer(
        self, server: httpx.AsyncClient, path: str, body: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        if body.get("stream") or body.get("n", 1) != 1:
            rule = f"this server sends the best of {self._num_answers} answers"
            raise ForeignRefused(f"{rule}; leave stream and n out")
        written = await server.post(path, json={**body, "n": self._num_answers})
        answer: dict[str, Any] = foreign_json(written.content)
        if written.is_success:
            prompts: Any = body.get("prompt")
            if "messages" in body or not _are_several(prompts):
                prompts = [body.get("messages", prompts)]
            choices = answer["choices"]
            size = self._num_answers
            answer["choices"] = [
                {**self._best(prompt, choices[number * size :][:size]), "index": number}
                for number, prompt in enumerate(prompts)
            ]
        return written.status_code, answer

    def _best(self, prompt: Any, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the choice with the highest reward, the first of equal ones."""
        columns: dict[str, Any] = {
            "prompts": [prompt] * len(choices),
            "completions": [
                [choice["message"]] if "message" in choice else choice["text"]
                for choice in choices
            ],
        }
        try:
            rewards = self._reward(**inputs_of(self._reward).accepted(columns))
        except Exception as error:  # whatever a reward of one's own raises
            raise RewardError(
                f"--best-by failed with {type(error).__name__}: {error}"
            ) from error
        known = [
            -math.inf if reward is None or math.isnan(reward) else reward for reward in rewards
        ]
        return choices[known.index(max(known))]


def _are_several(prompt: Any) -> bool:
    """Whether these are prompts, as texts or token ids, and not the token ids of one."""
    return isinstance(prompt, list) and not all(isinstance(part, int) for part in prompt)
