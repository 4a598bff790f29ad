"""Groups come back from JSON as they went in, and a column that JSON cannot say becomes text."""

import datetime
import math

from hypothesis import given
from hypothesis import strategies as st

from ycore.types import (
    Completion,
    Draw,
    Finished,
    Group,
    Image,
    Prompt,
    Score,
    from_bytes,
    from_json,
    to_bytes,
    to_json,
)

LOGPROBS = st.floats(-1e6, 0.0, allow_nan=False)
TEXT = st.text(max_size=20)
COMPLETIONS = st.builds(
    Completion,
    token_ids=st.lists(st.integers(0, 200_000), max_size=6).map(tuple),
    logprobs=st.one_of(st.none(), st.lists(LOGPROBS, max_size=6).map(tuple)),
    text=TEXT,
    finish_reason=st.sampled_from(["stop", "length"]),
    policy_version=st.integers(0, 1000),
    prompt_ids=st.one_of(st.none(), st.lists(st.integers(0, 99), max_size=3).map(tuple)),
)
COLUMNS = st.dictionaries(
    TEXT, st.one_of(TEXT, st.integers(), st.booleans(), st.none(), st.lists(TEXT, max_size=3))
)
CHAT = st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}), max_size=3)
IMAGES = st.lists(
    st.builds(Image, TEXT, st.integers(1, 99), st.integers(1, 99)), max_size=2
).map(tuple)
PROMPTS = st.builds(
    Prompt,
    row=st.integers(0, 99),
    content=st.one_of(TEXT, CHAT),
    columns=COLUMNS,
    images=IMAGES,
)
SCORES = st.builds(
    Score, value=st.one_of(st.none(), st.floats(-10, 10)), problem=st.one_of(st.none(), TEXT)
)
GROUPS = st.builds(
    Group,
    draw=st.builds(
        Draw, st.integers(0, 99), PROMPTS, st.lists(st.integers(0, 99), max_size=5).map(tuple)
    ),
    completions=st.lists(COMPLETIONS, max_size=3).map(tuple),
    scores_GR=st.lists(st.lists(SCORES, max_size=2).map(tuple), max_size=3).map(tuple),
)


@given(GROUPS, st.booleans())
def test_a_group_comes_back_as_it_went(group: Group, teaches: bool) -> None:
    assert from_bytes(to_bytes(group)) == group
    finished = Finished(group, teaches)
    assert from_json(Finished, to_json(finished)) == finished


def test_a_logprob_that_is_no_number_stays_none() -> None:
    group = Group(
        Draw(0, Prompt(0, "a"), (1,)),
        (Completion((1,), (math.nan,), "a", "stop", 0),),
        ((Score(1.0),),),
    )
    (logprob,) = from_bytes(to_bytes(group)).completions[0].logprobs or ()
    assert math.isnan(logprob)


def test_a_column_that_json_has_no_word_for_becomes_its_text() -> None:
    group = Group(Draw(0, Prompt(7, "a", {"when": datetime.date(2020, 1, 1)}), (1,)), (), ())
    assert from_bytes(to_bytes(group)).draw.prompt.columns == {"when": "2020-01-01"}


def test_half_a_character_in_a_column_comes_back() -> None:
    """A lone surrogate, which JSON of a dataset may hold and UTF-8 may not."""
    group = Group(Draw(0, Prompt(0, "q", {"answer": "\ud83d"}), (1,)), (), ())
    assert from_bytes(to_bytes(group)) == group


def test_a_picture_is_as_long_in_the_journal_whatever_its_size() -> None:
    def length(side: int) -> int:
        prompt = Prompt(0, "a", images=(Image("0" * 64, side, side),))
        return len(to_bytes(Group(Draw(0, prompt, (1,)), (), ())))

    assert length(1000) - length(1) == 2 * len("000")
