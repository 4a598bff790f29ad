"""Show in a plan what was read of a dataset: which columns, and its first rows as the model will see them."""

import json
import math
from collections.abc import Sequence
from itertools import islice
from os.path import commonprefix
from typing import Any

from ycore.config.schema import RunConfig
from ycore.data.examples import ExampleSet
from ycore.data.prompts import PromptSet, load_prompts
from ycore.data.rows import REASONING_COLUMNS
from ycore.errors import DataError, ModelError
from ycore.models.names import ChatTemplate, ModelPlan, resolve_model
from ycore.run.text import named_first
from ycore.types import Content, JsonObject, Prompt, Record, said

_ANSWERS = {"completion": "learned", "chosen": "better", "rejected": "worse"}
_WIDTH = 68
_MAX_LINES = 3
_MEASURED_ROWS = 16  # whose length stands for all
_TOKEN_CHARACTERS = 4  # a rough mean, for the forecast of seconds alone
_TURN_KEYS = {"role", "content", "tool_calls", "tool_call_id", "id", *REASONING_COLUMNS}
"""Keys of a turn that are looked for in other ways, or that no template writes."""


def rows_read(
    rows: PromptSet | ExampleSet,
    model: ModelPlan,
    template_arguments: Record | None,
    *,
    num_rows: int,
) -> JsonObject:
    """Describe the reading, with the first rows written by the model's template where it is on this machine.

    DataError where the template refuses a row; of the rows with the same order of roles, one is tried.
    """
    if isinstance(rows, PromptSet) and rows.parts:
        return _parts_read(rows, model, template_arguments, num_rows=num_rows)
    writer = _RowWriter(model, template_arguments or {})
    every: Sequence[Any] = rows.prompts if isinstance(rows, PromptSet) else rows.train
    if rows.is_chat and writer.has_template:
        for place, row in rows.samples.items():
            writer.row(every[row] if isinstance(row, int) else row, place)
    first = islice(every, max(num_rows, _MEASURED_ROWS))
    written = [writer.row(row, "a row that the plan shows") for row in first]
    notes = list(rows.reading.get("notes", ()))
    if rows.is_chat and not writer.has_template:
        notes.append("the model is not here yet: rows are shown without its chat template")
    characters = sum(len(text) for row in written for text in row.values())
    return {
        **rows.reading,
        "notes": notes,
        "rows": written[:num_rows],
        "lost": sorted(writer.lost),
        "mean_tokens": math.ceil(characters / _TOKEN_CHARACTERS / max(1, len(written))),
    }


def _parts_read(
    rows: PromptSet, model: ModelPlan, arguments: Record | None, *, num_rows: int
) -> JsonObject:
    """Describe the reading of several datasets as one."""
    readings = {
        name: rows_read(part, model, arguments, num_rows=num_rows)
        for name, part in rows.parts.items()
    }
    merged = {
        "in_words": "; ".join(f"{name}: {part['in_words']}" for name, part in readings.items()),
        "mean_tokens": max(part["mean_tokens"] for part in readings.values()),
    }
    for key in ("unused", "expected", "notes", "rows", "lost"):
        merged[key] = [item for part in readings.values() for item in part[key]]
    return merged


def reading_rows(reading: Record) -> list[tuple[str, str]]:
    """Put `rows_read` into words, in lines of at most 80 columns."""
    unused = f"; not used: {', '.join(reading['unused'])}" if reading["unused"] else ""
    lines = [*named_first("read", [reading["in_words"] + unused, *reading["notes"]])]
    for row in reading["rows"]:
        for label, text in row.items():
            lines += named_first(label, _lines_of(text))
    return lines


def _lines_of(text: str) -> list[str]:
    r"""Cut a text into lines, with its own line breaks as `\n`; the middle of a long one is left out."""
    text = text.replace("\n", "\\n")
    lines = [text[start : start + _WIDTH] for start in range(0, len(text), _WIDTH)] or [""]
    if (num_left_out := len(text) - _MAX_LINES * _WIDTH) > 0:
        lines[_MAX_LINES - 1 :] = [f"... {num_left_out} characters ...", text[-_WIDTH:]]
    return lines


def reading_warnings(reading: Record, *, has_tools: bool) -> list[str]:
    """Name what the rows say and the model does not get, a line each."""
    lines = [
        f"the column {name} is not used, and its name says that it matters; rename it to what it is, or remove it"
        for name in reading["expected"]
    ]
    if lost := ", ".join(reading["lost"]):
        lines.append(f"the chat template does not show {lost}: the model will not see it")
    if has_tools and "tools" in reading["in_words"].split(", "):
        lines.append("the rows' tools are not used: the run has tools of its own")
    return lines


def shown_dataset(
    config: RunConfig, *, num_rows: int
) -> tuple[JsonObject, list[tuple[str, str]]]:
    """Read the dataset of a run, as its dry run does, as JSON values and as rows of a table.

    A model that is not known here shows its rows without a chat template.
    """
    try:
        model = resolve_model(config.model)
    except ModelError as problem:
        model = ModelPlan(
            "hub", config.model, None, False, str(problem), has_chat_template=True
        )
    prompts = load_prompts(config, as_chat=model.has_chat_template is True)
    arguments = config.trl.get("chat_template_kwargs")
    reading = rows_read(prompts, model, arguments, num_rows=num_rows)
    warnings = reading_warnings(reading, has_tools=config.has_turns)
    rows = [("dataset", f"{config.dataset}: {len(prompts.prompts)} rows")]
    rows += [*reading_rows(reading), *(("warning", line) for line in warnings)]
    return {"rows": len(prompts.prompts), "reading": reading, "warnings": warnings}, rows


class _RowWriter:
    """Writes rows as the model sees them.

    Attributes:
        lost: What rows say, and the template leaves out.
    """

    def __init__(self, model: ModelPlan, arguments: Record) -> None:
        self.lost: set[str] = set()
        folder = model.ready_folder
        self._template = ChatTemplate(folder) if folder is not None else None
        self._arguments = arguments
        self._name = model.name

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def row(self, row: Prompt | Record, place: str) -> dict[str, str]:
        try:
            return self._prompt(row) if isinstance(row, Prompt) else self._example(row)
        except ValueError as problem:
            raise DataError(
                f"the chat template of {self._name} refuses {place}: {problem}; "
                "change or remove the row, or take a model whose template takes it"
            ) from None

    def _prompt(self, prompt: Prompt) -> dict[str, str]:
        options = {"tools": list(prompt.tools) or None, **prompt.template_arguments}
        return {"asked": self._written(prompt.content, options, opens_answer=True)}

    def _example(self, example: Record) -> dict[str, str]:
        """Return the prompt, up to where all answers still agree with it, and what follows: what is learned from."""
        tools = example.get("tools")
        options = {
            "tools": json.loads(tools) if tools else None,
            **(example.get("chat_template_kwargs") or {}),
        }
        if "prompt" not in example:
            content = example["messages"] if "messages" in example else example["text"]
            return {"learned": self._written(content, options)}
        prompt = self._written(example["prompt"], options, opens_answer=True)
        answers = {
            label: self._written(example["prompt"] + example[name], options)
            for name, label in _ANSWERS.items()
            if name in example
        }
        shared = len(commonprefix([prompt, *answers.values()]))  # noqa: RUF071 (letter by letter)
        written = {"asked": prompt[:shared]} | {
            label: text[shared:] for label, text in answers.items()
        }
        if "label" in example:
            written["label"] = "good" if example["label"] else "bad"
        return written

    def _written(self, content: Content, options: Record, *, opens_answer: bool = False) -> str:
        if isinstance(content, str):
            if options.get("tools"):
                self.lost.add("the row's tools")
            end = "" if opens_answer or self._template is None else self._template.eos_token
            return content if content.endswith(end) else content + end  # as TRL ends texts
        if self._template is None:
            return "\n".join(f"{turn['role']}: {said(turn)}" for turn in content)
        options = {**self._arguments, **options}
        text = self._template.render(content, add_generation_prompt=opens_answer, **options)
        self._note_lost(content, options.get("tools") or (), text)
        return text

    def _note_lost(self, turns: Sequence[Record], tools: Sequence[Record], text: str) -> None:
        words = " ".join(text.split())

        def is_lost(value: Any) -> bool:
            return " ".join(str(value or "").split()) not in words

        for turn in turns:
            role = turn["role"]
            if not _are_named(turn.get("tool_calls") or (), text):
                self.lost.add(f"the tool_calls of the {role}")
            self.lost.update(
                f"{key} of the {role}" for key in turn.keys() - _TURN_KEYS if is_lost(turn[key])
            )
            content = turn.get("content")
            if isinstance(content, str):
                # Templates drop earlier thinking on purpose.
                content = " ".join(content.rpartition("</think>")[2].split())
                if content not in words and json.dumps(content)[1:-1] not in text:
                    self.lost.add(f"what the {role} says")
        answer = turns[-1] if turns else {}
        parts = [key for key in REASONING_COLUMNS if is_lost(answer.get(key))]
        self.lost.update(f"{key} of the answer" for key in parts)
        if not _are_named(tools, text):
            self.lost.add("the row's tools")


def _are_named(entries: Sequence[Record], text: str) -> bool:
    return all(str(entry.get("function", entry).get("name", "")) in text for entry in entries)
