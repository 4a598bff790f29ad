"""The journal: what was committed comes back to the bit, and a round that some rank lacks was never made."""

import json
from pathlib import Path
from typing import Any

import pytest

from ycore.controller.journal import Journal, JournaledRounds
from ycore.controller.peers import Alone
from ycore.errors import RunFolderError
from ycore.sampling.demand import Yield
from ycore.types import Completion, Draw, Group, Prompt, Score


def group(position: int) -> Group:
    completion = Completion((5, 6), (-0.1 - 1e-17, -2.0 / 3.0), "ok ü", "stop", 3)
    prompt = Prompt(position, [{"role": "user", "content": "hi"}], {"answer": "4", "numbers": [1, 2.5]})
    return Group(Draw(position, prompt, (1, 2)), (completion,), ((Score(1 / 3), Score(None, "raised ValueError: x")),))


class CountingRounds:
    """A source of rounds for these tests: new groups at every call, and a cursor that moves."""

    class Cursor:
        cursor = 0

    class Inner:
        yields = Yield()

    class Waiting:
        waiting: list[Any] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.draws, self.round, self.surplus = self.Cursor(), self.Inner(), self.Waiting()

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        first = self.draws.cursor
        self.draws.cursor += num_groups
        return [group(first + n) for n in range(num_groups)]


def journaled(rounds: Any, folder: Path, recorded: dict[str, float], peers: Any = None) -> JournaledRounds:
    return JournaledRounds(rounds, Journal(folder, rank=0), peers or Alone(), recorded.__setitem__)


def test_a_committed_round_is_given_again_and_the_cursor_with_it(tmp_path: Path) -> None:
    first = journaled(CountingRounds(), tmp_path, {})
    rounds = [first.next_round(step=step, num_groups=2) for step in range(3)]

    again, recorded = CountingRounds(), dict[str, float]()
    source = journaled(again, tmp_path, recorded)
    assert source.next_round(step=1, num_groups=2) == rounds[1]
    assert recorded == {"ycore/replayed": 1.0} and again.draws.cursor == 4
    assert source.next_round(step=2, num_groups=2) == rounds[2]
    recorded.clear()
    new = source.next_round(step=3, num_groups=2)
    assert [one.draw.position for one in new] == [6, 7] and not recorded


def test_a_round_that_another_rank_lacks_is_generated_anew(tmp_path: Path) -> None:
    class OneOfTwo(Alone):
        world = 2

    journaled(CountingRounds(), tmp_path, {}).next_round(step=0, num_groups=1)
    rounds, recorded = CountingRounds(), dict[str, float]()
    rounds.draws.cursor = 10
    (made,) = journaled(rounds, tmp_path, recorded, OneOfTwo()).next_round(step=0, num_groups=1)
    assert made.draw.position == 10 and not recorded


def test_pruning_keeps_what_a_checkpoint_still_needs(tmp_path: Path) -> None:
    source, journal = journaled(CountingRounds(), tmp_path, {}), Journal(tmp_path, rank=0)
    for step in range(5):
        source.next_round(step=step, num_groups=1)
    journal.prune(before=3)
    assert [journal.read(step) is None for step in range(5)] == [True, True, True, False, False]


def test_damage_is_named(tmp_path: Path) -> None:
    source, journal = journaled(CountingRounds(), tmp_path, {}), Journal(tmp_path, rank=0)
    source.next_round(step=0, num_groups=1)
    text = journal.path(0).read_text()
    journal.path(0).write_text(text[: len(text) // 2])
    with pytest.raises(RunFolderError, match=r"round-000000-rank-0\.json is damaged .* remove it and resume"):
        journal.read(0)
    assert json.loads(text)["groups"]
