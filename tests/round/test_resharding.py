"""Another number of ranks: every position once and in order, whatever the ranks before had drawn."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.round.journal import (
    PARTS,
    Journal,
    positions_to_come,
    reshard_round,
    reshard_states,
)
from ycore.round.sampling import Shard
from ycore.types import Completion, Draw, Group, Prompt, Score, to_json

WORLDS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def group(position: int, num_tokens: int = 2) -> Group:
    completion = Completion((5,) * num_tokens, (-0.5,) * num_tokens, "ok", "stop", 3)
    return Group(
        Draw(position, Prompt(position, "hi", {}), (1, 2)), (completion,), ((Score(1.0),),)
    )


def item(position: int) -> dict[str, Any]:
    return {"group": to_json(group(position)), "teaches": True}


def state(cursor: int, surplus: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
    waiting = [item(position) for position in surplus]
    return {
        "draws": {"cursor": cursor, "gaps": [], "start": 0},
        "acceptance": {"kept": 1.0, "finished": 1.0},
        "leftover_groups": waiting,
        "reuse_buffer": [],
        "placement": None,
        "curriculum": None,
        "lengths": {"rows": [[3, 7.0]]},
        "unfinished_groups": [],
        "constraints": None,
        **more,
    }


def positions(items: list[dict[str, Any]]) -> list[int]:
    return [leftover["group"]["draw"]["position"] for leftover in items]


@given(st.data(), WORLDS)
def test_through_any_ranks_each_position_is_drawn_once_and_in_order(
    data: st.DataObject, worlds: list[int]
) -> None:
    """Each of several runs draws unevenly, and the next one has another number of ranks."""
    drawn: list[int] = []
    states = [state(0) for _ in range(worlds[0])]
    for number, world in enumerate(worlds):
        if number:
            states = reshard_states(states, world=world)
        for rank, draws in enumerate(dict(state["draws"]) for state in states):
            shard = Shard(rank, world, tuple(draws["gaps"]), draws["start"])
            count = data.draw(st.integers(0, 9))
            mine = [
                shard.position(index)
                for index in range(draws["cursor"], draws["cursor"] + count)
            ]
            assert mine == sorted(mine)
            drawn += mine
            draws["cursor"] += count
            states[rank] = {**states[rank], "draws": draws}
    assert len(set(drawn)) == len(drawn), "none twice"
    last = reshard_states(states, world=1)[0]["draws"]
    alone = Shard(gaps=tuple(last["gaps"]), start=last["start"])
    rest = [alone.position(index) for index in range(len(last["gaps"]) + 50)]
    assert rest == sorted(rest), "in order"
    assert sorted(drawn + rest) == list(range(len(drawn) + len(rest))), "none lost"


@given(st.data(), st.integers(1, 5), st.integers(1, 5))
def test_the_ranks_together_draw_what_is_to_come_in_turn(
    data: st.DataObject, before: int, world: int
) -> None:
    cursors = [data.draw(st.integers(0, 9)) for _ in range(before)]
    gaps, start = positions_to_come(cursors, (), 0)
    alone = Shard(gaps=gaps, start=start)
    shards = [Shard(rank, world, gaps, start) for rank in range(world)]
    together = [shard.position(index) for index in range(12) for shard in shards]
    assert together == [alone.position(index) for index in range(12 * world)]
    taken = {
        Shard(rank, before).position(index)
        for rank, cursor in enumerate(cursors)
        for index in range(cursor)
    }
    assert together == [place for place in range(200) if place not in taken][: 12 * world]


def test_ranks_that_drew_as_many_leave_no_gap() -> None:
    assert positions_to_come([6, 6], (), 0) == ((), 12)
    assert positions_to_come([6, 4], (), 0) == ((9,), 11)
    assert positions_to_come([1], (9,), 11) == ((), 11)
    assert positions_to_come([0], (9,), 11) == ((9,), 11)


def test_leftover_groups_and_what_was_learned_go_along() -> None:
    learned = {"division": {"rollout": 2}}
    before = [state(5, (4, 6), placement=learned), state(4, (1,))]
    first, second, third = reshard_states(before, world=3)
    assert [
        positions(rank_state["leftover_groups"]) for rank_state in (first, second, third)
    ] == [
        [1],
        [4],
        [6],
    ]
    assert first["placement"] == second["placement"] == learned, (
        "the first rank of each machine takes it"
    )
    assert first["acceptance"] == before[0]["acceptance"]
    assert first["lengths"] == third["lengths"] == before[0]["lengths"]
    assert first.keys() == PARTS.keys(), "no part is forgotten"
    assert json.loads(json.dumps(first)) == first


@given(
    st.lists(st.integers(1, 50), min_size=12, max_size=12),
    st.sampled_from([1, 2, 3, 4, 6]),
    st.sampled_from([1, 2, 3]),
)
def test_a_round_is_dealt_whole(lengths: list[int], world: int, before: int) -> None:
    groups = [group(position, length) for position, length in enumerate(lengths)]
    assigned = reshard_round([groups[rank::before] for rank in range(before)], world=world)
    assert [len(rank_groups) for rank_groups in assigned] == [12 // world] * world
    assert (
        sorted(
            (dealt_group for rank_groups in assigned for dealt_group in rank_groups),
            key=lambda dealt_group: dealt_group.draw.position,
        )
        == groups
    )
    assert all(
        rank_groups == sorted(rank_groups, key=lambda dealt_group: dealt_group.draw.position)
        for rank_groups in assigned
    )


def commit(folder: Path, step: int, world: int, *, but: int | None = None) -> None:
    for rank in set(range(world)) - {but}:
        rank_groups = [group(4 * step + number) for number in range(rank, 4, world)]
        Journal(folder, rank=rank, world=world).commit(
            step, rank_groups, state((step + 1) * 4 // world), {"reward": 1.0}
        )


@pytest.mark.parametrize(("before", "world"), [(1, 2), (2, 1), (2, 4), (4, 1)])
def test_the_journal_gives_other_ranks_their_part(
    tmp_path: Path, before: int, world: int
) -> None:
    commit(tmp_path, 3, before)
    parts = [Journal(tmp_path, rank=rank, world=world).read(3) for rank in range(world)]
    assert all(part is not None for part in parts)
    read_parts = [part for part in parts if part is not None]
    assert sorted(
        read_group.draw.position for part in read_parts for read_group in part.groups
    ) == [
        12,
        13,
        14,
        15,
    ]
    assert all(
        part.state["draws"] == {"start": 16, "gaps": [], "cursor": 0} for part in read_parts
    )


def test_a_round_that_lacks_a_part_was_never_made(tmp_path: Path) -> None:
    commit(tmp_path, 0, 2, but=1)
    commit(tmp_path, 1, 2, but=0)
    for rank, world in ((0, 1), (0, 2), (1, 2), (2, 3)):
        journal = Journal(tmp_path, rank=rank, world=world)
        assert [journal.read(0), journal.read(1)] == [None, None]


def test_a_part_left_from_other_ranks_counts_for_nothing(tmp_path: Path) -> None:
    commit(tmp_path, 0, 3, but=0)  # parts of ranks 1 and 2
    commit(tmp_path, 0, 2, but=1)  # and of rank 0, of two
    assert Journal(tmp_path, rank=0, world=1).read(0) is None
    assert Journal(tmp_path, rank=1, world=2).read(0) is None


def test_files_of_ranks_that_are_no_more_go_with_the_others(tmp_path: Path) -> None:
    for step in range(4):
        commit(tmp_path, step, 3)
    journal = Journal(tmp_path, rank=0, world=1)
    journal.prune(before=1)
    journal.forget_from(3)
    assert (
        sorted(path.name[6:12] for path in tmp_path.iterdir())
        == ["000001"] * 3 + ["000002"] * 3
    )
    Journal(tmp_path, rank=1, world=2).forget_from(2)
    assert (
        not (tmp_path / "round-000002-rank-1.json").exists()
        and (tmp_path / "round-000002-rank-0.json").exists()
    )
