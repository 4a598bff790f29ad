"""What is drafted, when drafts are made, and what is counted; no engine."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ycore.engine import drafts
from ycore.engine.drafts import Lookup, Memory, Pace


def remembered(*texts: list[int]) -> Memory:
    memory = Memory()
    for text in texts:
        memory.add([], text)
    return memory


def test_what_followed_the_same_tokens_is_drafted() -> None:
    memory = remembered([1, 2, 3, 4, 5, 6])
    assert memory.draft([9, 1, 2, 3], 8) == [4, 5, 6]
    assert memory.draft([9, 1, 2, 3], 2) == [4, 5]
    assert memory.draft([9, 9, 2, 3], 8) == [] and memory.draft([2, 3], 8) == []


def test_the_longest_of_the_same_endings_is_followed_and_then_the_latest() -> None:
    memory = remembered([7, 8, 1, 2, 3, 40], [1, 2, 3, 50], [9, 1, 2, 3, 60])
    assert memory.draft([7, 8, 1, 2, 3], 1) == [40]
    assert memory.draft([5, 1, 2, 3], 1) == [60]
    assert memory.draft([0, 8, 1, 2, 3], 1) == [40]


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    memory, text = Memory(), list[int]()
    memory.add(text, [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3])
    assert memory.draft(text, 6) == [4, 1, 2, 3, 4, 1]


def test_what_was_not_seen_for_longest_is_forgotten() -> None:
    memory = Memory(kept=10)
    memory.add([], list(range(100, 110)))
    memory.add([], [*range(8), *range(100, 105)])
    assert memory.draft([1, 2, 3], 2) == [4, 5]
    assert memory.draft([100, 101, 102], 2) == [103, 104]
    assert memory.draft([105, 106, 107], 2) == []


@pytest.mark.parametrize(
    ("cost", "least", "most"), [(0.5, 0.98, 1.0), (0.99, 0.0, 0.3), (3.0, 0.0, 0.01)]
)
def test_drafts_are_made_while_they_pay(cost: float, least: float, most: float) -> None:
    """`cost`: of a token in passes with drafts, over that without; the noise is a tenth. What does not pay is tried
    again, now and then, and the more it costs the more seldom."""
    pace, source, choices = Pace(), random.Random(0), list[bool]()
    for _ in range(4000):
        choices.append(drafted := pace.wants(4))
        pace.note(
            4, drafted=drafted, seconds=0.02 * (cost if drafted else 1.0) * source.uniform(0.9, 1.1)
        )
    assert least <= sum(choices[200:]) / len(choices[200:]) <= most
    assert 0 < sum(choices[200:]) < len(choices[200:])


def test_what_begins_to_pay_is_found() -> None:
    pace, last = Pace(), list[bool]()
    for number in range(6000):
        drafted = pace.wants(2)
        last.append(drafted)
        pace.note(2, drafted=drafted, seconds=1.0 if not drafted else 1.5 if number < 1000 else 0.5)
    assert sum(last[100:1000]) < 20 and all(last[-500:])


def test_many_requests_are_judged_apart_from_few() -> None:
    pace = Pace()
    for _ in range(300):
        for number, cost in ((1, 0.5), (32, 2.0)):
            drafted = pace.wants(number)
            pace.note(number, drafted=drafted, seconds=cost if drafted else 1.0)
    assert [pace.wants(1), pace.wants(32)] == [True, False]
    assert pace.plain_s(32) == pytest.approx(1.0) and pace.plain_s(200) is None


def test_one_long_pause_does_not_turn_drafts_off() -> None:
    pace = Pace()
    for number in range(200):
        drafted = pace.wants(1)
        pace.note(1, drafted=drafted, seconds=60.0 if number == 100 else 0.5 if drafted else 1.0)
    assert pace.wants(1)


class Rows:
    """vLLM's rows of token ids, as its drafter sees them."""

    def __init__(self, *prompts: list[int]) -> None:
        self.ids = np.zeros((8, 64), dtype=np.int32)
        self.lengths = np.zeros(8, dtype=np.int64)
        self.place(prompts)

    def place(self, texts: Any) -> None:
        for row, text in enumerate(texts):
            self.ids[row, : len(text)], self.lengths[row] = text, len(text)

    def texts(self, number: int) -> list[list[int]]:
        return [self.ids[row, : self.lengths[row]].tolist() for row in range(number)]

    def write(self, drafter: Lookup, *new: list[int]) -> list[list[int]]:
        for row, tokens in enumerate(new):
            at = self.lengths[row]
            self.ids[row, at : at + len(tokens)] = tokens
            self.lengths[row] = at + len(tokens)
        return drafter.propose([list(tokens) for tokens in new], self.lengths, self.ids)


def drafter(monkeypatch: pytest.MonkeyPatch, *, most: int = 4, limit: int = 64) -> Lookup:
    monkeypatch.setattr(Pace, "wants", lambda self, number: True)
    sizes = {
        "speculative_config": {"num_speculative_tokens": most},
        "model_config": {"max_model_len": limit},
    }
    return Lookup(
        SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in sizes.items()})
    )


def test_a_completion_is_drafted_from_its_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup, rows = drafter(monkeypatch), Rows([5, 6, 7], [5, 6, 7])
    assert rows.write(lookup, [8], [8]) == [[], []]
    for token in (9, 10, 11):
        rows.write(lookup, [token], [])
    assert rows.write(lookup, [12], [])[1] == []  # a row that gets no token is not ready
    assert rows.write(lookup, [13], [9])[1] == [10, 11, 12, 13]


def test_rows_that_change_places_keep_their_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup, rows = drafter(monkeypatch), Rows([1, 2, 3, 4], [5, 6, 7, 8], [5, 6, 7, 8])
    rows.write(lookup, [9], [9], [20])
    rows.write(lookup, [10], [10], [21])
    first, _, third = rows.texts(3)
    rows.place([third, first])  # the second has ended, and the last took the first place
    rows.write(lookup, [22], [11])
    assert lookup._texts == rows.texts(2)
    assert rows.write(lookup, [20, 21, 22], [12])[0] == [20, 21, 22, 20]


def test_while_drafts_do_not_pay_texts_are_not_read_and_later_caught_up_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookup, rows = drafter(monkeypatch), Rows([1, 2, 3, 4])
    rows.write(lookup, [5])
    monkeypatch.setattr(Pace, "wants", lambda self, number: False)
    for token in (6, 7, 8):
        assert rows.write(lookup, [token]) == [[]]
    assert lookup._texts == [[1, 2, 3, 4, 5]]
    monkeypatch.setattr(Pace, "wants", lambda self, number: True)
    assert rows.write(lookup, [5, 6, 7]) == [[8, 5, 6, 7]]
    assert lookup._texts == rows.texts(1)


def test_the_longest_context_is_never_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup, rows = drafter(monkeypatch, most=8, limit=14), Rows([1, 2, 3, 1, 2, 3, 1, 2])
    assert len(rows.write(lookup, [3])[0]) == 4
    assert len(rows.write(lookup, [1, 2, 3, 1])[0]) == 0


def test_what_drafts_did_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(drafts.time, "perf_counter", lambda: now[0])
    lookup, rows = drafter(monkeypatch), Rows([1, 2, 3])
    rows.write(lookup, [4])
    for number, token in enumerate((5, 6, 7, 8), 1):  # passes without a draft, of one second each
        now[0] = float(number)
        rows.write(lookup, [token])
    now[0] = 6.0
    assert rows.write(lookup, [1, 2, 3]) == [[4, 5, 6, 7]]
    now[0] = 7.5
    rows.write(lookup, [4, 5, 6])  # two of four were right, and the third is the policy's own
    tokens, accepted, seconds, plain_s = lookup.take()
    assert (tokens, accepted) == (4, 2)
    assert seconds == pytest.approx(4 * 1.0 + 2.0 + 1.5)
    assert plain_s == pytest.approx(4 * 1.0 + 2.0 + 3 * 1.0, rel=0.05)
    assert lookup.take() == [0, 0, 0, 0]
