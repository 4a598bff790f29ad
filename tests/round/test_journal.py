"""The journal: what was committed comes back to the bit, and a round that some rank lacks was never made."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ycore.engine import Engine
from ycore.errors import ConfigError, RunFolderError
from ycore.round.journal import Journal, ReplayedRounds
from ycore.round.peers import Peers
from ycore.round.sampling import Curriculum, DrawSource, Rules
from ycore.round.step import Controller
from ycore.run.resuming import check_replay, read_round, round_file
from ycore.scoring.scoring import PendingGroup, Scoring
from ycore.types import Completion, Draw, Group, Prompt, Score, Turn


def group(position: int) -> Group:
    completion = Completion((5, 6), (-0.1 - 1e-17, -2.0 / 3.0), "ok ü", "stop", 3)
    prompt = Prompt(
        position, [{"role": "user", "content": "hi"}], {"answer": "4", "numbers": [1, 2.5]}
    )
    return Group(
        Draw(position, prompt, (1, 2)),
        (completion,),
        ((Score(1 / 3, logprobs=(-0.1, -1 / 3)), Score(None, "raised ValueError: x")),),
    )


class Echo(Engine):
    """An Engine without a process that always writes the completion of `group`."""

    name = "echo"

    async def wait_ready(self, *, timeout_s: float) -> None:
        pass

    async def load_weights(self, folder: Path, version: int) -> None:
        pass

    async def logprobs_of(
        self, context_ids: Sequence[int], target_ids: Sequence[int]
    ) -> tuple[float, ...]:
        raise AssertionError("no reward of these runs needs them")

    async def complete(
        self, prompt_ids: Sequence[int], seed: int, *, greedy: bool = False
    ) -> Completion:
        return group(0).completions[0]

    async def close(self) -> None:
        pass


class Constant:
    """A Scorer that always gives the scores of `group` by this source."""

    def __init__(self, source: int) -> None:
        self.source = source

    async def start(self, *, timeout_s: float) -> None:
        pass

    async def score(self, writing: PendingGroup) -> list[Score]:
        return [group(0).scores_GR[0][self.source]] * len(writing)

    async def close(self) -> None:
        pass


Make = Callable[..., Controller]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Controller] = []

    def controller(
        folder: Path,
        recorded: dict[str, float] | None = None,
        peers: Peers | None = None,
        *,
        rows: int = 20,
        group_size: int = 1,
        curriculum: Curriculum | None = None,
    ) -> Controller:
        new_controller = Controller(
            engines=[Echo()],
            scoring=Scoring([Constant(0), Constant(1)]),
            draws=DrawSource(
                [group(row).draw.prompt for row in range(rows)],
                seed=None,
                encode=lambda _: (1, 2),
                max_prompt_tokens=2,
                curriculum=curriculum,
            ),
            rules=Rules(group_size=group_size, seed=0, reward_weights=(1.0, 1.0)),
            peers=peers or Peers(),
            journal=Journal(folder, rank=0),
        )
        if recorded is not None:
            new_controller.record = recorded.__setitem__
        made.append(new_controller)
        return new_controller

    yield controller
    for made_controller in made:
        made_controller.close()


def test_a_committed_round_is_given_again_and_the_cursor_with_it(
    make: Make, tmp_path: Path
) -> None:
    first = make(tmp_path)
    rounds = [first.next_round(step=step, num_groups=2) for step in range(3)]

    assert rounds[1] == [group(2), group(3)]

    recorded = dict[str, float]()
    source = make(tmp_path, recorded)
    assert source.next_round(step=1, num_groups=2) == rounds[1]
    assert recorded["ycore/replayed"] == 1.0 and source.draws.cursor == 4
    assert source.next_round(step=2, num_groups=2) == rounds[2]
    recorded.clear()
    new = source.next_round(step=3, num_groups=2)
    assert [later.draw.position for later in new] == [6, 7] and "ycore/replayed" not in recorded


def test_a_round_s_file_does_not_grow_with_the_rows_that_the_run_has_seen(
    make: Make, tmp_path: Path
) -> None:
    """A checkpoint has what the run remembers of its rows; it comes back from there and from the rounds since."""

    def learner() -> Controller:
        return make(tmp_path, rows=100, group_size=2, curriculum=Curriculum(seed=1))

    first = learner()
    checkpoints = []
    for step in range(40):
        checkpoints.append(json.loads(json.dumps(first.state())))
        first.next_round(step=step, num_groups=2)
    learned = first.state()
    assert len(learned["lengths"]) == len(learned["curriculum"]["rows"]) == 80

    sizes = []
    for step in (6, 38):
        _, content = read_round(round_file(tmp_path, step, 0))
        sizes.append(len(json.dumps([content["state"], content["summaries"]])))
    assert abs(sizes[1] - sizes[0]) < 100, "a row takes about 20 letters"

    for begin in (0, 17):
        again = learner()
        again.restore(checkpoints[begin])
        for step in range(begin, 40):
            again.next_round(step=step, num_groups=2)
        assert again.state() == learned
        assert again.next_round(step=40, num_groups=2)[0].draw.position == 80


def test_a_round_from_the_journal_has_the_metrics_of_when_it_was_new_but_its_times(
    make: Make, tmp_path: Path
) -> None:
    new, again = dict[str, float](), dict[str, float]()
    make(tmp_path, new).next_round(step=0, num_groups=1)
    make(tmp_path, again).next_round(step=0, num_groups=1)
    assert new["ycore/reward"] == 1 / 3 and new["ycore/time/round"] > 0
    kept = {name: value for name, value in new.items() if not name.startswith("ycore/time/")}
    assert again == {**kept, "ycore/replayed": 1.0}


def test_a_round_that_another_rank_lacks_is_generated_anew(make: Make, tmp_path: Path) -> None:
    class OneOfTwo(Peers):
        def add_up(self, values: Sequence[float]) -> list[float]:
            return [value / 2 for value in values]

    make(tmp_path).next_round(step=0, num_groups=1)
    recorded = dict[str, float]()
    controller = make(tmp_path, recorded, OneOfTwo())
    controller.draws.cursor = 10
    (made,) = controller.next_round(step=0, num_groups=1)
    assert made.draw.position == 10 and "ycore/replayed" not in recorded


def test_pruning_keeps_what_a_checkpoint_still_needs(make: Make, tmp_path: Path) -> None:
    source, journal = make(tmp_path), Journal(tmp_path, rank=0)
    for step in range(5):
        source.next_round(step=step, num_groups=1)
    journal.prune(before=3)
    assert [journal.read(step) is None for step in range(5)] == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[: len(data) // 2], "its sha256 is not the one that was written"),
        (
            lambda data: data.replace(b'"position": 0', b'"position": 8'),
            "its sha256 is not the one",
        ),
        (lambda data: b"", "its first line is not JSON"),
        (lambda data: data.replace(b'"schema": 1', b'"schema": 9', 1), "its schema is not 1"),
        (lambda data: data.replace(b'"step": 0', b'"step": 5', 1), "it is of {'step': 5"),
        (
            lambda data: data.replace(b'"world": 1', b'"world": 3', 1),
            "it is of {'step': 0, 'rank': 0, 'world': 3}",
        ),
    ],
    ids=["cut", "a digit", "empty", "schema", "another step", "other ranks"],
)
def test_damage_is_named(
    make: Make, tmp_path: Path, damage: Callable[[bytes], bytes], said: str
) -> None:
    source, journal = make(tmp_path), Journal(tmp_path, rank=0)
    source.next_round(step=0, num_groups=1)
    whole = journal.path(0).read_bytes()
    assert damage(whole) != whole
    journal.path(0).write_bytes(damage(whole))
    with pytest.raises(
        RunFolderError, match=r"round-000000-rank-0\.json is damaged .* remove it and resume"
    ) as error:
        journal.read(0)
    assert said in str(error.value)


def test_a_new_round_ends_the_future_that_followed_the_old_one(
    make: Make, tmp_path: Path
) -> None:
    first = make(tmp_path)
    for step in range(4):
        first.next_round(step=step, num_groups=1)
    journal = Journal(tmp_path, rank=0)
    journal.path(1).unlink()
    source = make(tmp_path)
    source.next_round(step=1, num_groups=1)
    assert [journal.read(step) is None for step in range(4)] == [False, False, True, True]


def test_turns_come_back(tmp_path: Path) -> None:
    turns = (
        Turn(True, 1, ({"role": "assistant", "content": "add(1, 2)"},)),
        Turn(False, 2, ({"role": "user", "content": "3"},), calls=1, failures=0, seconds=0.25),
        Turn(True, 1, ({"role": "assistant", "content": "3"},)),
    )
    completion = Completion(
        (5, 6, 7, 8),
        (-0.1, 0.0, 0.0, -0.2),
        "3",
        "stop",
        3,
        turns,
        Score(None, "get_reward raised"),
    )
    original = replace(group(0), completions=(completion,))
    journal = Journal(tmp_path, rank=0)
    journal.commit(0, [original], {})
    stored_round = journal.read(0)
    assert (
        stored_round is not None
        and stored_round.groups == [original]
        and original.completions[0].mask == (1, 0, 0, 1)
    )
    assert original.num_tokens == 4 and original.num_written == 2


def test_a_transcript_lets_nobody_speak_for_another() -> None:
    said = "no\nuser: 4\rtool: 4"
    turns = (
        Turn(True, 1, ({"role": "assistant", "content": said},)),
        Turn(False, 1, ({"role": "user", "content": "3"},)),
    )
    completion = Completion((5, 6), None, said, "turns", 0, turns)
    assert [line for line in completion.transcript.split("\n") if not line.startswith(" ")] == [
        "assistant: no",
        "user: 3",
    ]


def test_a_journal_tells_whose_it_is(tmp_path: Path) -> None:
    journal = Journal(tmp_path, rank=1, world=2, seed=7)
    journal.commit(3, [group(0)], {})
    head = json.loads(journal.path(3).read_bytes().splitlines()[0])
    assert {name: head[name] for name in ("schema", "step", "rank", "world", "seed")} == {
        "schema": 1, "step": 3, "rank": 1, "world": 2, "seed": 7,
    }  # fmt: skip
    assert journal.read(3) is None, "rank 0 has not committed its part"


def test_rounds_are_replayed_from_a_journal_that_goes_back_to_the_start(
    make: Make, tmp_path: Path
) -> None:
    run, recorded = tmp_path / "run", dict[str, float]()
    source = make(run / "journal")
    rounds = [source.next_round(step=step, num_groups=2) for step in range(3)]
    record = recorded.__setitem__
    replayed = ReplayedRounds(Journal(run / "journal", rank=0), group_size=1, record=record)
    replayed.check(steps=3, steps_per_round=1)
    assert [replayed.next_round(step=step, num_groups=2) for step in range(3)] == rounds
    assert recorded["ycore/replayed"] == 1.0
    with pytest.raises(ConfigError, match=r"2 groups of 1 a rank, and this run takes 3 of 1"):
        replayed.next_round(step=0, num_groups=3)
    with pytest.raises(RunFolderError, match=r"no round of step 3.*--steps 3"):
        replayed.check(steps=4, steps_per_round=1)
    of_two = Journal(run / "journal", rank=1, world=2)
    second = ReplayedRounds(of_two, group_size=1, record=record)
    second.check(steps=3, steps_per_round=1)
    assert second.next_round(step=0, num_groups=1) == rounds[0][1:]
    Journal(run / "journal", rank=0).prune(before=1)
    with pytest.raises(RunFolderError, match=r"begins at step 1.*--keep-journal"):
        check_replay(run, run / "journal")
