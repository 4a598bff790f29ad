"""Text that may come from anywhere is shown, and does nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.run.text import as_duration, printable


def test_control_characters_are_shown_as_escapes() -> None:
    assert printable("\x1b[2J\x07\rover\x9b1m\x00") == r"\x1b[2J\x07\rover\x9b1m\x00"
    assert printable("ab\u202egnp.exe\u2028\ud800") == r"ab\u202egnp.exe\u2028\ud800"


def test_ordinary_text_stays() -> None:
    text = "[/INST] 7 :smile:\n\tnaïve 数学 👩‍🔬 \xa0{}"
    assert printable(text) == text
    assert printable("a\n\tb", one_line=True) == r"a\n\tb"


@given(st.text(st.characters()))
def test_any_text_can_be_encoded_and_is_one_line_when_asked(text: str) -> None:
    printed = printable(text, one_line=True)
    assert len(printed.encode().decode().splitlines()) <= 1 and "\x1b" not in printed


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert as_duration(seconds) == text
