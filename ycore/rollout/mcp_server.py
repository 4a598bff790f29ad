"""A client of an MCP server over standard input and output, for its tools alone (Model Context Protocol 2025-06-18).

It imports the standard library alone, like everything in a tool worker: the official client takes 0.45 s and 64 MiB of
each worker, and any Python can run this. The server is a child of the worker, and so is confined as the worker is.
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

from ycore.rollout import ToolRefused

MCP_PREFIX = "mcp:"
START_S = 60.0  # limit for the server's first answers
_VERSION = "2025-06-18"


class ServerEnded(Exception):
    """The server is gone, and with it all that it knew."""


class McpServer:
    """The server of `mcp:COMMAND`, started when its tools are first asked for; ToolRefused where it cannot be."""

    def __init__(self, name: str, *, start_s: float = START_S) -> None:
        self.name = name
        self._start_s = start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._number = 0
        try:
            self._command = shlex.split(name.removeprefix(MCP_PREFIX))
        except ValueError as error:
            raise ToolRefused(
                f"tool {name!r}: {error}; quote the words of the command as for a shell"
            ) from None
        if not self._command:
            raise ToolRefused(
                f"tool {name!r} has no command; say what starts the server, e.g. mcp:python server.py"
            )

    @cached_property
    def tools(self) -> dict[str, dict[str, Any]]:
        """The server's tools, by names that can be written as a call: `_` stands for other characters."""
        tools: dict[str, dict[str, Any]] = {}
        params: dict[str, Any] = {}
        while True:
            page = self._start_and_ask("tools/list", params)
            tools |= {re.sub(r"\W", "_", tool["name"]): tool for tool in page["tools"]}
            if not page.get("nextCursor"):
                return tools
            params = {"cursor": page["nextCursor"]}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools in the form of chat templates."""
        if not self.tools:
            raise ToolRefused(f"tool {self.name!r}: the server has no tools")
        return [_schema(name, tool) for name, tool in self.tools.items()]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a tool's answer as text; RuntimeError where it failed, ServerEnded where the server did."""
        params = {"name": self.tools[name]["name"], "arguments": dict(arguments)}
        result = self._ask("tools/call", params, until=None)
        text = "\n".join(map(_text, result.get("content", ())))
        if result.get("isError"):
            raise RuntimeError(text or "the tool failed")
        return text or json.dumps(result.get("structuredContent") or "")

    def end(self) -> None:
        """End the server, and forget its tools; who asks for them next starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None
        self._buffer = b""
        self.__dict__.pop("tools", None)

    def _start_and_ask(self, method: str, params: dict[str, Any]) -> Any:
        """Return the server's answer; it is started first where it does not run."""
        until = time.monotonic() + self._start_s
        try:
            if self._process is None:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
                hello = {
                    "protocolVersion": _VERSION,
                    "capabilities": {},
                    "clientInfo": {"name": "ycore", "version": "1"},
                }
                self._ask("initialize", hello, until=until)
                self._send({"method": "notifications/initialized"})
            return self._ask(method, params, until=until)
        except TimeoutError:
            problem = f"it did not answer within {self._start_s:g} s"
        except OSError as error:
            problem = f"{self._command[0]!r}: {error.strerror or error}"
        except (ServerEnded, RuntimeError, KeyError, TypeError) as error:
            problem = str(error)
        self.end()
        raise ToolRefused(
            f"tool {self.name!r}: no MCP server started: {problem}; the command runs in the sandbox, without a network "
            "unless turns.sandbox.network is true"
        )

    def _ask(self, method: str, params: dict[str, Any], *, until: float | None) -> Any:
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        while True:
            message = self._receive(until)
            if (
                "method" in message and "id" in message
            ):  # the server may ping, and ask nothing else
                refusal = {"error": {"code": -32601, "message": "no"}}
                answer = {"result": {}} if message["method"] == "ping" else refusal
                self._send({"id": message["id"], **answer})
            elif message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(str(message["error"].get("message", message["error"])))
                return message["result"]

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(
                json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
            )
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _receive(self, until: float | None) -> dict[str, Any]:
        """Return the next message; anything else that the server prints goes to the log."""
        while True:
            line = self._read_line(until)
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if isinstance(message, dict):
                return message
            print(line.decode(errors="replace"), file=sys.stderr)

    def _read_line(self, until: float | None) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        output = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            timeout_s = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([output], [], [], timeout_s)[0]:
                raise TimeoutError
            part = os.read(output, 65536)
            if not part:
                raise self._ended()
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _ended(self) -> ServerEnded:
        assert self._process is not None
        try:
            status = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return ServerEnded("it closed its output")
        return ServerEnded(f"it ended with status {status}")


def _schema(name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": name,
        "description": tool.get("description") or "",
        "parameters": {"type": "object", "properties": {}, **tool.get("inputSchema", {})},
    }
    return {"type": "function", "function": function}


def _text(block: Mapping[str, Any]) -> str:
    """Return the text of an answer's block; a block without text is named."""
    if block.get("type") == "resource":
        block = {"type": "resource", "text": block["resource"].get("text"), **block}
    return str(block.get("text") or f"[{block.get('type')}]")
