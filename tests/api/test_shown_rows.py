"""A plan shows a dataset's columns, its first rows as the model sees them, and what the model will not see."""

import json
from pathlib import Path
from typing import Any

import pytest

from ycore.api.shown_rows import reading_rows, reading_warnings, rows_read
from ycore.config.resolve import resolve
from ycore.data.examples import load_examples
from ycore.data.prompts import load_prompts
from ycore.errors import DataError
from ycore.models.names import ModelPlan

TEMPLATE = (
    "{% if tools %}[{{ tools[0].name }}]{% endif %}{% for turn in messages %}<{{ turn.role }}>"
    "{{ turn.reasoning_content }}{{ turn.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}"


def read(
    folder: Path,
    method: str,
    rows: dict[str, Any] | list[dict[str, Any]],
    template: str = TEMPLATE,
) -> dict[str, Any]:
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "eos_token": "</s>"})
    )
    listed = rows if isinstance(rows, list) else [rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    model = ModelPlan("m", "folder", folder, True, "found", has_chat_template=True)
    options = {
        "algorithm": method,
        "model": "m",
        "output": "o",
        "dataset": str(folder / "rows.jsonl"),
    }
    if method == "grpo":
        config = resolve(options={**options, "rewards": ["exact_answer"]})
        return rows_read(load_prompts(config, as_chat=True), model, {}, num_rows=3)
    config = resolve(options={**options, "held_out": 0})
    return rows_read(load_examples(config, as_chat=True), model, {}, num_rows=3)


ROW = {
    "messages": [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "d"},
    ],
    "tools": [{"name": "add"}],
    "source": "s",
    "weight": 2,
}


def test_the_rows_of_each_command(tmp_path: Path) -> None:
    assert read(tmp_path, "sft", ROW)["rows"] == [
        {"asked": "[add]<user>a\nb</><assistant>", "learned": "dc</>"}
    ]
    assert read(tmp_path, "grpo", ROW)["rows"] == [{"asked": "[add]<user>a\nb</><assistant>"}]
    pair = {"prompt": "a", "chosen": "yes", "rejected": "yet"}
    assert read(tmp_path, "dpo", pair)["rows"] == [
        {"asked": "<user>a</><assistant>", "better": "yes</>", "worse": "yet</>"}
    ]
    assert read(tmp_path, "sft", {"text": "a"})["rows"] == [{"learned": "a</s>"}]


def test_lines_and_warnings(tmp_path: Path) -> None:
    reading = read(tmp_path, "sft", ROW)
    assert reading_rows(reading) == [
        (
            "read",
            "question from messages, answer from messages, tools; not used: source, weight",
        ),
        ("asked", "[add]<user>a\\nb</><assistant>"),
        ("learned", "dc</>"),
    ]
    (warning,) = reading_warnings(reading, has_tools=False)
    assert "column weight is not used" in warning
    assert "tools of its own" in reading_warnings(reading, has_tools=True)[1]
    lost = read(tmp_path, "sft", ROW, PLAIN)["lost"]
    assert lost == ["reasoning_content of the answer", "the row's tools"]
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {}}}],
    }
    called = {"messages": [{"role": "user", "content": "a"}, call]}
    assert read(tmp_path, "sft", called, PLAIN)["lost"] == ["the tool_calls of the assistant"]


def test_other_keys_of_turns_that_the_template_leaves_out_are_told_in_one_line(
    tmp_path: Path,
) -> None:
    question = {"role": "user", "content": "a", "name": "Ann", "id": 7, "language": None}
    answer = {"role": "assistant", "content": "b", "thought": "Add.", "prefix": True}
    called = {"role": "tool", "content": "Ann", "name": "Ann", "tool_call_id": "x"}
    turns = [question, {"role": "assistant", "content": "c"}, called, answer]
    reading = read(tmp_path, "sft", {"messages": turns}, PLAIN)
    assert reading["lost"] == ["prefix of the assistant", "thought of the assistant"]
    (warning,) = reading_warnings(reading, has_tools=False)
    assert all(part in warning for part in reading["lost"])
    assert (
        read(tmp_path, "sft", {"messages": [question, answer]}, PLAIN)["lost"][0]
        == "name of the user"
    )


def test_tools_beside_a_text_are_lost(tmp_path: Path) -> None:
    row = {"text": "a story", "tools": [{"name": "add"}]}
    assert read(tmp_path, "sft", row)["lost"] == ["the row's tools"]


def test_a_long_row_is_cut_in_the_middle(tmp_path: Path) -> None:
    lines = reading_rows(read(tmp_path, "grpo", {"prompt": "a" * 5000}))
    assert all(len(line) <= 70 for _, line in lines) and len(lines) < 7
    assert lines[-1][1].endswith("a</><assistant>")


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.mark.parametrize("method", ["sft", "dpo", "reward", "kto", "grpo"])
def test_a_row_that_the_template_refuses_is_refused(method: str, tmp_path: Path) -> None:
    """The second row is refused, although the plan shows one: every order of roles is tried."""
    row = {"prompt": "a", "completion": "b", "chosen": "c", "rejected": "d"}
    if method in ("sft", "kto"):
        row = {"prompt": "a", "completion": "b"}
    rows = [row, {**row, "system": "s"}, {**row, "system": ""}]
    if method == "kto":
        rows = [{**row, "label": index < 2} for index, row in enumerate(rows)]
    with pytest.raises(DataError, match=r"row 1 \(line 2\) of .*: no system; change or remove"):
        read(tmp_path, method, rows, NO_SYSTEM + PLAIN)
    assert read(tmp_path, method, rows, PLAIN)["lost"] == []


def test_a_model_that_is_not_here_shows_rows_without_its_template(tmp_path: Path) -> None:
    read(tmp_path, "grpo", [ROW])
    config = resolve(
        options={
            "algorithm": "grpo", "model": "m", "output": "o", "dataset": str(tmp_path / "rows.jsonl"),
            "rewards": ["exact_answer"],
        }
    )  # fmt: skip
    model = ModelPlan("hub", "m", None, False, "", has_chat_template=True)
    reading = rows_read(load_prompts(config, as_chat=True), model, {}, num_rows=1)
    assert "without its chat template" in reading["notes"][-1]
