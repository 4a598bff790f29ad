"""Machines of a run, as threads of this process on loopback: they meet, agree, and learn of each other's ends."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from ycore.config.schema import RunConfig
from ycore.errors import ConfigError, Interrupted, RunError
from ycore.launch import machines as module
from ycore.launch.layout import MEETING_SECRET, Layout
from ycore.launch.machines import Machines, meeting
from ycore.run.claim import run_facts

CONTENTS = {"dataset": "4 rows, sha256 ab"}


def config(**changes: Any) -> RunConfig:
    settings = {
        "model": "m",
        "dataset": "rows.jsonl",
        "rewards": [{"reward": "exact_answer"}],
        "output": "run",
    }
    return RunConfig.model_validate(settings | changes)


FACTS = run_facts(config(), CONTENTS)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in module._INTERFACES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def layout(port: int, rank: int, *, count: int = 2, host: str = "127.0.0.1") -> Layout:
    settings = {"main_process_ip": host, "main_process_port": port}
    return Layout(count, count, rank, settings)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Meeting:
    """Machines that have met, each in a thread until `leave` says how it ends."""

    def __init__(self, pool: ThreadPoolExecutor, port: int, count: int) -> None:
        self.lines: list[list[str]] = [[] for _ in range(count)]
        self.machines: dict[int, Machines] = {}
        self._ends = [threading.Event() for _ in range(count)]
        self._errors: dict[int, BaseException] = {}
        self.left: list[Future[None]] = [
            pool.submit(self._stay, layout(port, rank, count=count), rank)
            for rank in range(count)
        ]
        until(lambda: len(self.machines) == count or any(left.done() for left in self.left))
        assert len(self.machines) == count, [
            left.exception() for left in self.left if left.done()
        ]

    def _stay(self, place: Layout, rank: int) -> None:
        with meeting(place, FACTS, say=self.lines[rank].append) as machines:
            self.machines[rank] = machines
            self._ends[rank].wait()
            if rank in self._errors:
                raise self._errors[rank]

    def leave(self, rank: int, error: BaseException | None = None) -> None:
        if error is not None:
            self._errors[rank] = error
        self._ends[rank].set()

    def close(self) -> None:
        for end in self._ends:
            end.set()


@pytest.fixture(autouse=True)
def no_interface_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that meet in this process name the interface for its later children."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
        monkeypatch.delenv(name)


@pytest.fixture
def three(pool: ThreadPoolExecutor, port: int) -> Iterator[Meeting]:
    met = Meeting(pool, port, 3)
    yield met
    met.close()


def test_they_meet_and_know_the_interface_between_them(three: Meeting) -> None:
    for rank in range(3):
        assert "3 machines have met at 127.0.0.1" in three.lines[rank][-1]
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    with ThreadPoolExecutor(3) as pool:
        gathered = [
            pool.submit(machines.gather, "start 0", rank * 10, look=machines.check)
            for rank, machines in three.machines.items()
        ]
    assert [future.result() for future in gathered] == [{0: 0, 1: 10, 2: 20}] * 3


def test_an_interface_that_the_user_chose_stays(
    pool: ThreadPoolExecutor, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    met = Meeting(pool, port, 2)
    met.close()
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("ib0", "lo")


def test_one_machine_waits_for_nobody() -> None:
    with meeting(Layout(), FACTS, say=print) as machines:
        machines.check()
        assert machines.gather("trained", look=machines.check) == {0: None}


def test_a_failure_reaches_all_with_its_machine(three: Meeting) -> None:
    heard = [threading.Event(), threading.Event()]
    for event, rank in zip(heard, (0, 2), strict=True):
        three.machines[rank].on_end = event.set
    three.leave(1, RunError("the disk is full"))
    for rank, event in zip((0, 2), heard, strict=True):
        assert event.wait(10)
        with pytest.raises(RunError, match=r"machine 1 \(.*\): the disk is full"):
            three.machines[rank].check()


def test_a_command_that_is_killed_is_missed_at_once(three: Meeting) -> None:
    for link in three.machines[2]._links.values():  # as the kernel closes them
        link.shutdown(socket.SHUT_RDWR)
    for rank in (0, 1):
        until(lambda rank=rank: three.machines[rank].has_ended)
        with pytest.raises(RunError, match=r"machine 2 .*killed"):
            three.machines[rank].check()


def test_a_machine_that_has_finished_was_not_killed(three: Meeting) -> None:
    """Its connections close as those of a killed command do, perhaps before another has read that all have trained."""
    heard = threading.Event()
    for rank in (0, 1):
        three.machines[rank].on_end = heard.set
    three.leave(2)
    three.left[2].result(timeout=30)
    assert not heard.wait(1)
    three.machines[0].check()


def test_silence_is_the_end_and_slowness_is_not(
    pool: ThreadPoolExecutor, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SILENT_S", 1.0)
    monkeypatch.setattr(module, "_BEAT_S", 0.1)
    met = Meeting(pool, port, 2)
    time.sleep(1.5)  # nothing but heartbeats came
    met.machines[0].check()
    monkeypatch.setattr(met.machines[1], "_links", {})  # nothing gets through any more
    until(lambda: met.machines[0].has_ended)
    with pytest.raises(RunError, match=r"machine 1 .*silent for 1 s"):
        met.machines[0].check()
    met.close()


def test_an_interrupt_is_asked_of_all_and_is_no_failure(three: Meeting) -> None:
    three.machines[1].tell("stop 1")
    until(lambda: three.machines[2].num_stops == 1)
    three.leave(1, Interrupted("stopped after step 3"))
    until(lambda: three.machines[2].has_ended)
    three.machines[2].check()
    assert (three.machines[0].num_stops, three.machines[1].num_stops) == (1, 0)
    three.machines[2].tell("stop 2")
    until(lambda: three.machines[0].num_stops == 2)


def test_a_failure_is_no_request_to_stop(three: Meeting) -> None:
    three.leave(1, RunError("the disk is full"))
    until(lambda: three.machines[0].has_ended)
    assert three.machines[0].num_stops == 0


def test_of_several_failures_the_cause_is_shown(three: Meeting) -> None:
    three.machines[0].tell("failed 0", ["another rank failed", False])
    three.machines[1].tell("failed 0", ["rank 1: out of memory", True])
    until(lambda: three.machines[2].failure(0))
    assert "machine 1" in str(three.machines[2].failure(0))
    assert three.machines[2].failure(1) is None


def test_each_difference_is_a_line_with_both_values(
    pool: ThreadPoolExecutor, port: int
) -> None:
    lines: list[str] = []

    def come(rank: int) -> None:
        changes = {"max_tokens": 64} if rank else {}
        contents = {"dataset": "5 rows, sha256 cd"} if rank else CONTENTS
        facts = run_facts(config(**changes), contents)
        with meeting(layout(port, rank), facts, say=lines.append):
            pass

    for future in [pool.submit(come, rank) for rank in range(2)]:
        with pytest.raises(ConfigError, match=r"differ in max_tokens, dataset"):
            future.result()
    assert any("dataset: 4 rows, sha256 ab on machine 0" in line for line in lines)
    assert any("5 rows, sha256 cd on machine 1" in line for line in lines)
    assert any(line.startswith("max_tokens: ") and "64 on machine 1" in line for line in lines)


@pytest.mark.parametrize("comes", [(0, 1), (1, 2)])
def test_who_is_missing_is_named_with_the_port(
    pool: ThreadPoolExecutor, port: int, monkeypatch: pytest.MonkeyPatch, comes: tuple[int, ...]
) -> None:
    monkeypatch.setattr(module, "_NAMED_EVERY_S", 0.3)
    monkeypatch.setattr(module, "_MEET_WITHIN_S", 2.0)
    lines: list[str] = []

    def come(rank: int) -> None:
        with meeting(layout(port, rank, count=3), FACTS, say=lines.append):
            pass

    missing = {
        0: "machine 0 .*cannot be reached",
        2: r"machine 2 \(from rank 2 on\) of 3 cannot be reached",
    }
    for future in [pool.submit(come, rank) for rank in comes]:
        with pytest.raises((ConfigError, RunError), match=missing[({0, 2} - {*comes}).pop()]):
            future.result()
    assert any(f"port {port}" in line and "firewall" in line for line in lines)


def test_a_stop_while_they_meet_is_one_of_all(
    pool: ThreadPoolExecutor, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_NAMED_EVERY_S", 0.3)

    def press_ctrl_c(line: str) -> None:
        raise KeyboardInterrupt

    def come(rank: int) -> None:
        say: Callable[[str], None] = press_ctrl_c if rank else lambda line: None
        with meeting(layout(port, rank, count=3), FACTS, say=say):
            pass

    first, second = (pool.submit(come, rank) for rank in range(2))
    with pytest.raises(KeyboardInterrupt):
        second.result()
    with pytest.raises(Interrupted, match=r"machine 1 .*was stopped"):
        first.result(timeout=30)


def test_two_machines_of_one_rank(pool: ThreadPoolExecutor, port: int) -> None:
    met = Meeting(pool, port, 2)
    # The listener is closed by now; a third machine that came in time:
    with pytest.raises(ValueError, match="machine_rank 1 of 2 is taken"):
        met.machines[0]._admit(socket.socket(), 1, "")
    met.close()


def test_a_port_that_is_taken(port: int) -> None:
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ConfigError, match=f"main_process_port {port}"),
        meeting(layout(port, 0), FACTS, say=print),
    ):
        pass


def test_a_stranger_at_the_door_does_no_harm(pool: ThreadPoolExecutor, port: int) -> None:
    first = pool.submit(_stay_a_moment, layout(port, 0))
    until(lambda: _knocks(port))
    second = pool.submit(_stay_a_moment, layout(port, 1))
    assert first.result() == second.result() == [0, 1]


def test_who_does_not_know_the_secret_can_end_nothing(
    pool: ThreadPoolExecutor, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def come(rank: int, secret: str) -> Future[list[int]]:
        monkeypatch.setenv(MEETING_SECRET, secret)
        machine = pool.submit(_stay_a_moment, layout(port, rank))
        until(lambda: MEETING_SECRET not in os.environ)
        return machine

    first = come(0, "ab")
    end = json.dumps([1, "end", [1, "a stranger's"]]).encode()
    for secret in ({}, {"secret": ""}, {"secret": "é"}, {"secret": 1}, [], "ab"):
        place = json.dumps([1, "place", secret]).encode()
        until(lambda words=place + b"\n" + end + b"\n": _knocks(port, words))
    with pytest.raises(
        RunError, match=f"{MEETING_SECRET} is another there; say the same on all"
    ):
        come(1, "abc").result()
    assert come(1, "ab").result() == first.result() == [0, 1]


def _knocks(port: int, words: bytes = b"GET / HTTP/1.1\r\n\r\n") -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(words)
    except OSError:
        return False
    return True


def _stay_a_moment(place: Layout) -> list[int]:
    with meeting(place, FACTS, say=print) as machines:
        return list(machines.gather("trained", look=machines.check))
