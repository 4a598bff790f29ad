"""A completion that an agent of the person's own writes with the policy, through the calls of its OpenAI client.

The messages of a call are compared with what was said before, as messages. What they add is appended as tokens, and is
the environment's. What the policy wrote before is never tokenised again. A call that goes on from no earlier one begins
another sequence of the completion.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ycore.errors import ConfigError
from ycore.rollout.agent_host import MODEL
from ycore.rollout.agent_pool import AgentPool, AgentRun, Asked, Ended
from ycore.rollout.dialogue import Call, Dialogue
from ycore.rollout.tool_pool import OutOfTime
from ycore.rollout.turns import OneTurn, Start, Talk, TurnMeter, Write, completion_seed
from ycore.sandbox.confined_worker import CallFailed
from ycore.types import Completion, Score, Turn

Dialogues = Callable[[str], Dialogue]
"""How the policy talks with these tools, which are JSON as an agent sent them."""

_NOT_SERVED = ("stop", "logit_bias", "functions", "function_call", "logprobs", "audio")


class Refused(Exception):
    """A call that is answered with an error; the message says why, in one line. `ends`: as what it ends the talk."""

    def __init__(self, line: str, *, ends: str | None = None) -> None:
        super().__init__(line)
        self.ends = ends


class Request(NamedTuple):
    """What a call asks: messages with text and calls alone, tools as JSON, and the most tokens."""

    messages: list[dict[str, Any]]
    tools: str
    max_tokens: int | None


def read_request(body: Mapping[str, Any]) -> Request:
    """The body of a chat completion; Refused where the door does not serve it. How to sample is left to the run."""
    for name in _NOT_SERVED:
        if body.get(name):
            raise Refused(f"{name} is not served: the run decides how the policy is sampled")
    if body.get("n") not in (None, 1) or body.get("tool_choice") not in (None, "auto"):
        raise Refused("n above 1 and a tool_choice besides 'auto' are not served")
    if (body.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise Refused("a response_format besides text is not served")
    messages, tools = body.get("messages"), body.get("tools") or []
    if not isinstance(messages, list) or not messages or not isinstance(tools, list):
        raise Refused("messages must be a list that is not empty, and tools a list")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise Refused(f"max_tokens must be a whole number above 0; it is {limit!r:.40}")
    names: dict[str, str] = {}
    try:
        read = [_message(one, names) for one in messages]
        return Request(read, json.dumps([_tool(one) for one in tools]), limit)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Refused(
            f"a message or a tool is not as OpenAI has them: {type(error).__name__} {error!s:.80}"
        ) from None


def _message(one: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A message's role, text, calls and, of a tool, its name. `names` are those of the calls so far, by their ids."""
    role = {"developer": "system"}.get(one["role"], one["role"])
    if role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"role {role!r}")
    content = one.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    message = {"role": role, "content": str(content)}
    calls = [(call["id"], call["function"]) for call in one.get("tool_calls") or ()]
    names |= {number: function["name"] for number, function in calls}
    if calls and role == "assistant":
        functions = [
            {"name": one["name"], "arguments": _arguments(one["arguments"])} for _, one in calls
        ]
        message["tool_calls"] = [
            {"type": "function", "function": function} for function in functions
        ]
    if role == "tool":
        message["name"] = names.get(one.get("tool_call_id", ""), one.get("name", "tool"))
    return message


def _arguments(text: str) -> Any:
    """As chat templates take them: an object, or the text of what is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, dict) else text


def _tool(one: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as the policy is told it; in the order of its keys, in which templates write it."""
    function, parameters = dict(one["function"]), dict(one["function"].get("parameters") or {})
    for name, value in (("type", "object"), ("properties", {})):
        parameters.setdefault(name, value)
    function.setdefault("description", "")
    function["parameters"] = parameters
    if not isinstance(function["name"], str) or not isinstance(function["description"], str):
        raise TypeError("a function's name and description are text")
    return {"type": "function", "function": function}


class Agents(OneTurn):
    """With an agent of the person's own, which decides what the policy reads, and when a completion ends.

    Args: those of `Turns`; and `dialogues`, see `Dialogues`.
    """

    def __init__(
        self,
        dialogues: Dialogues,
        pool: AgentPool,
        *,
        max_turns: int,
        max_tokens: int,
        turn_tokens: int | None,
        max_prompt_tokens: int,
        call_s: float,
    ) -> None:
        self.meter = TurnMeter()
        self.meters = [self.meter]
        self.dialogues, self._pool, self._call_s = dialogues, pool, call_s
        self.max_turns, self.max_tokens, self.turn_tokens = (
            max_turns,
            max_tokens,
            turn_tokens or max_tokens,
        )
        self.max_prompt_tokens = max_prompt_tokens

    async def play(self, start: Start, index: int, write: Write, *, seed: int) -> Completion:
        position = start.draw.position
        door = _Door(self, write, lambda turn: completion_seed(seed, position, index, turn))
        earned, ended = (
            Score(None, problem="environment: the agent did not end by itself"),
            "failed",
        )
        async with self._pool.run(start.prompt, position=position, index=index) as agent:
            try:
                end = await self._served(agent, door)
                earned, ended = end.score, "failed" if end.code else "stop"
            except OutOfTime:
                ended = "deadline"
            except CallFailed as failure:
                earned = Score(None, problem=f"environment: {failure}"[:300])
        completion = await door.completion(start, ended, earned)
        self.meter.count(completion)
        return completion

    async def _served(self, agent: AgentRun, door: "_Door") -> Ended:
        """Answer the agent's calls until it ends. Once one was refused for good, it has `call_s` left to do so."""
        event = await agent.next()
        while isinstance(event, Asked):
            status, body = await door.answer(event.body, agent.seconds)
            reply = {"number": event.number, "status": status, "body": body}
            limit = {} if door.ended is None else {"within_s": self._call_s}
            event = await agent.next(reply, **limit)
        return event


@dataclass(slots=True, eq=False)
class _Conversation:
    """Calls that go on from one another: one sequence. `asked` is its prompt, `said` all of it as the agent has it."""

    talk: Talk
    prompt_ids: tuple[int, ...]
    dialogue: Dialogue
    tools: str
    asked: Sequence[Mapping[str, Any]]
    said: list[dict[str, Any]] = field(default_factory=list)

    def goes_on(self, request: Request) -> bool:
        new = request.messages[len(self.said) :]
        is_the_same = (
            request.messages[: len(self.said)] == self.said and request.tools == self.tools
        )
        return is_the_same and bool(new) and all(one["role"] in ("tool", "user") for one in new)


class _Door:
    """One completion's calls. `ended` says as what it ended, once no call is answered any more."""

    def __init__(self, limits: Agents, write: Write, seed_of_turn: Callable[[int], int]) -> None:
        self.ended: str | None = None
        self._limits, self._write, self._seed_of_turn = limits, write, seed_of_turn
        self._all: list[_Conversation] = []
        self._last: _Conversation | None = None
        self._turns = 0
        self._seconds = 0.0

    async def answer(self, body: Mapping[str, Any], seconds: float) -> tuple[int, dict[str, Any]]:
        """A call's status and answer, in OpenAI's form. `seconds`: what the agent took so far."""
        try:
            request = read_request(body)
            one = self._continued(request, seconds) or self._begun(request)
            return 200, await self._written(one, request)
        except Refused as refusal:
            self.ended = self.ended or refusal.ends
            return 400, {
                "error": {
                    "message": str(refusal),
                    "type": "invalid_request_error",
                    "code": refusal.ends,
                }
            }

    def _room(self, one: _Conversation | None = None) -> int:
        """Tokens that a conversation may have in all, where the others leave that many."""
        return self._limits.max_tokens - sum(
            other.talk.num_tokens for other in self._all if other is not one
        )

    def _begun(self, request: Request) -> _Conversation:
        """A conversation that goes on from no other."""
        if request.messages[-1]["role"] == "assistant":
            raise Refused("the last message is the policy's, and nobody answers it")
        if self._all and not self._limits.splits:
            raise Refused(
                "the messages or tools do not go on from those of the call before", ends="forked"
            )
        try:
            dialogue = self._limits.dialogues(request.tools)
        except ConfigError as error:
            raise Refused(str(error), ends="failed") from None
        heard = dialogue.heard(request.messages)
        prompt_ids = dialogue.prompt_ids([*heard])
        num, most = len(prompt_ids), self._limits.max_prompt_tokens
        if not 0 < num <= most:
            raise Refused(
                f"the messages have {num} tokens, and between 1 and {most} fit", ends="length"
            )
        if self._room() <= 0:
            raise Refused("the completion has no room for another turn (max_tokens)", ends="length")
        return _Conversation(
            Talk(prompt_ids, self._room()), prompt_ids, dialogue, request.tools, heard
        )

    def _continued(self, request: Request, seconds: float) -> _Conversation | None:
        """The longest conversation that the call goes on from, with what its messages add; None where there is none."""
        if self.ended is not None:
            raise Refused(f"the completion is over ({self.ended})")
        if self._last is not None and self._last.talk.ended == "length":
            raise Refused(
                "the turn before was cut off, and the completion ends with it", ends="length"
            )
        if self._turns == self._limits.max_turns:
            raise Refused(f"the policy has had its {self._turns} turns (max_turns)", ends="turns")
        one = max(
            (one for one in self._all if one.goes_on(request)),
            key=lambda one: len(one.said),
            default=None,
        )
        if one is None:
            return None
        new = request.messages[len(one.said) :]
        heard, calls = one.dialogue.heard(new), sum(message["role"] == "tool" for message in new)
        turn = Turn(False, 0, tuple(heard), calls, seconds=seconds - self._seconds)
        one.talk.max_tokens = self._room(one)
        if not one.talk.add_answer(turn, one.dialogue.answer_ids(heard)):
            raise Refused("the messages leave no room for another turn (max_tokens)", ends="length")
        self._seconds = seconds
        return one

    async def _written(self, one: _Conversation, request: Request) -> dict[str, Any]:
        """The policy's next turn, as an answer to the call."""
        talk = one.talk
        limits = [
            self._limits.turn_tokens,
            talk.room,
            *([request.max_tokens] if request.max_tokens else []),
        ]
        part = await self._write(
            talk.token_ids, self._seed_of_turn(self._turns), max_tokens=min(limits)
        )
        message, calls = one.dialogue.read(part.token_ids, part.text, prefix=talk.token_ids)
        before = len(talk.token_ids)
        talk.add(part, message)
        if one not in self._all:
            self._all.append(one)
        self._last = one
        said = answer_of(message, calls if part.finish_reason == "stop" else [], turn=self._turns)
        one.said = [*request.messages, _message(said, {})]
        self._turns += 1
        reason = "tool_calls" if said.get("tool_calls") else part.finish_reason
        used = {
            "prompt_tokens": before,
            "completion_tokens": len(part.token_ids),
            "total_tokens": len(talk.token_ids),
        }
        return {
            "id": f"chatcmpl-{self._turns}",
            "object": "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [{"index": 0, "message": said, "finish_reason": reason, "logprobs": None}],
            "usage": used,
        }

    async def completion(self, start: Start, ended: str, earned: Score) -> Completion:
        """What was written. Of an agent that never asked, one token that nothing is learned from."""
        if self._last is None:
            part = await self._write(start.draw.token_ids, self._seed_of_turn(0), max_tokens=1)
            logprobs = None if part.logprobs is None else (0.0,) * len(part.token_ids)
            turn = Turn(False, len(part.token_ids), ({"role": "assistant", "content": ""},))
            reason = self.ended or ("failed" if ended == "stop" else ended)
            return Completion(
                part.token_ids, logprobs, "", reason, part.policy_version, (turn,), earned
            )
        last = self._last.talk
        last.ended = self.ended or (last.ended if ended == "stop" else ended)
        first, *others = sorted(
            self._all, key=lambda one: one is self._last
        )  # how it ended is told of its end
        whole = first.talk.completion(earned, first.prompt_ids)
        for one in others:
            whole = _followed(whole, one, one.talk.completion(earned))
        return whole


def _followed(whole: Completion, one: _Conversation, part: Completion) -> Completion:
    """The completion with another sequence behind it."""
    prompt, logprobs = Turn(False, len(one.prompt_ids), tuple(one.asked), begins=True), None
    if whole.logprobs is not None and part.logprobs is not None:
        logprobs = (*whole.logprobs, *(0.0 for _ in one.prompt_ids), *part.logprobs)
    return replace(
        part,
        token_ids=whole.token_ids + one.prompt_ids + part.token_ids,
        logprobs=logprobs,
        policy_version=min(whole.policy_version, part.policy_version),
        turns=(*whole.turns, prompt, *part.turns),
        prompt_ids=whole.prompt_ids,
    )


def answer_of(message: Mapping[str, Any], calls: Sequence[Call], *, turn: int) -> dict[str, Any]:
    """The policy's turn as an OpenAI client reads it. Arguments of a call with a problem say it, and are no JSON."""
    said: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
    if isinstance(message.get("reasoning_content"), str):
        said["reasoning_content"] = message["reasoning_content"]
    if calls:
        said["tool_calls"] = [
            {
                "id": f"call_{turn}_{number}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.problem or json.dumps(dict(call.arguments)),
                },
            }
            for number, call in enumerate(calls)
        ]
    return said
