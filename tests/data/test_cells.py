"""One cell of a table: dialogues in one text, JSON in text, roles, and what is no text and no list of turns."""

import json
import time
from typing import Any

import pytest

from ycore.data.cells import Table, TableRow, content_of, is_dialogue, to_messages
from ycore.errors import DataError


def row_of(value: Any) -> TableRow:
    return Table("data", [{"messages": value}], ("messages",), lines=[4]).row(0)


def test_a_dialogue_is_taken_apart_turn_by_turn() -> None:
    text = "\n\nHuman: one\n\ntwo\n\nAssistant: he said Human: x\n\nHuman: \n\nAssistant:"
    assert (
        is_dialogue(text)
        and not is_dialogue("Human beings: ...")
        and not is_dialogue("Say:\n\nHuman: hello")
    )
    assert [(turn["role"], turn["content"]) for turn in to_messages(text)] == [
        ("user", "one\n\ntwo"), ("assistant", "he said Human: x"), ("user", ""),
    ], "what opens the answer is no turn"  # fmt: skip


def test_cells_of_white_space_are_read_in_linear_time() -> None:
    began = time.process_time()
    assert len(to_messages("Human:" + "\n" * 50_000 + "a")) == 1
    assert content_of(row_of(" " * 50_000 + "{ a"), "messages", {})
    assert time.process_time() - began < 5.0, "minutes where the time is quadratic"


def test_a_turn_that_holds_half_of_a_character_is_refused_with_its_place() -> None:
    turns = [{"role": "user", "content": "fine"}, {"role": "system", "content": "a\ud800"}]
    with pytest.raises(
        DataError,
        match=r"^turn 1 of 'messages' holds half of a character .* in row 0 \(line 4\) of data",
    ):
        content_of(row_of(turns), "messages", {})


TURNS = [{"role": "user", "content": "it's 1\n"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    "text",
    [
        '[{"role": "user", "content": "it\'s 1\\n"}, {"role": "assistant", "content": "2"}]',
        str(TURNS),  # as pandas writes a list
        ' \n[{"from": "human", "value": "it\'s 1\\n"}, {"from": "GPT", "value": "2"}]',
    ],
)
def test_a_list_of_turns_in_a_text(text: str) -> None:
    assert content_of(row_of(text), "messages", {}) == TURNS


@pytest.mark.parametrize(
    "text", ["[1, 2, 3]", '{"a": 1}', "[{x}] is a set", '[{"id": 1}]', "{"]
)
def test_other_brackets_are_text(text: str) -> None:
    assert content_of(row_of(text), "messages", {}) == text


@pytest.mark.parametrize("text", ['[{"role": "user", "content": "cut', "{'role': array('x')}"])
def test_turns_that_cannot_be_parsed_are_refused(text: str) -> None:
    with pytest.raises(
        DataError, match=r"in row 0 \(line 4\) of data, and cannot be read as JSON.*JSONL"
    ):
        content_of(row_of(text), "messages", {})


def test_names_of_writers_stand_for_roles_and_are_told() -> None:
    aliases: dict[str, str] = {}
    turns = [
        {"from": "USER", "value": "a"},
        {"role": "bing", "content": "b"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "c"},
    ]
    read = content_of(row_of(turns), "messages", aliases)
    assert [turn["role"] for turn in read if not isinstance(turn, str)] == [
        "user", "assistant", "assistant", "tool",
    ]  # fmt: skip
    assert read[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}  # type: ignore[index]
    assert aliases == {
        "USER": "user", "bing": "assistant", "function_call": "assistant", "observation": "tool",
    }  # fmt: skip
    with pytest.raises(
        DataError, match=r"turn 0 of 'messages' has the role 'critic' in row 0.*rename"
    ):
        content_of(row_of([{"role": "critic", "content": "a"}]), "messages", {})


def test_calls_that_are_json_in_a_text_are_read() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": json.dumps([call])},
        {"role": "assistant", "content": "a", "tool_calls": "[]"},
    ]
    assert content_of(row_of(turns), "messages", {}) == [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "a"},
    ]
    with pytest.raises(
        DataError, match=r"turn 0 of 'messages' is a call in row 0.*'f\(1\)'.*JSON"
    ):
        content_of(row_of([{**turns[0], "tool_calls": "f(1)"}]), "messages", {})


def test_all_keys_of_a_turn_are_kept_and_a_weight_is_refused() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    turns = [
        {"role": "user", "content": "a", "name": "Ann", "tool_calls": None, "weight": 0},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "b"},
        {"role": "tool", "content": "c", "tool_call_id": "1", "weight": 1},
    ]
    assert content_of(row_of(turns), "messages", {}) == [
        {"role": "user", "content": "a", "name": "Ann"},
        turns[1],
        {"role": "tool", "content": "c", "tool_call_id": "1"},
    ]
    with pytest.raises(DataError, match=r"has weight 0 in row 0 \(line 4\).*remove the key"):
        content_of(row_of([{"role": "assistant", "content": "a", "weight": 0}]), "messages", {})
