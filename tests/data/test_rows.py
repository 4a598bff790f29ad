"""What a row says: a file of every form in its writer's own layout, refusals, and a scan of 1,000 rows."""

import csv
import io
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from ycore.config.resolve import resolve
from ycore.data.examples import ExampleSet, load_examples
from ycore.data.prompts import PromptSet, load_prompts
from ycore.data.rows import last_boxed
from ycore.errors import DataError

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases"
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
    ("Alpaca", {"instruction": "Add.", "input": "2 and 2", "output": "4", "system": "Be brief.",
                "history": [["Hi", "Hello"]]},
     [SYSTEM, user("Hi"), said("Hello"), user("Add.\n\n2 and 2")], "4", None),
    ("Dolly", {"instruction": "Add.", "context": "2 and 2", "response": "4", "category": "qa"},
     [user("Add.\n\n2 and 2")], "4", None),
    ("OpenOrca", {"id": "1", "system_prompt": "Be brief.", "question": "2 + 2?", "response": "4"},
     [SYSTEM, *TURNS[:1]], "4", None),
    ("NuminaMath, OpenR1", {"problem": "2 + 2?", "solution": "So \\boxed{4}.", "answer": "4"},
     TURNS[:1], "So \\boxed{4}.", "4"),
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
    asked = prompts(path)
    assert asked.prompts[0].content == question
    assert asked.prompts[0].columns.get("answer") == gold
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
    found = examples(path, "reward")
    assert sorted(row["margin"] for row in found.train) == [0.0, 0.5]
    assert found.reading["notes"] == ["1 x pairs without a margin count as margin 0"]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
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
            "begin with their question",
        ),
        (
            {"prompt": "[INST] Where? [/INST]", "chosen": "S", "rejected": "N"},
            "marks of a chat template",
        ),
        (
            {"task": "Where?", "chosen": "It is S", "rejected": "It is N"},
            "common beginning of chosen",
        ),
    ],
)
def test_the_plan_says_what_looks_odd(row: dict[str, Any], note: str, tmp_path: Path) -> None:
    (said,) = examples(write_jsonl(tmp_path / "a.jsonl", [row]), "dpo").reading["notes"]
    assert said.startswith("1 x ")
    assert note in said


def test_the_plan_counts_prompts_without_an_answer_and_lists_that_are_text(
    tmp_path: Path,
) -> None:
    answers: list[Any] = [None, "", [], float("nan"), "3", 0]
    rows = [{"prompt": "Q?", "answer": answer} for answer in answers]
    rows.append({"prompt": '["Q?", "R?"]', "answer": "3"})
    rows += [{"prompt": "Q?", "answer": answer} for answer in ({"result": 3}, {"value": 3})]
    notes = prompts(write_jsonl(tmp_path / "a.jsonl", rows)).reading["notes"]
    unknown = notes.pop(0)
    assert unknown.startswith("1 x answer has none of the keys value, aliases,"), notes
    assert [note.split(" is ")[0].split(" are ")[0] for note in notes] == [
        "4 x answer",
        "1 x questions in brackets",
    ]


def test_one_turn_needs_no_list(tmp_path: Path) -> None:
    row = {"prompt": user("Q?"), "chosen": said("a"), "rejected": said("b")}
    (pair,) = examples(write_jsonl(tmp_path / "a.jsonl", [row]), "dpo").train
    assert (pair["prompt"], pair["rejected"]) == ([user("Q?")], [said("b")])


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


def texts_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.values() for text in texts_in(item)]
    return (
        [text for item in value for text in texts_in(item)] if isinstance(value, list) else []
    )


def random_row(chance: random.Random, number: int) -> dict[str, Any]:
    """Fill a random form with texts that occur nowhere else."""

    def fresh(value: Any) -> Any:
        if isinstance(value, str):
            return f"{value} t{number}x{chance.randrange(10**9)}"
        if isinstance(value, list):
            return [fresh(item) for item in value]
        if isinstance(value, dict):
            return {
                key: item if key in ("role", "from", "type") else fresh(item)
                for key, item in value.items()
            }
        return value

    _, row, *_ = chance.choice(FORMS)
    row = {**row}
    for name in ("source", "system", "history", "reasoning", "context", "notes"):
        if name not in row and chance.random() < 0.15:
            row[name] = [["Hi", "Hello"]] if name == "history" else name
    made = {key: fresh(value) for key, value in row.items()}
    if isinstance(made.get("prompt"), str) and "Assistant:" in made["prompt"]:
        made["prompt"] = row["prompt"]
    return made


def test_no_text_of_a_thousand_rows_disappears_without_a_word(tmp_path: Path) -> None:
    """Each text of a row is in its example, in a column that the plan names as not used, or the row is refused."""
    chance = random.Random(0)
    num_read = 0
    for number in range(1000):
        row = random_row(chance, number)
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row) + "\n")
        try:
            found = examples(path, "sft")
        except DataError as problem:
            assert "row 0" in str(problem), row
            continue
        num_read += 1
        (example,) = found.train
        kept = "\n".join(texts_in(example))
        for name, value in row.items():
            if name in found.reading["unused"]:
                continue
            for text in texts_in(value):
                is_name = text in ("user", "assistant", "system", "human", "gpt")
                assert (
                    is_name
                    or " ".join(text.split()) in " ".join(kept.split())
                    or ("Human:" in text)
                ), (name, text, example)
        roles = [turn["role"] for turn in example["prompt"]]
        assert roles[-1] == "user" and example["completion"][-1]["role"] == "assistant"
    assert num_read > 900


@pytest.mark.parametrize(
    ("case", "method"),
    [
        *(("alpaca-input/pairs.jsonl", method) for method in ("dpo", "reward")),
        ("alpaca-input/kto.jsonl", "kto"),
        ("alpaca-input/sft.jsonl", "sft"),
        ("alpaca-input/rl.jsonl", "grpo"),
    ],
)
def test_the_shared_case_of_alpaca(case: str, method: str) -> None:
    path = CASES / case
    if not path.is_file():
        pytest.skip(f"the shared case {case} is not on this machine")
    question = [user("Add the two numbers.\n\n2 and 1")]
    if method == "grpo":
        assert question in [prompt.content for prompt in prompts(path).prompts]
    else:
        assert question in [row["prompt"] for row in examples(path, method).train]


def test_what_a_plan_says_of_pairs_that_are_prompts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"chosen": TURNS, "rejected": [*TURNS[:1], said("5")], "weight": 1}
    path.write_text(json.dumps(row) + "\n")
    reading = prompts(path).reading
    assert reading["in_words"] == "question from chosen"
    assert (reading["unused"], reading["expected"]) == (["rejected", "weight"], ["weight"])
    assert reading["notes"] == ["1 x last answers are cut, for the policy writes them"]
