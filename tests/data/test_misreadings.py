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
        (
            {**QUESTION, "thinking_trajectories": ["It burns."]},
            "sft",
            ["thinking_trajectories"],
        ),  # s1K
        ({**PAIR, "chosen_reasoning": "Add."}, "dpo", ["chosen_reasoning"]),
        ({**PAIR, "chat_history": [user("Hi"), said("Hello")]}, "dpo", ["chat_history"]),
        ({**QUESTION, "system_instruction": "Be brief."}, "grpo", ["system_instruction"]),
        ({**QUESTION, "contexts": ["The sun is."]}, "grpo", ["contexts"]),
        ({**QUESTION, "premise": "The sun is."}, "sft", ["premise"]),
        ({**PAIR, "winner": "model_b"}, "dpo", ["winner"]),
        ({**PAIR, "overall_preference": -2}, "reward", ["overall_preference"]),
        ({**PAIR, "prefix": "Step 1."}, "dpo", ["prefix"]),
        ({"messages": TURNS, "available_tools": TOOLS}, "sft", ["available_tools"]),
        ({"prompt": "2 + 2?", "completion": "4", "tool_calls": TOOLS}, "sft", ["tool_calls"]),
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
        ({"messages": TURNS, "knowledge": "Adding."}, "sft"),  # Magpie's
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
    grpo_prompts = prompts(tmp_path / "rows.parquet").prompts
    assert [list(prompt.tools) for prompt in grpo_prompts] == [row["tools"] for row in rows]


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


@pytest.mark.parametrize("text", [TURNS, "\n\nHuman: 2 + 2?\n\nAssistant: 4"])
def test_system_and_history_stand_before_a_conversation_in_the_column_text(
    text: Any, tmp_path: Path
) -> None:
    row = {"text": text, "system": "Be brief.", "history": [["Hi", "Hello"]]}
    read = examples(write_jsonl(tmp_path / "rows.jsonl", [row]), "sft")
    (example,) = read.train
    assert example["prompt"] == [SYSTEM, user("Hi"), said("Hello"), *TURNS[:1]]
    assert read.reading["in_words"] == "question from system + history + text, answer from text"


def test_a_system_prompt_beside_a_text_that_asks_nothing_is_refused(tmp_path: Path) -> None:
    row = {"text": "Once upon a time.", "system": "Be brief."}
    with pytest.raises(DataError, match=r"row 0 .*system prompt.*no question before 'text'"):
        examples(write_jsonl(tmp_path / "rows.jsonl", [row]), "sft")
    alone = write_jsonl(tmp_path / "rows.jsonl", [row | {"system": ""}])
    assert examples(alone, "sft").train == [{"text": row["text"]}]


def test_the_plan_says_that_pairs_share_the_question_after_a_system_prompt(
    tmp_path: Path,
) -> None:
    row = {"system": "Be.", "chosen": TURNS, "rejected": [TURNS[0], said("5")]}
    read = examples(write_jsonl(tmp_path / "rows.jsonl", [row]), "dpo").reading["in_words"]
    assert read.startswith("question from system + what chosen and rejected share, ")


def test_tools_may_be_a_list_of_json_in_texts(tmp_path: Path) -> None:
    """When2Call has them so."""
    texts = [json.dumps(tool) for tool in TOOLS]
    rows = [{"messages": TURNS, "tools": tools} for tools in (texts, "nan")]
    read = examples(write_jsonl(tmp_path / "rows.jsonl", rows), "sft").train
    tools = sorted(json.loads(row["tools"] or "[]") for row in read)
    assert tools == [[], TOOLS]


@pytest.mark.parametrize("tools", [["add", "sub"], {"add": {}}, 3, True])
def test_tools_that_are_no_schemas_are_refused_with_their_value(
    tools: Any, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": TURNS, "tools": tools}])
    with pytest.raises(
        DataError, match=r"'tools' is .* in row 0 .*list of tools.*correct"
    ) as caught:
        examples(path, "sft")
    assert repr(tools) in str(caught.value)


@pytest.mark.parametrize("method", ["sft", "kto", "dpo"])
def test_turns_without_a_question_teach_nothing(method: str, tmp_path: Path) -> None:
    def row(question: str, label: bool) -> dict[str, Any]:
        turns = [user(question), said("4")]
        if method == "dpo":
            return {"chosen": turns, "rejected": [user(question), said("5")]}
        return {"messages": turns, "label": label}

    rows = [row("2 + 2?", True), row("3 + 1?", False), row(" ", True)]
    read = examples(write_jsonl(tmp_path / "rows.jsonl", rows), method)
    assert len(read.train) == 2 and read.left_out == {"no question": 1}


def test_the_way_out_of_unknown_columns_leads_out(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"Question": "2 + 2?", "Response": "4"}])
    for names in ({}, {"answer_column": "Response"}):
        with pytest.raises(DataError, match=r"--prompt-column .*--answer-column "):
            examples(path, "sft", **names)
    (row,) = examples(path, "sft", prompt_column="Question", answer_column="Response").train
    assert row == {"prompt": TURNS[:1], "completion": TURNS[1:]}
    write_jsonl(path, [PAIR | {"label": 1}])
    with pytest.raises(DataError, match=r"unlabelled prompt, chosen and rejected"):
        examples(path, "kto")


@pytest.mark.parametrize(
    "answer",
    [
        "4\n\nHuman: Thanks.\n\nAssistant: Bye.",
        "<|user|>\n2 + 2?\n<|assistant|>\n4",
        "<|im_start|>assistant\n4<|im_end|>",
    ],
)
def test_marks_of_turns_within_an_answer_are_noted(answer: str, tmp_path: Path) -> None:
    rows = [{"prompt": "\n\nHuman: 2 + 2?\n\nAssistant:", "chosen": answer, "rejected": "5"}]
    (note,) = examples(write_jsonl(tmp_path / "rows.jsonl", rows), "dpo").reading["notes"]
    assert note.startswith("1 x answers have the marks of turns")


def test_accepted_answers_may_be_the_target_of_a_mapping() -> None:
    """Search-R1's `ground_truth` has it."""
    assert golds_of({"target": ["Paris", "paris"]}) == ["Paris", "paris"]


def test_an_answer_in_tags_is_compared_without_them() -> None:
    assert golds_of("<think>x</think><answer> 145 </answer>") == ["145"]


def test_a_column_is_renamed_also_where_it_is_a_key_of_objects(tmp_path: Path) -> None:
    row = {"prompt": "2 + 2?", "meta": {"system": "Be brief.", "right": "4"}, "answer": "x"}
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    columns = {"system": "meta.system", "answer": "meta.right"}
    (prompt,) = prompts(path, columns=columns).prompts
    assert (prompt.content, prompt.columns["answer"]) == ([SYSTEM, *TURNS[:1]], "4")
