"""A client of an MCP server over standard input and output, for its tools alone (Model Context Protocol 2025-06-18).

It imports the standard library alone, like everything in a tool worker: the official client takes 0.45 s and 64 MiB of
each worker, and any Python can run this. The server is a child of the worker, confined and ended with it.
"""

import contextlib
import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from ycore.rollout import ToolRefused

MCP_PREFIX = "mcp:"
START_S = 60.0  # limit for the server's first answers
_VERSION = "2025-06-18"
_HELLO = {
    "protocolVersion": _VERSION,
    "capabilities": {},
    "clientInfo": {"name": "ycore", "version": "1"},
}


class McpServer:
    """The server of `mcp:COMMAND`; ToolRefused where it does not start.

    `tools` are by names that can be written as a call: `_` stands for other characters. Once the server has ended,
    every call fails.
    """

    def __init__(self, name: str, *, start_s: float = START_S) -> None:
        self.name = name
        self._number = 0
        try:
            command = shlex.split(name.removeprefix(MCP_PREFIX))
        except ValueError as error:
            raise ToolRefused(
                f"tool {name!r}: {error}; quote the words of the command as for a shell"
            ) from None
        if not command:
            raise ToolRefused(
                f"tool {name!r} has no command; say what starts the server, e.g. mcp:python server.py"
            )
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self.tools = self._start(start_s)
        except OSError as error:
            problem = f"{command[0]!r}: {error.strerror or error}"
        except (RuntimeError, KeyError, TypeError) as error:
            problem = str(error)
        else:
            return
        raise ToolRefused(
            f"tool {name!r}: no MCP server started: {problem}; the command runs in the sandbox, without a network "
            f"unless turns.sandbox.network is true, and has {start_s:g} s"
        )

    def _start(self, start_s: float) -> dict[str, dict[str, Any]]:
        """Return the server's tools; it is ended where it does not answer in time."""
        deadline = threading.Timer(start_s, self._process.kill)
        deadline.start()
        tools: dict[str, dict[str, Any]] = {}
        try:
            self._ask("initialize", _HELLO)
            self._send({"method": "notifications/initialized"})
            page = self._ask("tools/list", {})
            tools |= _by_name(page)
            while page.get("nextCursor"):
                page = self._ask("tools/list", {"cursor": page["nextCursor"]})
                tools |= _by_name(page)
        finally:
            deadline.cancel()
        if not tools:
            raise RuntimeError("it has no tools")
        return tools

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools in the form of chat templates."""
        return [_schema(name, tool) for name, tool in self.tools.items()]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a tool's answer as text; RuntimeError where it failed, or the server has ended."""
        params = {"name": self.tools[name]["name"], "arguments": dict(arguments)}
        result = self._ask("tools/call", params)
        text = "\n".join(map(_text, result.get("content", ())))
        if result.get("isError"):
            raise RuntimeError(text or "the tool failed")
        return text or json.dumps(result.get("structuredContent") or "")

    def _ask(self, method: str, params: dict[str, Any]) -> Any:
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        while True:
            message = self._receive()
            if "method" in message and "id" in message:
                # The server may ping, and ask nothing else.
                refusal = {"error": {"code": -32601, "message": "no"}}
                answer = {"result": {}} if message["method"] == "ping" else refusal
                self._send({"id": message["id"], **answer})
            elif message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(str(message["error"].get("message", message["error"])))
                return message["result"]

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_receive` says that the server has ended
            self._process.stdin.write(
                json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
            )
            self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        """Return the next message; anything else that the server prints goes to the log."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    return message
            print(line.decode(errors="replace"), file=sys.stderr)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        raise RuntimeError(f"it ended with status {self._process.returncode}")


def _by_name(page: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {re.sub(r"\W", "_", tool["name"]): tool for tool in page["tools"]}


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
