"""Clients of judges over `/v1/chat/completions`: a vLLM server of the run, or an OpenAI-compatible address, where a
teacher may be too.

Only the text of the judge's own turn comes back, so nothing inside the question can be taken for the answer.
"""

import asyncio
import itertools
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from ycore.engine.server import BadRequest, Server
from ycore.errors import EngineError, RewardError
from ycore.foreign import (
    LARGEST_REWARD,
    ForeignRefused,
    foreign_json,
    foreign_line,
    foreign_reward,
    foreign_word,
)
from ycore.judge.declaration import JsonVerdict, Judge, LabelVerdict, Served
from ycore.judge.question import Question
from ycore.judge.verdict import Reply, ReplyToken
from ycore.placement.placement import JUDGE
from ycore.run.address import Address, AddressAnswer, AddressFailed
from ycore.run.work import working

T = TypeVar("T")

_FORM_TOKENS = 64  # at most, of a label's verdict without the label
TRIES = 7  # of a request that fails while the address answers others
PATIENCE_S = 1800.0  # of a request while the address answers none
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
_AWAY_STATUS = (429, 502, 503, 504, 529)
_TRANSIENT_STATUS = (408, 409, 425, 500, *_AWAY_STATUS)
_REFUSED_STATUS = (400, 413, 422)
_MAX_REPLY = 4 * 2**20  # bytes of an answer, packed and unpacked
_BYTES_PER_TOKEN = 512  # more, of a teacher's
_ROUNDING = 0.01  # above 0, of a log-probability


class QuestionRefused(Exception):
    """The judge does not take this question; it may take another."""


def refuse(name: str, why: str, *, details: str) -> NoReturn:
    """Give a question up; the log has the details."""
    print(f"{name}: {why}: {foreign_line(details)}", flush=True)
    raise QuestionRefused(why)


class VllmJudge(Server):
    """Example: `VllmJudge("judge-0", folder.socket("judge-0"), request_timeout_s=600)`."""

    async def ask(
        self, judge: Judge, question: Question, *, seed: int, again: bool = False
    ) -> Reply:
        """Ask one question.

        Args:
            again: Whether the last reply could not be read; the judge then samples, so that the seed matters.

        Raises:
            QuestionRefused: The judge does not take this question.
            EngineError: The engine is gone for good.
        """
        body = build_chat_request(judge, question, model=JUDGE, seed=seed, again=again)
        try:
            answer = await self.request("POST", "/v1/chat/completions", body)
        except BadRequest as problem:  # most often too long for the judge's context
            refuse(self.name, "the engine refused the question", details=str(problem))
        try:
            return parse_reply(answer)
        except ForeignRefused as problem:
            refuse(self.name, "its answer cannot be read", details=str(problem))


class _Remote:
    """A model at an address that the user gives. While nobody answers there the run waits, for half an hour at most.

    The key is read from the environment, kept here and sent to this address alone.

    Args:
        request_timeout_s: Limit of each try of a request.
        transport: For tests.
    """

    def __init__(
        self, name: str, served: Served, *, request_timeout_s: float, transport: Any = None
    ) -> None:
        assert served.base_url is not None
        self.name = name
        self._served = served
        self._base_url = served.base_url
        self._in_flight = asyncio.Semaphore(served.concurrency)
        self._timeout_s = request_timeout_s
        self._answered_at = -math.inf
        self._address = Address(
            served.base_url.rstrip("/") + "/",
            headers=key_header(served, name=name),
            transport=transport,
        )

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Nothing to wait for: the first question finds out whether the address answers."""

    async def _ask(
        self, path: str, body: Mapping[str, Any], read: Callable[[Any], T], *, max_bytes: int
    ) -> T:
        """Return what `read` makes of the answer's JSON; it raises ForeignRefused for JSON that it cannot read.

        A status that a retry cannot change is an EngineError, unless the address has answered before: then it costs
        this question.
        """
        async with self._in_flight:
            answer = await self._post(path, body, max_bytes)
        details = f"{self._base_url} answered {answer.status}: {answer.line}"
        if answer.status in _REFUSED_STATUS or (
            answer.status != 200 and self._answered_at > -math.inf
        ):
            refuse(self.name, "the address refused the question", details=details)
        if answer.status != 200:
            raise EngineError(f"{self.name}: {details}; check base_url, model and key")
        try:
            value = await asyncio.to_thread(lambda: read(foreign_json(answer.data)))
        except ForeignRefused as problem:
            refuse(
                self.name,
                "its answer cannot be read",
                details=f"{problem}: {details}; check base_url and model",
            )
        self._answered_at = time.monotonic()
        return value

    async def close(self) -> None:
        await self._address.close()

    async def _post(self, path: str, body: Mapping[str, Any], max_bytes: int) -> AddressAnswer:
        """Ask until there is an answer. EngineError once the address has answered nobody for `PATIENCE_S`."""
        began = time.monotonic()
        for attempt in itertools.count():
            retry_after_s = 0.0
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await self._address.ask(path, body, max_bytes=max_bytes)
                if answer.status not in _TRANSIENT_STATUS:
                    return answer
                problem = f"status {answer.status}"
                is_away = answer.status in _AWAY_STATUS
                retry_after_s = answer.retry_after_s
            except TimeoutError:
                problem = (
                    f"no whole answer within {self._timeout_s:g} s (engine.request_timeout_s)"
                )
                break
            except AddressFailed as failure:
                problem = str(failure)
                is_away = failure.may_pass
                if not is_away:
                    break
            if attempt + 1 >= TRIES and (not is_away or self._answered_at > began):
                break
            waited_s = time.monotonic() - began
            if waited_s > PATIENCE_S:
                raise EngineError(
                    f"{self.name}: {self._base_url} has not answered for {waited_s:.0f} s ({problem}); see that it does, "
                    "and go on with --resume"
                )
            with working(f"waiting for {self.name}: {self._base_url}, {problem}"):
                await asyncio.sleep(backoff_s(attempt, at_least_s=retry_after_s))
        refuse(self.name, "the address did not answer", details=f"{self._base_url}, {problem}")


class RemoteJudge(_Remote):
    async def ask(
        self, judge: Judge, question: Question, *, seed: int, again: bool = False
    ) -> Reply:
        """Ask one question, as `VllmJudge.ask`."""
        body = build_chat_request(judge, question, model=judge.model, seed=seed, again=again)
        return await self._ask("chat/completions", body, parse_reply, max_bytes=_MAX_REPLY)


class RemoteTeacher(_Remote):
    """Example: `RemoteTeacher("teacher:big", teacher, request_timeout_s=600)`."""

    async def logprobs_of(
        self, context_ids: Sequence[int], target_ids: Sequence[int]
    ) -> tuple[float, ...]:
        """Return the log-probability of each target token; QuestionRefused for a sequence that is not taken."""
        num_tokens = len(context_ids) + len(target_ids)
        return await self._ask(
            "completions",
            prompt_request(self._served.model, context_ids, target_ids),
            lambda answer: prompt_logprobs(answer, context_ids, target_ids),
            max_bytes=_MAX_REPLY + _BYTES_PER_TOKEN * num_tokens,
        )


def prompt_request(
    model: str, context_ids: Sequence[int], target_ids: Sequence[int]
) -> dict[str, Any]:
    """Ask for the log-probability of each target token after those before it, at temperature 1 (vLLM's field)."""
    return {
        "model": model,
        "prompt": [*context_ids, *target_ids],
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
    }


def prompt_logprobs(
    answer: Any, context_ids: Sequence[int], target_ids: Sequence[int]
) -> tuple[float, ...]:
    """Read the answer to a `prompt_request`; ForeignRefused where it lacks a token's."""
    try:
        by_place = answer["choices"][0]["prompt_logprobs"][len(context_ids) :]
        return tuple(
            _logprob(logprobs[str(token)])
            for logprobs, token in zip(by_place, target_ids, strict=True)
        )
    except (KeyError, IndexError, TypeError, ValueError):
        raise ForeignRefused(
            "it gives no probabilities of a prompt's tokens (prompt_logprobs); a teacher's address is a vLLM server"
        ) from None


def _logprob(source: Any) -> float:
    """Return the log-probability, infinite for less than any number; TypeError for text, ValueError for more than 1."""
    value = source["logprob"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a log-probability is a number")
    if not value < _ROUNDING:
        raise ValueError("a log-probability is at most 0")
    return float(value) if value >= -LARGEST_REWARD else -math.inf


JudgeEngine = VllmJudge | RemoteJudge


def key_header(served: Served, *, name: str) -> dict[str, str]:
    """Return the header with the address's key; RewardError where its variable is not set."""
    variable = served.api_key_env
    if variable is None:
        return {}
    if not (key := os.environ.get(variable, "")):
        raise RewardError(
            f"{name}: the environment variable {variable} (api_key_env) is not set; export it"
        )
    return {"Authorization": f"Bearer {key}"}


def backoff_s(attempt: int, *, at_least_s: float = 0.0) -> float:
    """Return the seconds before the next try, doubling with a random part, at most `LONGEST_WAIT_S`."""
    grown = FIRST_WAIT_S * 2.0 ** min(attempt, 9) * random.uniform(0.5, 1.0)
    return min(LONGEST_WAIT_S, max(grown, at_least_s))


def build_chat_request(
    judge: Judge, question: Question, *, model: str, seed: int, again: bool
) -> dict[str, Any]:
    """Return the body of a request, with fields of OpenAI's API only."""
    verdict = judge.verdict
    body: dict[str, Any] = {
        "model": model,
        "messages": question,
        "seed": seed,
        # At temperature 0 another seed changes nothing.
        "temperature": max(judge.temperature, 0.7) if again else judge.temperature,
        "max_tokens": judge.max_tokens,
    }
    if isinstance(verdict, LabelVerdict):
        longest = max(map(len, verdict.labels))
        body |= {"max_tokens": _FORM_TOKENS + longest, "logprobs": True}
        body["top_logprobs"] = 20  # the most that vLLM and OpenAI give
        body["response_format"] = _json_object(
            {"code": _CODE, "label": {"type": "string", "enum": [*verdict.labels]}}
        )
    elif isinstance(verdict, JsonVerdict):
        number = {"type": "number", "minimum": verdict.min, "maximum": verdict.max}
        # The reason comes first, so that the model writes it before it decides on the number.
        reason = {"reason": {"type": "string", "maxLength": 400}} if verdict.reason else {}
        body["response_format"] = _json_object({**reason, verdict.field: number, "code": _CODE})
    return body


# No pattern holds the code to the right one: a judge that only copies would have it from there.
_CODE = {"type": "string", "maxLength": 20}


def _json_object(fields: Mapping[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }
    return {
        "type": "json_schema",
        "json_schema": {"name": "verdict", "strict": True, "schema": schema},
    }


def parse_reply(answer: Any) -> Reply:
    """Read the first choice's message; ForeignRefused where the answer has none."""
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        usage = answer.get("usage") or {}
        tokens = (choice.get("logprobs") or {}).get("content") or []
        # The number is for a metric alone, so an odd one costs no verdict.
        num_tokens = foreign_reward(usage.get("total_tokens")) or 0.0
        return Reply(
            text="" if text is None else foreign_word(text, "content"),
            tokens=[
                ReplyToken(
                    foreign_word(token["token"], "a token"),
                    _likeliest(token.get("top_logprobs") or ()),
                )
                for token in tokens
            ]
            or None,
            num_tokens=max(0, int(num_tokens)),
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as problem:
        raise ForeignRefused(
            f"no chat completion ({foreign_line(repr(problem), max_characters=80)})"
        ) from None


def _likeliest(candidates: Any) -> dict[str, float]:
    likeliest: dict[str, float] = {}  # different tokens may have the same text
    for candidate in candidates:
        token = foreign_word(candidate["token"], "a token")
        likeliest[token] = max(_logprob(candidate), likeliest.get(token, -math.inf))
    return likeliest
