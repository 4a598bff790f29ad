"""Layouts of real datasets that were read as something else without a word: each is read right, warned of, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_rows import (
    SYSTEM,
    TOOLS,
    TURNS,
    examples,
    prompts,
    said,
    user,
    write_jsonl,
    write_parquet,
)
from ycore.api.shown_rows import reading_warnings
from ycore.data.cells import golds_of
from ycore.errors import DataError


def expected(tmp_path: Path, row: dict[str, Any], method: str) -> list[str]:
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    reading = prompts(path).reading if method == "grpo" else examples(path, method).reading
    lines = reading_warnings({**reading, "lost": []}, has_tools=False)
    assert len(lines) == len(reading["expected"])
    return list(reading["expected"])


QUESTION = {"question": "Which is hot?", "answer": "sun"}
PAIR = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}


@pytest.mark.parametrize(
    ("row", "method", "columns"),
    [
        (
            {**QUESTION, "prompt": "Answer the question."},
            "grpo",
            ["question"],
        ),  # another question
        ({**QUESTION, "prompt": "Answer the question."}, "sft", ["question"]),
        ({"prompt": "2 + 2?", "messages": [SYSTEM, *TURNS]}, "grpo", ["messages"]),
        ({**QUESTION, "A": "sun", "B": "ice"}, "sft", ["A", "B"]),  # MMLU's CSV
        ({**QUESTION, "opa": "sun lamp", "opb": "ice"}, "grpo", ["opa", "opb"]),  # MedMCQA
        ({**QUESTION, "distractor1": "ice"}, "grpo", ["distractor1"]),  # SciQ
        ({**QUESTION, "article": "The sun is."}, "grpo", ["article"]),  # RACE
        ({**QUESTION, "body": "I know two things."}, "sft", ["body"]),  # ASDiv
        ({**QUESTION, "image_1": "a.png", "image_2": None}, "grpo", ["image_1"]),  # MMMU
        ({**QUESTION, "img": "a.png"}, "sft", ["img"]),
        ({"messages": TURNS, "videos": ["a.mp4"]}, "sft", ["videos"]),
        ({"prompt": "2 + 2?", "completion": "5", "label": False}, "sft", ["label"]),
        ({**PAIR, "label": 0}, "dpo", ["label"]),
        ({"text": "Hi?", "role": "prompter"}, "sft", ["role"]),  # a tree of OpenAssistant
        ({**QUESTION, "complex_cot": "It burns."}, "sft", ["complex_cot"]),
    ],
)
def test_columns_that_change_the_question_or_what_is_learned_are_warned_of(
    row: dict[str, Any], method: str, columns: list[str], tmp_path: Path
) -> None:
    assert expected(tmp_path, row, method) == columns


@pytest.mark.parametrize(
    ("row", "method"),
    [
        ({"prompt": "2 + 2?", "messages": TURNS}, "grpo"),
        ({"prompt": "2 + 2?", "messages": TURNS}, "sft"),  # UltraChat, one turn
        ({**PAIR, "messages": TURNS}, "dpo"),  # UltraFeedback
        ({"problem": "2 + 2?", "solution": "4", "messages": TURNS}, "grpo"),  # NuminaMath
        ({**QUESTION, "question": "Which?\nA. sun\nB. ice", "choices": ["sun", "ice"]}, "grpo"),
        ({**QUESTION, "context": "", "input": "nan", "system_message": None}, "grpo"),
        ({**QUESTION, "label": 3}, "grpo"),  # rewards get it
    ],
)
def test_columns_that_repeat_what_was_read_are_not_warned_of(
    row: dict[str, Any], method: str, tmp_path: Path
) -> None:
    assert expected(tmp_path, row, method) == []


def test_answers_that_differ_are_noted(tmp_path: Path) -> None:
    row = {"question": "2 + 2?", "answer": "We add.", "final_answer": "4"}
    same = {"question": "2 + 2?", "answer": "We add. #### 4", "final_answer": "4"}
    path = write_jsonl(tmp_path / "rows.jsonl", [row, same])
    (note,) = prompts(path).reading["notes"]
    assert note.startswith("1 x final_answer") and "--answer-column" in note
    assert prompts(path, answer_column="final_answer").reading["notes"] == []


def test_a_first_row_without_an_answer_does_not_choose_the_column(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "reward_model": {"ground_truth": None}, "solution": "x"},
        {"prompt": "b", "reward_model": {"ground_truth": "4"}, "solution": "y"},
    ]
    read = prompts(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert [row.columns["answer"] for row in read.prompts] == [None, "4"]


def test_the_question_is_no_history_or_system_prompt_too(tmp_path: Path) -> None:
    """SHP has its questions in `history`."""
    row = {"history": "Why?", "system": "Be.", "chosen": "a", "rejected": "b"}
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    (pair,) = examples(path, "dpo", prompt_column="history").train
    assert pair["prompt"] == [{"role": "system", "content": "Be."}, user("Why?")]
    (pair,) = examples(write_jsonl(path, [PAIR | {"system": "Why?"}]), "dpo", prompt_column="system").train  # fmt: skip
    assert pair["prompt"] == [user("Why?")]


def test_objects_of_parquet_have_their_own_keys_alone(tmp_path: Path) -> None:
    def row(name: str, key: str) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": {key: 1}}}
        parameters = {"type": "object", "properties": {key: {"type": "integer"}}}
        tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
        turns = [user("2 + 2?"), {"role": "assistant", "content": "", "tool_calls": [call]}]
        return {"messages": turns, "tools": [tool]}

    rows = [row("f", "a"), row("g", "b")]
    write_parquet(tmp_path / "rows.parquet", rows)
    read = examples(tmp_path / "rows.parquet", "sft").train
    assert sorted(read, key=str) == sorted(
        ({"prompt": row["messages"][:1], "completion": row["messages"][1:], "tools": json.dumps(row["tools"])}
         for row in rows), key=str,
    )  # fmt: skip
    asked = prompts(tmp_path / "rows.parquet").prompts
    assert [list(prompt.tools) for prompt in asked] == [row["tools"] for row in rows]


def test_calls_of_openai_are_objects_also_under_their_old_name(tmp_path: Path) -> None:
    """Most templates write arguments that are a text in quotes, and none shows `function_call`."""
    call = {"name": "add", "arguments": '{"a": 2}'}
    read = {"name": "add", "arguments": {"a": 2}}
    for key, value in (
        ("function_call", call),
        ("tool_calls", [{"type": "function", "function": call}]),
        ("tool_calls", [call]),
    ):
        calling = {"role": "assistant", "content": "", key: value}
        turns = [user("2 + 2?"), calling, {"role": "tool", "content": "4"}, said("4")]
        path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": turns, "tools": TOOLS}])
        for content in (
            examples(path, "sft").train[0]["prompt"],
            prompts(path).prompts[0].content,
        ):
            assert content[1]["tool_calls"] == [{"type": "function", "function": read}]
            assert "function_call" not in content[1]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "a", "reasoning": "on", "answer": "b"},  # Nemotron's switch
        {"question": "a", "reasoning": "c", "answer": "<think>c</think>b"},
        {"messages": [user("a"), said("b", train_detail=[{"train": False}])]},
        {"messages": [user("<image>a<image>b"), said("c")], "images": ["a.png"]},
    ],
)
def test_what_would_be_learned_wrongly_is_refused(row: dict[str, Any], tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    with pytest.raises(DataError, match=r"row 0 \(line 1\).*(?:remove|make)"):
        examples(path, "sft")


def test_an_answer_in_tags_is_compared_without_them() -> None:
    assert golds_of("<think>x</think><answer> 145 </answer>") == ["145"]


def test_a_column_is_renamed_also_where_it_is_a_key_of_objects(tmp_path: Path) -> None:
    row = {"prompt": "2 + 2?", "meta": {"system": "Be brief.", "right": "4"}, "answer": "x"}
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    columns = {"system": "meta.system", "answer": "meta.right"}
    (prompt,) = prompts(path, columns=columns).prompts
    assert (prompt.content, prompt.columns["answer"]) == ([SYSTEM, *TURNS[:1]], "4")
