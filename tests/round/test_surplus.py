"""Surplus groups are kept if they teach and are young enough; of the trained ones the widest is taken once more."""

from ycore.round.sampling import LeftoverGroups, ReuseBuffer, Rules
from ycore.types import Completion, Draw, Finished, Group, Prompt, Score


def finished(position: int, *versions: int, teaches: bool = True) -> Finished:
    completions = tuple(Completion((1,), (-1.0,), "a", "stop", version) for version in versions)
    scores = ((Score(1.0),),) * len(versions)
    return Finished(
        Group(Draw(position, Prompt(position, "a"), (1,)), completions, scores), teaches
    )


def positions(items: list[Finished]) -> list[int]:
    return [item.group.draw.position for item in items]


def test_only_what_teaches_is_kept_and_taken_once() -> None:
    surplus = LeftoverGroups(max_age=1)
    surplus.put([finished(0, 0), finished(1, 0, teaches=False), finished(2, 0)])
    assert len(surplus) == 2
    assert positions(surplus.take(1)) == [0, 2]
    assert surplus.take(1) == []


def test_age_is_that_of_the_oldest_completion() -> None:
    surplus = LeftoverGroups(max_age=2)
    surplus.put([finished(0, 3, 5), finished(1, 4, 5), finished(2, 6)])
    assert positions(surplus.take(6)) == [1, 2]


def test_no_age_keeps_nothing_for_a_later_version() -> None:
    surplus = LeftoverGroups(max_age=0)
    surplus.put([finished(0, 3)])
    assert surplus.take(4) == []


def rewarded(position: int, *rewards: float | None, version: int = 0) -> Group:
    completions = tuple(Completion((1,), (-1.0,), "a", "stop", version) for _ in rewards)
    scores = tuple((Score(reward),) for reward in rewards)
    return Group(Draw(position, Prompt(position, "a"), (1,)), completions, scores)


def reuse_buffer(share: float = 0.5) -> ReuseBuffer:
    return ReuseBuffer(Rules(group_size=4, seed=0, reward_weights=(1.0,), reuse=share))


def places(groups: list[Group]) -> list[int]:
    return [group.draw.position for group in groups]


def test_the_groups_whose_rewards_differ_most_are_taken_once_more() -> None:
    buffer = reuse_buffer()
    assert buffer.num_ready(4) == 0  # nothing was trained on
    buffer.put([rewarded(0, 1, 0, 0, 0), rewarded(1, 1, 1, 0, 0), rewarded(2, 1, 1, 1, 1)])
    buffer.put([rewarded(3, None, None), rewarded(4, 0.2, 0.9, None, 0.9, version=1)])
    assert buffer.num_ready(4) == 2 and buffer.num_ready(5) == 2
    assert places(buffer.take(2)) == [0, 1]
    assert places(buffer.take(2)) == [3, 4]
    assert buffer.num_ready(4) == 1


def test_groups_of_the_last_four_rounds_are_kept() -> None:
    buffer = reuse_buffer()
    for step in range(6):
        buffer.put([rewarded(step, 1, step / 10, version=step)])
    assert places(buffer.take(4)) == [5, 4, 3, 2]
    assert buffer.take(1) == []


def test_the_oldest_go_first_whatever_was_taken_meanwhile() -> None:
    buffer = reuse_buffer()
    for step in range(4):
        buffer.put(
            [
                rewarded(2 * step, 1, 0.5, version=step),
                rewarded(2 * step + 1, 1, 0, version=step),
            ]
        )
    buffer.take(1)
    buffer.put([rewarded(8, 1, 0.5, version=4), rewarded(9, 1, 0.5, version=4)])
    assert sorted(places(buffer.take(8))) == [1, 2, 3, 4, 5, 6, 8, 9]


def test_without_a_share_nothing_is_kept() -> None:
    buffer = reuse_buffer(0.0)
    buffer.put([rewarded(0, 1, 0)])
    assert buffer.state_dict() == [] and buffer.num_ready(4) == 0


def test_a_checkpoint_has_what_may_be_taken() -> None:
    buffer, resumed = reuse_buffer(), reuse_buffer()
    buffer.put([rewarded(0, 1, 0), rewarded(1, 1, 1)])
    resumed.load_state_dict(buffer.state_dict())
    assert resumed.take(2) == buffer.take(2)
