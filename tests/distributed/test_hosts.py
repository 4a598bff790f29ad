"""`--hosts` and `engine.hosts`: a terminal, which is a machine of its own here, runs commands or engines over a real ssh.

Machines are network namespaces, each with an sshd; the scripted engine and light ranks (`light_rank`) work on them.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.distributed.light_rank import FAILS_WITH, MODULE, write_launcher
from tests.distributed.network import Host, network
from tests.harness import COMMAND, ENVIRONMENT, HANG_S, command_line
from tests.tiny_model import write_tiny_model
from ycore import __version__
from ycore.launch.guardian import remove_leftovers
from ycore.launch.layout import MEETING_SECRET
from ycore.placement.placement import JUDGE, ROLLOUT
from ycore.run.files import RunFolder
from ycore.run.metrics import read_metrics
from ycore.run.trace import Span, parse_event

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
REWARD = "def spread(completion_ids, **columns):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
WORDS = (
    "grpo --model model --dataset rows.jsonl --reward their_rewards.py:spread --max-tokens 8 --group-size 2 "
    "--prompts-per-step 12 --set dtype=float32 --set engine.count=1 --output run"
)
SECRET = "hf_abcdefghijklmnopqrstuvwx0123"
# Each host's Python exchanges the engine's command as `tests.chaos.command` does.
SITE = """
import sys
words = " ".join(sys.orig_argv)
if "ycore_cli.hosts" in words or "engine_watch serve" in words:
    from tests.chaos.command import put_in_place
    put_in_place({options})
"""
ENDED_WITHIN_S = 60.0  # on a busy machine


class Terminal:
    """The machine that a person sits at, and the hosts that it reaches by ssh."""

    def __init__(self, machines: list[Host], place: Path) -> None:
        *self.hosts, self.host = machines
        self.place = place
        self.folder = RunFolder(place / "run")
        self.log = place / "terminal.log"
        self.commands: list[subprocess.Popen[bytes]] = []

    def write_keys(self) -> None:
        for name in ("host_key", "user_key"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.place / name]
            subprocess.run(words, check=True, timeout=60)
        (self.place / "ssh_config").write_text(
            f"StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\nIdentityFile {self.place}/user_key\n"
            + "".join(f"Host {host.name}\nHostName {host.address}\n" for host in self.hosts)
        )
        (self.place / "bin").mkdir()
        ssh = self.place / "bin" / "ssh"  # reads the user's own configuration elsewhere
        ssh.write_text(
            f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.place}/ssh_config "$@"\n'
        )
        ssh.chmod(0o755)

    def open_doors(
        self, *, ranks: str | None = MODULE, hosts: list[Host] | None = None, site: str = SITE
    ) -> None:
        """Start an sshd on the hosts."""
        options = {} if ranks is None else {"trainer": ranks}
        (self.place / "site").mkdir(exist_ok=True)
        (self.place / "site" / "sitecustomize.py").write_text(site.format(options=options))
        paths = [self.place / "site", *([] if ranks is None else [self.place / "light"]), ROOT]
        variables = {
            **ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "OMP_NUM_THREADS": "1",
        }
        for host in self.hosts if hosts is None else hosts:
            config = self.place / f"sshd-{host.name}"
            config.write_text(
                f"ListenAddress {host.address}\nHostKey {self.place}/host_key\nPidFile none\nStrictModes no\n"
                f"AuthorizedKeysFile {self.place}/user_key.pub\nUsePAM no\nPermitRootLogin yes\n"
                f"SetEnv {' '.join(f'{name}={value}' for name, value in variables.items())}\n"
            )
            Path("/run/sshd").mkdir(exist_ok=True)
            words = [str(SSHD), "-D", "-e", "-f", str(config)]
            self.commands.append(
                host.start(words, cwd=self.place, log=self.place / f"{host.name}.log")
            )

    def start(self, more: str, hosts: str = "node0,node1") -> "subprocess.Popen[bytes]":
        environment = {
            **ENVIRONMENT,
            "PATH": f"{self.place}/bin:{os.environ['PATH']}",
            "HF_TOKEN": SECRET,
        }
        command = [*COMMAND, *WORDS.split(), "--hosts", hosts, *more.split()]
        node = self.host.start(command, cwd=self.place, log=self.log, environment=environment)
        self.commands.append(node)
        return node

    def start_with_engines(
        self, hosts: list[str], more: str, scripted: dict[str, str] | None
    ) -> "subprocess.Popen[bytes]":
        """Train on the terminal's machine, with engines on the hosts."""
        environment = {**ENVIRONMENT, "PATH": f"{self.place}/bin:{os.environ['PATH']}"}
        words = [*WORDS.split(), "--set", f"engine.hosts={json.dumps(hosts)}", *more.split()]
        command = command_line(words, scripted_engine=scripted)
        environment["PYTHONPATH"] = str(ROOT)
        node = self.host.start(command, cwd=self.place, log=self.log, environment=environment)
        self.commands.append(node)
        return node

    def wait_until_said(self, words: str) -> None:
        deadline = time.monotonic() + HANG_S
        while words not in self.said():
            assert self.commands[-1].poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def said(self) -> str:
        return self.log.read_text()

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + HANG_S
        while len(read_metrics(self.folder.metrics)) < count:
            assert self.commands[-1].poll() is None, self.said()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def pids(self, host: Host) -> list[int]:
        """All processes on it but sshd's, which does not know that a network is cut."""
        present = host.pids()
        names = {process.pid: process.info["name"] for process in psutil.process_iter(["name"])}
        return [pid for pid in present if names.get(pid, "sshd") != "sshd"]

    def command_on(self, host: Host) -> psutil.Process:
        processes = [psutil.Process(pid) for pid in self.pids(host)]
        return next(
            process for process in processes if "ycore_cli.hosts" in " ".join(process.cmdline())
        )

    def assert_nothing_is_left(
        self, hosts: list[Host], began: float, within_s: float = ENDED_WITHIN_S
    ) -> float:
        """Wait until no process is on the hosts; return the seconds since then."""
        while left := [pid for host in hosts for pid in self.pids(host)]:
            assert time.monotonic() < began + within_s, left
            time.sleep(0.1)
        return time.monotonic() - began


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("OpenSSH's client and server are not installed")
    write_tiny_model(tmp_path / "model")
    (tmp_path / "their_rewards.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"{n} + 1 ="}) + "\n" for n in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    write_launcher(tmp_path / "light")
    with network(3) as machines:
        terminal = Terminal(machines, tmp_path)
        terminal.write_keys()
        try:
            yield terminal
        finally:
            for command in terminal.commands:
                command.kill()
            for home in tmp_path.glob("run/**/.lock"):
                remove_leftovers(RunFolder(home.parent))


def test_one_command_runs_on_both_hosts(terminal: Terminal) -> None:
    terminal.open_doors()
    command = terminal.start("--steps 30")
    terminal.wait_for_steps(1)
    for process in psutil.process_iter(["cmdline"]):
        assert SECRET not in " ".join(process.info["cmdline"] or ())
    assert "their_rewards.py:spread" not in terminal.command_on(terminal.hosts[1]).cmdline()
    processes = [psutil.Process(pid) for pid in terminal.pids(terminal.hosts[1])]
    rank = next(process for process in processes if MODULE in process.cmdline())
    assert rank.environ()["HF_TOKEN"] == SECRET and MEETING_SECRET not in rank.environ()
    assert command.wait(HANG_S) == 0, terminal.said()
    said = terminal.said()
    assert "2 machines have met at 10.41.0.1: node0, node1" in said
    assert [row["step"] for row in read_metrics(terminal.folder.metrics)] == list(range(1, 31))
    assert (
        json.loads((terminal.folder.root / "node-1" / "summary.json").read_text())["status"]
        == "finished"
    )
    terminal.assert_nothing_is_left(terminal.hosts, time.monotonic())


@pytest.mark.verify
@pytest.mark.parametrize("engine", ["scripted", "vllm"])
def test_a_real_run(terminal: Terminal, engine: str) -> None:
    if engine == "vllm" and find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    terminal.open_doors(ranks=None, **{} if engine == "scripted" else {"site": ""})
    began = time.monotonic()
    command = terminal.start("--steps 3")
    assert command.wait(HANG_S) == 0, terminal.said()
    steps = read_metrics(terminal.folder.metrics)
    seconds = [row["ycore/time/step"] for row in steps]
    print(f"{engine}: {time.monotonic() - began:.0f} s, of which steps {seconds}")
    assert [row["step"] for row in steps] == [1, 2, 3]
    terminal.assert_nothing_is_left(terminal.hosts, time.monotonic())


def test_every_host_that_cannot_run_is_named_and_nothing_starts(terminal: Terminal) -> None:
    terminal.open_doors(hosts=terminal.hosts[:1])
    assert terminal.start("--steps 3").wait(HANG_S) == 2
    line = next(line for line in terminal.said().splitlines() if line.startswith("error: host"))
    assert line.startswith(
        "error: host node1 cannot start: ssh: connect to host 10.41.0.2 port 22: Connection refused"
    )
    assert "`ssh node1` without a question" in line and "node0" not in line
    assert not terminal.folder.root.exists()


def test_hosts_with_another_version_are_named(terminal: Terminal) -> None:
    site = SITE + "    import ycore\n    ycore.__version__ = '0.0.1'\n"
    terminal.open_doors(site=site)
    assert terminal.start("--steps 3").wait(HANG_S) == 2
    said = terminal.said().splitlines()
    for name in ("node0", "node1"):
        line = next(
            line
            for line in said
            if line.startswith(f"error: host {name} has ycore 0.0.1; it needs ")
        )
        assert f"ycore {__version__} at {sys.executable}" in line


def interrupt(terminal: Terminal) -> None:
    terminal.commands[-1].send_signal(signal.SIGINT)


def interrupt_twice(terminal: Terminal) -> None:
    interrupt(terminal)
    time.sleep(0.2)  # two signals at once are one
    interrupt(terminal)


def close(terminal: Terminal) -> None:
    terminal.commands[-1].send_signal(signal.SIGHUP)


def kill(terminal: Terminal) -> None:
    terminal.commands[-1].kill()


def cut_terminal(terminal: Terminal) -> None:
    terminal.host.cut()


def kill_on_host(terminal: Terminal) -> None:
    terminal.command_on(terminal.hosts[1]).kill()


def fail_on_host(terminal: Terminal) -> None:
    (terminal.folder.root / "fail-1").touch()


def cut_host(terminal: Terminal) -> None:
    (terminal.folder.root / "cut-1").touch()
    terminal.hosts[1].cut()


@pytest.mark.verify
@pytest.mark.parametrize("lose", [kill_on_host, cut_host])
def test_a_host_that_is_lost_is_started_again(
    terminal: Terminal, lose: Callable[[Terminal], None]
) -> None:
    terminal.open_doors()
    command = terminal.start("--steps 60 --restarts 1")
    terminal.wait_for_steps(2)
    lose(terminal)
    began = time.monotonic()
    while "waits for all others (1 of 1)" not in terminal.said():
        assert time.monotonic() < began + ENDED_WITHIN_S, terminal.said()
        time.sleep(0.1)
    terminal.hosts[1].join()
    assert command.wait(HANG_S) == 0, terminal.said()
    assert terminal.said().count("2 machines have met") == 2
    print(f"{lose.__name__}: {time.monotonic() - began:.0f} s to the end of 60 steps")
    terminal.assert_nothing_is_left(terminal.hosts, time.monotonic())


def cut_power(host: Host) -> None:
    """Nothing comes back, its sshd neither."""
    host.cut()
    for pid in host.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


SOON = "import ycore.launch.machines as machines\nmachines._MEET_WITHIN_S = 15.0\n"


@pytest.mark.verify
@pytest.mark.parametrize("lost", [0, 1])
def test_a_run_goes_on_without_a_host_that_stays_away(terminal: Terminal, lost: int) -> None:
    """With real trainers: as a person's own resume of the same folder on the other host, to the bit."""
    more = "--steps 10 --no-dynamic-sampling --set checkpoint_every=3"
    terminal.open_doors(ranks=None, site=SITE + SOON)
    terminal.start(f"{more} --restarts 1 --min-hosts 1")
    terminal.wait_for_steps(5)
    cut_power(terminal.hosts[lost])
    # Where the first is lost, nobody can meet: the other ends its part by itself.
    terminal.wait_until_said("waits for all others (1 of 1)" if lost else "cannot be reached")
    by_hand = terminal.place / "by-hand"
    shutil.copytree(
        terminal.place, by_hand, ignore=shutil.ignore_patterns("*.log", "bin", "*.sock")
    )
    assert terminal.commands[-1].wait(HANG_S) == 0, terminal.said()
    line = f"without node{lost}, on node{1 - lost}: going on from step 3\n"
    assert terminal.said().count(line) == 1
    terminal.assert_nothing_is_left([terminal.hosts[1 - lost]], time.monotonic())
    command = command_line(f"{WORDS} {more} --resume", scripted_engine={})
    with (by_hand / "log").open("wb") as log:
        options = {
            "cwd": by_hand,
            "env": {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        }
        subprocess.run(command, stdout=log, stderr=log, check=True, timeout=HANG_S, **options)
    outcomes = []
    for folder in (terminal.folder, RunFolder(by_hand / "run")):
        rows = read_metrics(folder.metrics)
        assert [row["step"] for row in rows] == list(range(1, 11))
        figures = [[row[name] for name in ("reward", "loss", "grad_norm")] for row in rows]
        outcomes.append((figures, (folder.model / "adapter_model.safetensors").read_bytes()))
    assert outcomes[0] == outcomes[1]


FAULTS: dict[Callable[[Terminal], None], tuple[int, str, str]] = {
    interrupt: (130, "interrupted: stopped after step", "interrupted"),
    interrupt_twice: (130, "interrupted: stopped", "interrupted"),
    close: (130, "interrupted: stopped after step", "interrupted"),
    kill: (-signal.SIGKILL, "", "interrupted"),
    cut_terminal: (1, "error: no connection to host node1 any more", "interrupted"),
    kill_on_host: (1, "error: machine 1 (node1): its command was killed", "failed"),
    fail_on_host: (
        1,
        f"node1: error: trainer rank 1 ended with exit status 1: {FAILS_WITH}",
        "failed",
    ),
    cut_host: (1, "error: machine 1 (node1): silent for 5 s", "failed"),
}
"""Faults, with the exit status, what the terminal says where it can, and how the first machine's summary calls it."""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[pytest.mark.verify] * (fault in (cut_host, interrupt_twice)))
        for fault in FAULTS
    ],
    ids=lambda fault: fault.__name__,
)
def test_whatever_ends_the_run_ends_all_of_it(
    terminal: Terminal, fault: Callable[[Terminal], None]
) -> None:
    terminal.open_doors()
    command = terminal.start("--steps 10000")
    terminal.wait_for_steps(2)
    began = time.monotonic()
    fault(terminal)
    code, words, status = FAULTS[fault]
    assert command.wait(ENDED_WITHIN_S) == code, terminal.said()
    ended_s = time.monotonic() - began
    hosts_s = terminal.assert_nothing_is_left(terminal.hosts, began)
    print(f"{fault.__name__}: terminal {ended_s:.1f} s, hosts {hosts_s:.1f} s")
    assert words in terminal.said()
    assert json.loads(terminal.folder.summary.read_text())["status"] == status
    terminal.assert_nothing_is_left([terminal.host], began)


def slots_that_wrote(folder: RunFolder, role: str = ROLLOUT) -> list[int]:
    """The slot of each request, in the order in which they ended."""
    events = filter(None, map(parse_event, folder.trace.read_text().splitlines()))
    spans = (event for event in events if isinstance(event, Span))
    return [span.slot for span in spans if span.name == role]


def test_an_engine_elsewhere_writes_is_lost_and_comes_back(terminal: Terminal) -> None:
    terminal.open_doors(ranks=None, hosts=terminal.hosts[:1])
    command = terminal.start_with_engines(["node0"], "--steps 10000", {"--token-s": "0.01"})
    terminal.wait_for_steps(2)
    assert "CPU core each of node0" in terminal.said()
    assert set(slots_that_wrote(terminal.folder)) == {0, 1, 2}
    began = time.monotonic()
    terminal.hosts[0].cut()
    terminal.wait_until_said("on node0 ended with exit status 255")
    lost_s = time.monotonic() - began
    terminal.wait_for_steps(len(read_metrics(terminal.folder.metrics)) + 3)
    terminal.hosts[0].join()
    terminal.wait_until_said("is back")
    print(f"lost after {lost_s:.1f} s, back after {time.monotonic() - began:.1f} s")
    num_before = len(slots_that_wrote(terminal.folder))
    steps = len(read_metrics(terminal.folder.metrics))
    terminal.wait_for_steps(steps + 2)
    assert {1, 2} & set(slots_that_wrote(terminal.folder)[num_before:])
    command.send_signal(signal.SIGINT)
    assert command.wait(ENDED_WITHIN_S) == 130, terminal.said()
    rows = read_metrics(terminal.folder.metrics)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert min(row["ycore/sync_proved"] for row in rows[-2:]) == 1.0
    terminal.assert_nothing_is_left(terminal.hosts, time.monotonic())


JUDGE_FILE = """
rubric: Is it good?
verdict: {kind: json, min: 0, max: 1}
model: model
max_model_len: 512
max_tokens: 64
"""


@pytest.mark.verify
def test_a_judge_elsewhere_answers_is_lost_and_comes_back(terminal: Terminal) -> None:
    """Its engines need no weights. No engine is on the trainer's machine, so the run waits."""
    (terminal.place / "judge.yaml").write_text(JUDGE_FILE)
    terminal.open_doors(ranks=None, hosts=terminal.hosts[:1])
    more = "--steps 20 --reward judge:judge.yaml --set engine.count=0"
    command = terminal.start_with_engines(["node0"], more, {})
    terminal.wait_for_steps(2)
    assert set(slots_that_wrote(terminal.folder, JUDGE)) <= {0, 1}
    terminal.hosts[0].cut()
    terminal.wait_until_said("judge-0 on node0 ended with exit status 255")
    terminal.hosts[0].join()
    assert command.wait(HANG_S) == 0, terminal.said()
    assert "judge-0 is back" in terminal.said()
    rows = read_metrics(terminal.folder.metrics)
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert all(0 < row["rewards/judge/mean"] < 1 for row in rows), rows[0].keys()
    terminal.assert_nothing_is_left(terminal.hosts, time.monotonic())


@pytest.mark.verify
def test_engines_elsewhere_are_waited_for_and_end_with_a_killed_command(
    terminal: Terminal,
) -> None:
    terminal.open_doors(ranks=None, hosts=terminal.hosts[:1])
    command = terminal.start_with_engines(["node0"], "--steps 10000 --set engine.count=0", {})
    terminal.wait_for_steps(1)
    for pid in terminal.pids(terminal.hosts[0]):
        if "tests.chaos.scripted_engine" in psutil.Process(pid).cmdline():
            os.kill(pid, signal.SIGKILL)
    terminal.wait_until_said(
        "on node0 ended with exit status 1: error: rollout-0 ended with killed by SIGKILL"
    )
    terminal.wait_until_said("is back")
    terminal.wait_for_steps(len(read_metrics(terminal.folder.metrics)) + 2)
    command.kill()
    seconds = terminal.assert_nothing_is_left(terminal.hosts, time.monotonic())
    print(f"nothing left after {seconds:.1f} s")


def test_a_host_without_a_door_is_refused(terminal: Terminal) -> None:
    command = terminal.start_with_engines(["node0"], "--steps 1", {})
    assert command.wait(HANG_S) == 2
    assert "engine.hosts: node0" in terminal.said() and "ssh node0" in terminal.said()


@pytest.mark.verify
def test_vllm_on_a_host_writes_for_a_trainer_here(terminal: Terminal) -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    terminal.open_doors(ranks=None, hosts=terminal.hosts[:1], site="")
    door = psutil.Process(terminal.commands[-1].pid)
    door.cpu_affinity(door.cpu_affinity()[:1])  # a machine of one core
    more = "--steps 4 --max-staleness 2 --set engine.count=0"
    command = terminal.start_with_engines(["node0"], more, None)
    assert command.wait(HANG_S) == 0, terminal.said()
    rows = read_metrics(terminal.folder.metrics)
    print([(row["ycore/time/step"], row.get("ycore/time/sync")) for row in rows])
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["ycore/sync_proved"] == 1.0
    assert rows[-1]["ycore/stale_gap"] < 0.01, "the engine has the trainer's own weights"
    terminal.assert_nothing_is_left(terminal.hosts, time.monotonic())
