"""A policy's turn as tool calls, and their answers as the tokens that it reads next, by one tokenizer's chat template.

Nothing is tokenised twice: what the policy wrote stays as it was sampled, and what answers it is appended. Its tokens
are those by which the template's rendering of a short dummy talk grows when the answer is added, as in TRL's own loop.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from ycore.errors import ConfigError
from ycore.foreign import foreign_json, foreign_line, foreign_value, foreign_word
from ycore.judge.question import break_special_tokens, special_tokens
from ycore.rollout.tool_pool import Answer, ToolSet
from ycore.types import Content, JsonObject, Message, Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DUMMY: Record = {"role": "user", "content": "dummy"}
_MAX_LINE = 4000  # characters of a call in text
_WAY_OUT = (
    'say --actions calls, and the policy calls them in its text, as name(1, word="x") on a line, and is answered as by '
    "a user"
)


class Call(NamedTuple):
    """A call that the policy wrote; `problem` says why it cannot be made."""

    name: str
    arguments: Record
    problem: str | None = None


class Dialogue:
    """How a model calls tools and is answered. ConfigError where its chat template cannot express it.

    Args:
        actions: `template`, `calls` or `auto`, see `TurnSettings`.
        template_arguments: TRL's `chat_template_kwargs`.
        users_answer: whether a user may answer too, besides the tools.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        tool_set: ToolSet,
        *,
        actions: str,
        template_arguments: Record | None = None,
        users_answer: bool = False,
    ) -> None:
        self.takes_text = tool_set.takes_text
        self._tokenizer = tokenizer
        self._tools = list(tool_set.tools)
        self._by_template = actions != "calls" and bool(self._tools)
        self._template: str | None = None
        self._template_arguments = dict(template_arguments or {})
        self._special = special_tokens(tokenizer)
        name = tokenizer.name_or_path
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"tools and environments need a chat template, and {name} has none; take a chat model"
            )
        if self._by_template:
            try:
                self._prepare_calls(name)
            except ConfigError:
                if actions == "template":
                    raise
                self._by_template = False
        examples = [self.answer_messages([Call("dummy", {})], [Answer("dummy")])]
        if users_answer:
            examples.append([_DUMMY])
        try:
            self._check_answers(examples)
        except ConfigError:
            # TRL's copy of the template renders what came before the same whatever follows.
            from trl.chat_template_utils import get_training_chat_template

            try:
                self._template = get_training_chat_template(tokenizer)
                self._check_answers(examples)
            except ValueError:
                raise ConfigError(
                    f"the chat template of {name} changes earlier turns when later ones follow, and TRL has no copy "
                    "of it that keeps them; take another model, or a template that keeps them"
                ) from None

    def _check_answers(self, examples: Sequence[Sequence[Message]]) -> None:
        for messages in examples:
            self.answer_ids(messages)

    @property
    def calls_in_text(self) -> bool:
        """Whether the policy calls its tools in its text, because of `actions` or for want of a template's own calls."""
        return bool(self._tools) and not self._by_template

    def _prepare_calls(self, name: str) -> None:
        from trl.chat_template_utils import add_response_schema, supports_tool_calling

        tokenizer = self._tokenizer
        if not supports_tool_calling(tokenizer):
            raise ConfigError(
                f"the chat template of {name} shows no tool calls to the model; {_WAY_OUT}"
            )
        if getattr(tokenizer, "response_template", None) or getattr(
            tokenizer, "response_schema", None
        ):
            return
        try:
            add_response_schema(tokenizer)
        except ValueError:
            raise ConfigError(
                f"TRL cannot read the tool calls of {name}'s chat template; {_WAY_OUT}"
            ) from None

    def prompt_ids(
        self, content: Content, template_arguments: Record | None = None
    ) -> tuple[int, ...]:
        """Return a prompt's token ids, with what the policy must know of its tools.

        Args:
            template_arguments: The prompt's own, over the run's.
        """
        if isinstance(content, str):
            content = [{"role": "user", "content": content}]
        messages = self._template_messages(content)
        if self._by_template:
            return self._render(
                messages, template_arguments, add_generation_prompt=True, tools=self._tools
            )
        if self._tools:
            system = ["You can call these functions, each on a line of its own:"]
            system += map(_signature, self._tools)
            text = "\n".join(system)
            if messages[0]["role"] == "system":
                text = f"{messages.pop(0)['content']}\n\n{text}"
            messages.insert(0, {"role": "system", "content": text})
        return self._render(messages, template_arguments, add_generation_prompt=True)

    def parse_turn(
        self, token_ids: Sequence[int], text: str, *, prefix: Sequence[int]
    ) -> tuple[JsonObject, list[Call]]:
        """Return a finished turn of the policy as a message in TRL's form, and the calls in it.

        A call in text that cannot be made stays text: it is none of the message's `tool_calls`.

        Args:
            text: the turn without special tokens.
            prefix: all tokens before it.
        """
        message: JsonObject = {"role": "assistant", "content": text}
        if self._by_template:
            from trl.chat_template_utils import parse_response

            tools: Any = self._tools
            try:
                parsed = foreign_value(
                    parse_response(
                        self._tokenizer, list(token_ids), prefix=list(prefix), tools=tools
                    )
                )
                return parsed, [_read_call(call) for call in parsed.get("tool_calls") or ()]
            except Exception:  # noqa: BLE001 (whatever a model wrote: TRL lets an AttributeError of an empty turn pass)
                return message, []
        if self.takes_text:
            return message, []
        calls, message["content"] = calls_in(text, self._tools)
        tool_calls = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
            if call.problem is None
        ]
        if tool_calls:
            message["tool_calls"] = tool_calls
        return message, calls

    def answer_messages(
        self, calls: Sequence[Call], answers: Sequence[Answer]
    ) -> list[Message]:
        """Return the messages that answer these calls, in their order; an environment that takes text is a user."""
        messages = []
        for call, answer in zip(calls, answers, strict=True):
            if self.takes_text:
                messages.append({"role": "user", "content": answer.text})
            else:
                messages.append({"role": "tool", "name": call.name, "content": answer.text})
        return self.sanitize(messages)

    def sanitize(self, messages: Sequence[Message]) -> list[Message]:
        """Break special tokens in what messages say, so that no message ends its turn or begins another."""
        return [
            {**message, "content": break_special_tokens(message["content"], self._special)}
            for message in messages
        ]

    def _template_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages as the template takes them.

        Where it has no calls, calls are text, and tools answer as one user.
        """
        if self._by_template:
            return [*messages]
        chat: list[Message] = []
        for is_tool, run in groupby(messages, lambda message: message["role"] == "tool"):
            if is_tool:
                text = "\n".join(message["content"] for message in run)
                chat.append({"role": "user", "content": text})
            else:
                chat += map(self._calls_as_text, run)
        return chat

    def _calls_as_text(self, message: Message) -> Message:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        if not calls:
            return message
        lines = []
        for call in calls:
            if isinstance(call["arguments"], Mapping):  # else the call is in the content
                arguments = [f"{key}={value!r}" for key, value in call["arguments"].items()]
                lines.append(f"{call['name']}({', '.join(arguments)})")
        text = break_special_tokens("\n".join(lines), self._special)
        parts = filter(None, [message["content"], text])
        return {"role": message["role"], "content": "\n".join(parts)}

    def answer_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens from the end of the policy's turn to the beginning of its next one."""
        messages = self._template_messages(messages)
        turn: JsonObject = {"role": "assistant", "content": ""}
        if messages[0]["role"] == "tool":
            function = {"name": messages[0]["name"], "arguments": {}}
            turn["tool_calls"] = [{"type": "function", "function": function}]
        before = self._render([_DUMMY, turn])
        whole = self._render([_DUMMY, turn, *messages], add_generation_prompt=True)
        eos = self._tokenizer.eos_token_id
        if eos in before:
            # Some templates write a line break after the end token, which belongs to what follows.
            before = before[: len(before) - before[::-1].index(eos)]
        if whole[: len(before)] != before:
            raise ConfigError("the chat template renders a turn otherwise when another follows")
        return whole[len(before) :]

    def _render(
        self,
        messages: Sequence[Message],
        template_arguments: Record | None = None,
        **options: Any,
    ) -> tuple[int, ...]:
        arguments = {**self._template_arguments, **(template_arguments or {}), **options}
        try:
            ids: Any = self._tokenizer.apply_chat_template(
                list(map(dict, messages)),
                chat_template=self._template,
                tokenize=True,
                return_dict=False,
                **arguments,
            )
        except Exception as problem:  # a template is a program, which may raise anything
            reason = foreign_line(f"{type(problem).__name__}: {problem}")
            raise ConfigError(
                f"the chat template of {self._tokenizer.name_or_path} cannot show these messages and tools "
                f"({reason}); correct the tools' schemas, or take another template"
            ) from problem
        return tuple(ids)


def _read_call(source: Record) -> Call:
    function = source["function"]
    name = foreign_word(function["name"], "a function's name")
    if isinstance(function["arguments"], Mapping):
        return Call(name, function["arguments"])
    return Call(name, {}, "the arguments must be an object with a value for each name")


def _signature(tool: Message) -> str:
    function = tool["function"]
    parameters = [
        f"{name}: {schema.get('type', 'any')}"
        for name, schema in function["parameters"]["properties"].items()
    ]
    return f"{function['name']}({', '.join(parameters)}) - {function['description'].strip()}"


def calls_in(text: str, tools: Sequence[Message]) -> tuple[list[Call], str]:
    """Return the calls in a text: each line that begins with a tool's name and a bracket, as Python with literals.

    `add(2, y=3)` is a call of `add` with x=2 and y=3, where x is the first of its parameters. A line that begins so and
    is no such call is one with a `problem`, so that the policy is told. The second value is the text without the calls
    that have none.
    """
    parameters = {
        tool["function"]["name"]: list(tool["function"]["parameters"]["properties"])
        for tool in tools
    }
    calls = list[Call]()
    rest = list[str]()
    for whole_line in text.splitlines():
        line = whole_line.strip(" \t`")
        begin = re.match(r"(\w+)\s*\(", line)
        if begin is None or begin[1] not in parameters:
            rest.append(whole_line)
            continue
        call = _parse_call(line, begin[1], parameters[begin[1]])
        calls.append(call)
        if call.problem is not None:
            rest.append(whole_line)
    if all(call.problem for call in calls):
        return calls, text
    return calls, "\n".join(rest).strip()


def _parse_call(line: str, name: str, parameters: Sequence[str]) -> Call:
    try:
        arguments = _arguments_in(line, name, parameters)
        # As the tool gets them; TypeError of a set.
        return Call(name, foreign_json(json.dumps(arguments)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        problem = (
            str(error).partition(" (")[0] if isinstance(error, SyntaxError) else str(error)
        )
        form = f"{name}({', '.join(parameters)})"
        return Call(
            name, {}, f"{problem[:120]}; write {form} with plain values, alone on a line"
        )


def _arguments_in(line: str, name: str, parameters: Sequence[str]) -> JsonObject:
    if len(line) > _MAX_LINE:
        raise ValueError("the line is too long")
    call = ast.parse(line, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError("the line holds more than the call")
    if len(call.args) > len(parameters):
        raise ValueError(f"{name} takes {len(parameters)} arguments")
    arguments = {
        key: ast.literal_eval(value) for key, value in zip(parameters, call.args, strict=False)
    }
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("** is no plain value")
        if keyword.arg in arguments:
            raise ValueError("an argument is given twice")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return arguments
