"""What is over is kept if it can teach, and trained on only while it is young enough."""

from ycore.round.sampling import LeftoverGroups
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
