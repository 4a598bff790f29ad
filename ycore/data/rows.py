"""Read what a row says: question, answers, tools and what else the chat template gets. All commands read by `FORMS`.

A form is chosen by the columns of the whole table and the command's `RowNeeds`; then each row is read by it.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from os.path import commonprefix
from typing import Any, Literal, NamedTuple

from ycore.data.cells import (
    GOLD_KEYS,
    IMAGE_COLUMNS,
    ROLES,
    Table,
    TableRow,
    check_characters,
    content_of,
    golds_of,
    is_dialogue,
    last_boxed,
    parse_literal,
    to_messages,
)
from ycore.errors import DataError
from ycore.types import IMAGE_MARK, Content, JsonObject, Message

ANSWERS = (
    "completion",
    "response",
    "output",
    "solution",
    "answer",
    "canonical_solution",
    "code",
    "solutions",
)


@dataclass(eq=False)  # looked up for each row
class Form:
    """Where a kind of dataset has its question and its answer.

    Attributes:
        question: The column of the question; a list of turns may hold the answer too.
        joined: Columns that follow the question as further paragraphs.
        answers: Columns of the answer, in order of preference; none where the turns hold it.
        marker: A column that only this kind of dataset has.
    """

    question: str
    joined: tuple[str, ...] = ()
    answers: tuple[str, ...] = ANSWERS
    marker: str | None = None


CONVERSATIONS = tuple(
    Form(name, answers=()) for name in ("messages", "conversations", "conversation")
)
FORMS = (
    Form("prompt"),  # TRL, verl, HumanEval, hh
    *CONVERSATIONS,  # OpenAI, ShareGPT
    Form("question", joined=("context", "starter_code")),  # GSM8K, SQuAD, OpenOrca, APPS, TACO
    Form("problem"),  # MATH, NuminaMath, OpenR1
    Form("instruction", joined=("input", "context")),  # Alpaca, Dolly
    Form("question_content", joined=("starter_code",)),  # LiveCodeBench
    Form("query"),  # MetaMath
    Form("input"),
    Form("text", answers=("code",), marker="test_list"),  # MBPP
)
"""The kinds of datasets, in order of preference where a table has the columns of several."""

SYSTEM_COLUMNS = ("system", "system_prompt")
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
"""Columns that the chat template gets beside the turns."""
REASONING_COLUMNS = ("reasoning_content", "reasoning", "thinking")
GOLD_COLUMNS = (
    "answer",
    "reward_model.ground_truth",
    "ground_truth",
    "expected_answer",
    "final_answer",
    "solution",
)
"""Columns that rewards get as `answer`, in order of preference."""
_EXPECTED_COLUMNS = r"""(?ix)
    # The question itself, and what belongs before it.
    prompt | messages | conversations? | question(_content)? | problem | instruction | query | inputs?
    | sys(tem)?(_\w+)? | instructions | (\w+_)?tools | tool_\w+ | functions | chat_template_kwargs
    | (\w+_)?history | previous_\w+ | trajectory | role
    # What the question is about.
    | contexts? | context_messages | documents? | passages? | article | body | paragraph | story | support | hint
    | starter_code | prefix | facts? | evidence | tables? | schema | premise | hypothesis
    # The answers to choose from: choices, b, option_b, Choice 2, opb.
    | choices | options | [a-e] | (option|choice|distractor)[ _]?\w | op[a-e]
    # Pictures and sounds: image, decoded_image, img_0, video path.
    | (decoded_)? (image|img|picture|video|audio)s? ([ _]?(\d+|path|file|url))?
    # What an answer is to teach, and how much.
    | reasoning(_content)? | thinking | weights? | loss_mask | margin | soft_label
"""
"""Names of columns that belong to a question, or say what it is to teach: the plan warns where one is not used."""
_EXPECTED_BESIDE_ANSWERS = rf"""{_EXPECTED_COLUMNS}
    | label | kto_tag | (complex_)?cot | chain_of_thought | rationale
    | \w+_(reasoning|thinking)(_\w+)? | thinking_\w+ | winner\w* | (\w+_)?preference
"""
"""Names that matter too beside an answer that is learned."""
_BEGINS_CHAT = re.compile(
    r"<\|im_start\|>|<s>|\[INST\]|<bos>|<\|(begin_of_text|start_header_id)\|>"
)
"""The marks at the beginning of a text that a chat template wrote."""
_OPENS_ANSWER = re.compile(
    r"""
    \n[ \t]*Assistant: | ASSISTANT: | \#\#\#\ (Response|Assistant|Answer):
    | <\|im_start\|>assistant | \[/INST\] | <\|end_header_id\|>             # ChatML, Mistral, Llama
    | <start_of_turn>model | <\|assistant\|>                                # Gemma, Phi
    """,
    re.VERBOSE,
)
"""The marks that open an answer in a text."""
_MARKS_OF_TURNS = ("\n\nHuman:", "<|im_start|>", "<|assistant|>", "<start_of_turn>", "[/INST]")
_ENDS_BEFORE_ANSWER = re.compile(rf"(?:{_OPENS_ANSWER.pattern})\s*\Z", re.VERBOSE)
# `[...]` and `{...}` as a whole, but no text that begins with the mark [INST].
_IN_BRACKETS = re.compile(r"(?!\[INST)(?:\[(?s:.*)\]|\{(?s:.*)\})\Z")
_MAX_ORDERS = 1000
_MAX_SPACES = 20  # of an answer that rewards may compare
_FIRST_ROWS = 100  # stand for all where every row would take too long


class RowNeeds(NamedTuple):
    """The part of a row that a command takes.

    Attributes:
        kind: `prompts` (the policy writes the answer), `answers`, `pairs`, or `labelled` (answers with a label).
        prompt_column: The user's choice; None goes by `FORMS`.
        answer_column: The same for the answer.
        as_chat: Make texts chat turns, for a model with a chat template.
        whole: Keep a conversation in one piece, for a loss over all answers.
    """

    kind: Literal["prompts", "answers", "pairs", "labelled"]
    as_chat: bool
    prompt_column: str | None = None
    answer_column: str | None = None
    whole: bool = False


class Row(NamedTuple):
    """A question, and the answers: `completion`; `chosen` and `rejected`; or all of it as `text` or `messages`."""

    question: Content | None
    answers: dict[str, Content]


class RowReader:
    """Reads the rows of a table by the form that its columns have; DataError with the row where that cannot be.

    Attributes:
        form: None where there is no question apart from the answers.
        notes: Counts what was read otherwise than it stands, by what was done.
    """

    def __init__(self, table: Table, needs: RowNeeds) -> None:
        self.table = table
        self.needs = needs
        self.notes: Counter[str] = Counter()
        self.roles: dict[str, str] = {}
        self._columns = frozenset(table.columns).difference(table.joined)
        self.has_pairs = {"chosen", "rejected"} <= self._columns
        self.labels: tuple[str, ...] = ()  # columns beside the answers that are learned from
        self.form = self._find_form()
        self._columns -= {self._question_name or ""}  # from here on, those beside the question
        self.answer = self._find_answer()
        self._other_golds = [
            name
            for name in (() if needs.answer_column else GOLD_COLUMNS[:-1])
            if name != self.answer and name.partition(".")[0] in self._columns
        ]
        self._joined = self._present(self.form.joined if self.form else ())
        self._system = self._first(SYSTEM_COLUMNS)
        self._history_columns = self._present(["history"])
        learns_turns = needs.as_chat and needs.kind != "prompts" and self.answer is not None
        self._reasoning = self._first(REASONING_COLUMNS) if learns_turns else None
        self._for_template = self._present(TEMPLATE_COLUMNS if needs.as_chat else ())
        self._whole_answers = self._present(("chosen", "completion"))
        self._has_image_columns = not self._columns.isdisjoint(IMAGE_COLUMNS)

    def _present(self, names: Sequence[str]) -> list[str]:
        """Return those of the names that are columns, apart from the question's."""
        return [name for name in names if name in self._columns]

    def _first(self, names: Sequence[str]) -> str | None:
        return next(iter(self._present(names)), None)

    def _find_form(self) -> Form | None:
        """Return the form of the column that the user named, or else the first that fits the table."""
        if (name := self.needs.prompt_column) is not None:
            self.table.require_column(name, "--prompt-column")
            return next((form for form in FORMS if form.question == name), Form(name))
        forms = FORMS
        others = tuple(form for form in FORMS if form not in CONVERSATIONS)
        if self.needs.kind == "answers":
            forms = CONVERSATIONS + others
        elif self.reads_pairs:
            forms = others
            chosen = self.table.row(0).cell("chosen") or []
            if not isinstance(chosen, list) or len(chosen) == 1:
                forms += CONVERSATIONS  # else they are often the pair's better answer
        return next((form for form in forms if self._fits(form)), None)

    def _fits(self, form: Form) -> bool:
        """Tell whether the table has the columns of a form; where answers are learned, one of these too."""
        if not {form.question, form.marker or form.question} <= self._columns:
            return False
        if self.needs.kind != "answers" or self.needs.answer_column or form in CONVERSATIONS:
            return True
        return not self._columns.isdisjoint(form.answers)

    def _find_answer(self) -> str | None:
        """Return the column with the answer; of a run with rollouts, the one that rewards get as `answer`."""
        if self.reads_pairs:
            return None
        if (name := self.needs.answer_column) is not None:
            self.table.require_column(name, "--answer-column")
            return name
        if self.needs.kind == "prompts":
            for name in GOLD_COLUMNS:
                if name in self._columns or any(
                    row.cell(name) is not None for row in islice(self.table, _FIRST_ROWS)
                ):
                    return name
            return None
        return self._first(self.form.answers if self.form else ())

    def prompt(self, row: TableRow) -> Content:
        """Return what the policy is asked: the question, or a conversation up to its last answer."""
        if self.form is None:
            content = content_of(row, "chosen", self.roles)
            turns = (
                to_messages(content)
                if isinstance(content, str) and is_dialogue(content)
                else content
            )
            if isinstance(turns, str):
                raise DataError(
                    f"'chosen' is an answer without its conversation in {row.place}; "
                    "name the column that holds the prompts with --prompt-column"
                )
            return self._after_history(self._before_answer(turns), row)
        question = self.question(row)
        if isinstance(question, str):
            return question
        if self.form.question != "prompt":
            return self._before_answer(question)
        for name in self._whole_answers:
            if isinstance(row.values.get(name), str | list):
                answer = content_of(row, name, self.roles)
                if not isinstance(answer, str):
                    head, _ = _split_answer(answer, question, name, row, strip=False)
                    return head or question
        return question

    def _before_answer(self, turns: list[Message]) -> list[Message]:
        """Cut the answer that ends a whole conversation: the policy is to write it."""
        stop = _num_before(turns, ["assistant"])
        if stop == len(turns):
            return turns
        self.notes["last answers are cut, for the policy writes them"] += 1
        return turns[:stop]

    def question(self, row: TableRow) -> Content:
        """Return the question, with what belongs before and after it."""
        assert self.form is not None
        content = content_of(row, self.form.question, self.roles)
        if isinstance(content, str):
            content = self._with_joined(content, row)
            if not self.needs.as_chat and not self._history_columns:
                system = _text_of(row, self._system)
                return f"{system}\n\n{content}" if system else content
            content = self._turns(content)
        elif beside := next((name for name in self._joined if _text_of(row, name)), None):
            raise DataError(
                f"{beside!r} is text beside a question of chat turns in {row.place}; "
                "write it into the turns, or rename the column"
            )
        return self._after_history(content, row)

    def _with_joined(self, text: str, row: TableRow) -> str:
        """Return a question of text with the columns that follow it; DataError where it was to be turns."""
        assert self.form is not None
        if self.form in CONVERSATIONS and not (self.needs.as_chat and is_dialogue(text)):
            raise DataError(
                f"{self.form.question!r} is text in {row.place}; it must be a list of {{role, content}} turns"
            )
        for name in self._joined:
            if more := _text_of(row, name):
                text = f"{text}\n\n{more}" if text.strip() else more
        if _IN_BRACKETS.match(text):
            self.notes["questions in brackets are taken as text, for they list no turns"] += 1
        return text

    def _turns(self, text: str) -> list[Message]:
        """Return the turns of a dialogue in a text, or a text as one turn of the user's."""
        if is_dialogue(text):
            return to_messages(text)
        if _BEGINS_CHAT.match(text) or _ENDS_BEFORE_ANSWER.search(text):
            self.notes[
                "texts have the marks of a chat template, and get the model's template around them"
            ] += 1
        return [{"role": "user", "content": text}]

    def _after_history(self, turns: list[Message], row: TableRow) -> list[Message]:
        """Put the columns `system` and `history` before the turns."""
        start = turns[:1] if turns and turns[0]["role"] == "system" else []
        rest = turns[len(start) :]
        if system := _text_of(row, self._system):
            if not start:
                start = [{"role": "system", "content": system}]
            elif start[0]["content"].strip() != system.strip():
                self.notes[
                    f"turns keep their own system prompt, not the column {self._system}"
                ] += 1
        return [*start, *(_history(row) if self._history_columns else ()), *rest]

    def may_show(self, content: Content) -> bool:
        """Tell whether a row with this question may have pictures."""
        if self._has_image_columns or isinstance(content, str):
            return self._has_image_columns
        return IMAGE_MARK in "".join([turn["content"] or "" for turn in content])

    def read(self, row: TableRow) -> Row | str:
        """Return what a row says to a trainer that learns from answers, or why nothing can be learned from it."""
        if self.reads_pairs:
            return self._pair(row)
        if self.form is None:
            return self._whole_text(row)
        if self.answer is not None:
            return self._answered(row)
        turns = self.question(row)
        assert isinstance(turns, list)
        return self._cut(turns)

    @property
    def reads_pairs(self) -> bool:
        return self.has_pairs and (
            self.needs.kind == "pairs"
            or (self.needs.kind == "labelled" and "label" not in self._columns)
        )

    def _answered(self, row: TableRow) -> Row | str:
        """Read a question and an answer in two columns."""
        assert self.form is not None and self.answer is not None
        question = self.question(row)
        answer = (
            self._first_solution(row)
            if self.answer == "solutions"
            else content_of(row, self.answer, self.roles)
        )
        if _is_empty(answer):
            return "no answer"
        if text := _text_of(row, self._reasoning):
            if re.fullmatch("(?i)on|off|true|false", text) or "</think>" in last_text(answer):
                raise DataError(
                    f"{self._reasoning!r} is {text!r:.40} in {row.place}: a switch, or beside an answer that thinks; "
                    f"remove the column, or rename it: --set columns.mode={self._reasoning}"
                )
            turns = (
                [{"role": "assistant", "content": answer}]
                if isinstance(answer, str)
                else answer
            )
            answer = [*turns[:-1], {**turns[-1], "reasoning_content": text}]
        return self._joined_row(row, question, {"completion": answer})

    def _first_solution(self, row: TableRow) -> Content:
        """Return the first of APPS's and TACO's programs."""
        solutions = _parsed(row, "solutions") or [""]
        if not isinstance(solutions, Sequence) or not isinstance(solutions[0], str):
            raise DataError(
                f"'solutions' is {solutions!r:.60} in {row.place}; it is a list of programs: correct or remove the row"
            )
        if len(solutions) > 1:
            self.notes["of several solutions the first is learned"] += 1
        return solutions[0]

    def _joined_row(
        self, row: TableRow, question: Content, answers: dict[str, Content]
    ) -> Row | str:
        """Return question and answers as texts, or all as chat turns; answers that repeat the question lose it."""
        last_words = last_text(question).strip()
        are_texts = isinstance(question, str)
        for name, answer in answers.items():
            if not isinstance(answer, str):
                are_texts = False
            elif last_words and answer.lstrip().startswith(last_words):
                self.notes[
                    "answers begin with their question and are learned with it; cut it there if it is no part of them"
                ] += 1
            elif is_dialogue(answer):
                raise DataError(_holds_question(name, row))
            elif any(mark in answer for mark in _MARKS_OF_TURNS):
                self.notes["answers have the marks of turns, which are learned too"] += 1
        if are_texts and not self.needs.as_chat:
            return Row(question, answers)
        turns = self._turns(question) if isinstance(question, str) else question
        text = row.cell(self._question_name or "")
        was_dialogue = isinstance(text, str) and is_dialogue(text)
        if turns and turns[-1]["role"] == "assistant":
            raise DataError(
                f"the prompt ({self._question_name!r}) ends with an assistant turn in {row.place}; "
                "remove that turn: it stands before the answer"
            )
        if was_dialogue and any(_is_empty([turn]) for turn in turns):
            return "a turn is empty"
        if self._asks_nothing(turns):
            return "no question"
        heads: list[list[Message]] = []
        learned: dict[str, Content] = {}
        for name, answer in answers.items():
            head, learned[name] = _split_answer(answer, turns, name, row, strip=was_dialogue)
            heads.append(head or turns)
        if heads[0] != heads[-1]:
            return "conversations part before the last answer"
        return Row(heads[0], learned)

    def _asks_nothing(self, turns: list[Message]) -> bool:
        """Tell whether the last question is blank, and no column has a picture in its place."""
        asks = not turns or turns[-1]["role"] != "user" or last_text(turns).strip()
        return not (asks or self._has_image_columns)

    @property
    def _question_name(self) -> str | None:
        return self.form.question if self.form else None

    def _cut(self, turns: list[Message]) -> Row | str:
        """Cut before the last answer, so that the loss is of that answer and not of what the user said."""
        if self.needs.whole and not _is_empty(turns):
            return Row(None, {"messages": turns})
        question, answer = self._split_last_answer(turns)
        if _is_empty(answer):
            return "no answer"
        if not question or self._asks_nothing(question):
            return "no question"
        return Row(question, {"completion": answer})

    def _split_last_answer(self, turns: list[Message]) -> tuple[list[Message], list[Message]]:
        """Split a conversation before the turns of the assistant at its end; questions that nobody answers are cut."""
        stop = _num_before(turns, ["user", "system", "developer", "tool"])
        if stop < len(turns) and stop:
            self.notes["last questions that nobody answers are cut"] += 1
        start = _num_before(turns[:stop], ["assistant"])
        return turns[:start], turns[start:stop]

    def _whole_text(self, row: TableRow) -> Row | str:
        """Read the column `text`, which holds a conversation or is learned as it stands."""
        content = content_of(row, "text", self.roles)
        if isinstance(content, str) and self.needs.as_chat and is_dialogue(content):
            content = to_messages(content)
        if isinstance(content, list):
            return self._cut(self._after_history(content, row))
        self._refuse_history(row, "'text'")
        return Row(None, {"text": content}) if content.strip() else "no text"

    def _refuse_history(self, row: TableRow, columns: str) -> None:
        """DataError where a system prompt or earlier turns would stand before no question."""
        if self._after_history([], row):
            raise DataError(
                f"{row.place} has a system prompt or a history, and no question before {columns}; "
                "name the question's column with --prompt-column, or make them chat turns"
            )

    def _pair(self, row: TableRow) -> Row | str:
        """Read a better and a worse answer, with the question that a column has or that both begin with."""
        pair = {}
        for name in ("chosen", "rejected"):
            content = content_of(row, name, self.roles)
            if self.needs.as_chat and isinstance(content, str) and is_dialogue(content):
                content = to_messages(content)
            if _is_empty(content) or (
                isinstance(content, list) and content[-1]["role"] == "user"
            ):
                return "no answer"
            pair[name] = content
        if pair["chosen"] == pair["rejected"]:
            return "answers equal"
        if self.form is not None:
            question = self.question(row)
            if isinstance(question, list) and self.form in CONVERSATIONS:
                question = self._before_answer(question)
            return self._joined_row(row, question, pair)
        return self._pair_alone(row, **pair)

    def _pair_alone(self, row: TableRow, chosen: Content, rejected: Content) -> Row | str:
        """Return a pair without a column for its question, which is the common beginning of both."""
        if isinstance(chosen, str) and isinstance(rejected, str):
            self._refuse_history(row, "'chosen' and 'rejected'")
            if self.needs.as_chat or "Assistant:" not in chosen:
                self.notes["questions are the common beginning of chosen and rejected"] += 1
            return _split_texts(chosen, rejected)
        if isinstance(chosen, str) or isinstance(rejected, str):
            raise DataError(
                f"one of 'chosen' and 'rejected' is chat turns in {row.place}, and the other is text; "
                "make them the same kind"
            )
        differ_last = len(chosen) > 1 and chosen[:-1] == rejected[:-1]
        are_answers = chosen[-1]["role"] == rejected[-1]["role"] == "assistant"
        if not (differ_last and are_answers):
            return "conversations part before the last answer"
        question = self._after_history(chosen[:-1], row)
        if self._asks_nothing(question):
            return "no question"
        return Row(question, {"chosen": chosen[-1:], "rejected": rejected[-1:]})

    def tools(self, row: TableRow) -> Sequence[Any]:
        """Return the tools that the chat template lists before the question."""
        value = self._template_cell(row, "tools") or []
        with suppress(ValueError, TypeError):
            value = [parse_literal(tool) if isinstance(tool, str) else tool for tool in value]
        if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
            raise DataError(
                f"'tools' is {value!r:.60} in {row.place}; it is a list of tools as JSON schemas: correct the cell"
            )
        return value

    def template_arguments(self, row: TableRow) -> JsonObject:
        """Return the row's own arguments of the chat template."""
        value = self._template_cell(row, "chat_template_kwargs") or {}
        if not isinstance(value, Mapping):
            raise DataError(
                f"'chat_template_kwargs' is {type(value).__name__} in {row.place}; it is an object"
            )
        return {str(key): item for key, item in value.items() if item is not None}

    def _template_cell(self, row: TableRow, column: str) -> Any:
        return _parsed(row, column) if column in self._for_template else None

    def note_gold(self, row: TableRow) -> None:
        """Count answers that rewards cannot compare, or hardly."""
        if self.answer is None:
            return
        try:
            golds = golds_of(row.cell(self.answer))
            for name in self._other_golds:
                if (other := golds_of(row.cell(name))) and set(golds).isdisjoint(other):
                    self.notes[
                        f"{name} is not {self.answer}, which rewards compare; name the right one with --answer-column"
                    ] += 1
        except RecursionError:
            raise DataError(
                f"{self.answer!r} nests too deep in {row.place}; flatten it"
            ) from None
        if not golds:
            self.notes[
                f"{self.answer} is empty, or has none of the keys {', '.join(GOLD_KEYS)}: "
                "rewards that compare it do not score the row"
            ] += 1
        elif golds[0].count(" ") > _MAX_SPACES:
            self.notes[
                f"{self.answer} is a long text: rewards that compare it want all of it"
            ] += 1

    def gold(self, row: TableRow) -> Any:
        """Return what rewards get as `answer`; of a worked solution that boxes its result, the result."""
        assert self.answer is not None
        value = row.cell(self.answer)
        is_worked = self.answer == "solution" and self.needs.answer_column is None
        if is_worked and isinstance(value, str):
            return last_boxed(value) or value
        return value

    @property
    def used(self) -> set[str]:
        """The columns that were read."""
        used = {
            self._question_name if self.needs.kind != "prompts" else self.prompt_column,
            self.answer,
            self._system,
            self._reasoning,
            *self._joined,
            *self._for_template,
            *IMAGE_COLUMNS,
            "history",
        }
        if self.reads_pairs:
            used |= {"chosen", "rejected", "margin", *self.labels}
        if self.needs.kind == "labelled":
            used.add("label")
        if self.needs.kind == "answers" and self.form is None:
            used.add("text")
        return {
            name if name in self.table.columns else name.partition(".")[0]
            for name in used
            if name
        }

    @property
    def prompt_column(self) -> str | None:
        """The column that the policy is asked with; None where there is none."""
        return self._question_name or ("chosen" if self.has_pairs else None)

    def summary(self) -> JsonObject:
        """Describe the reading as JSON values; only after all rows were read are its notes whole."""
        used = {*self.used, *self.table.joined}
        unused = [name for name in self.table.columns if name not in used]
        notes = [f"{count} x {note}" for note, count in sorted(self.notes.items())]
        if self.roles:
            notes.append(
                "roles "
                + ", ".join(f"{name} as {role}" for name, role in sorted(self.roles.items()))
            )
        return {
            "in_words": self.in_words(),
            "split": self.table.split,
            "unused": unused,
            "expected": self._expected(unused),
            "notes": notes,
        }

    def _expected(self, unused: Sequence[str]) -> list[str]:
        """Return the unused columns that matter by their names, and say in some row what its question does not."""
        wanted = _EXPECTED_COLUMNS if self.needs.kind == "prompts" else _EXPECTED_BESIDE_ANSWERS
        names = [name for name in unused if re.fullmatch(wanted, name)]
        more = set[str]()
        notes = self.notes.copy()  # of these rows were taken when all were read
        for row in islice(self.table, _FIRST_ROWS if names else 0):
            question = self._read_question(row)
            with suppress(RecursionError):  # a cell that nests so deep is no part of a question
                words = _flat(question)
                more.update(name for name in names if _says_more(row.cell(name), words))
        self.notes = notes
        return [name for name in names if name in more]

    def _read_question(self, row: TableRow) -> Any:
        """Return a row's question, or all that it says where the question is no part of its own."""
        if self.needs.kind == "prompts":
            return self.prompt(row) if self.prompt_column else None
        read = self.read(row)
        return read if isinstance(read, str) else read.question or read.answers

    def in_words(self) -> str:
        """`question from instruction + input, answer from output, tools`."""
        question = self.prompt_column or "the environment"
        answer = " + ".join(filter(None, (self._reasoning, self.answer)))
        if self.reads_pairs:
            question = self._question_name or "what chosen and rejected share"
            answer = "chosen and rejected"
        elif self.needs.kind != "prompts":
            question = self._question_name or "text"
            answer = answer or question
        parts = (self._system, *self._history_columns, question, *self._joined)
        words = f"question from {' + '.join(filter(None, parts))}"
        if answer:
            words += f", answer from {answer}"
        return ", ".join([words, *self._for_template])


def _says_more(value: Any, words: str) -> bool:
    """Tell whether a cell has a text that `words` lack; what turns of the assistant say does not count."""
    if isinstance(value, Mapping):
        role = ROLES.get(str(value.get("role", value.get("from"))))
        asked = [value.get("content", value.get("value"))] if role else list(value.values())
        value = [] if role == "assistant" else asked
    if isinstance(value, list):
        return any(_says_more(item, words) for item in value)
    text = str(value).strip()
    pattern = rf"(?<!\w){re.escape(_flat(text)[1:-1])}(?!\w)"
    return not (_is_blank(text) or text == "None" or re.search(pattern, words))


def _flat(value: Any) -> str:
    """Return a value as JSON, in one line and with single spaces."""
    return " ".join(json.dumps(value, ensure_ascii=False).replace("\\n", " ").split())


def _text_of(row: TableRow, column: str | None) -> str:
    """Return a cell of text; empty where there is none, or pandas' `nan`."""
    value = None if column is None else row.cell(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"{column!r} is {type(value).__name__} in {row.place}; it is text that belongs to the question: "
            "write it as text, or rename the column"
        )
    check_characters(value, repr(column), row)
    return "" if _is_blank(value) else value


def _history(row: TableRow) -> list[Message]:
    """Return the earlier turns of Alpaca's `history`: a list of questions with their answers."""
    value = _parsed(row, "history") or []
    if value and isinstance(value[0], Mapping):
        listed = content_of(row, "history", {})
        assert not isinstance(listed, str)
        return listed
    turns: list[Message] = []
    for pair in value:
        if not isinstance(pair, list | tuple) or [*map(type, pair)] != [str, str]:
            raise DataError(
                f"'history' has {pair!r:.60} in {row.place}; it is a list of [question, answer] pairs"
            )
        question, answer = pair
        turns += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    return turns


def _parsed(row: TableRow, column: str) -> Any:
    """Return the value of a cell that may hold JSON in a text; None where it is empty."""
    value = row.own_cell(column)
    if not isinstance(value, str):
        return value
    if _is_blank(value):
        return None
    try:
        return parse_literal(value)
    except ValueError as problem:
        raise DataError(
            f"{column!r} cannot be read as JSON in {row.place}: {problem}; correct the cell"
        ) from None


class RoleOrders:
    """Tells the first of the rows whose turns have the same roles and keys: a chat template takes all of them, or none.

    Of a thousand orders only the first rows are told.
    """

    def __init__(self) -> None:
        self._orders: set[Any] = set()

    def is_new(self, *contents: Any) -> bool:
        """Tell whether no row before had turns of these roles and keys."""
        order = tuple(
            [
                turn["role"] if len(turn) == 2 else (turn["role"], *turn)
                for content in contents
                if type(content) is list
                for turn in content
            ]
        )
        if order in self._orders or len(self._orders) == _MAX_ORDERS:
            return False
        self._orders.add(order)
        return True


def last_text(content: Content) -> str:
    """Return a text itself, or the text of the last turn; empty where there is none."""
    if isinstance(content, str):
        return content
    return (content[-1].get("content") or "") if content else ""


def _is_empty(content: Content) -> bool:
    """Tell whether there is nothing to learn from: no turns, blank text, or a last turn that is blank."""
    if isinstance(content, str):
        return _is_blank(content)
    return not last_text(content).strip() and not (content and content[-1].get("tool_calls"))


def _is_blank(text: str) -> bool:
    """Tell whether a cell of text is empty, or `nan` as pandas writes an empty one."""
    return text.strip().lower() in ("", "nan")


def _split_answer(
    content: Content, question: list[Message], name: str, row: TableRow, *, strip: bool
) -> tuple[list[Message] | None, list[Message]]:
    """Split a whole conversation into its question and the answer; None for the question where it is no conversation.

    The conversation's question wins where the row's `question` is its end: it may have a system prompt, earlier turns or
    less white space.
    """
    if isinstance(content, str):
        if strip:
            content = content.strip().removeprefix("Assistant:").lstrip()
        return None, [{"role": "assistant", "content": content}]
    start = _num_before(content, ["assistant", "tool"])
    repeats = _starts_with(content, question)
    if start == 0 and not repeats:
        return None, content
    if start == len(content):
        raise DataError(
            f"{name!r} ends with a {content[-1]['role']} turn in {row.place}; an answer ends with the assistant's"
        )
    head = content[:start]
    if repeats and start <= len(question):
        return content[: len(question)], content[len(question) :]
    if not repeats and _starts_with(head[-len(question) :], question):
        return head, content[start:]
    if not repeats and _starts_with(question[-start:], head):
        return None, content[start:]
    raise DataError(_holds_question(name, row))


def _num_before(turns: Sequence[Message], roles: Sequence[str]) -> int:
    """Count the turns before those at the end that all have one of the roles."""
    count = len(turns)
    while count and turns[count - 1]["role"] in roles:
        count -= 1
    return count


def _holds_question(name: str, row: TableRow) -> str:
    return (
        f"{name!r} contains a user's turn that the row's question lacks in {row.place}; an answer is the "
        "assistant's alone: remove the turns before it, or the column with the question"
    )


def _starts_with(turns: Sequence[Message], question: Sequence[Message]) -> bool:
    """Tell whether the turns begin with the question, without regard to white space."""
    begin, end = (
        [(turn["role"], (turn.get("content") or "").split()) for turn in listed]
        for listed in (turns[: len(question)], question)
    )
    return begin == end


def _split_texts(chosen: str, rejected: str) -> Row | str:
    """Cut where the assistant's last turn begins, else at the last space of the common beginning."""
    common = commonprefix([chosen, rejected])  # noqa: RUF071 (letter by letter)
    marks = list(_OPENS_ANSWER.finditer(common))
    end = marks[-1].end() if marks else common.rfind(" ")
    answers = (chosen[end:], rejected[end:])
    if end <= 0 or not all(map(str.strip, answers)) or any(map(_OPENS_ANSWER.search, answers)):
        return "conversations part before the last answer"
    return Row(chosen[:end], dict(zip(("chosen", "rejected"), answers, strict=True)))


def renamed(table: Table, columns: Mapping[str, str]) -> Table:
    """Give columns the names of `columns` in place of the user's, which are its values, and may be keys of objects."""
    for new_name, old_name in columns.items():
        table.require_column(old_name, f"columns.{new_name}")
    if not columns:
        return table
    gone = {*columns, *columns.values()}
    kept = [name for name in table.columns if name not in gone]
    rows = [
        {name: row.values[name] for name in kept if name in row.values}
        | {new_name: row.cell(old_name) for new_name, old_name in columns.items()}
        for row in table
    ]
    return replace(table, rows=rows, columns=(*kept, *columns))
