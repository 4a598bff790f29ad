"""The gate for foreign text: honest text is the same, anything else becomes whole, bounded and readable."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.rollout.talks import TALKS, dialogue_of
from ycore.config.schema import RunConfig, Said, TurnSettings
from ycore.foreign import (
    ForeignRefused,
    foreign_json,
    foreign_line,
    foreign_reward,
    foreign_text,
    foreign_value,
    read_tool,
)
from ycore.rollout.agents import CallRejected, read_request
from ycore.rollout.tool_pool import Answer, Episode, ToolPool
from ycore.run.files import RunFolder
from ycore.sandbox.confined_worker import CallFailed, reply_in
from ycore.types import Prompt

HONEST = ["", "a", "ä", "\0", "\ufeffa", "\uffff", "😀", "a\u2028b", "\x1b[2J", "e\u0301"]


def test_honest_text_is_the_same() -> None:
    assert [foreign_text(text) for text in HONEST] == HONEST
    value = {"a": [HONEST, 1, 2.5, None, True], "": ("x", {"b": 10**40})}
    assert foreign_value(value) == value and foreign_json(json.dumps(value["a"])) == value["a"]


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("\ud800", "\ufffd"),
        ("a\udc80b", "a\ufffdb"),
        ("\ud83d\ude00", "😀"),
        ("\ud83d😀", "\ufffd😀"),
        ("\ufeff\udfff", "\ufeff\ufffd"),
    ],
)
def test_halves_of_characters_become_whole(text: str, whole: str) -> None:
    assert foreign_text(text) == whole
    assert foreign_value([{text: text}]) == [{whole: whole}]
    whole.encode()


def test_what_is_too_long_is_cut_and_what_is_too_deep_is_refused() -> None:
    assert foreign_text("abc", max_characters=2) == "ab"
    for data in ("[" * 100, "[" * 100_000, "[" * 65 + "]" * 65, '{"a":' * 65 + "1" + "}" * 65):
        with pytest.raises(ForeignRefused) as refusal:
            foreign_json(data)
        assert len(str(refusal.value)) < 120 and "\n" not in str(refusal.value)
    assert foreign_json("[" * 64 + "]" * 64)
    with pytest.raises(ForeignRefused):
        foreign_json("9" * 5000)


@pytest.mark.parametrize(
    "value", ["1", True, None, float("nan"), float("inf"), 1e300, 10**400, []]
)
def test_what_is_no_reward_is_none(value: object) -> None:
    assert foreign_reward(value) is None
    assert foreign_reward(-3) == -3.0


def test_lines_do_nothing_to_a_terminal() -> None:
    assert foreign_line("a\x1b[2J \n\ud800b\n") == "a?[2J ?b"


def test_replies_of_confined_code_pass_the_gate() -> None:
    assert reply_in(b'{"nonce": "n", "value": "\\ud800"}', "n")["value"] == "\ufffd"
    with pytest.raises(CallFailed, match="too deep"):
        reply_in(b'{"nonce": "n", "value": ' + b"[" * 100 + b"]" * 100 + b"}", "n")


def test_half_a_character_of_the_tool_python_is_read_by_every_dialogue(tmp_path: Path) -> None:
    async def work() -> Answer:
        config = RunConfig(
            algorithm="grpo",
            model="m",
            dataset="d",
            rewards=[{"reward": "math"}],
            output=str(tmp_path),
            tools=["python"],
            turns=TurnSettings(call_s=30),
        )
        pool = ToolPool(config, RunFolder(tmp_path / "run"))
        try:
            async with Episode(pool, Prompt(0, "x"), position=0, index=0) as episode:
                return await episode.call("python", {"code": "print(chr(55296))"})
        finally:
            await pool.close()

    answer = asyncio.run(work())
    assert answer == Answer("\ufffd\n")
    for name in TALKS:
        _, dialogue = dialogue_of(name)
        call = dialogue.parse_turn([5], "add(1, y=2)", prefix=[])[1]
        messages = [{"role": "tool", "name": "add", "content": answer.text}]
        assert dialogue.answer_ids(messages), call


@pytest.mark.parametrize(
    "arguments", ["[" * 20_000, '{"a":' * 20_000, '{"a": ' + "9" * 5000 + "}"]
)
def test_deep_arguments_of_an_agents_call_stay_text(arguments: str) -> None:
    function = {"name": "f", "arguments": arguments}
    message = {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}
    request = read_request({"messages": [message]})
    assert request.messages[0]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    "function",
    [
        {},
        {"name": 5},
        {"name": None},
        {"name": "f", "description": 5},
        {"name": "f", "parameters": 5},
        {"name": "f", "parameters": {"properties": 5}},
        {"name": "f", "parameters": {"properties": {"a": 5}}},
        [],
        "f",
    ],
)
def test_odd_tools_are_refused(function: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        read_tool({"function": function})
    with pytest.raises(CallRejected, match="not as OpenAI has them"):
        read_request({"messages": [{"role": "user"}], "tools": [{"function": function}]})


def test_what_a_run_says_to_its_policy_is_whole() -> None:
    assert TypeAdapter(Said).validate_python("ä😀") == "ä😀"
    for field, value in (
        ("system_prompt", "a\ud800"),
        ("few_shot", [{"role": "user", "content": "\udfff"}]),
    ):
        with pytest.raises(ValidationError, match=f"{field}[^§]*half of a character"):
            RunConfig.model_validate({field: value})
