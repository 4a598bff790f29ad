"""`python -m ycore.rollout.tool_host DESCRIPTOR [PYTHON]`: a confined process with tools and one environment.

It imports the standard library alone: there are many of them, and another PYTHON can run it. JSON lines come on
standard input; answers go to the descriptor. The first line is `{"nonce", "tools", "env", "describe"}`, answered by
`{"nonce", "ready": what there is}` or `{"nonce", "error": line}`. Each later one has an `op` and is answered by
`{"nonce", "value"}`, or by `{"nonce", "failed": line}` where a person's or a model's code raised. The environment is
TRL's (`environment_factory`): `reset(**row)`, public methods as tools, `get_reward()`. Deadlines are the parent's.
"""

import ast
import asyncio
import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
import io
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ycore.rollout import Refused
from ycore.rollout.games import GAMES, named
from ycore.rollout.mcp_server import PREFIX, McpServer, ServerEnded
from ycore.rollout.openenv_local import PREFIX as OPENENV
from ycore.rollout.openenv_local import Local, openenv_local
from ycore.sandbox.channel import Channel

PYTHON = "python"
"""The name of the tool that runs what the model writes."""

MOST_TEXT = 16_000  # characters of an answer
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


class Host:
    """The loaded tools, and the environment, which lasts for one episode after the other."""

    def __init__(self, tools: list[str], env: str | None) -> None:
        self._tools: dict[str, Callable[..., Any]] = {}
        self._runner = asyncio.Runner()
        self._env: Any = None
        self._paid: float | None = (
            None  # for calls and steps since the turn's reward was last asked for
        )
        self._servers = [McpServer(name) for name in tools if name.startswith(PREFIX)]
        self._declared: list[McpServer | Local] = [
            *self._servers
        ]  # who say themselves what tools they have
        for name in tools:
            if not name.startswith(PREFIX):
                self._add(python if name == PYTHON else load(name, "tool"), of=name)
        if env is not None:
            self._env = _environment(env)
            self._check_reward(env)
            for name in self._methods:
                self._add(getattr(self._env, name), of=f"{env}.{name}")
        if isinstance(self._env, Local):
            self._declared.append(self._env)

    @property
    def _methods(self) -> list[str]:
        """The environment's public methods, which are its tools; as in TRL, of its class, inherited or not."""
        if isinstance(self._env, Local):
            return []
        members = inspect.getmembers(type(self._env), inspect.isfunction)
        return [name for name, _ in members if name not in _NOT_TOOLS and not name.startswith("_")]

    @property
    def _takes_text(self) -> bool:
        """Whether its only method is `step(self, text)`, so that a whole turn is the action."""
        if isinstance(self._env, Local):
            return self._env.takes_text
        return (
            self._env is not None
            and self._methods == ["step"]
            and len(inspect.signature(self._env.step).parameters) == 1
        )

    def _add(self, tool: Callable[..., Any], *, of: str) -> None:
        _require_new(tool.__name__, self._tools, of=of)
        self._tools[tool.__name__] = tool

    def _check_reward(self, env: str) -> None:
        get_reward = getattr(self._env, "get_reward", None)
        returned = getattr(get_reward, "__annotations__", {}).get("return")
        if returned in (str, "str", bytes, "bytes", list, "list", dict, "dict"):
            shown = returned if isinstance(returned, str) else returned.__name__
            raise Refused(
                f"get_reward of environment {env!r} returns {shown}; a reward is a number, or None"
            )

    def describe(self, *, schemas: bool) -> dict[str, Any]:
        """What a run must know of the tools: their JSON schemas as transformers makes them, for the chat template."""
        takes_text = self._takes_text
        schemas = schemas and not takes_text
        found = [schema_of(tool) for tool in self._tools.values()] if schemas else []
        for server in self._declared if schemas else ():
            for schema in server.schemas:
                _require_new(
                    schema["function"]["name"],
                    [one["function"]["name"] for one in found],
                    of=server.name,
                )
                found.append(schema)
        return {
            "tools": found,
            "takes_text": takes_text,
            "pays": callable(getattr(self._env, "get_reward", None)),
            "pays_turns": hasattr(type(self._env), _TURN_REWARD),
        }

    def answer(self, request: Mapping[str, Any]) -> object:
        """What an operation gives; any exception of the person's or model's code goes on."""
        seed(request.get("seed", 0))
        if request["op"] == "reset":
            self._paid = None
        try:
            return self._answered(request)
        finally:
            if request["op"] in ("reset", "step", "call") and hasattr(
                type(self._env), _TURN_REWARD
            ):
                self._collect()

    def _collect(self) -> None:
        """Add what the environment paid since it was last looked at to what is paid for the turn."""
        paid = getattr(self._env, _TURN_REWARD)
        self._env.turn_reward = None
        if paid is not None:
            self._paid = (self._paid or 0.0) + float(paid)

    def _answered(self, request: Mapping[str, Any]) -> object:
        match request["op"]:
            case "reset":
                return self._text_or_none(self._waited(self._env.reset(**request["row"])), "reset")
            case "step":
                return self._text_or_none(self._waited(self._env.step(request["text"])), "step")
            case "call":
                return str(self._called(request["name"], request["arguments"]))[:MOST_TEXT]
            case "start_servers":
                return sum(len(server.tools) for server in self._servers)
            case "end_servers":
                for server in self._servers:
                    server.end()
                return None
            case "attributes":
                return self._attributes()
            case "turn_reward":
                paid, self._paid = self._paid, None
                return paid
            case "reward":
                value = (
                    self._waited(self._env.get_reward())
                    if hasattr(self._env, "get_reward")
                    else None
                )
                if isinstance(value, str | bytes):
                    raise TypeError(
                        f"get_reward returns a number or None, not the {type(value).__name__} {value!r:.60}"
                    )
                return None if value is None else float(value)
        raise ValueError(f"no operation {request['op']!r}")

    def _attributes(self) -> str:
        """The environment's public attributes that JSON can carry, for reward functions."""
        kept: dict[str, Any] = {}
        for name, value in vars(self._env).items():
            with contextlib.suppress(TypeError, ValueError):
                if not name.startswith("_"):
                    kept[name] = json.loads(json.dumps(value))
        text = json.dumps(kept)
        if len(text) > MOST_TEXT:
            raise ValueError(
                f"the environment's attributes take {len(text)} letters as JSON, of {MOST_TEXT} at most"
            )
        return text

    def _called(self, name: str, arguments: Mapping[str, Any]) -> Any:
        if name in self._tools:
            return self._waited(self._tools[name](**arguments))
        for server in self._declared:
            if name in server.tools:
                return server.call(name, arguments)
        raise ValueError(f"Tool {name} not found.")  # TRL's words

    def _waited(self, result: Any) -> Any:
        return self._runner.run(_as_coroutine(result)) if inspect.isawaitable(result) else result

    def _text_or_none(self, value: Any, method: str) -> str | None:
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{method} returns text or None here, not a {type(value).__name__}")
        return value if value is None else value[:MOST_TEXT]


def _environment(env: str) -> Any:
    """The environment of this name; Refused where it is none, or does not start."""
    try:
        if env.startswith(OPENENV):
            return openenv_local(env, partial(load, kind="environment"))
        made = named(env) if env.partition(":")[0] in GAMES else load(env, "environment")
        if not callable(getattr(made, "reset", None)):
            raise Refused(
                f"environment {env!r} has no reset(self, **row), which begins an episode; define it"
            )
        if not (inspect.isclass(made) and inspect.isfunction(getattr(made, "reset", None))):
            raise Refused(f"environment {env!r} must be a class; it is a {type(made).__name__}")
        return made()
    except Refused:
        raise
    except BaseException as error:
        raise Refused(
            f"environment {env!r}: {env.rpartition(':')[2]}() raised {one_line(error)}"
        ) from error


def _require_new(name: str, names: Collection[str], *, of: str) -> None:
    if name in names:
        raise Refused(
            f"two tools are named {name!r}, one of them {of!r}; rename one: a model calls them by name"
        )


async def _as_coroutine(result: Any) -> Any:
    return await result


def load(name: str, kind: str) -> Any:
    """The object of `file.py:name` or `package.module:name`; Refused where there is none."""
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise Refused(
            f"{kind} {name!r} needs both sides of its colon: file.py:name or package.module:name"
        )
    sys.path[:0] = [folder for folder in (str(Path.cwd()),) if folder not in sys.path]
    try:
        if source.endswith(".py") or "/" in source:
            path = Path(source).expanduser()
            if not path.is_file():
                raise Refused(
                    f"{kind} {name!r}: no file {path}; give its path from the working folder"
                )
            sys.path.insert(0, str(path.resolve().parent))
            spec = importlib.util.spec_from_file_location(f"ycore_{kind}_{path.stem}", path)
            assert spec is not None and spec.loader is not None
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
    except Refused:
        raise
    except BaseException as error:
        raise Refused(f"{kind} {name!r}: importing {source} raised {one_line(error)}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        public = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_")
        ]
        raise Refused(
            f"{kind} {name!r}: {source} has no {attribute!r} to call; it has {', '.join(public[:8]) or 'none'}"
        )
    return found


def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """The tool as chat templates are told it; Refused where it lacks types or a docstring."""
    try:
        from transformers.utils.chat_template_utils import get_json_schema
    except ImportError as error:
        raise Refused(
            f"tool {tool.__name__!r} cannot be shown to a model: the schema is made by transformers, and this Python "
            f"({sys.executable}) has none; install it there"
        ) from error
    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:
        raise Refused(
            f"tool {tool.__name__!r} cannot be shown to a model: {one_line(error)}; "
            "give it a docstring with `Args:` that describes every argument, and a type for each"
        ) from error
    return schema


def seed(number: int) -> None:
    """Seed this process' generators, so that the same episode meets the same world."""
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number % 2**32)


def one_line(error: BaseException) -> str:
    message = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


_IN_ANOTHER = """
import runpy, sys, types
package = sys.modules["ycore"] = types.ModuleType("ycore")
package.__path__ = [sys.argv.pop(1)]
runpy.run_module("ycore.rollout.tool_host", run_name="__main__", alter_sys=True)
"""
"""Runs this module in a Python that has ycore's folder and nothing of what is installed beside it."""


def main() -> None:
    if len(sys.argv) > 2:
        folder = str(Path(__file__).resolve().parent.parent)
        os.execv(sys.argv[2], [sys.argv[2], "-I", "-B", "-c", _IN_ANOTHER, folder, sys.argv[1]])
    channel = Channel(int(sys.argv[1]))
    faulthandler.register(
        signal.SIGUSR2, all_threads=True
    )  # with this signal, the launcher asks for stacks
    requests = iter(channel)
    first = next(requests)
    try:
        host = Host(first["tools"], first["env"])
        channel.reply({"nonce": first["nonce"], "ready": host.describe(schemas=first["describe"])})
    except Refused as error:
        return channel.reply({"nonce": first["nonce"], "error": str(error)})
    for request in requests:
        owner = os.getpid()
        try:
            answer = {"value": host.answer(request)}
        except ServerEnded:
            raise  # what it knew is lost: this process ends, and another takes the calls again
        except BaseException as error:  # noqa: BLE001 (a process boundary: sys.exit in a tool is its failure, not ours)
            traceback.print_exc()
            answer = {"failed": " ".join(str(error).split())[:300] or type(error).__name__}
        if os.getpid() != owner:  # the tool forked, and this is the child: it must not answer too
            os._exit(0)
        channel.reply({"nonce": request["nonce"], **answer})


if __name__ == "__main__":
    main()
