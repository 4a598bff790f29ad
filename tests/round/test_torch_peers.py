"""Two controllers, two processes, a real process group: help, dealing, stops and failures between them."""

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ycore.errors import Interrupted
from ycore.round.peers import Peers

WORKER = Path(__file__).with_name("rank_of_two.py")
REWARD = """
def digit(completions, flat, **columns):
    return [1.0 if is_flat else float(text) for text, is_flat in zip(completions, flat)]
"""
WITHIN_S = 300

Seen = dict[str, list[dict[str, Any]]]


def run(folder: Path, *scenarios: str) -> Seen:
    """Run the scenarios, and return what each rank saw of each."""
    (folder / "their_rewards.py").write_text(REWARD)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), ",".join(scenarios), str(folder)],
            env={**os.environ, **common, "RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=WITHIN_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return {
        name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]
        for name in scenarios
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    scenarios = ("plain", "dynamic", "slow_and_fast", "exchange", "curriculum", "ahead")
    return run(tmp_path_factory.mktemp("two"), *scenarios)


def positions(ranks: list[dict[str, Any]]) -> list[int]:
    return sorted(group["position"] for rank in ranks for group in rank["groups"])


@pytest.mark.verify
def test_without_dynamic_sampling_every_rank_draws_its_share(seen: Seen) -> None:
    ranks = seen["plain"]
    assert [rank["drawn"] for rank in ranks] == [4, 4]
    assert positions(ranks) == list(range(8))
    assert [len(rank["groups"]) for rank in ranks] == [4, 4]


def test_dealing_evens_out_the_tokens_and_says_what_it_moved(seen: Seen) -> None:
    ranks = seen["plain"]
    metrics = [rank["metrics"] for rank in ranks]
    loads = [sum(group["tokens"] for group in rank["groups"]) for rank in ranks]
    for rank_metrics in metrics:
        assert rank_metrics["ycore/balance/after"] == pytest.approx(max(loads) * 2 / sum(loads))
        assert (
            1.0 <= rank_metrics["ycore/balance/after"] <= rank_metrics["ycore/balance/before"]
        )
    foreign = [
        sum(group["position"] % 2 != rank for group in seen["plain"][rank]["groups"])
        for rank in (0, 1)
    ]
    assert (metrics[0]["ycore/bytes_moved"] > 0) == (sum(foreign) > 0)
    assert metrics[0]["ycore/bytes_moved"] == metrics[1]["ycore/bytes_moved"]


def test_a_rank_whose_groups_teach_helps_one_whose_groups_do_not(seen: Seen) -> None:
    """Rank 1 keeps one group in four: alone it would have to draw sixteen for its four."""
    ranks = seen["dynamic"]
    rows = [group["row"] for rank in ranks for group in rank["groups"]]
    assert len(rows) == 8 and all(row % 2 == 0 or row % 8 == 1 for row in rows), (
        "a group that cannot teach was taken"
    )
    assert ranks[0]["drawn"] > 4, "rank 0 did not help"
    assert ranks[1]["drawn"] < 16
    assert [len(rank["groups"]) for rank in ranks] == [4, 4]
    assert any(group["position"] % 2 == 0 for group in ranks[1]["groups"]), (
        "no whole group was dealt to the late rank"
    )
    assert ranks[0]["metrics"]["ycore/sampling/filled"] == 0.0
    assert ranks[0]["metrics"]["ycore/sampling/drawn"] == sum(rank["drawn"] for rank in ranks)


def test_a_free_engine_takes_what_a_busy_one_has_not_begun(seen: Seen) -> None:
    ranks = seen["slow_and_fast"]
    assert ranks[0]["drawn"] > ranks[1]["drawn"] >= 1
    assert sum(rank["drawn"] for rank in ranks) == 12
    assert [len(rank["groups"]) for rank in ranks] == [6, 6]


def test_ranks_learn_the_same_curriculum_and_leave_out_what_does_not_teach(seen: Seen) -> None:
    """Each of the first 64 positions is drawn; of the later ones, the flat rows' about one in ten."""
    ranks = seen["curriculum"]
    assert ranks[0]["state"] == ranks[1]["state"] and len(ranks[0]["state"]["rows"]) == 64
    draws = [draw for rank in ranks for draw in rank["asked"]]
    assert all(position % 64 == row for position, row in draws)
    assert len({position for position, _ in draws}) == len(draws), "a position was drawn twice"
    later = [
        row for position, row in draws if position >= 80
    ]  # a round draws ahead of what it learns
    flat = sum(row % 2 == 1 and row % 8 != 1 for row in later) / len(later)
    assert len(later) > 0 and flat < 0.25, (
        f"{flat:.2f} of the later draws are flat, 0.375 without a curriculum"
    )


def test_rounds_one_step_ahead_beside_the_collectives_of_training(seen: Seen) -> None:
    ranks = seen["ahead"]
    assert [rank["sums"] for rank in ranks] == [[3.0] * 200] * 2
    assert [[step["version"] for step in rank["steps"]] for rank in ranks] == [[0, 0, 1, 2]] * 2
    drawn = [
        group["position"]
        for rank in ranks
        for step in rank["steps"]
        for group in step["groups"]
    ]
    assert len(drawn) == 32 and len({*drawn}) == 32, "a group was trained on twice"


def test_a_controllers_state_comes_back_exactly(seen: Seen) -> None:
    for name in ("plain", "dynamic"):
        assert [rank["restored"] for rank in seen[name]] == [True, True]
    assert [rank["state"]["draws"]["cursor"] for rank in seen["dynamic"]] == [
        rank["drawn"] for rank in seen["dynamic"]
    ]


def test_groups_pass_whole_and_sums_are_everybodys(seen: Seen) -> None:
    ranks = seen["exchange"]
    assert [rank["sums"] for rank in ranks] == [[3.0, 20.0]] * 2
    assert [rank["empty"] for rank in ranks] == [0, 0]
    assert positions(ranks) == list(range(6))


@pytest.mark.parametrize(
    "scenario",
    ["stopped", pytest.param("stopped_while_waited_for", marks=pytest.mark.verify)],
)
def test_a_stop_on_one_rank_stops_both(tmp_path: Path, scenario: str) -> None:
    for rank in run(tmp_path, scenario)[scenario]:
        assert rank["error"] == "Interrupted"
        assert rank["after_s"] < 5


def test_a_rank_that_does_not_come_to_a_collective_is_an_error_in_time(tmp_path: Path) -> None:
    waited, _ = run(tmp_path, "absent")["absent"]
    assert "rank 0: adding up did not end" in waited["message"]
    assert "within 1 s (collective_timeout_s)" in waited["message"]
    assert "the first rank is gone" not in waited["message"], "it is this one"


def test_unfinished_groups_go_on_with_the_rank_that_began_them(tmp_path: Path) -> None:
    ranks = run(tmp_path, "carried")["carried"]
    trained = [group["position"] for rank in ranks for step in rank["steps"] for group in step]
    left = [position for rank in ranks for position in rank["left"]]
    everything = trained + left + [position for rank in ranks for position in rank["kept"]]
    assert len(trained) == 20 and left and len({*everything}) == len(everything), (
        "a group came twice"
    )


@pytest.mark.verify
def test_in_a_stream_each_token_has_its_version_and_no_group_comes_twice(
    tmp_path: Path,
) -> None:
    ranks = run(tmp_path, "stream")["stream"]
    trained = [group["position"] for rank in ranks for step in rank["steps"] for group in step]
    assert len(trained) == 48 and len({*trained}) == 48
    crossed = 0
    for rank in ranks:
        for step, versions, token_ids in rank["versions"]:
            start = 0
            for end, version in versions:
                assert step - 3 <= version <= step
                assert {*token_ids[start:end]} <= {version}
                start = end
            crossed += len(versions) > 1
    assert crossed, "no completion met new weights"


def test_a_rank_that_begins_a_round_does_not_wait_for_one_that_stops() -> None:
    """The other sees the stop before it begins the round, and never comes."""
    stays = Peers(timeout_s=60.0)
    stops = Peers(timeout_s=60.0)
    stays.world = stops.world = 2
    stops.rank = 1
    stops._store = stays._store
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(stays.open_tally, need=1, ready=0, starts=1)
        time.sleep(0.2)
        assert not begun.done()
        stops.ask_to_stop()
        with pytest.raises(Interrupted):
            begun.result(timeout=30.0)
