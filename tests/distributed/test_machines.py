"""Machines with a network between them (namespaces): one run, and one fate, whatever ends on any of them.

Whole commands run on every machine, with the scripted engine. Where a test is about ends alone, ranks are light ones
(`light_rank`); where it is about what a resume repeats, trainers are real, and start at once (`forked_ranks`) or not.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from subprocess import Popen
from typing import Any

import psutil
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.distributed import forked_ranks
from tests.distributed.light_rank import FAILS_WITH, MODULE, write_launcher
from tests.distributed.network import Host, network, slow_link
from tests.harness import ENVIRONMENT, HANG_S, command_line
from tests.tiny_model import write_tiny_model
from ycore.launch.guardian import remove_leftovers
from ycore.run.files import RunFolder
from ycore.run.metrics import read_metrics
from ycore.run.reports import read_report

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FORKED = "forked"
WORDS = (
    "grpo --model model --dataset rows.jsonl --reward their_rewards.py:spread --max-tokens 8 --group-size 2 "
    "--prompts-per-step 12 --set dtype=float32 --set engine.count=1 --output run --steps"
)
REWARD = "def spread(completion_ids, **columns):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
KEEP = f"""
import os
from pathlib import Path

def all_of(groups):
    if (Path(__file__).parent / "run" / f"fail-{{os.environ['NODE_RANK']}}").exists():
        raise ValueError("{FAILS_WITH}")
    return [group.rewards >= 0 for group in groups]
"""
ENDED_WITHIN_S = 60.0  # on a busy machine


class Machines:
    """Runs the same command on each host; `place` is the folder that they share."""

    def __init__(self, hosts: list[Host], place: Path) -> None:
        self.hosts, self.place = hosts, place
        self.folder = RunFolder(place / "run")
        self.nodes: list[Popen[bytes]] = []

    def start(
        self,
        *,
        steps: int,
        main: str | None = None,
        ranks: str | None = MODULE,
        folders: list[Path] | None = None,
        more: str = "",
    ) -> None:
        options = {"trainer": ranks} if ranks == MODULE else {}
        folder = {None: [], MODULE: ["light"], FORKED: ["forked"]}[ranks]
        paths = [*(str(self.place / name) for name in folder), str(ROOT)]
        command = command_line(f"{WORDS} {steps} {more}", scripted_engine=options)
        environment = {
            **ENVIRONMENT,
            "NNODES": str(len(self.hosts)),
            "MASTER_ADDR": main or self.hosts[0].address,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            forked_ranks.SOCKET: str(self.place.parent / "forked.sock"),
        }
        for number in range(len(self.hosts)):
            cwd = self.place if folders is None else folders[number]
            self.nodes.append(self.start_on(number, command, cwd, environment))
        self.last = command, environment

    def start_on(
        self, number: int, command: list[str], cwd: Path, environment: dict[str, str]
    ) -> Popen[bytes]:
        return self.hosts[number].start(
            command,
            cwd=cwd,
            log=self.place / f"{self.hosts[number].name}.log",
            environment=environment | {"NODE_RANK": str(number)},
        )

    def come_back(self, number: int) -> None:
        """Start the command again on one machine."""
        command, environment = self.last
        words = [*command, "--resume"]
        self.nodes[number] = self.start_on(number, words, self.place, environment)

    def go_on(self, **options: Any) -> None:
        """Start it again, on the network as it was at first."""
        for node in self.nodes:
            node.kill()
        self.nodes = []
        for number, host in enumerate(self.hosts):
            host.join()
            (self.folder.root / f"fail-{number}").unlink(missing_ok=True)
        self.start(**options | {"more": f"{options['more']} --resume"})

    def said(self, number: int) -> str:
        return (self.place / f"{self.hosts[number].name}.log").read_text()

    def wait(
        self, numbers: list[int] | None = None, within_s: float = HANG_S
    ) -> list[int | None]:
        """Wait until these commands have ended, and return the exit statuses of all."""
        deadline = time.monotonic() + within_s
        for number in range(len(self.nodes)) if numbers is None else numbers:
            self.nodes[number].wait(max(0.1, deadline - time.monotonic()))
        return [node.poll() for node in self.nodes]

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + HANG_S
        while len(read_metrics(self.folder.metrics)) < count:
            ends = [node.poll() for node in self.nodes]
            assert ends == [None] * len(ends), [self.said(n) for n in range(len(ends))]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def wait_until_met(self) -> None:
        deadline = time.monotonic() + HANG_S
        while not all("machines have met" in self.said(n) for n in range(len(self.nodes))):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def kill_all(self) -> None:
        for host in self.hosts:
            for pid in host.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a machine's rank."""
        home = self.folder.root / f"node-{number}" if number else self.folder.root
        deadline = time.monotonic() + HANG_S
        while (report := read_report(RunFolder(home), 0)) is None:
            assert time.monotonic() < deadline, "it has no rank"
            time.sleep(0.05)
        return psutil.Process(report.pid)

    def assert_nothing_is_left(self, numbers: list[int]) -> None:
        deadline = time.monotonic() + ENDED_WITHIN_S
        while any(self.hosts[number].pids() for number in numbers):
            assert time.monotonic() < deadline, "processes are left"
            time.sleep(0.1)
        for number in numbers:
            home = self.folder.root if number == 0 else self.folder.root / f"node-{number}"
            assert not RunFolder(home).sockets.exists()
            assert not RunFolder(home).temporary.exists()
            assert not RunFolder(home).shared_memory.exists()


Make = Callable[..., Machines]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make machines, each time in a folder of their own."""
    write_tiny_model(tmp_path / "model")
    with network(4) as hosts:
        count = 0

        def made(num_hosts: int = 2) -> Machines:
            nonlocal count
            count += 1
            place = tmp_path / str(count)
            place.mkdir()
            (place / "model").symlink_to(tmp_path / "model")
            (place / "their_rewards.py").write_text(REWARD)
            (place / "keep.py").write_text(KEEP)
            rows = [json.dumps({"prompt": f"{n} + 1 ="}) + "\n" for n in range(24)]
            (place / "rows.jsonl").write_text("".join(rows))
            write_launcher(place / "light")
            (place / "forked").mkdir()
            (place / "forked" / "sitecustomize.py").write_text(forked_ranks.SITE)
            for host in hosts:
                host.join()
            return Machines(hosts[:num_hosts], place)

        try:
            yield made
        finally:  # a machine whose power was cut has left it
            for home in tmp_path.glob("*/run/**/.lock"):
                remove_leftovers(RunFolder(home.parent))


def kill_command(machines: Machines, victim: int) -> None:
    machines.nodes[victim].kill()


def kill_rank(machines: Machines, victim: int) -> None:
    machines.rank(victim).kill()


def fail_in_rank(machines: Machines, victim: int) -> None:
    (machines.folder.root / f"fail-{victim}").touch()


def interrupt(machines: Machines, victim: int) -> None:
    machines.nodes[victim].send_signal(signal.SIGINT)


def cut_network(machines: Machines, victim: int) -> None:
    machines.hosts[victim].cut()


def drop_packets(machines: Machines, victim: int) -> None:
    machines.hosts[victim].drop_packets()


def freeze_command(machines: Machines, victim: int) -> None:
    machines.nodes[victim].send_signal(signal.SIGSTOP)


def cut_power(machines: Machines, victim: int) -> None:
    """Let no packet of its end leave it."""
    machines.hosts[victim].cut()
    for pid in machines.hosts[victim].pids():
        os.kill(pid, signal.SIGKILL)


FAULTS: dict[Callable[[Machines, int], None], tuple[int, str]] = {
    kill_command: (1, "its command was killed"),
    kill_rank: (1, "a signal"),
    fail_in_rank: (1, FAILS_WITH),
    interrupt: (130, "stopp"),
    cut_network: (1, "silent for"),
    drop_packets: (1, "silent for"),
    freeze_command: (1, "silent for"),
    cut_power: (1, "silent for"),
}
"""Faults, with the exit status of the machines that learn of it and the reason that they name."""

QUICK = (kill_command, fail_in_rank, interrupt, freeze_command)
"""One fault of each reason; the others are left to `make verify`."""


CUTS = (cut_network, drop_packets, cut_power)


def known_after(machines: Machines, numbers: list[int], reason: str, began: float) -> float:
    """Return the seconds until each of the machines has named the reason."""
    while True:
        said = [machines.said(number) for number in numbers]
        if all(reason in text for text in said):
            return time.monotonic() - began
        assert time.monotonic() < began + ENDED_WITHIN_S, said
        time.sleep(0.05)


def one_fault(machines: Machines, fault: Any, victim: int) -> float:
    """Let it happen; check every end, and return the seconds until all others had named it."""
    exit_code, reason = FAULTS[fault]
    survivors = [number for number in range(len(machines.hosts)) if number != victim]
    began = time.monotonic()
    fault(machines, victim)
    seconds = known_after(machines, survivors, reason, began)
    ends = machines.wait(survivors, ENDED_WITHIN_S)
    assert {ends[number] for number in survivors} == {exit_code}, ends
    if exit_code == 1:
        name = f"machine {victim} (node{victim})"
        for number in survivors:
            line = next(
                line for line in machines.said(number).splitlines() if line.startswith("error:")
            )
            # Of a cut in a line of several machines each end is right.
            assert name in line or fault in CUTS, line
            logs = machines.folder.root / (f"node-{number}" if number else "") / "logs"
            if list(logs.glob("trainer*")):  # said at once: to clear up takes seconds
                assert "; its processes end here\n" in machines.said(number)
    machines.nodes[victim].send_signal(signal.SIGCONT)  # where it was frozen
    if fault not in (kill_command, cut_power):
        machines.wait([victim], ENDED_WITHIN_S)
        # Of a user's function it is the user's mistake.
        expected = {exit_code, 2} if fault is fail_in_rank else {exit_code}
        assert machines.nodes[victim].returncode in expected, machines.said(victim)
    if fault is not cut_power:
        survivors.append(victim)
    machines.assert_nothing_is_left(survivors)
    return seconds


@pytest.mark.parametrize(
    "fault",
    [
        fault if fault in QUICK else pytest.param(fault, marks=pytest.mark.verify)
        for fault in FAULTS
    ],
    ids=lambda fault: fault.__name__,
)
def test_an_end_on_one_machine_is_the_end_on_all(make: Make, fault: Any) -> None:
    machines = make(2)
    machines.start(steps=10_000)
    machines.wait_for_steps(2)
    one_fault(machines, fault, victim=1)


@dataclass(frozen=True)
class Outcome:
    """The result of a run: the figures of every step, and the bytes of the trained adapter."""

    steps: list[list[float]]
    adapter: bytes

    @classmethod
    def of(cls, machines: Machines) -> "Outcome":
        rows = read_metrics(machines.folder.metrics)
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        adapter = machines.folder.model / "adapter_model.safetensors"
        return cls([learnt(row) for row in rows], adapter.read_bytes())


WHOLE_RUN = {"steps": 10, "more": "--no-dynamic-sampling --set checkpoint_every=3"}
"""Which groups a round draws does not depend on time in it, so that all of it comes out the same again."""
KEEPS = " --keep keep.py:all_of"
LAST_FAULT_STEP = 7


def wait_for_a_moment(machines: Machines, fault: Any, generator: random.Random) -> str:
    """Return in words when it is: while they start, where there is no step to fail in, or in a step."""
    if fault not in (kill_rank, fail_in_rank) and generator.random() < 0.25:
        machines.wait_until_met()
        seconds = generator.uniform(0, 6)
        time.sleep(seconds)
        return f"{seconds:.1f} s after they met"
    step = generator.randint(1, LAST_FAULT_STEP)
    machines.wait_for_steps(step)
    time.sleep(generator.uniform(0, 0.5))
    return f"after step {step}"


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[None]:
    command = [
        sys.executable,
        "-m",
        "tests.distributed.forked_ranks",
        str(tmp_path / "forked.sock"),
    ]
    with Popen(
        command, cwd=ROOT, env={**os.environ, **ENVIRONMENT, **forked_ranks.ROOM}
    ) as server:
        while not (tmp_path / "forked.sock").exists():
            assert server.poll() is None
            time.sleep(0.1)
        yield
        server.kill()


@pytest.mark.verify
@pytest.mark.parametrize("ranks", [FORKED, None], ids=["forked", "launched"])
@pytest.mark.usefixtures("forks")
@pytest.mark.timeout(0)  # of any number
def test_every_run_with_a_fault_ends_as_promised_and_goes_on_to_the_same_end(
    make: Make, ranks: str | None
) -> None:
    """`YCORE_NUM_FAULTS` come at random moments, on two to four machines, with real trainers; then `--resume`."""
    options = WHOLE_RUN | {"ranks": ranks}
    seed = int(os.environ.get("YCORE_FAULTS_SEED", "41"))
    generator = random.Random(seed)
    undisturbed: dict[int, Outcome] = {}
    seconds: dict[str, list[float]] = {}
    problems: list[str] = []
    for number in range(int(os.environ.get("YCORE_NUM_FAULTS", "8"))):
        fault = list(FAULTS)[number % len(FAULTS)]
        count = generator.choices([2, 3, 4], weights=[16, 3, 1])[0]
        victim = generator.randrange(count)
        if count not in undisturbed:
            machines = make(count)
            machines.start(**options)
            assert set(machines.wait()) == {0}, machines.said(0)
            undisturbed[count] = Outcome.of(machines)
        machines = make(count)
        more = f"{options['more']}{KEEPS if fault is fail_in_rank else ''}"
        machines.start(**options | {"more": more})
        words = [str(number), fault.__name__, f"machine {victim} of {count}"]
        try:
            words.append(wait_for_a_moment(machines, fault, generator))
            known_s = one_fault(machines, fault, victim)
            words.append(f"known after {known_s:.1f} s")
            num_before = len(read_metrics(machines.folder.metrics))
            words.append(f"{num_before} steps written")
            machines.go_on(**options | {"more": more})
            assert set(machines.wait()) == {0}, [machines.said(n) for n in range(count)]
            machines.assert_nothing_is_left(list(range(count)))
            assert Outcome.of(machines) == undisturbed[count], "it came to another end"
            seconds.setdefault(fault.__name__, []).append(known_s)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            problems.append(f"{' '.join(words)}: {error!r}")
            machines.kill_all()
            words.append(f"PROBLEM {error!r}")
        print(", ".join(words), flush=True)
    for name, times in seconds.items():
        print(
            f"{name}: {len(times)}, known after {median(times):.1f} s, at most {max(times):.1f} s"
        )
    assert not problems


def learnt(row: dict[str, Any]) -> list[float]:
    return [row[name] for name in ("reward", "loss", "grad_norm")]


def test_ctrl_c_ends_the_wait_for_a_machine(make: Make) -> None:
    machines = make(2)
    machines.start(steps=10_000, more="--restarts 1")
    machines.wait_for_steps(2)
    kill_command(machines, 1)
    known_after(machines, [0], "waits for all others", time.monotonic())
    interrupt(machines, 0)
    assert machines.wait(within_s=ENDED_WITHIN_S)[0] == 130, machines.said(0)
    machines.assert_nothing_is_left([0, 1])


@pytest.mark.parametrize("ranks", [MODULE, pytest.param(None, marks=pytest.mark.verify)])
def test_a_restart_is_one_of_all_machines(make: Make, ranks: str | None) -> None:
    machines = make(2)
    num_steps = 30 if ranks else 8
    machines.start(steps=num_steps, ranks=ranks, more="--restarts 1")
    machines.wait_for_steps(2)
    kill_rank(machines, 1)
    assert machines.wait() == [0, 0], [machines.said(n) for n in range(2)]
    assert read_metrics(machines.folder.metrics)[-1]["step"] == num_steps
    for number in range(2):
        assert machines.said(number).count("resuming from the newest checkpoint (1 of 1)") == 1
    assert "machine 1 (node1)" in machines.said(0)


@pytest.mark.verify
@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_wait_for_a_machine_that_comes_back(make: Make, victim: int) -> None:
    """The command is killed there and started again; later the network is cut for a while."""
    machines = make(2)
    machines.start(steps=60, more="--restarts 2")
    machines.wait_for_steps(2)
    other = 1 - victim
    kill_command(machines, victim)
    known_after(machines, [other], "waits for all others (1 of 2)", time.monotonic())
    machines.come_back(victim)
    began = time.monotonic()
    while machines.said(other).count("2 machines have met") < 2:
        assert time.monotonic() < began + ENDED_WITHIN_S, machines.said(other)
        time.sleep(0.1)
    machines.wait_for_steps(len(read_metrics(machines.folder.metrics)) + 2)
    cut_network(machines, victim)
    known_after(machines, [0, 1], "silent for", time.monotonic())
    machines.hosts[victim].join()
    assert machines.wait() == [0, 0], [machines.said(n) for n in range(2)]
    for number in range(2):
        assert machines.said(number).count("2 machines have met") == 3
    machines.assert_nothing_is_left([0, 1])


@pytest.mark.verify
@pytest.mark.parametrize("fault", [kill_command, cut_network, cut_power])
def test_a_real_run_goes_on_when_a_machine_comes_back(make: Make, fault: Any) -> None:
    """Steps after the newest checkpoint come out of the journal to the bit."""
    machines = make(2)
    machines.start(
        steps=12, ranks=None, more="--restarts 1 --set checkpoint_every=3 --set seed=7"
    )
    machines.wait_for_steps(5)
    before = read_metrics(machines.folder.metrics)
    fault(machines, 1)
    began = time.monotonic()
    known_after(machines, [0], "waits for all others (1 of 1)", began)
    machines.hosts[1].join()
    if fault is not cut_network:
        machines.come_back(1)
    assert machines.wait() == [0, 0], [machines.said(n) for n in range(2)]
    print(f"{fault.__name__}: {time.monotonic() - began:.0f} s from the fault to the end")
    after = read_metrics(machines.folder.metrics)
    assert [row["step"] for row in after] == list(range(1, 13))
    repeated = after[: len(before)]
    assert [learnt(row) for row in repeated] == [learnt(row) for row in before]
    machines.assert_nothing_is_left([0, 1])


def test_ctrl_c_on_all_after_the_last_step_is_no_failure(make: Make) -> None:
    machines = make(2)
    machines.start(steps=5)
    machines.wait_for_steps(5)
    for node in machines.nodes:
        node.send_signal(signal.SIGINT)
    assert set(machines.wait()) <= {0, 130}, [machines.said(n) for n in range(2)]
    assert "failed" not in machines.said(0) + machines.said(1)


@pytest.mark.verify
def test_a_machine_that_hears_of_a_stop_after_the_last_step_lets_no_other_wait(
    make: Make,
) -> None:
    """The other has finished, heeds no first Ctrl-C any more, and waited for this one's word for ever."""
    machines = make(2)
    machines.start(steps=30)
    machines.wait_for_steps(1)
    (machines.folder.root / "is-stopped-late-1").touch()
    assert machines.wait(within_s=2 * ENDED_WITHIN_S) == [130, 130]
    assert "`ycore resume run` continues" in machines.said(0)
    machines.assert_nothing_is_left([0, 1])


@pytest.mark.verify
def test_a_rank_that_never_ends_after_a_stop_is_killed_once_others_have_ended(
    make: Make,
) -> None:
    machines = make(2)
    machines.start(steps=10_000)
    machines.wait_for_steps(2)
    (machines.folder.root / "hangs-0").touch()
    interrupt(machines, 0)
    assert machines.wait(within_s=2 * ENDED_WITHIN_S) == [130, 130]
    assert "`ycore resume run` continues" in machines.said(0)
    machines.assert_nothing_is_left([0, 1])


@pytest.mark.verify
def test_a_ctrl_c_that_reaches_a_rank_late_ends_it_in_order(make: Make) -> None:
    """Killed in Python's shutdown it looked failed to torchrun, whose fellow on machine 0 waited 300 s for it."""
    machines = make(2)
    machines.start(steps=1000, ranks=None)
    machines.wait_for_steps(2)
    rank = machines.rank(1)
    home = RunFolder(machines.folder.root / "node-1")
    interrupt(machines, 0)
    while (report := read_report(home, 0)) and report.exit_code is None:
        time.sleep(0.01)
    with suppress(psutil.NoSuchProcess):
        while True:
            rank.send_signal(signal.SIGINT)
            time.sleep(0.005)
    assert machines.wait() == [130, 130], [machines.said(n) for n in range(2)]
    assert "ChildFailedError" not in home.log("trainer").read_text()
    machines.assert_nothing_is_left([0, 1])


def test_machines_that_differ_do_not_start(make: Make) -> None:
    machines = make(2)
    other = machines.place / "other"
    other.mkdir()
    for name in ("model", "their_rewards.py", "light"):
        (other / name).symlink_to(machines.place / name)
    rows = (machines.place / "rows.jsonl").read_text()
    (other / "rows.jsonl").write_text(rows + '{"prompt": "7 + 7 ="}\n')
    machines.folder.root.mkdir()
    (other / "run").symlink_to(machines.folder.root)
    machines.start(steps=5, folders=[machines.place, other])
    assert machines.wait() == [2, 2], [machines.said(n) for n in range(2)]
    for number in range(2):
        said = machines.said(number)
        assert "24 rows" in said and "25 rows" in said and "node1" in said
        assert "the machines differ in dataset" in said


@pytest.mark.verify
@pytest.mark.parametrize("version", [4, 6])
def test_a_real_run_over_a_network_as_debian_names_hosts(make: Make, version: int) -> None:
    """Every host's own name is 127.0.1.1, which is what gloo would tell the other ranks."""
    machines = make(2)
    main = machines.hosts[0].address if version == 4 else machines.hosts[0].address6
    machines.start(steps=3, main=main, ranks=None)
    assert machines.wait() == [0, 0], [machines.said(n) for n in range(2)]
    assert f"2 machines have met at {main}: node0, node1" in machines.said(1)
    assert [row["step"] for row in read_metrics(machines.folder.metrics)] == [1, 2, 3]
    machines.assert_nothing_is_left([0, 1])


def write_wide_model(folder: Path) -> int:
    """Put a wider model in the place of the tiny one, and return its parameters' bytes in float32."""
    config = LlamaConfig.from_pretrained(folder)
    config.update({"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8})
    config.update({"num_key_value_heads": 8, "head_dim": 64})
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return 4 * model.num_parameters()


@pytest.mark.verify
def test_a_real_run_over_a_slow_network(make: Make) -> None:
    """Measure seconds a step and the bytes that each machine sends, at 1 Gb/s and 5 ms each way and without limits."""
    num_bytes = 0
    for name in ("no limit", "1 Gb/s, 5 ms"):
        machines = make(2)
        num_bytes = num_bytes or write_wide_model(machines.place / "model")
        first, second = machines.hosts
        with ExitStack() as cable:
            interface, main = "eth0", first.address
            if name != "no limit":
                main = cable.enter_context(slow_link(first, second, rate="1gbit", delay_ms=5))
                interface = "slow"
            before = [host.sent_bytes(interface) for host in machines.hosts]
            machines.start(steps=6, ranks=None, main=main, more="--full")
            assert machines.wait() == [0, 0], [machines.said(n) for n in range(2)]
            sent = [host.sent_bytes(interface) for host in machines.hosts]
        steps = read_metrics(machines.folder.metrics)
        assert [row["step"] for row in steps] == list(range(1, 7))
        steps_s = [row["ycore/time/step"] for row in steps]
        step_mb = [(after - b) / 6 / 1e6 for after, b in zip(sent, before, strict=True)]
        # Each of two ranks sends its gradients once: half to be summed, and half of the sums.
        assert all(num_bytes / 1e6 < megabytes < 1.3 * num_bytes / 1e6 for megabytes in step_mb)
        print(f"{name}: {step_mb} MB a step of {num_bytes / 1e6:.1f} MB of gradients")
        print(f"{name}: {median(steps_s):.2f} s a step")
        if name != "no limit":
            assert min(steps_s) > num_bytes * 8 / 1e9, "what the cable must take"
