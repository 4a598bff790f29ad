"""Which column asks, what rewards get, and every prompt that cannot be asked."""

from typing import Any

import pytest

from ycore.data.columns import to_prompts
from ycore.data.table import Table, columns_of
from ycore.errors import DataError
from ycore.types import Prompt

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "be brief"}


def ask(*rows: dict[str, Any], **options: Any) -> tuple[tuple[Prompt, ...], tuple[str, ...]]:
    table = Table(name="data", rows=rows, columns=columns_of(rows))
    plain = {"prompt_column": None, "answer_column": None, "system_prompt": None, "as_chat": False}
    prompts, names = to_prompts(table, **{**plain, **options})
    return tuple(prompts), names


def contents(*rows: dict[str, Any], **options: Any) -> list[Any]:
    return [prompt.content for prompt in ask(*rows, **options)[0]]


def refused(*rows: dict[str, Any], **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        ask(*rows, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["prompt", "messages", "question", "problem", "instruction"])
def test_the_asking_column_is_found(name: str) -> None:
    assert contents({"other": "x", name: "hi"}) == ["hi"]


def test_the_first_of_several_asks_and_the_others_are_columns() -> None:
    prompts, columns = ask({"question": "q", "prompt": "p", "answer": "a"})
    assert (prompts[0].content, prompts[0].columns, columns) == (
        "p",
        {"question": "q", "answer": "a"},
        ("question", "answer"),
    )


def test_a_chosen_column_asks() -> None:
    assert contents({"prompt": "p", "chosen": "c"}, prompt_column="chosen") == ["c"]


def test_no_asking_column_lists_what_is_there() -> None:
    message = refused({"text": "a", "label": 1})
    assert "it has text, label" in message and "--prompt-column" in message


def test_a_mistyped_column_names_the_nearest() -> None:
    assert "did you mean 'question'?" in refused({"question": "q"}, prompt_column="qestion")
    assert "did you mean 'solution'?" in refused({"prompt": "q", "solution": "s"}, answer_column="soluton")


def test_the_answer_column_is_renamed_and_wins() -> None:
    prompts, columns = ask({"prompt": "p", "answer": "long", "final": "short"}, answer_column="final")
    assert prompts[0].columns == {"answer": "short"} and columns == ("answer",)


def test_names_that_a_reward_is_called_with_are_not_columns() -> None:
    assert ask({"question": "q", "prompts": 1, "completions": 2, "completion": 3, "kept": 4})[1] == ("kept",)


def test_a_missing_value_is_none() -> None:
    assert ask({"prompt": "a", "answer": "1"}, {"prompt": "b"})[0][1].columns == {"answer": None}


def test_an_empty_dataset() -> None:
    assert "is empty" in refused()


@pytest.mark.parametrize(
    ("value", "found"), [(None, "null"), (3, "int"), (1.5, "float"), ({"role": "user"}, "dict"), (b"x", "bytes")]
)
def test_prompts_of_another_type(value: Any, found: str) -> None:
    assert f"is {found} in row 1 of data" in refused({"prompt": "a"}, {"prompt": value})


@pytest.mark.parametrize("value", ["", "  \n"])
def test_empty_text(value: str) -> None:
    assert "is empty in row 1 of data" in refused({"prompt": "a"}, {"prompt": value})


def test_half_a_character() -> None:
    assert "lone surrogate" in refused({"prompt": "a\ud800"})


def test_text_and_chat_do_not_mix() -> None:
    message = refused({"prompt": "a"}, {"prompt": "b"}, {"prompt": [USER]})
    assert "text in row 0" in message and "chat in row 2" in message
    message = refused({"prompt": [USER]}, {"prompt": "b"})
    assert "chat in row 0" in message and "text in row 1" in message


def test_chat_prompts_keep_role_and_content() -> None:
    assert contents({"prompt": [SYSTEM, {**USER, "name": None}]}) == [[SYSTEM, USER]]


def test_the_last_answer_of_a_conversation_is_dropped() -> None:
    assert contents({"messages": [USER, ANSWER, USER, ANSWER]}) == [[USER, ANSWER, USER]]
    assert contents({"messages": [USER]}) == [[USER]]
    assert contents({"talk": [USER, ANSWER]}, prompt_column="talk") == [[USER]]


@pytest.mark.parametrize(
    "told", [[USER, ANSWER, USER, ANSWER], "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: hi\n\nAssistant: "]
)
def test_a_pair_of_conversations_asks_with_what_is_before_the_last_answer(told: Any) -> None:
    (prompt,), names = ask({"chosen": told, "rejected": told})
    assert prompt.content == [USER, ANSWER, USER]
    assert names == ("rejected",)


def test_a_pair_of_answers_without_their_conversation_cannot_ask() -> None:
    assert "'chosen' is an answer without its conversation in row 0" in refused({"chosen": "blue", "rejected": "red"})
    assert contents({"chosen": "blue", "rejected": "red", "question": "sky?"}) == ["sky?"]


def test_a_prompt_does_not_end_with_an_answer() -> None:
    assert "ends with an assistant turn in row 0" in refused({"prompt": [USER, ANSWER]})
    assert "ends with an assistant turn in row 0" in refused({"messages": [USER, ANSWER, ANSWER]})


@pytest.mark.parametrize("value", [[], [ANSWER]])
def test_a_conversation_without_a_question(value: list[Any]) -> None:
    assert "has no turns in row 0" in refused({"messages": value})


@pytest.mark.parametrize(
    ("turn", "found"),
    [
        ("hi", "turn 1 of row 0 of data is str"),
        ({"from": "human", "value": "hi"}, "has from: str, value: str; a turn has role and content"),
        ({"role": "user", "content": None}, "content: NoneType"),
        ({"role": "user", "content": [{"type": "text"}]}, "content: list"),
        ({"role": "", "content": "hi"}, "a turn has role and content"),
        ({}, "has nothing"),
        ({"role": "user", "content": " "}, "turn 1 is empty in row 0"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "calls tools"),
    ],
)
def test_turns_that_are_none(turn: Any, found: str) -> None:
    assert found in refused({"prompt": [USER, turn]})


def test_a_system_prompt_makes_text_a_chat() -> None:
    assert contents({"prompt": "hi"}, system_prompt="be brief") == [[SYSTEM, USER]]


def test_a_system_prompt_goes_before_chats_that_have_none() -> None:
    own = {"role": "system", "content": "be long"}
    assert contents({"prompt": [USER]}, {"prompt": [own, USER]}, system_prompt="be brief") == [
        [SYSTEM, USER],
        [own, USER],
    ]


def test_a_chat_model_gets_text_as_a_users_turn() -> None:
    assert contents({"prompt": "hi"}, as_chat=True) == [[USER]]
    assert contents({"prompt": [SYSTEM, USER]}, as_chat=True) == [[SYSTEM, USER]]
