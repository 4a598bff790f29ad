"""A judge's engine, asked one question at a time over `/v1/chat/completions`: a vLLM server of the run's own.

What comes back is the text of the judge's own turn and nothing else, so nothing that stands in the question can be
taken for the answer.

Not here: the same of an address that the user gives (`judge_address`), the questions and how a verdict is read
(`judging`), the server's process (`judge`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from ycore.errors import EngineError
from ycore.judging.declaration import JsonVerdict, Judge, LabelVerdict
from ycore.judging.prompt import Question
from ycore.judging.verdict import Reply
from ycore.roles.server import BadRequest, Server

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
