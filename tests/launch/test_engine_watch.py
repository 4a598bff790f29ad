"""Engines that share a device by sleeping: started one after the other, and left alone where they die asleep.

The engines are processes of the test's own that answer every route with 200; nothing here has a device.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ycore.config.schema import EngineSettings
from ycore.engine import commands
from ycore.engine.commands import EngineSpec
from ycore.engine.server import DROP, KEEP, asleep_file, mark_asleep
from ycore.errors import EngineError
from ycore.launch.engine_watch import (
    EngineWatch,
    LiveEngine,
    ssh_command,
    start_engines,
    start_order,
)
from ycore.launch.guardian import RunWatch
from ycore.run.files import RunFolder

ENGINE = """
import http.server, socketserver, sys, time
from pathlib import Path
name, socket, refuses = sys.argv[1:]
log = Path(socket).parent / "log"
class Server(socketserver.ThreadingUnixStreamServer):
    def get_request(self):
        return super().get_request()[0], ("engine", 0)
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        if self.path != "/health":
            log.open("a").write(f"{name} {self.path}\\n")
        self.send_response(500 if self.path.startswith(refuses) else 200)
        self.end_headers()
    do_GET = do_POST = answer
log.open("a").write(f"{name} starts\\n")
Server(socket, Handler).serve_forever()
"""


@pytest.fixture
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="yc-") as place:
        yield Path(place)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    in_vllms_place(monkeypatch)


def in_vllms_place(monkeypatch: pytest.MonkeyPatch, *, refuses: str = "/nothing") -> None:
    def command(engine: EngineSpec) -> list[str]:
        return [sys.executable, "-c", ENGINE, engine.name, str(engine.socket), refuses]

    monkeypatch.setattr(commands, "engine_command", command)


def planned(
    folder: RunFolder, sockets: Path, name: str, device: str | None = None, sleeps: bool = True
) -> EngineSpec:
    return EngineSpec(
        name=name, role=name.rpartition("-")[0], model=folder.root, socket=sockets / f"{name}.sock",
        temporary=folder.root, run_id=folder.run_id, dtype="float32", max_model_len=64, max_num_seqs=1, seed=0,
        devices=tuple(device or ()), sleeps=sleeps and device is not None,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    yield folder
    RunWatch(folder.run_id).kill(grace_s=0)


def start_all(
    folder: RunFolder, planned: list[EngineSpec], say: Callable[[str], None] = print
) -> list[LiveEngine]:
    settings = EngineSettings(health_timeout_s=60, start_timeout_s=60)
    return list(start_engines(planned, folder, settings, say=say).engines)


def test_a_turn_has_one_engine_of_each_device(sockets: Path, folder: RunFolder) -> None:
    named = [
        ("rollout-0", "4"),
        ("rollout-1", "5"),
        ("judge-0", "4"),
        ("judge-1", "5"),
        ("judge-2", "4"),
    ]
    turns = [
        [engine.name for engine in turn]
        for turn in start_order([planned(folder, sockets, *words) for words in named])
    ]
    assert turns == [["rollout-0", "rollout-1"], ["judge-0", "judge-1"], ["judge-2"]]
    wide = [("rollout-0", "4"), ("rollout-1", "5"), ("judge-0", "45"), ("reward-model-0", "5")]
    turns = [
        [engine.name for engine in turn]
        for turn in start_order([planned(folder, sockets, *words) for words in wide])
    ]
    assert turns == [["rollout-0", "rollout-1"], ["judge-0"], ["reward-model-0"]]


def test_each_is_asleep_before_the_next_one_of_its_device_starts(
    sockets: Path, folder: RunFolder
) -> None:
    wanted = [
        planned(folder, sockets, name, "0")
        for name in ("rollout-0", "judge-0", "reward-model-0")
    ]
    said: list[str] = []
    started = start_all(folder, wanted, say=said.append)
    assert [engine.name for engine in started] == [spec.name for spec in wanted]
    assert (sockets / "log").read_text().splitlines() == [
        *["rollout-0 starts", "rollout-0 /sleep?level=2"],
        *["judge-0 starts", "judge-0 /sleep?level=1"],
        *["reward-model-0 starts", "reward-model-0 /sleep?level=1"],
    ]
    levels = [asleep_file(spec.socket).read_text() for spec in wanted]
    assert levels == [str(DROP), str(KEEP), str(KEEP)]
    assert EngineWatch(started).are_ready and len(said) == 3


def test_those_that_stay_awake_on_a_device_start_in_turn_too(
    sockets: Path, folder: RunFolder
) -> None:
    """vLLM measures its memory while it starts; what a neighbour takes meanwhile would be counted for it."""
    named = [("rollout-0", "0"), ("rollout-1", "1"), ("judge-0", "0")]
    started = start_all(
        folder, [planned(folder, sockets, *words, sleeps=False) for words in named]
    )
    assert all(engine.is_ready for engine in started), "the trainer starts next, and last"
    lines = (sockets / "log").read_text().splitlines()
    assert lines[2] == "judge-0 starts" and sorted(lines[:2]) == [
        "rollout-0 starts",
        "rollout-1 starts",
    ]
    assert len(lines) == 3, "nobody sleeps"


def test_engines_on_cores_all_start_at_once(sockets: Path, folder: RunFolder) -> None:
    started = start_all(
        folder, [planned(folder, sockets, name) for name in ("rollout-0", "rollout-1")]
    )
    assert not any(engine.is_ready for engine in started)


def test_one_that_refuses_to_sleep_is_named_with_the_way_out(
    sockets: Path, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_vllms_place(monkeypatch, refuses="/sleep")
    with pytest.raises(EngineError, match=r"rollout-0 does not sleep; .*engine\.sleep=false"):
        start_all(folder, [planned(folder, sockets, "rollout-0", "0")])


def test_one_that_dies_asleep_is_started_again_when_it_is_woken(
    sockets: Path, folder: RunFolder
) -> None:
    spec, said = planned(folder, sockets, "judge-0", "0"), list[str]()
    engine = LiveEngine(spec, folder, health_timeout_s=60.0)
    watch = EngineWatch([engine], max_restarts=1, start_timeout_s=60, say=said.append)
    until_ready(watch)
    mark_asleep(spec.socket, KEEP)
    first = engine.processes()[0].pid
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while engine.processes():
        assert time.monotonic() < deadline
    watch.look()
    watch.check()
    assert engine.find_fault() is None and not engine.processes() and watch.num_restarts == 0
    asleep_file(spec.socket).unlink()
    watch.look()
    assert watch.num_restarts == 1 and "starting it again (1 of 1)" in said[-1]
    until_ready(watch)
    assert engine.processes()[0].pid != first


def test_a_new_process_is_not_taken_for_one_that_sleeps(
    sockets: Path, folder: RunFolder
) -> None:
    spec = planned(folder, sockets, "judge-0", "0")
    mark_asleep(spec.socket, DROP)
    LiveEngine(spec, folder, health_timeout_s=60.0)
    assert not asleep_file(spec.socket).exists()


def until_ready(watch: EngineWatch) -> None:
    deadline = time.monotonic() + 120
    while not watch.are_ready:
        watch.look()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(shutil.which("ssh") is None, reason="OpenSSH's client is not installed")
def test_the_socket_of_an_engine_elsewhere_may_have_any_name(folder: RunFolder) -> None:
    sockets = folder.root / "at 10:00, 5%"
    options = ssh_command(replace(planned(folder, sockets, "rollout-0"), host="b"))
    options = [*options[: options.index("--")], "-F", "none", "-G", "b"]
    settings = subprocess.run(options, capture_output=True, text=True, check=True).stdout
    assert f"localforward {sockets / 'rollout-0.host'} /tmp/ycore-" in settings


def test_a_lost_engine_leads_to_one_that_is_ready_and_on_to_the_next(tmp_path: Path) -> None:
    engines: list[Any] = [
        SimpleNamespace(
            engine=SimpleNamespace(
                role="judge", model=Path(model), socket=tmp_path / f"{name}.sock"
            ),
            socket=tmp_path / f"{name}.own",
            is_ready=name != "a",
        )
        for name, model in zip("axbc", ("mine", "other", "mine", "mine"), strict=True)
    ]
    lost, _, second, third = engines
    lost.lead_to = partial(LiveEngine.lead_to, lost)
    watch = EngineWatch(engines)
    lost.lead_to(lost.socket)
    watch._lead_on(lost)
    assert lost.engine.socket.readlink() == second.socket
    second.is_ready = False
    watch._lead_on(lost)
    assert lost.engine.socket.readlink() == third.socket
    third.is_ready = False
    watch._lead_on(lost)
    assert lost.engine.socket.readlink() == third.socket, "requests wait there"
