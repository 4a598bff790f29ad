"""`python -m ycore.rollout.tool_host [PYTHON]`: a confined process with tools and one environment.

It imports the standard library alone: there are many of them, and another PYTHON can run it. JSON lines come on
standard input, a socket, and are answered there. The first line is `{"nonce", "tools", "env", "describe"}`, answered by
`{"nonce", "ready": what there is}` or `{"nonce", "error": line}`. Each later one has an `op` and is answered by
`{"nonce", "value"}`, or by `{"nonce", "failed": line}` where a person's or a model's code raised. The environment is
TRL's (`environment_factory`): `reset(**row)`, public methods as tools, `get_reward()`. Deadlines are the parent's.
"""

import ast
import asyncio
import contextlib
import inspect
import io
import json
import os
import random
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ycore.errors import ConfigError, UserError
from ycore.rollout.games import GAMES, game_class
from ycore.rollout.mcp_server import MCP_PREFIX, McpServer
from ycore.sandbox.channel import Handler, answer_requests, exception_line, load_named
from ycore.types import JsonObject, Record

PYTHON = "python"
"""The name of the tool that runs what the model writes."""

MAX_TEXT = 16_000  # characters of an answer
_NOT_TOOLS = ("reset", "get_reward")
_TURN_REWARD = "turn_reward"
"""An attribute that a class of the person's declares: what a call or step paid, a number, or None. It is read after
each, and set to None."""
_variables: dict[str, Any] = {}


def python(code: str) -> str:
    """Run Python code. What it prints, and the value of its last line, come back. Variables stay from call to call.

    Args:
        code: The program.
    """
    body = ast.parse(code).body
    ends = body[-1] if body else None
    last = ast.Expression(ends.value) if isinstance(ends, ast.Expr) else None
    body = body[:-1] if last is not None else body
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.Module(body, []), "<tool>", "exec"), _variables)
        value = None if last is None else eval(compile(last, "<tool>", "eval"), _variables)
    return printed.getvalue() + ("" if value is None else repr(value))


class ToolHost:
    """The loaded tools, and the environment, which lasts for one episode after the other."""

    def __init__(self, tools: list[str], env: str | None) -> None:
        self._tools: dict[str, Callable[..., Any]] = {}
        self._env: Any = None
        self._turn_reward: float | None = None
        """The reward of calls and steps since the turn's reward was last asked for."""
        self._runner = asyncio.Runner()
        self._schemas: dict[str, JsonObject] = {}
        """Schemas of the servers' tools."""
        servers = [McpServer(name) for name in tools if name.startswith(MCP_PREFIX)]
        for name in tools:
            if name == PYTHON:
                self._add(name, python, source=name)
            elif not name.startswith(MCP_PREFIX):
                tool = load_named(name, kind="tool", error=ConfigError)
                self._add(tool.__name__, tool, source=name)
        if env is not None:
            self._env = _environment(env)
            for name in self._methods:
                self._add(name, getattr(self._env, name), source=f"{env}.{name}")
        for server in servers:
            for name, schema in server.schemas.items():
                self._add(name, partial(server.call, name), source=server.name)
                self._schemas[name] = schema

    @property
    def _methods(self) -> list[str]:
        """The environment's public methods, which are its tools; as in TRL, those of its class, inherited or not."""
        members = inspect.getmembers(type(self._env), inspect.isfunction)
        return [
            name for name, _ in members if name not in _NOT_TOOLS and not name.startswith("_")
        ]

    @property
    def _takes_text(self) -> bool:
        """Whether the only method is `step(self, text)`, so that a whole turn is the action."""
        if self._env is None or self._methods != ["step"]:
            return False
        return len(inspect.signature(self._env.step).parameters) == 1

    @property
    def _pays_turns(self) -> bool:
        return hasattr(type(self._env), _TURN_REWARD)

    def _add(self, name: str, tool: Callable[..., Any], *, source: str) -> None:
        if name in self._tools:
            raise ConfigError(
                f"two tools are named {name!r}, one of them {source!r}; rename one: a model calls them by name"
            )
        self._tools[name] = tool

    def describe(self, *, schemas: bool) -> JsonObject:
        """Return a `ToolSet` as JSON; with `schemas`, those that transformers makes for chat templates."""
        tools: list[JsonObject] = []
        if schemas and not self._takes_text:
            tools = [
                self._schemas.get(name) or schema_of(tool) for name, tool in self._tools.items()
            ]
        return {
            "tools": tools,
            "takes_text": self._takes_text,
            "pays": callable(getattr(self._env, "get_reward", None)),
            "pays_turns": self._pays_turns,
        }

    def answer(self, request: Record) -> object:
        """Return the value of an operation; any exception of the user's or the model's code goes on."""
        seed(request.get("seed", 0))
        op = request["op"]
        if op == "reset":
            self._turn_reward = None
        try:
            return getattr(self, f"_op_{op}")(request)
        finally:
            if op in ("reset", "step", "call") and self._pays_turns:
                self._collect_turn_reward()

    def _collect_turn_reward(self) -> None:
        reward = getattr(self._env, _TURN_REWARD)
        self._env.turn_reward = None
        if reward is not None:
            self._turn_reward = (self._turn_reward or 0.0) + float(reward)

    def _op_reset(self, request: Record) -> str | None:
        return self._observation(self._env.reset(**request["row"]), "reset")

    def _op_step(self, request: Record) -> str | None:
        return self._observation(self._env.step(request["text"]), "step")

    def _op_call(self, request: Record) -> str:
        return str(self._call(request["name"], request["arguments"]))[:MAX_TEXT]

    def _op_turn_reward(self, request: Record) -> float | None:
        reward = self._turn_reward
        self._turn_reward = None
        return reward

    def _op_reward(self, request: Record) -> float | None:
        if not hasattr(self._env, "get_reward"):
            return None
        value = self._awaited(self._env.get_reward())
        if isinstance(value, str | bytes):
            raise TypeError(
                f"get_reward returns a number or None, not the {type(value).__name__} {value!r:.60}"
            )
        return None if value is None else float(value)

    def _op_attributes(self, request: Record) -> str:
        """Return the environment's public attributes that JSON can carry, for reward functions."""
        attributes: JsonObject = {}
        for name, value in vars(self._env).items():
            with contextlib.suppress(TypeError, ValueError):
                if not name.startswith("_"):
                    attributes[name] = json.loads(json.dumps(value))
        text = json.dumps(attributes)
        if len(text) > MAX_TEXT:
            raise ValueError(
                f"the environment's attributes take {len(text)} letters as JSON, of {MAX_TEXT} at most"
            )
        return text

    def _call(self, name: str, arguments: Record) -> Any:
        if name not in self._tools:
            raise ValueError(f"Tool {name} not found.")  # TRL's words
        return self._awaited(self._tools[name](**arguments))

    def _awaited(self, result: Any) -> Any:
        return (
            self._runner.run(_as_coroutine(result)) if inspect.isawaitable(result) else result
        )

    def _observation(self, result: Any, method: str) -> str | None:
        text = self._awaited(result)
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{method} returns text or None here, not a {type(text).__name__}")
        return text if text is None else text[:MAX_TEXT]


def _environment(env: str) -> Any:
    """Return the environment of this name; ConfigError where there is none, or it does not start."""
    try:
        is_game = env.partition(":")[0] in GAMES
        factory = (
            game_class(env)
            if is_game
            else load_named(env, kind="environment", error=ConfigError)
        )
        if not (
            inspect.isclass(factory) and inspect.isfunction(getattr(factory, "reset", None))
        ):
            raise ConfigError(
                f"environment {env!r} must be a class with reset(self, **row), which begins an episode; it is a "
                f"{type(factory).__name__}"
            )
        return factory()
    except UserError:
        raise
    except BaseException as error:  # whatever a user's class raises, sys.exit too
        raise ConfigError(
            f"environment {env!r}: {env.rpartition(':')[2]}() raised {exception_line(error)}"
        ) from error


async def _as_coroutine(result: Any) -> Any:
    return await result


def schema_of(tool: Callable[..., Any]) -> JsonObject:
    """Return the tool's schema for chat templates; ConfigError where it lacks types or a docstring."""
    try:
        from transformers.utils.chat_template_utils import get_json_schema
    except ImportError as error:
        raise ConfigError(
            f"tool {tool.__name__!r} cannot be shown to a model: the schema is made by transformers, and this Python "
            f"({sys.executable}) has none; install it there"
        ) from error
    try:
        schema: JsonObject = get_json_schema(tool)
    except Exception as error:  # whatever transformers raises of a user's function
        raise ConfigError(
            f"tool {tool.__name__!r} cannot be shown to a model: {exception_line(error)}; "
            "give it a docstring with `Args:` that describes every argument, and a type for each"
        ) from error
    return schema


def seed(number: int) -> None:
    """Seed this process' generators, so that the same episode meets the same world."""
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number % 2**32)


_IN_ANOTHER = """
import runpy, sys, types
if sys.version_info < (3, 11):
    sys.exit(f"env_python {sys.executable} is Python {sys.version.split()[0]}; tools need 3.11 or later")
package = sys.modules["ycore"] = types.ModuleType("ycore")
package.__path__ = [sys.argv.pop(1)]
runpy.run_module("ycore.rollout.tool_host", run_name="__main__", alter_sys=True)
"""
"""Runs this module in a Python that has ycore's folder and nothing of what is installed beside it."""


def load_tools(first: Record) -> tuple[JsonObject, Handler]:
    """Load tools and environment; return their description, and the function that answers a request."""
    host = ToolHost(first["tools"], first["env"])

    def answer(request: Record) -> JsonObject:
        try:
            return {"value": host.answer(request)}
        except BaseException as error:  # noqa: BLE001 (a process boundary: sys.exit in a tool is its failure, not ours)
            traceback.print_exc()
            return {"failed": " ".join(str(error).split())[:300] or type(error).__name__}

    return host.describe(schemas=first["describe"]), answer


if __name__ == "__main__":
    if len(sys.argv) > 1:
        folder = str(Path(__file__).resolve().parent.parent)
        os.execv(sys.argv[1], [sys.argv[1], "-I", "-B", "-c", _IN_ANOTHER, folder])
    answer_requests(load_tools)
