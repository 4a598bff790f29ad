"""What the ranks of a machine are told of each other, and when. No process."""

from ycore.round.peers import Hub


def opened(num_ranks: int = 2) -> Hub:
    hub = Hub(num_ranks)
    letters = [hub.receive(rank, ["open", 1, 3, 9]) for rank in range(num_ranks)]
    assert letters[:-1] == [[]] * (num_ranks - 1), "nobody goes on before all have come"
    assert letters[-1] == [
        (rank, ["opened", num_ranks, 3 * num_ranks, 3 * num_ranks]) for rank in range(num_ranks)
    ]
    return hub


def test_counts_are_added_up_and_the_one_who_adds_gets_them_at_that_moment() -> None:
    hub = opened()
    assert hub.receive(0, ["count", 1, -1, 0]) == [(0, ["counted", 3, 5, 6])]
    assert hub.receive(1, ["count", 0, 2, 2]) == [(1, ["counted", 3, 7, 8])]
    for rank in (0, 1):
        again = hub.receive(rank, ["open", 0, 2, 9])
    assert again[0] == (0, ["opened", 0, 4, 4]), "each round counts from its own start"


def test_who_waits_hears_of_groups_that_cannot_teach_of_those_given_back_and_of_the_last() -> None:
    hub = opened()
    hub.receive(0, ["count", 1, -1, 0])
    hub.receive(0, ["count", 0, 1, 1])
    assert not hub.has_news
    hub.receive(0, ["count", 0, -1, 0])
    assert hub.has_news
    assert hub.take_news() == [(rank, ["counts", 3, 5, 7]) for rank in (0, 1)] and not hub.has_news
    hub.receive(1, ["count", 0, -1, -1])
    assert hub.has_news
    hub.take_news()
    for _ in range(4):
        assert not hub.has_news
        hub.receive(1, ["count", 1, -1, 0])
    assert hub.has_news


def test_a_meeting_is_over_when_all_have_come_and_says_whether_any_is_stopping() -> None:
    hub = Hub(3)
    for stopping in (False, True):
        assert hub.receive(2, ["meet", False]) == hub.receive(0, ["meet", stopping]) == []
        assert hub.receive(1, ["meet", False]) == [(rank, ["met", stopping]) for rank in range(3)]


def test_a_stop_reaches_all_and_a_failure_the_others() -> None:
    hub = Hub(3)
    assert hub.receive(1, ["stop"]) == [(rank, ["stop"]) for rank in range(3)]
    assert hub.receive(1, ["fail", "rank 1: gone"]) == [
        (rank, ["failed", "rank 1: gone"]) for rank in (0, 2)
    ]
