"""One cell of a table: dialogues in one text, and what is no text and no list of turns."""

import pytest

from ycore.data.table import Table, is_dialogue, to_messages
from ycore.errors import DataError


def test_a_dialogue_is_taken_apart_turn_by_turn() -> None:
    text = "\n\nHuman: one\n\ntwo\n\nAssistant: he said Human: x\n\nHuman: \n\nAssistant:"
    assert (
        is_dialogue(text)
        and not is_dialogue("Human beings: ...")
        and not is_dialogue("Say:\n\nHuman: hello")
    )
    assert [(turn["role"], turn["content"]) for turn in to_messages(text)] == [
        ("user", "one\n\ntwo"), ("assistant", "he said Human: x"), ("user", ""), ("assistant", ""),
    ]  # fmt: skip


def test_a_turn_that_holds_half_of_a_character_is_refused_with_its_place() -> None:
    turns = [{"role": "user", "content": "fine"}, {"role": "system", "content": "a\ud800"}]
    table = Table("data", [{"messages": turns}], ("messages",), lines=[4])
    with pytest.raises(
        DataError,
        match=r"^turn 1 of 'messages' holds half of a character .* in row 0 \(line 4\) of data",
    ):
        table.row(0).content("messages")
