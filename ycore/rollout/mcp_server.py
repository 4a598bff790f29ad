"""A client of an MCP server over standard input and output, for its tools alone (Model Context Protocol 2025-06-18).

It imports the standard library alone, like everything in a tool worker: the official client takes 0.45 s and 64 MiB of
each worker, and any Python can run this. The server is a child of the worker, confined and ended with it.
"""

import contextlib
import json
import math
import os
import re
import select
import shlex
import subprocess
import sys
import time
from typing import Any

from ycore.errors import ConfigError
from ycore.foreign import ForeignRefused, foreign_json, foreign_line, read_tool
from ycore.types import JsonObject, Record

MCP_PREFIX = "mcp:"
START_S = 60.0  # limit for the server's first answers
_MAX_LINE = 16 * 2**20  # bytes; a picture may be in it
_MAX_PAGES = 100
_MAX_TOOLS = 1000
_MALFORMED = (KeyError, TypeError, AttributeError, ValueError)
"""Errors of reading an answer that is not as MCP has it."""
_VERSION = "2025-06-18"
_HELLO = {
    "protocolVersion": _VERSION,
    "capabilities": {},
    "clientInfo": {"name": "ycore", "version": "1"},
}


class McpServer:
    """The server of `mcp:COMMAND`; ConfigError where it does not start.

    `tools` are by names that can be written as a call: `_` stands for other characters. `schemas` are the same in the
    form of chat templates. Once the server has ended, every call fails.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._number = 0
        self._received = b""
        try:
            command = shlex.split(name.removeprefix(MCP_PREFIX))
        except ValueError as error:
            raise ConfigError(
                f"tool {name!r}: {error}; quote the words of the command as for a shell"
            ) from None
        if not command:
            raise ConfigError(
                f"tool {name!r} has no command; say what starts the server, e.g. mcp:python server.py"
            )
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
            self.tools = self._start()
            self.schemas = {name: _schema(name, tool) for name, tool in self.tools.items()}
            return
        except OSError as error:
            problem = f"{command[0]!r}: {error.strerror or error}"
        except RuntimeError as error:
            problem = foreign_line(str(error))
        except _MALFORMED as error:
            problem = foreign_line(f"its list of tools is not as MCP has it ({error!r})")
        raise ConfigError(
            f"tool {name!r}: no MCP server started: {problem}; the command runs in the sandbox, without a network "
            f"unless turns.sandbox.network is true, and has {START_S:g} s"
        )

    def _start(self) -> dict[str, JsonObject]:
        """Return the server's tools; it is ended where it does not answer in time."""
        self._deadline = time.monotonic() + START_S
        tools: dict[str, JsonObject] = {}
        try:
            self._ask("initialize", _HELLO)
            self._send({"method": "notifications/initialized"})
            cursor: JsonObject = {}
            for _ in range(_MAX_PAGES):
                page = self._ask("tools/list", cursor)
                tools |= _by_name(page)
                if not page.get("nextCursor"):
                    break
                cursor = {"cursor": page["nextCursor"]}
            else:
                raise RuntimeError(f"its list of tools has more than {_MAX_PAGES} pages")
        except (RuntimeError, *_MALFORMED):
            self._process.kill()
            raise
        if not tools or len(tools) > _MAX_TOOLS:
            raise RuntimeError(
                f"it has {len(tools)} tools, and between 1 and {_MAX_TOOLS} can be used"
            )
        self._deadline = math.inf  # a call's is the trainer's
        return tools

    def call(self, name: str, /, **arguments: Any) -> str:
        """Return a tool's answer as text; RuntimeError where it failed, or the server has ended."""
        params = {"name": self.tools[name]["name"], "arguments": arguments}
        result = self._ask("tools/call", params)
        try:
            text = "\n".join(map(_text, result.get("content", ())))
        except _MALFORMED as problem:
            raise RuntimeError(f"its answer is not as MCP has it ({problem!r})") from None
        if result.get("isError"):
            raise RuntimeError(text or "the tool failed")
        return text or json.dumps(result.get("structuredContent") or "")

    def _ask(self, method: str, params: JsonObject) -> Any:
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
                if "result" in message:
                    return message["result"]
                error = message.get("error")
                raise RuntimeError(
                    str(error.get("message", error) if isinstance(error, dict) else error)
                )

    def _send(self, message: JsonObject) -> None:
        """Write a message; a server that reads nothing and asks without end fills the pipe."""
        assert self._process.stdin is not None
        pipe = self._process.stdin.fileno()
        data = json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # `_receive` says that the server has ended
            while data:
                if select.select([], [pipe], [], self._wait_s())[1]:
                    data = data[os.write(pipe, data) :]

    def _wait_s(self) -> float:
        """Return the seconds to wait at a time; RuntimeError once the server's time is over."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise RuntimeError("it did not answer in time")
        return min(left_s, 1.0)

    def _receive(self) -> JsonObject:
        """Return the next message; anything else that the server prints goes to the log."""
        while True:
            line = self._read_line()
            with contextlib.suppress(ForeignRefused):
                message = foreign_json(line)
                if isinstance(message, dict):
                    return message
            print(line.decode(errors="replace"), file=sys.stderr)

    def _read_line(self) -> bytes:
        """Return the next line; RuntimeError where there is none in time, it is too long, or the server has ended."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while True:
            wait_s = self._wait_s()
            if b"\n" in self._received:
                break
            if len(self._received) > _MAX_LINE:
                raise RuntimeError(f"it wrote a line of more than {_MAX_LINE} bytes")
            if not select.select([pipe], [], [], wait_s)[0]:
                continue
            part = os.read(pipe, 65536)
            if not part:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1)
                raise RuntimeError(f"it ended with status {self._process.returncode}")
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return line


def _by_name(page: Record) -> dict[str, JsonObject]:
    return {re.sub(r"\W", "_", tool["name"]): tool for tool in page["tools"]}


def _schema(name: str, tool: Record) -> JsonObject:
    function = {
        "name": name,
        "description": tool.get("description") or "",
        "parameters": {"type": "object", "properties": {}, **tool.get("inputSchema", {})},
    }
    return read_tool({"function": function})


def _text(block: Record) -> str:
    """Return the text of an answer's block; a block without text is named."""
    if block.get("type") == "resource":
        block = {"type": "resource", "text": block["resource"].get("text"), **block}
    return str(block.get("text") or f"[{block.get('type')}]")
