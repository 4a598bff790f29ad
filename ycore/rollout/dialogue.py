"""A policy's turn as tool calls, and their answers as the tokens that it reads next, by one tokenizer's chat template.

Nothing is tokenised twice: what the policy wrote stays as it was sampled, and what answers it is appended. Its tokens
are those by which the template's rendering of a short dummy talk grows when the answer is added, as in TRL's own loop.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    parse_response,
    supports_tool_calling,
)

from ycore.errors import ConfigError
from ycore.judge.question import break_special_tokens, special_tokens
from ycore.rollout.tool_pool import Answer, Description
from ycore.types import Content

_DUMMY: Mapping[str, Any] = {"role": "user", "content": "dummy"}
_MOST_LINE = 4000  # characters of a call in text
_WAY_OUT = (
    'say --actions calls, and the policy calls them in its text, as name(1, word="x") on a line, and is answered as by '
    "a user"
)


class Call(NamedTuple):
    """A call that the policy wrote; `problem` says why it cannot be asked."""

    name: str
    arguments: Mapping[str, Any]
    problem: str | None = None


class Dialogue:
    """How one model acts and is answered. ConfigError where its chat template cannot do it.

    Args:
        actions: `template` or `calls`, see `TurnSettings`.
        template_arguments: TRL's `chat_template_kwargs`.
        users_answer: whether a user may answer too, besides its tools.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        described: Description,
        *,
        actions: str,
        template_arguments: Mapping[str, Any] | None = None,
        users_answer: bool = False,
    ) -> None:
        self.takes_text = described.takes_text
        self._tokenizer, self._described = tokenizer, described
        self._by_template = (
            actions == "template" and not described.takes_text and bool(described.tools)
        )
        self._arguments = dict(template_arguments or {})
        self._special = special_tokens(tokenizer)
        self._template: str | None = None
        name = tokenizer.name_or_path
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"tools and environments need a chat template, and {name} has none; take a chat model"
            )
        if self._by_template:
            self._check_calls(name)
        self._checked = [
            self.answers([Call("dummy", {})], [Answer("dummy")]),
            *([[_DUMMY]] if users_answer else []),
        ]
        try:
            self._check_answers()
        except ValueError:
            self._keep_turns(name)

    def _check_answers(self) -> None:
        for answers in self._checked:
            self.answer_ids(answers)

    def _check_calls(self, name: str) -> None:
        if not supports_tool_calling(self._tokenizer):
            raise ConfigError(
                f"the chat template of {name} shows no tool calls to the model; {_WAY_OUT}"
            )
        known = any(
            getattr(self._tokenizer, key, None) for key in ("response_template", "response_schema")
        )
        try:
            if not known:
                add_response_schema(self._tokenizer)
        except ValueError:
            raise ConfigError(
                f"TRL cannot read the tool calls of {name}'s chat template; {_WAY_OUT}"
            ) from None

    def _keep_turns(self, name: str) -> None:
        """Take TRL's copy of the template, which renders what came before the same whatever follows."""
        try:
            self._template = get_training_chat_template(self._tokenizer)
            self._check_answers()
        except ValueError:
            raise ConfigError(
                f"the chat template of {name} changes earlier turns when later ones follow, and TRL has no copy of it "
                "that keeps them; take another model, or a template that keeps them"
            ) from None

    def prompt_ids(self, content: Content) -> tuple[int, ...]:
        """A prompt's token ids, with what the policy must know of its tools."""
        messages = self._shown(
            [{"role": "user", "content": content}] if isinstance(content, str) else content
        )
        if self._by_template:
            return self._rendered(
                messages, add_generation_prompt=True, tools=list(self._described.tools)
            )
        if self._described.tools and not self.takes_text:
            told = "\n".join(
                ["You can call these functions, each on a line of its own:", *self._signatures]
            )
            own = messages.pop(0)["content"] + "\n\n" if messages[0]["role"] == "system" else ""
            messages.insert(0, {"role": "system", "content": own + told})
        return self._rendered(messages, add_generation_prompt=True)

    @property
    def _signatures(self) -> list[str]:
        lines = []
        for tool in self._described.tools:
            function = tool["function"]
            named = function["parameters"]["properties"].items()
            shown = ", ".join(f"{name}: {one.get('type', 'any')}" for name, one in named)
            lines.append(f"{function['name']}({shown}) - {function['description'].strip()}")
        return lines

    def read(
        self, token_ids: Sequence[int], text: str, *, prefix: Sequence[int]
    ) -> tuple[dict[str, Any], list[Call]]:
        """A finished turn of the policy as a message in TRL's form, and the calls in it.

        A call in text that cannot be asked stays text: it is none of the message's `tool_calls`.

        Args:
            text: the turn without special tokens.
            prefix: all tokens before it.
        """
        if not self._by_template:
            calls, rest = ([], text) if self.takes_text else calls_in(text, self._described)
            functions = [
                {"name": one.name, "arguments": one.arguments}
                for one in calls
                if one.problem is None
            ]
            made = [{"type": "function", "function": function} for function in functions]
            return {
                "role": "assistant",
                "content": rest,
                **({"tool_calls": made} if made else {}),
            }, calls
        try:
            tools: Any = list(self._described.tools)
            message = parse_response(
                self._tokenizer, list(token_ids), prefix=list(prefix), tools=tools
            )
        except Exception:  # noqa: BLE001 (whatever a model wrote: TRL lets an AttributeError of an empty turn pass)
            message = {"role": "assistant", "content": text}
        return message, [_declared(call) for call in message.get("tool_calls") or ()]

    def answers(self, calls: Sequence[Call], answers: Sequence[Answer]) -> list[Mapping[str, Any]]:
        """The messages that answer these calls, in their order; of an environment that takes text, a user's."""
        roles = [
            {"role": "user"} if self.takes_text else {"role": "tool", "name": call.name}
            for call in calls
        ]
        return self.heard(
            [{**role, "content": answer.text} for role, answer in zip(roles, answers, strict=True)]
        )

    def heard(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Messages without special tokens in what they say, so that none ends its turn or begins another."""
        return [
            {**one, "content": break_special_tokens(one["content"], self._special)}
            for one in messages
        ]

    def _shown(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Messages as the template takes them: where it has no calls, those are text, and tools answer as one user."""
        found: list[Mapping[str, Any]] = []
        for of_tools, several in groupby(messages, lambda one: one["role"] == "tool"):
            if self._by_template:
                found += several
            elif of_tools:
                found.append(
                    {"role": "user", "content": "\n".join(one["content"] for one in several)}
                )
            else:
                found += map(self._in_text, several)
        return found

    def _in_text(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        asked = [
            one for one in functions if isinstance(one["arguments"], Mapping)
        ]  # the others are in the content
        if not functions:
            return message
        named = (
            ", ".join(f"{key}={value!r}" for key, value in one["arguments"].items())
            for one in asked
        )
        lines = [f"{one['name']}({arguments})" for one, arguments in zip(asked, named, strict=True)]
        text = break_special_tokens("\n".join(lines), self._special)
        return {
            "role": message["role"],
            "content": "\n".join(filter(None, [message["content"], text])),
        }

    def answer_ids(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The tokens from the end of the policy's turn to the beginning of its next one."""
        messages = self._shown(messages)
        turn: dict[str, Any] = {"role": "assistant", "content": ""}
        if messages[0]["role"] == "tool":
            function = {"name": messages[0]["name"], "arguments": {}}
            turn["tool_calls"] = [{"type": "function", "function": function}]
        before = self._rendered([_DUMMY, turn])
        whole = self._rendered([_DUMMY, turn, *messages], add_generation_prompt=True)
        ends = [
            place for place, token in enumerate(before) if token == self._tokenizer.eos_token_id
        ]
        if ends:  # some templates write a line break after it, which belongs to what follows
            before = before[: ends[-1] + 1]
        if whole[: len(before)] != before:
            raise ValueError("the chat template renders a turn otherwise when another follows")
        return whole[len(before) :]

    def _rendered(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> tuple[int, ...]:
        how = {
            "chat_template": self._template,
            "tokenize": True,
            "return_dict": False,
            **self._arguments,
            **how,
        }
        ids: Any = self._tokenizer.apply_chat_template(list(map(dict, messages)), **how)
        return tuple(ids)


def _declared(call: Mapping[str, Any]) -> Call:
    function = call["function"]
    if not isinstance(function["arguments"], Mapping):
        return Call(
            function["name"], {}, "the arguments must be an object with a value for each name"
        )
    return Call(function["name"], function["arguments"])


def calls_in(text: str, described: Description) -> tuple[list[Call], str]:
    """The calls in a text: each line that begins with a tool's name and a bracket, as Python with literal values.

    `add(2, y=3)` is a call of `add` with x=2 and y=3, where x is the first of its parameters. A line that begins so and
    is no such call is one with a `problem`, so that the policy is told. The second value is the text without the calls
    that have none.
    """
    parameters = {
        tool["function"]["name"]: tool["function"]["parameters"]["properties"]
        for tool in described.tools
    }
    calls, rest = list[Call](), list[str]()
    for whole in text.splitlines():
        line = whole.strip(" \t`")
        begun = re.match(r"(\w+)\s*\(", line)
        found = (
            [_written(line, begun[1], list(parameters[begun[1]]))]
            if begun and begun[1] in parameters
            else []
        )
        calls += found
        rest += [] if found and found[0].problem is None else [whole]
    return calls, text if all(call.problem for call in calls) else "\n".join(rest).strip()


def _written(line: str, name: str, parameters: Sequence[str]) -> Call:
    try:
        if len(line) > _MOST_LINE:
            raise ValueError("the line is too long")
        call = ast.parse(line, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("the line holds more than the call")
        if len(call.args) > len(parameters):
            raise ValueError(f"{name} takes {len(parameters)} arguments")
        given = [
            (key, ast.literal_eval(value))
            for key, value in zip(parameters, call.args, strict=False)
        ]
        if any(one.arg is None for one in call.keywords):
            raise ValueError("** is no plain value")
        given += [(str(one.arg), ast.literal_eval(one.value)) for one in call.keywords]
        if len(dict(given)) < len(given):
            raise ValueError("an argument is given twice")
        return Call(
            name, json.loads(json.dumps(dict(given)))
        )  # as the tool gets them; TypeError of a set
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        why = str(error).partition(" (")[0] if isinstance(error, SyntaxError) else str(error)
        return Call(
            name,
            {},
            f"{why[:120]}; write {name}({', '.join(parameters)}) with plain values, alone on a line",
        )
