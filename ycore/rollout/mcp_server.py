"""A client of one MCP server over standard input and output, for its tools alone (Model Context Protocol 2025-06-18).

Standard library only, as all that a tool worker imports: the official client takes 0.45 s and 64 MiB of each worker,
and any Python can run this. The server is a child of the worker, and so is held as the worker is.
"""

import json
import os
import re
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from ycore.rollout import Refused

PREFIX = "mcp:"
START_S = 60.0  # limit for the server's first answers
_VERSION = "2025-06-18"


class ServerEnded(Exception):
    """The server is gone, and with it all that it knew."""


class McpServer:
    """The server of `mcp:COMMAND`, started when its tools are first asked for; Refused where it cannot be."""

    def __init__(self, name: str, *, start_s: float = START_S) -> None:
        self.name, self._start_s = name, start_s
        try:
            self._words = shlex.split(name.removeprefix(PREFIX))
        except ValueError as error:
            raise Refused(
                f"tool {name!r}: {error}; quote the words of the command as for a shell"
            ) from None
        if not self._words:
            raise Refused(
                f"tool {name!r} has no command; say what starts the server, e.g. mcp:python server.py"
            )
        self._process: subprocess.Popen[bytes] | None = None
        self._held, self._number = b"", 0

    @cached_property
    def tools(self) -> dict[str, dict[str, Any]]:
        """What the server can do, as it says it, by names that can be written as a call: `_` for other letters."""
        found, cursor = [], None
        while True:
            page = self._started("tools/list", {} if cursor is None else {"cursor": cursor})
            found += page["tools"]
            cursor = page.get("nextCursor")
            if not cursor:
                return {re.sub(r"\W", "_", tool["name"]): tool for tool in found}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates are told them."""
        if not self.tools:
            raise Refused(f"tool {self.name!r}: the server has no tools")
        return [_schema(name, tool) for name, tool in self.tools.items()]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What a tool answers, as text; RuntimeError where it failed, ServerEnded where the server did."""
        asked = {"name": self.tools[name]["name"], "arguments": dict(arguments)}
        result = self._ask("tools/call", asked, until=None)
        text = "\n".join(map(_text, result.get("content", ())))
        if result.get("isError"):
            raise RuntimeError(text or "the tool failed")
        return text or json.dumps(result.get("structuredContent") or "")

    def end(self) -> None:
        """End the server, and forget what it said; the next to ask for its tools starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process, self._held = None, b""
        self.__dict__.pop("tools", None)

    def _started(self, method: str, params: dict[str, Any]) -> Any:
        """What a server answers that is started first, if there is none."""
        until = time.monotonic() + self._start_s
        try:
            if self._process is None:
                self._process = subprocess.Popen(
                    self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
                who = {"name": "ycore", "version": "1"}
                hello = {"protocolVersion": _VERSION, "capabilities": {}, "clientInfo": who}
                self._ask("initialize", hello, until=until)
                self._send({"method": "notifications/initialized"})
            return self._ask(method, params, until=until)
        except TimeoutError:
            why = f"it did not answer within {self._start_s:g} s"
        except OSError as error:
            why = f"{self._words[0]!r}: {error.strerror or error}"
        except (ServerEnded, RuntimeError, KeyError, TypeError) as error:
            why = str(error)
        self.end()
        raise Refused(
            f"tool {self.name!r}: no MCP server started: {why}; the command runs in the sandbox, without a network "
            "unless turns.sandbox.network is true"
        )

    def _ask(self, method: str, params: dict[str, Any], *, until: float | None) -> Any:
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        while True:
            message = self._message(until)
            if (
                "method" in message and "id" in message
            ):  # the server asks us: it may ping, and nothing else
                pong = (
                    {"result": {}}
                    if message["method"] == "ping"
                    else {"error": {"code": -32601, "message": "no"}}
                )
                self._send({"id": message["id"], **pong})
            elif message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(str(message["error"].get("message", message["error"])))
                return message["result"]

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _message(self, until: float | None) -> dict[str, Any]:
        """The next message; what else the server prints is passed on to the log."""
        assert self._process is not None and self._process.stdout is not None
        out = self._process.stdout.fileno()
        while True:
            line, newline, rest = self._held.partition(b"\n")
            if not newline:
                left = None if until is None else max(0.0, until - time.monotonic())
                if not select.select([out], [], [], left)[0]:
                    raise TimeoutError
                part = os.read(out, 65536)
                if not part:
                    raise self._ended()
                self._held += part
                continue
            self._held = rest
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if isinstance(message, dict):
                return message
            print(line.decode(errors="replace"), file=sys.stderr)

    def _ended(self) -> ServerEnded:
        assert self._process is not None
        try:
            status = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return ServerEnded("it closed its output")
        return ServerEnded(f"it ended with status {status}")


def _schema(name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}, **tool.get("inputSchema", {})}
    described = {
        "name": name,
        "description": tool.get("description") or "",
        "parameters": parameters,
    }
    return {"type": "function", "function": described}


def _text(block: Mapping[str, Any]) -> str:
    """A block of an answer; what is no text is named."""
    if block.get("type") == "resource":
        block = {"type": "resource", "text": block["resource"].get("text"), **block}
    return str(block.get("text") or f"[{block.get('type')}]")
