"""What a plan shows of a dataset: the columns, the first rows as the model sees them, and what it will not see."""

import json
from pathlib import Path
from typing import Any

from ycore.api.shown_rows import reading_rows, reading_warnings, rows_read
from ycore.config.resolve import resolve
from ycore.data.examples import load_examples
from ycore.data.prompts import load_prompts
from ycore.models.names import ModelPlan

TEMPLATE = (
    "{% if tools %}[{{ tools[0].name }}]{% endif %}{% for turn in messages %}<{{ turn.role }}>"
    "{{ turn.reasoning_content }}{{ turn.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}"


def read(
    folder: Path, method: str, row: dict[str, Any], template: str = TEMPLATE
) -> dict[str, Any]:
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "eos_token": "</s>"})
    )
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
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


def test_a_long_row_is_cut_in_the_middle(tmp_path: Path) -> None:
    lines = reading_rows(read(tmp_path, "grpo", {"prompt": "a" * 5000}))
    assert all(len(line) <= 70 for _, line in lines) and len(lines) < 7
    assert lines[-1][1].endswith("a</><assistant>")


def test_a_template_that_refuses_the_row_is_told(tmp_path: Path) -> None:
    rows = read(tmp_path, "grpo", ROW, "{{ raise_exception('no tools') }}")["rows"]
    assert "refuses this row: no tools" in rows[0]["asked"]
