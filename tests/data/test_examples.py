"""Rows for the trainers without rollouts: every kind of column, what is left out, what is held out, what is refused."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from ycore.config.resolve import resolve
from ycore.config.schema import TuneConfig
from ycore.data.cells import Table
from ycore.data.examples import ExampleSet, hold_out, load_examples, num_overlapping, pair_table
from ycore.errors import ConfigError, DataError

USER, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
TALK = "\n\nHuman: hello\n\nAssistant: hi there\n\nHuman: colour of the sky?\n\nAssistant:"


def load(
    folder: Path, method: str, rows: list[dict[str, Any]], *, as_chat: bool = True, **keys: Any
) -> ExampleSet:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "algorithm": method,
        "model": "m",
        "dataset": str(file),
        "output": "o",
        "held_out": 0,
        **keys,
    }
    return load_examples(resolve(options=options), as_chat=as_chat)


SFT: list[tuple[dict[str, Any], bool, dict[str, Any]]] = [
    ({"text": "Once."}, True, {"text": "Once."}),
    ({"prompt": "2 + 2?", "completion": "4"}, True, {"prompt": [USER], "completion": [ANSWER]}),
    ({"prompt": "2 + 2?", "completion": "4"}, False, {"prompt": "2 + 2?", "completion": "4"}),
    ({"question": "2 + 2?", "answer": "4"}, True, {"prompt": [USER], "completion": [ANSWER]}),
    (
        {"instruction": "Add.", "input": "2 2", "output": "4"},
        False,
        {"prompt": "Add.\n\n2 2", "completion": "4"},
    ),
    ({"messages": [USER, ANSWER, USER]}, True, {"prompt": [USER], "completion": [ANSWER]}),
    (
        {
            "conversations": [
                {"from": "human", "value": "2 + 2?"},
                {"from": "gpt", "value": "4"},
            ]
        },
        True,
        {"prompt": [USER], "completion": [ANSWER]},
    ),
]


@pytest.mark.parametrize(("row", "as_chat", "expected"), SFT)
def test_rows_of_sft(
    row: dict[str, Any], as_chat: bool, expected: dict[str, Any], tmp_path: Path
) -> None:
    assert load(tmp_path, "sft", [row], as_chat=as_chat).train == [expected]


@pytest.mark.parametrize("method", ["sdft", "gold"])
def test_who_needs_answers_refuses_texts(method: str, tmp_path: Path) -> None:
    """The dry run took them, and the trainer ended in a traceback."""
    more = {"trl": {"teacher_model_name_or_path": "t"}} if method == "gold" else {}
    with pytest.raises(DataError, match="messages, or prompt and completion"):
        load(tmp_path, method, [{"text": "2 + 2 = 4"}], **more)


def test_a_conversation_stays_whole_for_a_loss_over_all_answers(tmp_path: Path) -> None:
    rows = [{"messages": [USER, ANSWER, USER, ANSWER]}]
    assert load(tmp_path, "sft", rows, trl={"assistant_only_loss": True}).train == rows


def test_pairs_that_share_their_beginning_as_hh_rlhf_has_them(tmp_path: Path) -> None:
    rows = [{"chosen": f"{TALK} blue", "rejected": f"{TALK} green"}]
    (row,) = load(tmp_path, "reward", rows).train
    assert [turn["role"] for turn in row["prompt"]] == ["user", "assistant", "user"]
    assert row["chosen"] == [{"role": "assistant", "content": "blue"}]
    assert row["rejected"] == [{"role": "assistant", "content": "green"}]
    assert load(tmp_path, "reward", rows, as_chat=False).train == [
        {"prompt": TALK, "chosen": " blue", "rejected": " green"}
    ]


def test_pairs_with_their_prompt(tmp_path: Path) -> None:
    plain = [{"prompt": "2 + 2?", "chosen": "4", "rejected": "5", "margin": 2}]
    (row,) = load(tmp_path, "dpo", plain).train
    assert row == {
        "prompt": [USER], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "5"}], "margin": 2.0,
    }  # fmt: skip
    repeated = [
        {
            "prompt": "2 + 2?",
            "chosen": [USER, ANSWER],
            "rejected": [USER, {**ANSWER, "content": "5"}],
        }
    ]
    assert load(tmp_path, "dpo", repeated).train == [
        {name: value for name, value in row.items() if name != "margin"}
    ]


def test_soft_labels_of_pairs_name_the_likelier_answer_chosen(tmp_path: Path) -> None:
    pair = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
    soft_labels = [0.9, 0.25, None, 1]
    rows = [pair | {"soft_label": soft_label} for soft_label in soft_labels]
    read = load(tmp_path, "reward", rows, as_chat=False).train
    assert sorted((row["chosen"], row["rejected"], row["soft_label"]) for row in read) == [
        ("4", "5", 0.9), ("4", "5", 1.0), ("4", "5", 1.0), ("5", "4", 0.75),
    ]  # fmt: skip
    assert not load(tmp_path, "reward", rows).reading["unused"]
    hard = load(tmp_path, "dpo", rows)
    assert all(row["chosen"] == [ANSWER] and "soft_label" not in row for row in hard.train)
    assert hard.reading["expected"] == ["soft_label"]
    for soft_label in (1.5, -0.1, "nan", "often", True):
        with pytest.raises(DataError, match=r"'soft_label' is .* a number from 0 to 1"):
            load(tmp_path, "reward", [pair | {"soft_label": soft_label}])
    with pytest.raises(DataError, match=r"row 0 .*a margin, 2, and a soft_label, 0\.9"):
        load(tmp_path, "reward", [pair | {"soft_label": 0.9, "margin": 2}])


@pytest.mark.parametrize("as_chat", [True, False])
def test_a_table_of_pairs_has_the_answers_as_texts(as_chat: bool) -> None:
    """With other columns kept, and rows left out whose answers are the same."""
    rows = [
        {"question": "q", "chosen": "good", "rejected": "bad", "topic": "t"},
        {"question": "q", "chosen": "same", "rejected": "same", "topic": "t"},
    ]
    pairs = pair_table(Table("d", rows, tuple(rows[0])), None, as_chat=as_chat)
    (row,) = pairs.rows
    assert (row["chosen"], row["rejected"], row["topic"]) == ("good", "bad", "t")
    assert row["prompt"] == ([{"role": "user", "content": "q"}] if as_chat else "q")
    with pytest.raises(DataError, match="no row of d has two answers that differ"):
        pair_table(Table("d", rows[1:], tuple(rows[0])), None, as_chat=as_chat)
    with pytest.raises(DataError, match="rejected"):
        pair_table(Table("d", [{"chosen": "c"}], ("chosen",)), None, as_chat=as_chat)


def test_texts_without_a_dialogue_are_cut_at_the_last_blank_they_share(tmp_path: Path) -> None:
    rows = [{"chosen": "The sky is bright blue.", "rejected": "The sky is broken."}]
    assert load(tmp_path, "dpo", rows).train == [
        {"prompt": "The sky is", "chosen": " bright blue.", "rejected": " broken."}
    ]


def test_texts_that_share_no_beginning_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"chosen": "The sky is blue.", "rejected": "The sky is red."},
        {"chosen": "red wine", "rejected": "A wine"},
    ]
    examples = load(tmp_path, "dpo", rows)
    assert len(examples.train) == 1
    assert examples.left_out_note == "1 left out (1 conversations part before the last answer)"


def test_pairs_that_say_nothing_are_left_out_and_counted(tmp_path: Path) -> None:
    good = {"chosen": f"{TALK} blue", "rejected": f"{TALK} green"}
    equal = {"chosen": f"{TALK} blue", "rejected": f"{TALK} blue"}
    empty = {"chosen": TALK, "rejected": f"{TALK} green"}
    apart = {"chosen": f"{TALK} blue", "rejected": "\n\nHuman: bye\n\nAssistant: bye"}
    examples = load(tmp_path, "reward", [good, equal, equal, empty, apart])
    assert len(examples.train) == 1
    assert examples.left_out_note == (
        "4 left out (2 answers equal, 1 conversations part before the last answer, 1 no answer)"
    )
    with pytest.raises(DataError, match=r"no row of .* can be learned from \(answers equal\)"):
        load(tmp_path, "reward", [equal])


def test_labels_and_pairs_for_kto_come_shuffled(tmp_path: Path) -> None:
    labelled = [
        {"prompt": "2 + 2?", "completion": str(n), "label": "true" if n == 4 else 0}
        for n in range(8)
    ]
    rows = load(tmp_path, "kto", labelled).train
    assert {(row["completion"][0]["content"], row["label"]) for row in rows} == {
        (str(n), n == 4) for n in range(8)
    }
    pairs = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(20)]
    labels = [row["label"] for row in load(tmp_path, "kto", pairs).train]
    assert sorted(labels) == [False] * 20 + [True] * 20
    assert 3 < sum(labels[:20]) < 17, "the good answers must not all come first"


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    rows = [{"ask": "2 + 2?", "better": "4", "worse": "5", "prompt": "not this"}]
    names = {"prompt": "ask", "chosen": "better", "rejected": "worse"}
    (row,) = load(tmp_path, "dpo", rows, columns=names).train
    assert row["prompt"] == [USER] and row["chosen"] == [ANSWER]


REFUSED: list[tuple[str, list[dict[str, Any]], str]] = [
    (
        "sft",
        [{"a": "b"}],
        r"lacks the columns messages.*it has a; name yours: --prompt-column .* --answer-column ",
    ),
    (
        "dpo",
        [{"prompt": "p", "chosen": "c"}],
        r"lacks the columns chosen and rejected.*columns.rejected=",
    ),
    (
        "kto",
        [{"prompt": "p", "completion": "c"}],
        r"lacks the columns prompt, completion and label.*columns.label=",
    ),
    ("kto", [{"prompt": "p", "completion": "c", "label": True}], r"every label of .* is True"),
    (
        "kto",
        [{"prompt": "p", "completion": "c", "label": "good"}],
        r"'label' is 'good' in row 0 \(line 1\)",
    ),
    ("sft", [{"text": 3}], r"'text' is int in row 0 \(line 1\)"),
    ("sft", [{"messages": "hello"}], r"'messages' is text in row 0"),
    (
        "sft",
        [{"messages": [{"role": "user"}]}],
        r"turn 0 of 'messages' has role: str in row 0 \(line 1\)",
    ),
    (
        "sft",
        [{"messages": [USER, ANSWER]}, {"messages": [USER]}, {"messages": 3}],
        r"'messages' is int in row 2",
    ),
    ("sft", [], r"is empty; a run needs at least one row"),
]


@pytest.mark.parametrize(("method", "rows", "message"), REFUSED)
def test_what_cannot_be_learned_from_is_refused(
    method: str, rows: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        load(tmp_path, method, rows)


def test_text_and_chats_do_not_mix(tmp_path: Path) -> None:
    rows = [{"prompt": "2 + 2?", "completion": "4"}, {"prompt": [USER], "completion": [ANSWER]}]
    with pytest.raises(DataError, match="mixes text and chats"):
        load(tmp_path, "sft", rows, as_chat=False)


def test_held_out_rows_share_no_prompt_with_the_others_and_the_seed_decides(
    tmp_path: Path,
) -> None:
    rows = [{"prompt": f"{n // 3}?", "completion": str(n)} for n in range(60)]
    first, again = (load(tmp_path, "sft", rows, as_chat=False, held_out=10) for _ in range(2))
    other = load(tmp_path, "sft", rows, as_chat=False, held_out=10, seed=1)
    assert 10 <= len(first.held_out) < 13 and len(first.train) + len(first.held_out) == 60
    assert not {row["prompt"] for row in first.train} & {
        row["prompt"] for row in first.held_out
    }
    assert first.identity == again.identity != other.identity
    assert len(load(tmp_path, "sft", rows, as_chat=False, held_out=None).held_out) == 6


def test_held_out_rows_may_come_from_another_file(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "other"}) + "\n")
    examples = load(
        tmp_path,
        "sft",
        [{"text": "one"}],
        held_out=None,
        eval_dataset=str(tmp_path / "other.jsonl"),
    )
    assert (examples.train, examples.held_out) == ([{"text": "one"}], [{"text": "other"}])


def test_too_many_held_out_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="9 held-out rows of 2 leave none to train on"):
        load(tmp_path, "sft", [{"text": "a"}, {"text": "b"}], held_out=9)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(0, 30), st.integers(0, 3)
)
def test_holding_out_loses_nothing(prompts: list[int], count: int, seed: int) -> None:
    rows = [
        {"prompt": str(prompt), "completion": str(number)}
        for number, prompt in enumerate(prompts)
    ]
    train, apart = hold_out(rows, count, random.Random(seed))
    assert sorted(row["completion"] for row in train + apart) == sorted(
        row["completion"] for row in rows
    )
    assert len(apart) >= min(count, len(rows))


def picture(folder: Path, colour: str) -> str:
    Pillow.new("RGB", (2, 2), colour).save(folder / f"{colour}.png")
    return f"{colour}.png"


def test_rows_with_pictures_are_in_blocks_and_rows_without_have_none(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Which is <image>?", "completion": "red", "image": picture(tmp_path, "red")},
        {"prompt": "2 + 2?", "completion": "4", "image": None},
    ]
    dataset = load(tmp_path, "sft", rows)
    assert (
        dataset.shows and dataset.identity != load(tmp_path, "sft", [rows[1], rows[1]]).identity
    )
    by_answer = {row["completion"][0]["content"][0]["text"]: row for row in dataset.train}
    kinds = [
        [block["type"] for block in by_answer[name]["prompt"][0]["content"]]
        for name in ("red", "4")
    ]
    assert kinds == [["text", "image", "text"], ["text"]]
    assert [len(by_answer[name]["images"]) for name in ("red", "4")] == [1, 0]


def test_one_question_about_two_pictures_is_two_questions(tmp_path: Path) -> None:
    colours = ("red", "blue", "red")
    rows = [
        {"prompt": "Which?", "completion": name, "image": picture(tmp_path, name)}
        for name in colours
    ]
    dataset = load(tmp_path, "sft", rows, held_out=1)
    assert {len(dataset.train), len(dataset.held_out)} == {1, 2}
    assert {row["images"][0] for row in dataset.train}.isdisjoint(
        {row["images"][0] for row in dataset.held_out}
    )


def test_pairs_about_a_picture(tmp_path: Path) -> None:
    row = {
        "prompt": "Which?",
        "chosen": "red",
        "rejected": "blue",
        "images": [picture(tmp_path, "red")],
    }
    (made,) = load(tmp_path, "dpo", [row]).train
    assert [block["type"] for block in made["prompt"][0]["content"]] == ["image", "text"]
    assert made["chosen"][0]["content"] == [{"type": "text", "text": "red"}]


@pytest.mark.parametrize("method", ["reward", "kto"])
def test_who_reads_text_only_refuses_pictures(method: str, tmp_path: Path) -> None:
    row = {
        "prompt": "Which?",
        "chosen": "red",
        "rejected": "blue",
        "image": picture(tmp_path, "red"),
    }
    with pytest.raises(
        ConfigError,
        match=f"row 0 .*has a picture, and ycore {method} reads text only; take ycore sft",
    ):
        load(tmp_path, method, [row])


SHOWN = {"prompt": "Which?", "completion": "red", "chosen": "red", "rejected": "blue"}


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("sft", {"tools": [{"name": "look", "parameters": {}}]}),
        ("sft", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("dpo", {"tools": [{"name": "look", "parameters": {}}]}),
    ],
)
def test_what_trl_leaves_out_beside_pictures_is_refused(
    method: str, more: dict[str, Any], tmp_path: Path
) -> None:
    rows = [SHOWN | {"image": picture(tmp_path, "red")}, SHOWN | more]
    with pytest.raises(
        DataError, match=f"column '{next(iter(more))}', .* collator of pictures"
    ):
        load(tmp_path, method, rows)
    assert load(tmp_path, method, rows[1:]).train  # without pictures they are shown


@pytest.mark.parametrize(
    ("method", "column"),
    [
        ("orpo", "tools"),
        ("cpo", "tools"),
        ("sdft", "tools"),
        ("sdft", "chat_template_kwargs"),
        ("gold", "tools"),
    ],
)
def test_what_an_experimental_trainer_leaves_out_is_refused(
    method: str, column: str, tmp_path: Path
) -> None:
    values = {"tools": [{"name": "look", "parameters": {}}], "chat_template_kwargs": {"a": 1}}
    teacher = {"trl": {"teacher_model_name_or_path": "m"}} if method == "gold" else {}
    with pytest.raises(DataError, match=f"column '{column}', .* trainer of ycore {method} "):
        load(tmp_path, method, [SHOWN | {column: values[column]}], **teacher)


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        ("sft", "packing", True),
        ("sft", "padding_free", True),
        ("sft", "assistant_only_loss", True),
        ("dpo", "truncation_mode", "keep_end"),
        ("dpo", "precompute_ref_log_probs", True),
    ],
)
def test_fields_that_trl_refuses_beside_pictures_are_refused(
    method: str, field: str, value: Any, tmp_path: Path
) -> None:
    """TRL refuses them once the model is loaded."""
    row = SHOWN | {"image": picture(tmp_path, "red")}
    with pytest.raises(ConfigError, match=f"{field} is {value}, .* has pictures"):
        load(tmp_path, method, [row], trl={field: value})


def test_an_end_that_nothing_cuts_is_kept_beside_pictures(tmp_path: Path) -> None:
    row = SHOWN | {"image": picture(tmp_path, "red")}
    fields = {"truncation_mode": "keep_end", "max_length": None}
    assert load(tmp_path, "sft", [row], trl=fields).shows


def test_held_out_rows_are_seen_as_the_rows_that_are_trained_on(tmp_path: Path) -> None:
    seen = tmp_path / "seen.jsonl"
    seen.write_text(json.dumps(SHOWN | {"image": picture(tmp_path, "red")}) + "\n")
    told = tmp_path / "told.jsonl"
    told.write_text(json.dumps(SHOWN) + "\n")
    rows: dict[str, Any] = {"algorithm": "sft", "model": "m", "output": "o"}
    config = TuneConfig(dataset=str(seen), eval_dataset=str(told), **rows)
    assert load_examples(config, as_chat=True).held_out[0]["images"] == []
    config = TuneConfig(dataset=str(told), eval_dataset=str(seen), **rows)
    with pytest.raises(DataError, match=r"seen.jsonl have pictures, .* hold out other rows"):
        load_examples(config, as_chat=True)
    none_held_out = config.model_copy(update={"held_out": 0})
    assert not load_examples(none_held_out, as_chat=True).held_out


def test_a_picture_beside_plain_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a picture and plain text in row 0"):
        load(tmp_path, "sft", [{"text": "Once.", "image": picture(tmp_path, "red")}])


def test_prompts_that_differ_only_in_white_space_are_held_out_together() -> None:
    rows = [
        {"prompt": [{"role": "user", "content": text}], "completion": "4"}
        for text in ("2 + 2?", " 2 +\n2?", "3")
    ]
    for seed in range(8):
        train, apart = hold_out(rows, 1, random.Random(seed))
        assert (
            sorted((len(train), len(apart))) == [1, 2]
            and ExampleSet(train, apart, Counter(), {}, {}).overlap == 0
        )


def test_prompts_that_are_also_trained_on_are_counted() -> None:
    train = [[{"role": "user", "content": f"{n} + 1"}] for n in range(5)]
    turned = [{"content": "4  +\t1\n", "role": "user"}]
    assert (
        num_overlapping(
            [*train[:2], turned, "0 + 1", [{"role": "user", "content": "4 +1"}]], train
        )
        == 3
    )
