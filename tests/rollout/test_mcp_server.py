"""MCP servers as tools: the official library's server, and servers that do what no server should."""

import asyncio
import sys
import time
from pathlib import Path

import pytest

from tests.rollout.talks import names_of
from ycore.config.schema import RunConfig, TurnSettings
from ycore.errors import ConfigError
from ycore.rollout import mcp_server
from ycore.rollout.mcp_server import McpServer
from ycore.rollout.tool_pool import Answer, Episode, ToolPool, describe_tools
from ycore.run.files import RunFolder
from ycore.types import Prompt

OFFICIAL = '''
import os
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

app, notes = MCPServer("notes"), []

@app.tool(name="add-note")
def add_note(text: str, times: int = 1) -> str:
    """Keep a note."""
    notes.extend([text] * times)
    return ", ".join(notes)

@app.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("no such page")

@app.tool()
def look() -> list[str]:
    """Look around."""
    return [os.environ.get("HF_TOKEN", "no token"), str(os.path.exists("run/run.json"))]

@app.tool()
def end() -> str:
    """End the server."""
    os._exit(3)

app.run("stdio")
'''

ODD = r"""
import json, sys
page = 0
for line in sys.stdin:
    asked = json.loads(line)
    if "method" not in asked:
        pinged = asked
        continue
    print("a line of a log", flush=True)
    def say(**message):
        print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
    match asked["method"]:
        case "initialize":
            say(method="notifications/message", params={})
            say(id="p", method="ping")
            say(id=asked["id"], result={"protocolVersion": "2024-11-05"})
        case "tools/list":
            page = int(asked["params"].get("cursor", 0)) + 1
            say(id=asked["id"], result={"tools": [{"name": f"t.{page}"}], **({"nextCursor": str(page)} if page < 3 else {})})
        case "tools/call" if asked["params"]["name"] == "t.1":
            blocks = [{"type": "text", "text": "héllo"}, {"type": "image", "data": "x"}, {"type": "resource", "resource": {"text": "r"}}]
            say(id=asked["id"], result={"content": blocks})
        case "tools/call" if asked["params"]["name"] == "t.2":
            say(id=asked["id"], result={"structuredContent": {"pong": pinged}})
        case "tools/call":
            say(id=asked["id"], error={"code": 1, "message": "not here"})
"""  # noqa: E501


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "notes.py").write_text(OFFICIAL)
    (tmp_path / "odd.py").write_text(ODD)
    (tmp_path / "tools.py").write_text("def fail() -> int:\n    '''Fail.'''\n    return 1\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return tmp_path


def config_of(*tools: str) -> RunConfig:
    return RunConfig(
        model="m",
        dataset="d",
        output="run",
        rewards=[{"reward": "exact_answer"}],
        tools=list(tools),
    )


def test_what_a_server_says_is_read_by_the_protocol(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server = McpServer(f"mcp:{sys.executable} odd.py")
    try:
        assert list(server.tools) == ["t_1", "t_2", "t_3"]
        function = {
            "name": "t_1",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        }
        assert server.schemas["t_1"] == {"type": "function", "function": function}
        assert server.call("t_1") == "héllo\n[image]\nr"
        assert server.call("t_2") == '{"pong": {"jsonrpc": "2.0", "id": "p", "result": {}}}'
        with pytest.raises(RuntimeError, match="not here"):
            server.call("t_3")
        assert "a line of a log" in capfd.readouterr().err
    finally:
        server._process.kill()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ended with status -9"):
            server.call("t_1")


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("", "has no command; say what starts"),
        ("'python", "No closing quotation; quote the words"),
        (
            "no-such-program --here",
            "no MCP server started: 'no-such-program': No such file or directory; the command",
        ),
        ("sleep 100", "it did not answer in time; the command runs in the sandbox"),
        ("sh -c 'exit 5'", "it ended with status 5"),
        ("cat", "no MCP server started"),
    ],
)
def test_a_command_that_starts_no_server_is_refused_in_one_line(
    command: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_server, "START_S", 0.3 if "sleep" in command else 20)
    with pytest.raises(ConfigError) as refused:
        print(McpServer(f"mcp:{command}").tools)
    assert problem in str(refused.value) and "\n" not in str(refused.value)


def test_a_server_of_the_official_library_is_described_once_before_a_run(place: Path) -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    tool_set = describe_tools(config_of("mcp:python notes.py"))[None]
    assert names_of(tool_set) == ["add_note", "fail", "look", "end"]
    function = tool_set.tools[0]["function"]
    assert function["description"] == "Keep a note." and list(
        function["parameters"]["properties"]
    ) == ["text", "times"]
    with pytest.raises(
        ConfigError, match=r"two tools are named 'fail', one of them 'mcp:python notes\.py'"
    ):
        describe_tools(config_of("tools.py:fail", "mcp:python notes.py"))
    with pytest.raises(ConfigError, match="no MCP server started: it ended with status 2"):
        describe_tools(config_of("mcp:python none.py"))


def test_what_the_recipe_opens_is_open_to_servers_too(place: Path) -> None:
    config = config_of("mcp:python notes.py").model_copy(
        update={"turns": TurnSettings(sandbox={"network": True})}
    )
    pool = ToolPool(config, RunFolder(place / "run"))
    assert pool._confinement.view.network and not pool._python_confinement.view.network


def test_each_completion_has_a_server_of_its_own_held_as_tools_are(place: Path) -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed")

    async def play(pool: ToolPool, *calls: tuple[str, dict[str, object]]) -> list[Answer]:
        async with Episode(pool, Prompt(0, "go", {}), position=0, index=0) as episode:
            assert await episode.begin() is None
            return [await episode.call(name, arguments) for name, arguments in calls]

    async def work() -> tuple[list[Answer], list[Answer]]:
        pool = ToolPool(config_of("mcp:python notes.py"), RunFolder(place / "run"))
        try:
            async with asyncio.timeout(400):
                note = ("add_note", {"text": "a", "times": 2})
                first = await play(pool, note, ("fail", {}), ("look", {}), note)
                second = await play(pool, note, ("end", {}), note, ("none", {}))
                assert pool.workers == []
                return first, second
        finally:
            await pool.close()

    first, second = asyncio.run(work())
    assert first[0] == Answer("a, a") and first[3] == Answer("a, a, a, a")
    assert (
        first[1].failed
        and "no such page" in first[1].text
        and first[2] == Answer("no token\nFalse")
    )
    assert (
        second[0] == Answer("a, a") and second[1].failed
    )  # a new server, which then ends itself
    assert second[2].failed and "ended with status 3" in second[2].text
    assert second[3] == Answer("{'error': 'Tool none not found.'}", failed=True)


BAD = r"""
import json, sys
kind = sys.argv[1]
def say(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
def tools(*listed, **more):
    return {"tools": list(listed), **more}
TOOL = {"name": "t"}
PAGES = {
    "endless pages": lambda page: tools({"name": f"t{page}"}, nextCursor=str(page)),
    "the same page": lambda page: tools(TOOL, nextCursor="again"),
    "many tools": lambda page: tools(*({"name": f"t{number}"} for number in range(200_000))),
    "no tools": lambda page: tools(),
    "text": lambda page: "tools",
    "nothing": lambda page: None,
    "a list": lambda page: [TOOL],
    "tools of text": lambda page: tools("t"),
    "tools without a name": lambda page: tools({}),
    "a name of a number": lambda page: tools({"name": 5}),
    "tools in text": lambda page: {"tools": "abc"},
    "no schema": lambda page: tools({"name": "t", "inputSchema": 5}),
    "odd properties": lambda page: tools({"name": "t", "inputSchema": {"properties": 5}}),
    "odd property": lambda page: tools({"name": "t", "inputSchema": {"properties": {"a": 5}}}),
    "odd description": lambda page: tools({"name": "t", "description": [5]}),
}
page = 0
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    page += 1
    if kind == "no line end":
        while True:
            sys.stdout.write("x" * 65536)
    if kind == "endless log":
        while True:
            print("x" * 100)
    if kind == "endless pings":
        while True:
            print(json.dumps({"id": 1, "method": "ping"}), flush=True)
    if kind == "an error of text":
        print(json.dumps({"id": asked["id"], "error": "no\nway"}), flush=True)
    if kind == "neither":
        say(id=asked["id"])
    if kind == "deep":
        print("[" * 100_000, flush=True)
    say(id=asked["id"], result=PAGES[kind](page) if kind in PAGES and asked["method"] == "tools/list" else {})
"""
BAD_KINDS = [
    *("endless pages", "the same page", "many tools", "no tools", "text", "nothing", "a list"),
    *("tools of text", "tools without a name", "a name of a number", "tools in text"),
    *("no schema", "odd properties", "odd property", "odd description"),
    *("no line end", "endless log", "endless pings", "an error of text", "neither", "deep"),
]


@pytest.mark.parametrize("kind", BAD_KINDS)
def test_whatever_a_server_answers_it_is_refused_in_one_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mcp_server, "START_S", 3.0)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"^tool .mcp:") as refusal:
        print(McpServer(f"mcp:{sys.executable} bad.py '{kind}'").schemas)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 900
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "result",
    [
        *(
            5,
            "x",
            None,
            [],
            {"content": 5},
            {"content": [5]},
            {"content": [{"type": "resource"}]},
        ),
        {"content": [{"type": "resource", "resource": 5}]},
    ],
)
def test_an_odd_answer_of_a_tool_is_a_failed_call(result: object) -> None:
    server = object.__new__(McpServer)
    server.tools = {"t": {"name": "t"}}
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(server, "_ask", lambda method, params: result)
        with pytest.raises(RuntimeError, match="not as MCP has it"):
            server.call("t")
