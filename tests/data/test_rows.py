"""Rows are read from a file of every form in its writer's own layout, or refused; a scan reads 1,000 rows."""

import csv
import gzip
import io
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from ycore.config.resolve import resolve
from ycore.data.cells import last_boxed
from ycore.data.examples import ExampleSet, load_examples
from ycore.data.prompts import PromptSet, load_prompts
from ycore.errors import DataError

CASES = next(
    (
        folder / "shared" / "cases"
        for folder in Path(__file__).resolve().parents
        if (folder / "shared").is_dir()
    ),
    Path("cases"),
)
DOCS = Path(__file__).resolve().parents[2] / "docs" / "datasets.md"


def examples(path: Path, method: str, **keys: Any) -> ExampleSet:
    options = {"algorithm": method, "model": "m", "dataset": str(path), "output": "o"}
    as_chat = keys.pop("as_chat", True)
    return load_examples(resolve(options={**options, "held_out": 0, **keys}), as_chat=as_chat)


def prompts(path: Path, **keys: Any) -> PromptSet:
    options = {"algorithm": "grpo", "model": "m", "dataset": str(path), "output": "o"}
    as_chat = keys.pop("as_chat", True)
    config = resolve(options={**options, "rewards": ["exact_answer"], **keys})
    return load_prompts(config, as_chat=as_chat)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


TURNS = [user("2 + 2?"), said("4")]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
SHAREGPT = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
HH = "\n\nHuman: 2 + 2?\n\nAssistant: 4"
SYSTEM = {"role": "system", "content": "Be brief."}

FORMS: list[tuple[str, dict[str, Any], list[dict[str, Any]], str, Any]] = [
    # name in docs/datasets.md, a row, question, answer that sft learns, answer that rewards get
    ("TRL prompt-completion", {"prompt": "2 + 2?", "completion": "4"}, TURNS[:1], "4", None),
    ("TRL prompt-completion", {"prompt": TURNS[:1], "completion": TURNS[1:]}, TURNS[:1], "4", None),
    ("messages", {"messages": TURNS}, TURNS[:1], "4", None),
    ("ShareGPT", {"conversations": SHAREGPT, "system": "Be brief."}, [SYSTEM, *TURNS[:1]], "4", None),
    ("ShareGPT", {"conversations": [{**SHAREGPT[0], "weight": 0}, {**SHAREGPT[1], "weight": 1}]},
     TURNS[:1], "4", None),
    ("Alpaca", {"instruction": "Add.", "input": "2 and 2", "output": "4", "system": "Be brief.",
                "history": [["Hi", "Hello"]]},
     [SYSTEM, user("Hi"), said("Hello"), user("Add.\n\n2 and 2")], "4", None),
    ("Dolly", {"instruction": "Add.", "context": "2 and 2", "response": "4", "category": "qa"},
     [user("Add.\n\n2 and 2")], "4", None),
    ("OpenOrca", {"id": "1", "system_prompt": "Be brief.", "question": "2 + 2?", "response": "4"},
     [SYSTEM, *TURNS[:1]], "4", None),
    ("NuminaMath, OpenR1", {"problem": "2 + 2?", "solution": "So \\boxed{4}.", "answer": "4"},
     TURNS[:1], "So \\boxed{4}.", "4"),
    ("NuminaMath, OpenR1", {"question": "2 + 2?", "solution": "So \\boxed{4}.", "answer": "4"},
     TURNS[:1], "So \\boxed{4}.", "4"),
    ("NuminaMath, OpenR1", {"problem": "2 + 2?", "solution": "So 4.", "expected_answer": "4"},
     TURNS[:1], "So 4.", "4"),
    ("NuminaMath, OpenR1", {"question": "2 + 2?", "solution": "So 4.", "final_answer": ["4"]},
     TURNS[:1], "So 4.", ["4"]),
    ("MATH", {"question": "2 + 2?", "solution": "So \\boxed{4}."}, TURNS[:1], "So \\boxed{4}.", "4"),
    ("MATH", {"problem": "2 + 2?", "level": "1", "type": "algebra", "solution": "So \\boxed{4}."},
     TURNS[:1], "So \\boxed{4}.", "4"),
    ("hh-rlhf", {"prompt": "\n\nHuman: 2 + 2?\n\nAssistant:", "completion": " 4"}, TURNS[:1], "4", None),
    ("GSM8K", {"question": "2 + 2?", "answer": "Add. #### 4"}, TURNS[:1], "Add. #### 4", "Add. #### 4"),
    ("reasoning columns", {"question": "2 + 2?", "reasoning": "Add.", "answer": "4"}, TURNS[:1], "4", "4"),
    ("MetaMath", {"query": "2 + 2?", "response": "4", "type": "x"}, [user("2 + 2?")], "4", None),
    ("HumanEval", {"task_id": "h/0", "prompt": "def f():", "canonical_solution": "  return 4",
                   "test": "assert f() == 4", "entry_point": "f"}, [user("def f():")], "  return 4", None),
    ("MBPP", {"text": "Write f.", "code": "f = 4", "test_list": ["assert f"]}, [user("Write f.")], "f = 4", None),
    ("APPS, TACO", {"question": "2 + 2?", "starter_code": "def f():", "input_output": "{}", "answer": "x"},
     [user("2 + 2?\n\ndef f():")], "x", "x"),
    ("LiveCodeBench", {"question_content": "2 + 2?", "starter_code": "", "public_test_cases": "[]", "code": "x"},
     TURNS[:1], "x", None),
    ("verl", {"data_source": "d", "prompt": TURNS[:1], "reward_model": {"style": "rule", "ground_truth": "4"},
              "response": "4"}, TURNS[:1], "4", "4"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "question", "answer", "gold"), FORMS)
def test_every_command_reads_a_form_the_same(
    name: str, row: dict[str, Any], question: list[Any], answer: str, gold: Any, tmp_path: Path
) -> None:
    assert f"| {name} |" in DOCS.read_text(), "the table of forms"
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (example,) = examples(path, "sft").train
    assert example["prompt"] == question
    assert [turn["content"] for turn in example["completion"]] == [answer]
    prompt_set = prompts(path)
    assert prompt_set.prompts[0].content == question
    assert prompt_set.prompts[0].columns.get("answer") == gold
    pair = {key: value for key, value in row.items() if key not in ("completion", "messages")}
    if "messages" not in row and "conversations" not in row:
        path.write_text(json.dumps({**pair, "chosen": answer, "rejected": "no"}) + "\n")
        for method in ("dpo", "reward"):
            assert examples(path, method).train[0]["prompt"] == question, method
        path.write_text(
            "".join(json.dumps({**row, "label": label}) + "\n" for label in (True, False))
        )
        assert [row["prompt"] for row in examples(path, "kto").train] == [question] * 2


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_csv(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> None:
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    table.writeheader()
    table.writerows(rows)
    path.write_text(text.getvalue())


@pytest.mark.parametrize(
    "layout", ["a.json", "a.csv", "a.tsv", "semicolon.csv", "a.parquet", "saved"]
)
def test_every_file_layout(layout: str, tmp_path: Path) -> None:
    """Turns, tools and template arguments are the same from each; a table of text holds JSON."""
    row = {
        "messages": TURNS,
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    path = tmp_path / layout
    as_text = {key: json.dumps(value) for key, value in row.items()}
    if layout.endswith("json"):
        path.write_text(json.dumps([row, row]))
    elif layout.endswith("parquet"):
        write_parquet(path, [as_text, as_text])
    elif layout == "saved":
        from datasets import Dataset

        Dataset.from_list([as_text, as_text]).save_to_disk(path)
    else:
        write_csv(path, [as_text] * 2, {"a.tsv": "\t", "semicolon.csv": ";"}.get(layout, ","))
    example, _ = examples(path, "sft").train
    assert example == {
        "prompt": TURNS[:1], "completion": TURNS[1:], "tools": json.dumps(TOOLS),
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    prompt = prompts(path).prompts[1]
    assert (prompt.content, list(prompt.tools)) == (TURNS[:1], TOOLS)
    assert prompt.template_arguments == {"enable_thinking": False}


def test_a_csvs_header_may_have_spaces(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("question, answer\n2 + 2?, 4\n")
    assert (
        examples(path, "sft").reading["in_words"]
        == "question from question, answer from answer"
    )


def test_turns_that_call_tools_keep_all_keys(tmp_path: Path) -> None:
    turns = [
        user("2 + 2?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": "4"},
        said("4", reasoning_content="It is 4."),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n")
    (example,) = examples(path, "sft").train
    assert example == {"prompt": turns[:3], "completion": turns[3:]}
    assert prompts(path).prompts[0].content == turns[:3]


def test_answers_that_differ_in_their_reasoning_are_a_pair(tmp_path: Path) -> None:
    row = {
        "prompt": TURNS[:1],
        "chosen": [said("4", reasoning_content="Add.")],
        "rejected": [said("4", reasoning_content="Guess.")],
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert examples(path, "dpo").train == [row]


@pytest.mark.parametrize(
    "chosen",
    [
        [user("2 + 2? "), said("4")],
        [SYSTEM, user("2 + 2?"), said("4")],
        [user("Hi"), said("Hello"), user("2 + 2?"), said("4")],
    ],
)
def test_a_question_beside_whole_conversations_is_asked_once(
    chosen: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    rejected = [*chosen[:-1], said("5")]
    path.write_text(
        json.dumps({"prompt": " 2 + 2?", "chosen": chosen, "rejected": rejected}) + "\n"
    )
    for method in ("dpo", "reward"):
        (example,) = examples(path, method).train
        assert example == {
            "prompt": chosen[:-1],
            "chosen": [said("4")],
            "rejected": [said("5")],
        }
    assert prompts(path).prompts[0].content == chosen[:-1]


def test_margins_are_numbers_in_a_csv_and_zero_where_a_row_has_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt,chosen,rejected,margin\na,b,c,0.5\nd,e,f,\n")
    dataset = examples(path, "reward")
    assert sorted(row["margin"] for row in dataset.train) == [0.0, 0.5]
    assert dataset.reading["notes"] == ["1 x pairs without a margin count as margin 0"]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("sft", {"instruction": [user("a")], "input": "b", "output": "c"}, "'input' is text beside .*rename"),
    ("grpo", {"question": [user("a")], "starter_code": "b"}, "'starter_code' is text beside .*rename"),
    ("sft", {"messages": [user("a"), {"role": "critic", "content": "b"}]}, "role 'critic'.*rename"),
    ("sft", {"messages": [user("a"), said("b", weight=0)]}, "weight 0.*remove the key"),
    ("sft", {"prompt": [user("a"), said("b")], "completion": "c"}, "ends with an assistant turn.*remove"),
    ("grpo", {"prompt": [user("a"), {"role": "Assistant", "content": "b"}]}, "ends with an assistant turn"),
    ("sft", {"prompt": "a", "completion": [user("b"), said("c")]}, "contains a user's turn.*remove"),
    ("dpo", {"prompt": "a", "chosen": [user("b"), said("c")], "rejected": [user("b"), said("d")]},
     "contains a user's turn.*remove"),
    ("sft", {"messages": "[{'role': 'user', 'content': 'a'"}, "cannot be read as JSON.*JSONL"),
    ("sft", {"messages": TURNS, "tools": "[{"}, "'tools' cannot be read as JSON.*correct"),
    ("reward", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"}, "'margin' is 'much'.*correct"),
    ("sft", {"instruction": "a", "output": "b", "history": ["c"]}, "'history' has 'c'.*pairs"),
    ("sft", {"question": "a", "answer": "b", "system": 3}, "'system' is int.*text"),
]  # fmt: skip


_AS_TEXT = json.dumps(TURNS)
REFUSED += [
    (method, {column: cell, "answer": "4"}, rule)
    for method in ("sft", "grpo")
    for column, cell, rule in (
        ("messages", f"turns: {_AS_TEXT}", "'messages' is text .*must be a list"),
        ("messages", f"array({TURNS}, dtype=object)", "cannot be read as JSON.*JSONL"),
        ("prompt", json.dumps({"messages": TURNS[:1]}), "cannot be read as JSON.*JSONL"),
        (
            "prompt",
            '[{"id": 1, "role": "user", "content": "2 +',
            "cannot be read as JSON.*JSONL",
        ),
    )
]


@pytest.mark.parametrize(("method", "row", "message"), REFUSED)
def test_what_would_be_a_guess_is_refused_with_the_row(
    method: str, row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"in row 0 \(line 1\)") as caught:
        prompts(path) if method == "grpo" else examples(path, method)
    assert re.search(message, str(caught.value))


def test_a_dialogue_that_opens_the_answer_has_no_empty_turn(tmp_path: Path) -> None:
    row = {"prompt": "\n\nHuman: a\n\nAssistant:", "chosen": " b", "rejected": " c"}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    for method in ("dpo", "reward", "kto"):
        for example in examples(path, method).train:
            assert example["prompt"] == [user("a")]
    assert prompts(path).prompts[0].content == [user("a")]
    assert prompts(path, as_chat=False).prompts[0].content == row["prompt"]


@pytest.mark.parametrize(
    ("start", "answer"),
    [
        ("\nHuman: Where?", "\nAssistant:"),
        ("Human:Where?", "\n\n Assistant:"),
        ("\r\n\r\nHuman: Where?", "\r\n\r\nAssistant:"),
        ("Human:  Where? ", "\n\n\n\nAssistant: "),
    ],
)
def test_dialogues_with_other_spacing(start: str, answer: str, tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [{"chosen": f"{start}{answer} South.", "rejected": f"{start}{answer} North."}],
    )
    (pair,) = examples(path, "dpo").train
    assert pair["prompt"] == [user("Where?")] == prompts(path).prompts[0].content
    assert [pair[name][0]["content"] for name in ("chosen", "rejected")] == ["South.", "North."]


def test_a_dialogue_may_be_cut_before_its_speaker(tmp_path: Path) -> None:
    row = {
        "prompt": "\n\nHuman: Where?",
        "chosen": "\n\nAssistant: S",
        "rejected": "\n\nAssistant: N",
    }
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    (pair,) = examples(path, "dpo").train
    assert (pair["prompt"], pair["chosen"][0]["content"]) == ([user("Where?")], "S")
    assert prompts(path).prompts[0].content == [user("Where?")]


@pytest.mark.parametrize(
    "question", [{"messages": [user("2 + 2?")]}, {"input": "2 + 2?"}, {"query": "2 + 2?"}]
)
def test_pairs_of_texts_have_their_question_in_any_of_its_columns(
    question: dict[str, Any], tmp_path: Path
) -> None:
    row = {**question, "chosen": "The answer is 4", "rejected": "The answer is 5"}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    for method in ("dpo", "reward"):
        (pair,) = examples(path, method).train
        assert pair["prompt"] == [user("2 + 2?")]
        assert pair["chosen"][0]["content"] == "The answer is 4"


def test_a_row_without_a_question_teaches_nothing(tmp_path: Path) -> None:
    rows = [{"question": text, "answer": "4"} for text in ("", "  ", "2 + 2?")]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert examples(path, "sft").left_out == {"no question": 2}


@pytest.mark.parametrize(
    ("row", "note"),
    [
        (
            {"prompt": "Where?", "chosen": "Where? S", "rejected": "Where? N"},
            "2 x answers begin with their question",
        ),
        (
            {"prompt": "[INST] Where? [/INST]", "chosen": "S", "rejected": "N"},
            "1 x texts have the marks of a chat template",
        ),
        (
            {"task": "Where?", "chosen": "It is S", "rejected": "It is N"},
            "1 x questions are the common beginning of chosen",
        ),
        (
            {
                "chosen": "User: Where?\n\nAssistant: S",
                "rejected": "User: Where?\n\nAssistant: N",
            },
            "1 x questions are the common beginning of chosen",
        ),
    ],
)
def test_the_plan_says_what_looks_odd(row: dict[str, Any], note: str, tmp_path: Path) -> None:
    (said,) = examples(write_jsonl(tmp_path / "a.jsonl", [row]), "dpo").reading["notes"]
    assert said.startswith(note)


def test_an_answer_in_the_turns_is_not_said_to_be_in_the_system_prompt(tmp_path: Path) -> None:
    row = {"system": "Be brief.", "conversations": [user("Q?"), said("A.")]}
    read = examples(write_jsonl(tmp_path / "a.jsonl", [row]), "sft").reading["in_words"]
    assert read == "question from system + conversations, answer from conversations"


def test_the_plan_counts_prompts_without_an_answer_and_lists_that_are_text(
    tmp_path: Path,
) -> None:
    answers: list[Any] = [None, "", [], float("nan"), "3", 0]
    rows = [{"prompt": "Q?", "answer": answer} for answer in answers]
    rows.append({"prompt": '["Q?", "R?"]', "answer": "3"})
    rows += [{"prompt": "Q?", "answer": answer} for answer in ({"result": 3}, {"value": 3})]
    notes = prompts(write_jsonl(tmp_path / "a.jsonl", rows)).reading["notes"]
    unscored, brackets = notes
    assert unscored.startswith("5 x answer is empty, or has none of the keys value, aliases,")
    assert brackets.startswith("1 x questions in brackets are")


def test_turns_in_a_text_in_a_text_are_turns(tmp_path: Path) -> None:
    row = {"messages": json.dumps(json.dumps(TURNS))}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    assert prompts(path).prompts[0].content == TURNS[:1]
    (example,) = examples(path, "sft").train
    assert example == {"prompt": TURNS[:1], "completion": TURNS[1:]}


@pytest.mark.parametrize(
    "text",
    [
        '{"from": "LHR", "to": "JFK"}',
        '[{"name": "add_user", "arguments": {"role": "user", "name": "Bob"}}]',
        '"2 + 2?" he asked.',
        '{"value": 4}',
    ],
)
def test_json_that_lists_no_turns_is_text(text: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": text, "completion": text}])
    assert prompts(path).prompts[0].content == [user(text)]
    assert examples(path, "sft").train[0]["completion"] == [said(text)]


def test_an_answer_of_one_turn_has_its_question_in_the_conversation(tmp_path: Path) -> None:
    row = {
        "conversations": SHAREGPT[:1],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
    }
    for pair in (row, {**row, "chosen": [row["chosen"]], "rejected": [row["rejected"]]}):
        path = write_jsonl(tmp_path / "a.jsonl", [pair])
        for method in ("dpo", "reward", "kto"):
            assert examples(path, method).train[0]["prompt"] == TURNS[:1]


@pytest.mark.parametrize(
    ("before", "opening"),
    [
        ("<|im_start|>user\nWhere is it?<|im_end|>\n", "<|im_start|>assistant"),
        ("[INST] Where is it? ", "[/INST]"),
        ("USER: Where is it? ", "ASSISTANT:"),
        ("User: Where is it?", "\n\nAssistant:"),
    ],
)
def test_texts_are_cut_where_their_answer_opens(
    before: str, opening: str, tmp_path: Path
) -> None:
    question = before + opening
    row = {"chosen": f"{question} in the south", "rejected": f"{question} in the north"}
    (pair,) = examples(write_jsonl(tmp_path / "a.jsonl", [row]), "dpo").train
    assert (pair["prompt"], pair["chosen"]) == (question, " in the south")
    earlier = {key: f"{text} {question} Yes" for key, text in row.items()}
    path = write_jsonl(tmp_path / "a.jsonl", [row, earlier])
    left_out = examples(path, "dpo").left_out
    assert left_out == {"conversations part before the last answer": 1}
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": question, "completion": "South"}])
    notes = examples(path, "sft").reading["notes"]
    assert [note for note in notes if "texts have the marks of a chat template" in note]


def test_the_plan_counts_answers_that_are_worked_solutions_without_a_mark(
    tmp_path: Path,
) -> None:
    worked = "First we add the two. " * 5
    golds = [worked, rf"{worked}\boxed{{4}}", f"{worked}\n#### 4", "4"]
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"question": "Q?", "answer": gold} for gold in golds]
    )
    (note,) = prompts(path).reading["notes"]
    assert note.startswith("1 x answer is a long text")


def test_an_unused_column_in_a_thousand_lists_is_left_alone(tmp_path: Path) -> None:
    row = f'{{"prompt": "Q?", "options": {"[" * 900}3{"]" * 900}}}\n'
    (tmp_path / "a.jsonl").write_text(row)
    assert prompts(tmp_path / "a.jsonl").reading["expected"] == []


def test_an_answer_in_a_thousand_lists_is_a_refused_row(tmp_path: Path) -> None:
    row = f'{{"prompt": "Q?", "answer": {"[" * 900}3{"]" * 900}}}\n'
    (tmp_path / "a.jsonl").write_text(row)
    with pytest.raises(DataError, match=r"'answer' nests too deep in row 0"):
        prompts(tmp_path / "a.jsonl")


def test_one_turn_needs_no_list(tmp_path: Path) -> None:
    row = {"prompt": user("Q?"), "chosen": said("a"), "rejected": said("b")}
    (pair,) = examples(write_jsonl(tmp_path / "a.jsonl", [row]), "dpo").train
    assert (pair["prompt"], pair["rejected"]) == ([user("Q?")], [said("b")])


def test_the_first_of_several_solutions_is_learned(tmp_path: Path) -> None:
    rows = [{"question": "Q?", "solutions": json.dumps(texts)} for texts in (["a", "b"], [])]
    dataset = examples(write_jsonl(tmp_path / "a.jsonl", rows), "sft")
    assert [row["completion"] for row in dataset.train] == [[said("a")]]
    assert dataset.reading["notes"] == ["1 x of several solutions the first is learned"]
    assert dataset.left_out == {"no answer": 1}


def test_a_context_belongs_to_its_question(tmp_path: Path) -> None:
    row = {"question": "Where?", "context": "In Rome.", "answer": "Rome"}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    question = [user("Where?\n\nIn Rome.")]
    assert prompts(path).prompts[0].content == question
    (example,) = examples(path, "sft").train
    assert example["prompt"] == question


def test_an_answer_column_is_none_of_a_pair(tmp_path: Path) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "best": "d"}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError, match=r"dpo learns from .*--set columns\.chosen=best"):
        examples(path, "dpo", answer_column="best")


def test_earlier_turns_follow_the_system_prompt_of_the_turns(tmp_path: Path) -> None:
    row = {
        "prompt": [SYSTEM, user("b")],
        "history": [["a", "c"]],
        "chosen": "d",
        "rejected": "e",
    }
    (pair,) = examples(write_jsonl(tmp_path / "a.jsonl", [row]), "dpo").train
    assert pair["prompt"] == [SYSTEM, user("a"), said("c"), user("b")]


@pytest.mark.parametrize("column", ["answer", "reasoning"])
def test_columns_that_pairs_do_not_learn_are_named(column: str, tmp_path: Path) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "answer": "d", column: "e"}
    reading = examples(write_jsonl(tmp_path / "a.jsonl", [row]), "dpo").reading
    assert column in reading["unused"]


def test_a_dialogue_beside_another_question_is_refused_for_models_of_text(
    tmp_path: Path,
) -> None:
    row = {"prompt": "Q?", "chosen": f"{HH} or 5", "rejected": HH}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError, match=r"'chosen' contains a user's turn .*row 0"):
        examples(path, "dpo", as_chat=False)


def test_other_spellings_of_columns_that_trainers_read_are_warned_of(tmp_path: Path) -> None:
    row = {"instruction": "Add", "Input": "2 and 1", "choices": ["3"], "id": "a", "output": "3"}
    reading = examples(write_jsonl(tmp_path / "a.jsonl", [row]), "sft").reading
    assert reading["expected"] == ["Input", "choices"]


def test_columns_have_the_same_options_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        json.dumps({"ask": "a", "prompt": "no", "told": "b", "answer": "no"}) + "\n"
    )
    for keys in (
        {"prompt_column": "ask", "answer_column": "told"},
        {"columns": {"prompt": "ask", "answer": "told"}},
    ):
        assert prompts(path, **keys).prompts[0].columns["answer"] == "b"
        assert prompts(path, **keys).prompts[0].content == [user("a")]
        (example,) = examples(path, "sft", **keys).train
        assert example == {"prompt": [user("a")], "completion": [said("b")]}


def test_the_result_of_a_worked_solution() -> None:
    assert last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert last_boxed("4") is last_boxed(r"\boxed{1") is None


PAIRS: list[dict[str, Any]] = [
    {"prompt": "q", "chosen": "b", "rejected": "w", "margin": 0.5},
    {"prompt": [user("q")], "chosen": [said("b")], "rejected": [said("w")]},
    {"question": "q", "chosen": "b", "rejected": "w"},
    {"instruction": "q", "input": "i", "chosen": "b", "rejected": "w"},
    {"chosen": [user("SAME"), said("b")], "rejected": [user("SAME"), said("w")]},
    {"prompt": [user("SAME")], "chosen": [user("SAME"), said("b")], "rejected": [user("SAME"), said("w")]},
    {"chosen": "\n\nHuman: SAME\n\nAssistant: b", "rejected": "\n\nHuman: SAME\n\nAssistant: w"},
]  # fmt: skip
QUESTION_KEYS = (
    *("prompt", "question", "problem", "instruction", "input", "context", "query", "text"),
    *("question_content", "starter_code", "system", "system_prompt", "history"),
)
CONVERSATIONS = ("messages", "conversations", "chosen", "rejected", "completion")
MARK = re.compile(r"z\d+x\d+z")


def marks_in(value: Any) -> set[str]:
    return set(MARK.findall(json.dumps(value, default=str)))


def random_row(base: dict[str, Any], number: int, chance: random.Random) -> dict[str, Any]:
    """Fill a form, and some more columns, with texts that occur nowhere else."""
    row = {**base}
    for name in (
        *("source", "system", "system_prompt", "history", "context", "input"),
        *("reasoning", "thinking", "tools", "answer"),
    ):
        if name not in row and chance.random() < 0.1:
            row[name] = {"history": [["Hi", "Hello"]], "tools": TOOLS}.get(name, name)
    shared = f"z{number}x{chance.randrange(10**9)}z"

    def fresh(value: Any) -> Any:
        if isinstance(value, str):
            mark = f"z{number}x{chance.randrange(10**9)}z"
            if value.endswith("Assistant:"):
                return value.replace("2 + 2?", f"2 + 2? {mark}")
            text = value if "SAME" in value and "Human:" not in value else f"{value} {mark}"
            return text.replace("SAME", shared)
        if isinstance(value, list):
            return [fresh(item) for item in value]
        if isinstance(value, dict):
            fixed = ("role", "from", "type", "style")
            return {key: item if key in fixed else fresh(item) for key, item in value.items()}
        return value

    return {key: fresh(value) for key, value in row.items()}


def random_bases(pool: list[dict[str, Any]], chance: random.Random) -> list[dict[str, Any]]:
    """Return forms that a file mixes: any of them, or those of one question column, with texts and turns."""
    if chance.random() < 0.5:
        column = chance.choice(["prompt", "question", "problem", "instruction", "messages"])
        pool = [base for base in pool if column in base] or pool
        for base in [base for base in pool if isinstance(base.get(column), str)]:
            if "Human:" not in base[column]:
                pool = [*pool, {**base, column: [SYSTEM, user("q")]}]
            for name in ("completion", "output", "response"):
                if name in base:
                    pool = [*pool, {**base, name: [said("a")]}]
    return chance.sample(pool, min(len(pool), chance.randrange(1, 4)))


def write_rows(rows: list[dict[str, Any]], folder: Path, chance: random.Random) -> Path:
    layout = chance.choice(["jsonl", "json", "csv", "tsv", "parquet", "jsonl.gz", "bom.jsonl"])
    path = folder / f"rows.{layout}"
    names = list(dict.fromkeys(name for row in rows for name in row))
    as_text = [
        {
            name: value if isinstance(value, str | bool | float | None) else json.dumps(value)
            for name, value in ((name, row.get(name)) for name in names)
        }
        for row in rows
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if layout == "json":
        path.write_text(json.dumps(rows))
    elif layout in ("csv", "tsv"):
        write_csv(path, as_text, "\t" if layout == "tsv" else ",")
    elif layout == "parquet":
        write_parquet(path, as_text)
    elif layout == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif layout == "bom.jsonl":
        path.write_bytes(b"\xef\xbb\xbf" + lines.replace("\n", "\r\n").encode())
    else:
        path.write_text(lines)
    return path


def answer_marks(row: dict[str, Any]) -> set[str]:
    """Return the marks of the row's answers: of conversations, those of the last turn."""
    marks: set[str] = set()
    for name in CONVERSATIONS:
        value = row.get(name)
        is_dialogue = isinstance(value, str) and "Human:" in value
        last = value[-1] if isinstance(value, list) else value
        marks |= {MARK.findall(value)[-1]} if is_dialogue else marks_in(last)
    return marks


def read_example(method: str, path: Path, as_chat: bool) -> tuple[list[dict[str, Any]], Any]:
    if method not in ("grpo", "eval"):
        dataset = examples(path, method, as_chat=as_chat)
        return list(dataset.train), dataset
    options = {
        "algorithm": method,
        "model": "m",
        "dataset": str(path),
        "rewards": ["exact_answer"],
    }
    config = resolve(options=options if method == "eval" else {**options, "output": "o"})
    read = load_prompts(config, as_chat=as_chat)
    return [
        {"prompt": row.content, "tools": row.tools, "columns": dict(row.columns)}
        for row in read.prompts
    ], read


@pytest.mark.parametrize("as_chat", [True, False])
@pytest.mark.parametrize("method", ["sft", "dpo", "reward", "kto", "grpo", "eval"])
def test_no_text_of_a_thousand_mixed_rows_disappears_or_changes_place(
    method: str, as_chat: bool, tmp_path: Path
) -> None:
    """Each text is where it belongs, in a column that the plan calls not used, or its file is refused with the row."""
    chance = random.Random(0)
    forms = [row for _, row, *_ in FORMS]
    pool = {"sft": [*forms, *PAIRS], "dpo": PAIRS, "reward": PAIRS}.get(method, forms + PAIRS)
    num_read = 0
    for _ in range(50):
        bases = random_bases(pool, chance)
        rows = [random_row(chance.choice(bases), number, chance) for number in range(20)]
        if method == "kto":
            rows = [
                row if "chosen" in row else {**row, "label": chance.random() < 0.5}
                for row in rows
            ]
        path = write_rows(rows, tmp_path, chance)
        try:
            read, dataset = read_example(method, path, as_chat)
        except DataError as problem:
            rule = r"row \d+|lacks the columns|has no column|has none of the|no row of|every label|mixes text and chat"
            assert re.search(rule, str(problem)), problem
            continue
        num_read += 1
        unused = {*dataset.reading["unused"]}
        if any("keep their own system prompt" in note for note in dataset.reading["notes"]):
            unused |= {"system", "system_prompt"}
        num_absent = 0
        for row in rows:
            made = [example for example in read if marks_in(example) & marks_in(row)]
            num_absent += not made
            prompt_marks = set().union(
                *(marks_in(example.get("prompt", "")) for example in made)
            )
            kept = marks_in(made)
            is_whole = any("text" in example for example in made)
            if method in ("grpo", "eval"):
                kept |= answer_marks(row)  # the policy writes it
            for name, value in row.items() if made else ():
                lost = marks_in(value) - kept
                assert not lost or name in unused, (name, row, made, dataset.reading)
                if name in QUESTION_KEYS and name not in unused and not is_whole:
                    assert marks_in(value) <= prompt_marks | answer_marks(row), (
                        name,
                        row,
                        made,
                    )
            assert is_whole or not answer_marks(row) & prompt_marks, (row, made)
        num_left_out = 0 if method in ("grpo", "eval") else dataset.left_out.total()
        assert num_absent == num_left_out
    assert num_read >= 15


def turns_of(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    start = [] if system is None else [{"role": "system", "content": system}]
    return start + [(said if number % 2 else user)(text) for number, text in enumerate(texts)]


_CASES: list[tuple[str, str, Any, Any]] = [
    # file, methods, a question and what is learned of it; or None and the refusal
    ("alpaca-input/sft.jsonl", "sft grpo", turns_of("Add the two numbers.\n\n2 and 1"), "3"),
    ("alpaca-input/rl.jsonl", "sft grpo", turns_of("Add the two numbers.\n\n2 and 1"), "3"),
    ("alpaca-input/kto.jsonl", "kto", turns_of("Add the two numbers.\n\n2 and 1"), "3"),
    ("alpaca-input/pairs.jsonl", "dpo reward", turns_of("Add the two numbers.\n\n2 and 1"), "3"),
    ("alpaca-input/history.jsonl", "sft grpo",
     turns_of("Tell me about Peru 2.", "It is a country.", "And its capital?", system="Be brief."), "Lima."),
    ("alpaca-system-history/alpaca.jsonl", "sft grpo",
     turns_of("What is the capital of Peru?", "Lima.", "And the population in year 2002?",
              system="You are a geographer. Answer in pirate speech."), "About 2 million."),
    ("alpaca-system-history/sharegpt.jsonl", "sft grpo",
     turns_of("Weather in town 2?", system="You are a terse weather bot."), "Sunny."),
    ("csv-json-messages/chats.csv", "sft grpo", turns_of("What is 2+1?"), "3"),
    ("csv-json-messages/prompts.csv", "sft grpo", turns_of("What is 2+1?"), "3"),
    ("csv-json-messages/pairs.csv", "dpo reward kto grpo", turns_of("What is 2+1?"), "3"),
    ("csv-margin/pairs.csv", "dpo reward", turns_of("Question 2?"), "Good answer 2."),
    ("fields-dropped/dpo-reasoning.jsonl", "dpo reward", turns_of("What is 2+3?"), "5"),
    ("fields-dropped/reason.jsonl", "sft grpo", turns_of("What is 2+3?"), "It is 5."),
    ("fields-dropped/system-column.jsonl", "sft grpo", turns_of("Hi", system="Speak like a pirate."), "Arr"),
    ("hh-prompt-open/pairs.jsonl", "dpo reward kto grpo", turns_of("What is dew?"), "Water on grass."),
    ("message-extra-keys/reasoning.jsonl", "sft grpo", turns_of("What is 2+1?"), "3"),
    ("message-extra-keys/weight.jsonl", "sft grpo", None, "weight 0 in row 0"),
    ("pair-repeats-prompt/last-turn.jsonl", "dpo reward kto grpo", turns_of("Hi", "Hello", "What is dew?"), "Water."),
    ("pair-repeats-prompt/sft.jsonl", "sft grpo", turns_of("What is dew?"), "Water."),
    ("pair-repeats-prompt/space.jsonl", "dpo reward kto grpo", turns_of("What is dew?"), "Water."),
    ("pair-repeats-prompt/system.jsonl", "dpo reward kto grpo",
     turns_of("What is dew?", system="Be brief."), "Water on grass."),
    ("prompt-whitespace/pairs.jsonl", "dpo reward kto grpo", turns_of("Question 2?"), "Good answer 2."),
    ("prompt-whitespace/pairs-system.jsonl", "dpo reward kto grpo",
     turns_of("Question 2?", system="Be short."), "Good answer 2."),
    ("prompt-whitespace/sys.jsonl", "sft grpo", turns_of("Q2?", system="Be short."), "A."),
    ("unknown-role/chatgpt.jsonl", "sft grpo", turns_of("What is 2 plus 1?"), "It is 3."),
    ("unknown-role/conv.jsonl", "sft grpo", turns_of("2+1?"), "3"),
    ("unknown-role/model.jsonl", "sft grpo", turns_of("What is 2 plus 1?"), "It is 3."),
    ("unknown-role/text_roles.jsonl", "grpo", None, "ends with an assistant turn in row 0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "method", "question", "answer"),
    [
        (case, method, question, answer)
        for case, methods, question, answer in _CASES
        for method in methods.split()
    ],
)
def test_the_shared_cases_of_rows(case: str, method: str, question: Any, answer: str) -> None:
    path = CASES / case
    if not path.is_file():
        pytest.skip(f"the shared case {case} is not on this machine")
    if question is None:
        with pytest.raises(DataError, match=answer):
            read_example(method, path, as_chat=True)
        return
    rows, _ = read_example(method, path, as_chat=True)
    same = [row for row in rows if row["prompt"] == question]
    assert same
    if method != "grpo":
        learned = [row.get("chosen", row.get("completion"))[-1]["content"] for row in same]
        assert answer in learned


def test_what_a_plan_says_of_pairs_that_are_prompts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"chosen": TURNS, "rejected": [*TURNS[:1], said("5")], "weight": 1}
    path.write_text(json.dumps(row) + "\n")
    reading = prompts(path).reading
    assert reading["in_words"] == "question from chosen"
    assert (reading["unused"], reading["expected"]) == (["rejected", "weight"], ["weight"])
    assert reading["notes"] == ["1 x last answers are cut, for the policy writes them"]


def test_a_nan_of_pandas_is_an_empty_cell(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("instruction,input,output\nAdd.,nan,x\nSub.,1 2,nan\nMul.,3,NaN\n")
    dataset = examples(path, "sft")
    assert [row["prompt"] for row in dataset.train] == [[user("Add.")]]
    assert dataset.left_out == {"no answer": 2}
