"""A judge's engine, asked one question at a time over `/v1/chat/completions`: a vLLM server of the run's own.

What comes back is the text of the judge's own turn and nothing else, so nothing that stands in the question can be
taken for the answer.

A judge at an OpenAI-compatible address that the user gives: bounded concurrency, and patience with what may pass.

A reward model's engine, asked for the number of one text: vLLM's pooling server over a unix socket.

Not here: the same of an address that the user gives (`judge_address`), the questions and how a verdict is read
(`judging`), the server's process (`judge`).
"""

import asyncio
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import httpx

from ycore.engine.server import BadRequest, Server
from ycore.errors import EngineError
from ycore.judge.declaration import JsonVerdict, Judge, LabelVerdict
from ycore.judge.question import Question
from ycore.judge.verdict import Reply

SERVED_JUDGE = "judge"
"""The name under which every judge's engine serves its model."""

_TOP_LOGPROBS = 20  # the most that vLLM and OpenAI give
_MOST_IN_A_ROW = 16
_RETRY_TEMPERATURE = 0.7  # at 0, another seed would write the same again


class Refused(Exception):
    """The engine would not take this question; another one it may."""


class JudgeEngine(Protocol):
    """What a judge is asked through."""

    name: str

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Return once it answers; EngineError when it does not in time."""

    async def ask(self, judge: Judge, question: Question, *, seed: int, again: bool = False) -> Reply:
        """The judge's reply; Refused for this question, EngineError when nothing can be asked any more."""

    async def close(self) -> None:
        """Let go of connections."""


def chat_request(judge: Judge, question: Question, *, model: str, seed: int, again: bool) -> dict[str, Any]:
    """The body of a request; it has no field that OpenAI's API does not know."""
    verdict = judge.verdict
    temperature = max(judge.temperature, _RETRY_TEMPERATURE) if again else judge.temperature
    body: dict[str, Any] = {
        "model": model,
        "messages": question,
        "seed": seed,
        "temperature": temperature,
        "max_tokens": judge.max_tokens,
    }
    if isinstance(verdict, LabelVerdict):
        body |= {"max_tokens": 1, "logprobs": True, "top_logprobs": _TOP_LOGPROBS}
    elif isinstance(verdict, JsonVerdict):
        schema = {"name": "verdict", "strict": True, "schema": verdict_schema(verdict)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def verdict_schema(verdict: JsonVerdict) -> dict[str, Any]:
    """The JSON schema of an answer; the reason comes first, so that it is thought of before the number."""
    number = {"type": "number", "minimum": verdict.min, "maximum": verdict.max}
    reason = {"reason": {"type": "string", "maxLength": 400}} if verdict.reason else {}
    properties = {**reason, verdict.field: number}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def reply_of(answer: Any, *, name: str) -> Reply:
    """The first choice's message; EngineError where the answer has none."""
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        tokens = (choice.get("logprobs") or {}).get("content") or []
        usage = answer.get("usage") or {}
        return Reply(
            text="" if text is None else str(text),
            finish_reason=str(choice.get("finish_reason")),
            first_token=_likely(tokens[0]) if tokens else None,
            num_tokens=int(usage.get("total_tokens") or 0),
        )
    except (KeyError, IndexError, TypeError, AttributeError) as problem:
        raise EngineError(f"{name}: its answer is no chat completion ({problem!r}); is it an OpenAI API?") from None


def _likely(token: Mapping[str, Any]) -> dict[str, float]:
    """Each text once: different tokens may read the same."""
    likely: dict[str, float] = {}
    for one in token["top_logprobs"]:
        likely[one["token"]] = max(float(one["logprob"]), likely.get(one["token"], float("-inf")))
    return likely


@dataclass(slots=True)
class Refusals:
    """Questions refused one after another: some are the questions' fault, and cost a verdict; many are not."""

    name: str
    in_a_row: int = 0

    def refuse(self, why: str, *, said: str) -> NoReturn:
        self.in_a_row += 1
        if self.in_a_row >= _MOST_IN_A_ROW:
            said = " ".join(said[:300].split())
            raise EngineError(f"{self.name}: the last {self.in_a_row} questions had no answer, {why}: {said}")
        raise Refused(why)


class LocalJudge:
    """Example: `LocalJudge(Server("judge-0", folder.socket("judge-0"), request_timeout_s=600))`."""

    def __init__(self, server: Server) -> None:
        self.name = server.name
        self._server = server
        self._refusals = Refusals(server.name)

    async def wait_ready(self, *, timeout_s: float) -> None:
        await self._server.wait_ready(timeout_s=timeout_s)

    async def ask(self, judge: Judge, question: Question, *, seed: int, again: bool = False) -> Reply:
        body = chat_request(judge, question, model=SERVED_JUDGE, seed=seed, again=again)
        try:
            answer = await self._server.ask("POST", "/v1/chat/completions", body)
        except BadRequest as problem:  # too long for its context, most often
            self._refusals.refuse("the engine refused the question", said=str(problem))
        self._refusals.in_a_row = 0
        return reply_of(answer, name=self.name)

    async def close(self) -> None:
        await self._server.close()


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
