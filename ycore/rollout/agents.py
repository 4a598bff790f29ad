"""A completion that a user's own agent writes with the policy, through the calls of its OpenAI client.

Each completion has a confined process with an agent, which asks. What the process says is read as text that anybody may
have written: it can call, end, and name a reward, no more.

The messages of a call are compared with those of earlier calls, as messages. What they add is appended as tokens, and
counts as the environment's. What the policy wrote before is never tokenised again. A call that continues no earlier one
begins another sequence of the completion.
"""

import asyncio
import itertools
import json
import shlex
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ycore.config.schema import RunConfig
from ycore.errors import ConfigError
from ycore.foreign import (
    ForeignRefused,
    foreign_json,
    foreign_line,
    foreign_reward,
    foreign_word,
    read_tool,
)
from ycore.rollout.agent_host import MAX_BODY, MODEL, Reply
from ycore.rollout.dialogue import Call, Dialogue
from ycore.rollout.tool_pool import OutOfTime, turns_confinement
from ycore.rollout.turns import (
    CompletionBuilder,
    Generate,
    GroupStart,
    SingleTurnWriter,
    TurnLimits,
    TurnMeter,
    completion_seed,
)
from ycore.run.files import RunFolder
from ycore.sandbox import MIB, Level
from ycore.sandbox.confine import base_variables
from ycore.sandbox.confined_worker import CallFailed, ConfinedWorker
from ycore.sandbox.level import choose_level
from ycore.types import Completion, JsonObject, Prompt, Record, Score, Turn, number_from

_NOT_SERVED = ("stop", "logit_bias", "functions", "function_call", "logprobs", "audio")
_MAX_EVENT_BYTES = 3 * MAX_BODY + 4096
"""JSON takes six bytes for a character of two, and twelve for a character of four."""


class AgentExit(NamedTuple):
    """The agent's exit code, and the text of its reward file."""

    code: int
    paid: str | None = None

    @property
    def score(self) -> Score:
        with suppress(ValueError):
            value = foreign_reward(float(self.paid or ""))
            if value is not None:
                return Score(value)
        text = foreign_line(repr(self.paid) if self.paid else "nothing", max_characters=60)
        return Score(
            None,
            problem=f"environment: the agent wrote {text} to YCORE_REWARD_FILE, and no number",
        )


def split_command(agent: str) -> list[str]:
    """Split a command into its words; ConfigError where it cannot be started."""
    try:
        words = shlex.split(agent)
    except ValueError as error:
        raise ConfigError(
            f"agent {agent!r} is no command: {error}; write it as in a shell"
        ) from None
    if not words:
        raise ConfigError(
            "agent is an empty command; write it as in a shell, for example 'python my_agent.py'"
        )
    if shutil.which(words[0], path=base_variables("", Path("/"))["PATH"]) is None:
        raise ConfigError(
            f"agent {agent!r}: no program {words[0]!r}; give its path, or one on PATH in the sandbox"
        )
    missing = [word for word in words if word.endswith(".py") and not Path(word).is_file()]
    if missing:
        raise ConfigError(
            f"agent {agent!r}: no file {missing[0]}; give its path from the working folder"
        )
    return words


def check_agent(config: RunConfig) -> None:
    """ConfigError where the run's agent cannot work."""
    if config.agent is None:
        return
    split_command(config.agent)
    if config.tools or config.env:
        raise ConfigError(
            "an agent brings its own tools and world; leave out --tools and --env, or --agent"
        )
    choice = choose_level(config.sandbox.level)
    if choice.level is Level.LANDLOCK and not config.turns.sandbox.network:
        raise ConfigError(
            "an agent is reached on loopback, which the sandbox's level landlock closes; "
            f"{choice.remedy or 'take --sandbox namespaces'}, or --set turns.sandbox.network=true"
        )


class RunningAgent(ConfinedWorker[None]):
    """A confined process with an agent, from its start to its end.

    `seconds` are the agent's own, without those of the policy; it has `completion_s` of them.
    """

    module = "ycore.rollout.agent_host"
    kind = "agent"
    completion_s: float
    seconds = 0.0
    _has_begun = False

    async def next(self, reply: Reply | None = None) -> Record | AgentExit:
        """Return the body of the agent's next call, or how it ended, after the `reply` to its last call.

        Raises:
            OutOfTime: it took too long.
            CallFailed: it could not be started, or its process is gone.
        """
        began = time.perf_counter()
        timeout_s = max(0.01, self.completion_s - self.seconds)
        try:
            if not self._has_begun:
                self._has_begun = True
                await self.start()
            answer = await self.exchange(
                {"reply": reply}, max_bytes=_MAX_EVENT_BYTES, timeout_s=timeout_s
            )
            return _read_event(answer)
        except CallFailed as failure:
            if str(failure).startswith("timeout"):
                raise OutOfTime from None
            raise
        finally:
            self.seconds += time.perf_counter() - began


class AgentPool:
    """Example: `async with AgentPool(config, folder).run(prompt, position=4, index=1) as agent: await agent.next()`.

    At most `turns.at_once` agents run at a time.
    """

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        assert config.agent is not None
        self._config = config
        self._log = folder.log("agents")
        self._words: Sequence[str] = split_command(config.agent)
        names = [f"{word}:agent" for word in self._words if Path(word).is_file()]
        confinement = turns_confinement(
            config, names, run_folder=folder.root, run_id=folder.run_id
        )
        limits = replace(confinement.limits, output=MIB)  # each completion has a process
        self._confinement = confinement._replace(limits=limits)
        self._slots = asyncio.Semaphore(config.turns.at_once)
        self._numbers = itertools.count()

    @asynccontextmanager
    async def run(
        self, prompt: Prompt, *, position: int, index: int
    ) -> AsyncIterator[RunningAgent]:
        """Run an agent for this completion; it is ended, with all that it started, when this ends."""
        row = json.dumps({**prompt.columns, "prompt": prompt.content}, default=str)
        seed = str(number_from(f"{self._config.seed}/{position}/{index}", bits=32))
        variables = {"YCORE_ROW": row, "YCORE_SEED": seed, "PYTHONHASHSEED": seed}
        async with self._slots:
            agent = RunningAgent(
                {"command": self._words, "variables": variables},
                lambda ready: None,  # any answer but an error
                self._confinement,
                log=self._log,
                name=f"agent.{next(self._numbers)}",
            )
            agent.completion_s = self._config.turns.completion_s
            try:
                yield agent
            finally:
                await agent.close()


def _read_event(reply: Record) -> Record | AgentExit:
    match reply.get("value"):
        case {"body": dict(body)}:
            return body
        case {"exit": int(code), "paid": str() | None as paid}:
            return AgentExit(code, paid)
    raise CallFailed("no answer of an agent's process: neither a call nor its end")


class CallRejected(Exception):
    """A call that is answered with an error of one line. `ends` is the finish reason, where it ends the completion."""

    def __init__(self, line: str, *, ends: str | None = None) -> None:
        super().__init__(line)
        self.ends = ends


class ChatRequest(NamedTuple):
    """A call's messages, with text and calls alone, its tools as JSON, and its most tokens."""

    messages: list[JsonObject]
    tools: str
    max_tokens: int | None


def read_request(body: Record) -> ChatRequest:
    """Read the body of a chat completion; CallRejected where it is not served. The run decides how to sample."""
    for name in _NOT_SERVED:
        if body.get(name):
            raise CallRejected(
                f"{name} is not served: the run decides how the policy is sampled"
            )
    if body.get("n") not in (None, 1) or body.get("tool_choice") not in (None, "auto"):
        raise CallRejected("n above 1 and a tool_choice besides 'auto' are not served")
    if (body.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise CallRejected("a response_format besides text is not served")
    messages = body.get("messages")
    tools = body.get("tools") or []
    if not isinstance(messages, list) or not messages or not isinstance(tools, list):
        raise CallRejected("messages must be a list that is not empty, and tools a list")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise CallRejected(f"max_tokens must be a whole number above 0; it is {limit!r:.40}")
    tool_names: dict[str, str] = {}
    try:
        return ChatRequest(
            [_message(message, tool_names) for message in messages],
            json.dumps([read_tool(tool) for tool in tools]),
            limit,
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CallRejected(
            f"a message or a tool is not as OpenAI has them: {type(error).__name__} {error!s:.80}"
        ) from None


def _message(source: Record, tool_names: dict[str, str]) -> JsonObject:
    """Return a message's role, text, calls and, of a tool, its name. `tool_names` are by the ids of the calls so far."""
    role = "system" if source["role"] == "developer" else source["role"]
    if role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"role {role!r}")
    content = source.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    message: JsonObject = {"role": role, "content": str(content)}
    calls = []
    for call in source.get("tool_calls") or ():
        function = call["function"]
        tool_names[call["id"]] = foreign_word(function["name"], "a function's name")
        arguments = _arguments(function["arguments"]) if role == "assistant" else None
        calls.append(
            {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        )
    if calls and role == "assistant":
        message["tool_calls"] = calls
    if role == "tool":
        call_id = source.get("tool_call_id", "")
        message["name"] = tool_names.get(
            call_id, foreign_word(source.get("name", "tool"), "a function's name")
        )
    return message


def _arguments(text: str) -> Any:
    """Parse a call's arguments: a dict if they are a JSON object, else the raw text."""
    try:
        arguments = foreign_json(text)
    except ForeignRefused:
        return text
    return arguments if isinstance(arguments, dict) else text


@dataclass(eq=False)
class AgentWriter(SingleTurnWriter):
    """With a user's own agent, which decides what the policy reads, and when a completion ends.

    Args:
        dialogue_of: returns how the policy acts with these tools, which are JSON as an agent sent them.
    """

    dialogue_of: Callable[[str], Dialogue]
    pool: AgentPool
    limits: TurnLimits
    several_sequences: bool = True
    """Whether a completion may have several sequences, which only packed rows keep apart."""

    def __post_init__(self) -> None:
        self.meter = TurnMeter()
        self.meters = [self.meter]

    async def write(
        self, start: GroupStart, index: int, generate: Generate, *, seed: int
    ) -> Completion:
        position = start.draw.position

        def turn_seed(turn: int) -> int:
            return completion_seed(seed, position, index, turn)

        served = _ServedCompletion(self, generate, turn_seed)
        earned = Score(None, problem="environment: the agent did not end by itself")
        finish_reason = "failed"
        async with self.pool.run(start.prompt, position=position, index=index) as agent:
            try:
                end = await self._serve(agent, served)
                earned = end.score
                finish_reason = "failed" if end.code else "stop"
            except OutOfTime:
                finish_reason = "deadline"
            except CallFailed as failure:
                earned = Score(None, problem=f"environment: {failure}"[:300])
        completion = await served.completion(start, finish_reason, earned)
        self.meter.count(completion)
        return completion

    async def _serve(self, agent: RunningAgent, served: "_ServedCompletion") -> AgentExit:
        """Answer the agent's calls until it ends."""
        event = await agent.next()
        while not isinstance(event, AgentExit):
            event = await agent.next(await served.answer(event, agent.seconds))
        return event


@dataclass(eq=False)
class _Conversation:
    """Calls that continue one another: a sequence of the completion.

    `prompt` are the messages it begins with; `messages` are all of it as the agent has it.
    """

    builder: CompletionBuilder
    prompt_ids: tuple[int, ...]
    dialogue: Dialogue
    tools: str
    prompt: Sequence[Record]
    messages: list[JsonObject] = field(default_factory=list)

    def is_continued_by(self, request: ChatRequest) -> bool:
        """Return whether the call has this conversation's messages and, after them, new ones that are not the policy's."""
        num = len(self.messages)
        new = request.messages[num:]
        return (
            request.messages[:num] == self.messages
            and request.tools == self.tools
            and bool(new)
            and all(message["role"] in ("tool", "user") for message in new)
        )


@dataclass(eq=False)
class _ServedCompletion:
    """The calls of a completion. `finish_reason` is set once no call is answered any more."""

    writer: AgentWriter
    generate: Generate
    turn_seed: Callable[[int], int]
    finish_reason: str | None = None
    conversations: list[_Conversation] = field(default_factory=list)
    last: _Conversation | None = None
    num_turns: int = 0
    seconds: float = 0.0

    async def answer(self, body: Record, seconds: float) -> Reply:
        """Return a call's status and answer, in OpenAI's form. `seconds`: what the agent took so far."""
        try:
            request = read_request(body)
            self._check_open()
            conversation = self._continued(request, seconds) or self._new(request)
            return 200, await self._generate_turn(conversation, request)
        except (CallRejected, ConfigError) as problem:
            ends = problem.ends if isinstance(problem, CallRejected) else "failed"
            self.finish_reason = self.finish_reason or ends
            error = {"message": str(problem), "type": "invalid_request_error", "code": ends}
            return 400, {"error": error}

    def _check_open(self) -> None:
        if self.finish_reason is not None:
            raise CallRejected(f"the completion is over ({self.finish_reason})")
        if self.last is not None and self.last.builder.finish_reason == "length":
            raise CallRejected(
                "the turn before was cut off, and the completion ends with it", ends="length"
            )
        if self.num_turns == self.writer.limits.max_turns:
            raise CallRejected(
                f"the policy has had its {self.num_turns} turns (max_turns)", ends="turns"
            )

    def _continued(self, request: ChatRequest, seconds: float) -> _Conversation | None:
        """Return the longest conversation that the call continues, with what its messages add; None without one."""
        conversation = max(
            (
                conversation
                for conversation in self.conversations
                if conversation.is_continued_by(request)
            ),
            key=lambda conversation: len(conversation.messages),
            default=None,
        )
        if conversation is None:
            return None
        new = request.messages[len(conversation.messages) :]
        dialogue = conversation.dialogue
        builder = conversation.builder
        messages = dialogue.sanitize(new)
        turn = Turn(
            by_policy=False,
            num_tokens=0,
            messages=tuple(messages),
            calls=sum(message["role"] == "tool" for message in new),
            seconds=seconds - self.seconds,
        )
        builder.max_tokens = self._max_tokens_of(conversation)
        if not builder.add_answer(turn, dialogue.answer_ids(messages)):
            raise CallRejected(
                "the messages leave no room for another turn (max_tokens)", ends="length"
            )
        self.seconds = seconds
        return conversation

    def _new(self, request: ChatRequest) -> _Conversation:
        """Begin a conversation that continues no other."""
        if request.messages[-1]["role"] == "assistant":
            raise CallRejected("the last message is the policy's, and nobody answers it")
        if self.conversations and not self.writer.several_sequences:
            raise CallRejected(
                "the messages or tools do not go on from those of the call before",
                ends="forked",
            )
        dialogue = self.writer.dialogue_of(request.tools)
        messages = dialogue.sanitize(request.messages)
        prompt_ids = dialogue.prompt_ids([*messages])
        num_tokens = len(prompt_ids)
        limit = self.writer.limits.max_prompt_tokens
        if not 0 < num_tokens <= limit:
            raise CallRejected(
                f"the messages have {num_tokens} tokens, and between 1 and {limit} fit",
                ends="length",
            )
        max_tokens = self._max_tokens_of(None)
        if max_tokens <= 0:
            raise CallRejected(
                "the completion has no room for another turn (max_tokens)", ends="length"
            )
        builder = CompletionBuilder(prompt_ids, max_tokens)
        return _Conversation(builder, prompt_ids, dialogue, request.tools, messages)

    def _max_tokens_of(self, conversation: _Conversation | None) -> int:
        """Return how many tokens a conversation may have in all, beside those of the others."""
        return self.writer.limits.max_tokens - sum(
            other.builder.num_tokens
            for other in self.conversations
            if other is not conversation
        )

    async def _generate_turn(
        self, conversation: _Conversation, request: ChatRequest
    ) -> JsonObject:
        """Have the policy write its next turn; return it as the answer to the call."""
        builder = conversation.builder
        num_before = len(builder.token_ids)
        max_tokens = min(self.writer.limits.turn_tokens, builder.num_left)
        part = await self.generate(
            builder.token_ids,
            self.turn_seed(self.num_turns),
            max_tokens=min(max_tokens, request.max_tokens or max_tokens),
        )
        message, calls = conversation.dialogue.parse_turn(
            part.token_ids, part.text, prefix=builder.token_ids
        )
        builder.add_policy_turn(part, message)
        if conversation not in self.conversations:
            self.conversations.append(conversation)
        self.last = conversation
        answer = answer_of(
            message, calls if part.finish_reason == "stop" else [], turn=self.num_turns
        )
        conversation.messages = [*request.messages, _message(answer, {})]
        self.num_turns += 1
        choice = {
            "index": 0,
            "message": answer,
            "finish_reason": "tool_calls" if "tool_calls" in answer else part.finish_reason,
            "logprobs": None,
        }
        return {
            "id": f"chatcmpl-{self.num_turns}",
            "object": "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [choice],
            "usage": {
                "prompt_tokens": num_before,
                "completion_tokens": len(part.token_ids),
                "total_tokens": len(builder.token_ids),
            },
        }

    async def completion(
        self, start: GroupStart, finish_reason: str, earned: Score
    ) -> Completion:
        """Build the completion. An agent that made no call gets one masked token."""
        if self.last is None:
            part = await self.generate(start.draw.token_ids, self.turn_seed(0), max_tokens=1)
            num = len(part.token_ids)
            return Completion(
                token_ids=part.token_ids,
                logprobs=None if part.logprobs is None else (0.0,) * num,
                text="",
                finish_reason=self.finish_reason
                or ("failed" if finish_reason == "stop" else finish_reason),
                policy_version=part.policy_version,
                turns=(Turn(False, num, ({"role": "assistant", "content": ""},)),),
                earned=earned,
            )
        last = self.last.builder
        if self.finish_reason is not None:
            last.finish_reason = self.finish_reason
        elif finish_reason != "stop":
            last.finish_reason = finish_reason
        # The last conversation comes last: the completion's finish reason is that of its end.
        first, *later = sorted(
            self.conversations, key=lambda conversation: conversation is self.last
        )
        completion = first.builder.completion(earned, first.prompt_ids)
        for conversation in later:
            completion = _with_sequence(completion, conversation, earned)
        return completion


def _with_sequence(
    completion: Completion, conversation: _Conversation, earned: Score
) -> Completion:
    """Return the completion with the conversation as another sequence behind it."""
    part = conversation.builder.completion(earned)
    prompt_ids = conversation.prompt_ids
    prompt = Turn(False, len(prompt_ids), tuple(conversation.prompt), starts_new_sequence=True)
    logprobs = None
    if completion.logprobs is not None and part.logprobs is not None:
        logprobs = (*completion.logprobs, *(0.0,) * len(prompt_ids), *part.logprobs)
    start = len(completion.token_ids) + len(prompt_ids)
    versions = [(start + end, version) for end, version in part.versions]
    whole = replace(
        part,
        token_ids=completion.token_ids + prompt_ids + part.token_ids,
        logprobs=logprobs,
        turns=(*completion.turns, prompt, *part.turns),
        prompt_ids=completion.prompt_ids,
    )
    return whole.with_versions([*completion.versions, *versions])


def answer_of(message: Record, calls: Sequence[Call], *, turn: int) -> JsonObject:
    """Return the policy's turn as an OpenAI client reads it.

    The arguments of a call with a problem are the problem's text, and no JSON.
    """
    answer: JsonObject = {"role": "assistant", "content": message.get("content") or ""}
    if isinstance(message.get("reasoning_content"), str):
        answer["reasoning_content"] = message["reasoning_content"]
    tool_calls = []
    for number, call in enumerate(calls):
        arguments = call.problem or json.dumps(dict(call.arguments))
        function = {"name": call.name, "arguments": arguments}
        tool_calls.append(
            {"id": f"call_{turn}_{number}", "type": "function", "function": function}
        )
    if tool_calls:
        answer["tool_calls"] = tool_calls
    return answer
