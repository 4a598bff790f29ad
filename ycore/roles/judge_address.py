"""A judge at an OpenAI-compatible address that the user gives: bounded concurrency, and patience with what may pass.

Not here: the requests and replies, which are those of every judge (`judge_engine`).
"""

import asyncio
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from ycore.errors import EngineError
from ycore.judging.declaration import Judge
from ycore.judging.prompt import Question
from ycore.judging.verdict import Reply
from ycore.roles.judge_engine import Refusals, chat_request, reply_of

_TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_REFUSED = (400, 413, 422)
_MAY_PASS = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)


@dataclass(frozen=True, slots=True)
class Patience:
    """How an address is asked again: so many tries in all, each wait twice as long as the last, less a random part."""

    tries: int = 7
    first_s: float = 1.0
    most_s: float = 30.0

    def wait_s(self, attempt: int, *, asked_for_s: float = 0.0) -> float:
        """Before try `attempt + 1`; no less than the address asked for, but never longer than `most_s`."""
        grown = self.first_s * 2.0**attempt * random.uniform(0.5, 1.0)
        return min(self.most_s, max(grown, asked_for_s))


class RemoteJudge:
    """An address that the user gives. Bounded concurrency; only what may pass by itself is asked again.

    The key is read from the environment, held here and sent to this address alone.
    """

    def __init__(
        self,
        name: str,
        judge: Judge,
        *,
        request_timeout_s: float,
        patience: Patience | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        assert judge.base_url is not None
        self.name = name
        self._address = judge.base_url
        self._at_once = asyncio.Semaphore(judge.concurrency)
        self._patience = patience or Patience()
        self._refusals = Refusals(name)
        headers = {"Authorization": f"Bearer {required_key(name, judge)}"} if judge.api_key_env else {}
        self._client = httpx.AsyncClient(
            base_url=judge.base_url.rstrip("/") + "/",
            headers=headers,
            timeout=httpx.Timeout(request_timeout_s, connect=20.0, pool=None),
            transport=transport,
            follow_redirects=False,
        )

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Nothing: its first question will tell."""

    async def ask(self, judge: Judge, question: Question, *, seed: int, again: bool = False) -> Reply:
        body = chat_request(judge, question, model=judge.model, seed=seed, again=again)
        async with self._at_once:
            return reply_of(await self._answer(body), name=self.name)

    async def _answer(self, body: Mapping[str, Any]) -> Any:
        problem, asked_for_s = "", 0.0
        for attempt in range(self._patience.tries):
            if attempt:
                await asyncio.sleep(self._patience.wait_s(attempt - 1, asked_for_s=asked_for_s))
            try:
                response = await self._client.post("chat/completions", json=body)
            except _MAY_PASS as error:
                problem = str(error) or type(error).__name__
                continue
            except httpx.HTTPError as error:
                raise EngineError(f"{self.name}: {self._address} cannot be asked: {error}; check base_url") from None
            if response.status_code not in _TRANSIENT:
                return self._told(response)
            problem, asked_for_s = f"status {response.status_code}", _retry_after_s(response)
        self._refusals.refuse("the address did not answer", said=f"{self._address}, {problem}")

    def _told(self, response: httpx.Response) -> Any:
        status = response.status_code
        if status in _REFUSED:
            self._refusals.refuse("the address refused the question", said=response.text)
        self._refusals.in_a_row = 0
        if status != 200:
            said = " ".join(response.text[:200].split())
            raise EngineError(f"{self.name}: {self._address} answered {status}: {said}; check base_url, model and key")
        try:
            return response.json()
        except ValueError:
            raise EngineError(f"{self.name}: {self._address} answered no JSON; check base_url") from None

    async def close(self) -> None:
        await self._client.aclose()


def required_key(name: str, judge: Judge) -> str:
    """The key's value; EngineError where the variable is not set."""
    assert judge.api_key_env is not None
    key = os.environ.get(judge.api_key_env, "")
    if not key:
        raise EngineError(f"{name}: the environment variable {judge.api_key_env} is not set; export it (api_key_env)")
    return key


def _retry_after_s(response: httpx.Response) -> float:
    """What the `Retry-After` header says in seconds; 0 where it says nothing of the kind."""
    told = response.headers.get("retry-after", "")
    return float(told) if told.isdigit() else 0.0
