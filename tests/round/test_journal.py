"""The journal: what was committed comes back to the bit, and a round that some rank lacks was never made."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ycore.errors import ConfigError, RunFolderError
from ycore.round.journal import Journal, JournaledRounds, ReplayedRounds
from ycore.round.peers import Alone
from ycore.round.sampling import Yield
from ycore.round.slots import Slots
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
        slots = Slots(1)

    class Waiting:
        waiting: list[Any] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.draws, self.round, self.surplus = self.Cursor(), self.Inner(), self.Waiting()
        self.record: Callable[[str, float], None] = lambda name, value: None

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


def test_a_round_from_the_journal_tells_what_it_told_when_it_was_new_but_for_its_time(tmp_path: Path) -> None:
    class Telling(CountingRounds):
        def next_round(self, *, step: int, num_groups: int) -> list[Group]:
            self.record("ycore/reward", 0.25)
            self.record("ycore/time/round", 9.0)
            return super().next_round(step=step, num_groups=num_groups)

    new, again = dict[str, float](), dict[str, float]()
    journaled(Telling(), tmp_path, new).next_round(step=0, num_groups=1)
    journaled(Telling(), tmp_path, again).next_round(step=0, num_groups=1)
    assert new == {"ycore/reward": 0.25, "ycore/time/round": 9.0}
    assert again == {"ycore/reward": 0.25, "ycore/replayed": 1.0}


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


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[: len(data) // 2], "its sha256 is not the one that was written"),
        (lambda data: data.replace(b'"position": 0', b'"position": 8'), "its sha256 is not the one"),
        (lambda data: b"", "its first line is not JSON"),
        (lambda data: data.replace(b'"schema": 1', b'"schema": 9', 1), "its schema is not 1"),
        (lambda data: data.replace(b'"step": 0', b'"step": 5', 1), "it is of {'step': 5"),
    ],
    ids=["cut", "a digit", "empty", "schema", "another step"],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], said: str) -> None:
    source, journal = journaled(CountingRounds(), tmp_path, {}), Journal(tmp_path, rank=0)
    source.next_round(step=0, num_groups=1)
    whole = journal.path(0).read_bytes()
    assert damage(whole) != whole
    journal.path(0).write_bytes(damage(whole))
    with pytest.raises(RunFolderError, match=r"round-000000-rank-0\.json is damaged .* remove it and resume") as error:
        journal.read(0)
    assert said in str(error.value)


def test_a_new_round_ends_the_future_that_followed_the_old_one(tmp_path: Path) -> None:
    first = journaled(CountingRounds(), tmp_path, {})
    for step in range(4):
        first.next_round(step=step, num_groups=1)
    journal = Journal(tmp_path, rank=0)
    journal.path(1).unlink()
    source = journaled(CountingRounds(), tmp_path, {})
    source.next_round(step=1, num_groups=1)
    assert [journal.read(step) is None for step in range(4)] == [False, False, True, True]


def test_a_journal_tells_whose_it_is(tmp_path: Path) -> None:
    journal = Journal(tmp_path, rank=1, world=2, seed=7)
    journal.commit(3, [group(0)], {})
    head = json.loads(journal.path(3).read_bytes().splitlines()[0])
    assert {name: head[name] for name in ("schema", "step", "rank", "world", "seed")} == {
        "schema": 1, "step": 3, "rank": 1, "world": 2, "seed": 7,
    }  # fmt: skip
    with pytest.raises(RunFolderError, match="'world': 2"):
        Journal(tmp_path, rank=1, world=3).read(3)


def test_rounds_are_replayed_from_a_journal_that_goes_back_to_the_start(tmp_path: Path) -> None:
    run, recorded = tmp_path / "run", dict[str, float]()
    source = journaled(CountingRounds(), run / "journal", {})
    rounds = [source.next_round(step=step, num_groups=2) for step in range(3)]
    replayed = ReplayedRounds(run, rank=0, world=1, group_size=1, record=recorded.__setitem__)
    replayed.check(steps=3, steps_per_round=1)
    assert [replayed.next_round(step=step, num_groups=2) for step in range(3)] == rounds
    assert recorded == {"ycore/replayed": 1.0}
    with pytest.raises(ConfigError, match=r"2 groups of 1 a rank, and this run takes 3 of 1"):
        replayed.next_round(step=0, num_groups=3)
    with pytest.raises(RunFolderError, match=r"no round of step 3.*--steps 3"):
        replayed.check(steps=4, steps_per_round=1)
    with pytest.raises(RunFolderError, match=r"trained by 1 ranks and this run has 2"):
        ReplayedRounds(run, rank=0, world=2, group_size=1, record=recorded.__setitem__).check(
            steps=1, steps_per_round=1
        )
    Journal(run / "journal", rank=0).prune(before=1)
    with pytest.raises(RunFolderError, match=r"begins at step 1.*--keep-journal"):
        replayed.check(steps=3, steps_per_round=1)
