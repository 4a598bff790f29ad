"""What is recorded about a run's processes: the most memory of each role, and every stack when one of them hangs.

A process's peak is the kernel's own, VmHWM in /proc/PID/status, so a look every second misses no peak of a process that
lives longer than that. A role's peak is the largest sum over its processes that live at the same time. Memory that
several processes share is counted for each of them.
"""

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ycore.config.batch import derive_batch
from ycore.config.schema import RunConfig
from ycore.errors import YcoreError
from ycore.launch.layout import Site
from ycore.launch.processes import is_stopped
from ycore.launch.scoring_models import served_models
from ycore.placement.placement import JUDGE
from ycore.plan.devices import Device, Fleet, measured_core
from ycore.plan.job import Way, job_of
from ycore.plan.model_facts import facts_of
from ycore.plan.step_forecast import Row, compare
from ycore.run.files import read_json
from ycore.run.reports import RUN_MARKER

_LOOK_EVERY_S = 1.0
_SETTLED_AFTER_S = 1.0  # until then a new process may still have the command line of the one that started it
_HELPER = "helper"
_HELPERS = ("accelerate.commands.launch", "ycore.launch.guardian", "resource_tracker", "ycore.models")
_STACK_WITHIN_S = 1.0
_STACK_ENDS_AFTER_S = 0.05  # a stack is complete when its log has not grown for so long


class RunProcesses:
    """The processes that carry a run's marker, by role."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._roles: dict[int, str | None] = {}

    def by_role(self) -> list[tuple[str, psutil.Process]]:
        """Those that live now, without helpers, which only start others or clear up after them."""
        found = ((self._role(process), process) for process in psutil.process_iter())
        return [(role, process) for role, process in found if role is not None and role != _HELPER]

    def _role(self, process: psutil.Process) -> str | None:
        """By its command line, else its parent's role; None for a process that is not the run's."""
        if process.pid in self._roles:
            return self._roles[process.pid]
        try:
            is_ours = process.pid != os.getpid() and process.environ().get(RUN_MARKER) == self._run_id
            if time.time() - process.create_time() < _SETTLED_AFTER_S:
                return None
            role = (role_of(process.cmdline()) or self._roles.get(process.ppid()) or _HELPER) if is_ours else None
        except psutil.Error:
            return None  # ended, or another user's
        self._roles[process.pid] = role
        return role


class MemoryPeaks:
    """The most memory that each role of a run has held: `peaks`, in bytes."""

    def __init__(self, run_id: str) -> None:
        self.peaks: dict[str, int] = {}
        self._processes = RunProcesses(run_id)
        self._next_look = 0.0

    def look(self) -> None:
        """Read every process of the run, once a second at most."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_EVERY_S
        totals: Counter[str] = Counter()
        for role, process in self._processes.by_role():
            totals[role] += peak_bytes(process.pid) or 0
        for role, total in totals.items():
            self.peaks[role] = max(total, self.peaks.get(role, 0))


def role_of(command: Sequence[str]) -> str | None:
    """The role of a process by its command line: `trainer`, `rewards`, an engine's name; None where it says nothing."""
    if any(name in word for word in command for name in _HELPERS):
        return _HELPER
    if "--uds" in command:
        return Path(command[command.index("--uds") + 1]).stem
    for word in command:
        room, _, name = word.removeprefix("ycore.").partition(".")
        if word.startswith("ycore.") and room in ("trainer", "rewards"):
            return "rewards" if room == "rewards" else name or "trainer"
    return None


def peak_bytes(pid: int) -> int | None:
    """The most memory that a process has held; None where it has ended or the system does not say."""
    peak = _status(pid, "VmHWM")  # 123456 kB
    return int(peak.split()[0]) * 1024 if peak else None


def plan_and_measured(config: RunConfig, site: Site, metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a finished run took beside what the plan says; nothing where the two cannot be compared."""
    files = (site.folder.memory, site.folder.engines)
    if (
        config.algorithm not in ("grpo", "ppo")
        or site.machine.devices
        or not metrics
        or not all(file.is_file() for file in files)
    ):
        return []
    try:
        return [row.as_json() for row in compared(config, site, metrics, core=measured_core())]
    except YcoreError:
        return []  # a model that cannot be planned was trained all the same


def compared(config: RunConfig, site: Site, metrics: Sequence[Mapping[str, Any]], *, core: Device) -> list[Row]:
    """Plan and measurement of the run in the site's folder; `core` is one core of the machine that it ran on."""
    engines = read_json(site.folder.engines)
    policy = facts_of(read_json(Path(engines["model"]) / "config.json"), name=config.model)
    batch = derive_batch(config, world_size=site.layout.world, on_cpu=True)
    way = Way(
        ranks=site.layout.local,
        slots=max(1, len(engines["engines"])),
        sharding=site.layout.sharding,
        micro_batch=batch.per_device_train_batch_size,
        checkpointing=bool(config.trl.get("gradient_checkpointing")),
    )
    fleet = Fleet(core, max(len(site.machine.cores), way.ranks))
    served = next((scorer for scorer in engines.get("scorers", []) if scorer["role"] == JUDGE), None)
    declared = next((model for model in served_models(config) if model.role == JUDGE), None)
    judge, judge_tokens = None, None
    if served is not None and declared is not None:
        judge = facts_of(read_json(Path(served["model"]) / "config.json"), name=declared.name)
        judge_tokens = declared.max_new_tokens
    job = job_of(config, policy, judge=judge, judge_tokens=judge_tokens)
    return compare(job, way, fleet, peaks=read_json(site.folder.memory), metrics=metrics)


def write_stacks(processes: Iterable[psutil.Process], path: Path, *, why: str) -> Path:
    """Write the stack of each process to a file that only its owner can read; its first line is `why`.

    ycore's processes, and vLLM's engine core, write their stacks to their logs on SIGUSR2 (Python's faulthandler),
    even in the middle of a call that never ends. Of any other process, its state in the kernel is written instead.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8") as file:
        file.write(f"{why}\n")
        for process in processes:
            try:
                title = " ".join(process.cmdline()[:6])
            except psutil.Error:
                title = "ended"
            file.write(f"\n== process {process.pid}: {title}\n{_stack(process.pid)}\n")
    return path


def _stack(pid: int) -> str:
    where = _proc(pid, "wchan").strip("0\n")
    state = f"state {_status(pid, 'State') or 'gone'}" + (f", in {where}" if where else "")
    catches = int(_status(pid, "SigCgt") or "0", 16) >> (signal.SIGUSR2 - 1) & 1  # else the signal would end it
    log = Path(os.path.realpath(f"/proc/{pid}/fd/2"))  # of standard error
    if not catches or not os.path.isfile(log):
        return f"cannot be asked for its stack; {state}"
    before = log.stat().st_size
    os.kill(pid, signal.SIGUSR2)
    if is_stopped(pid):
        os.kill(pid, signal.SIGCONT)  # it is killed next in any case, and can say where it was
        state += "; continued, to write its stack"
    stack = _appended(log, before)
    return f"{state}\n{stack}" if stack else f"wrote no stack within {_STACK_WITHIN_S:.0f} s; {state}"


def _status(pid: int, name: str) -> str:
    """A value of /proc/PID/status; empty for a process that has ended."""
    found = re.search(rf"^{name}:\s*(.*)", _proc(pid, "status"), re.MULTILINE)
    return found[1] if found else ""


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""


def _appended(log: Path, before: int) -> str:
    """What a log grew by, once it has stopped growing."""
    deadline = time.monotonic() + _STACK_WITHIN_S
    size, grew = before, time.monotonic()
    while time.monotonic() < deadline:
        now = log.stat().st_size
        if now > size:
            size, grew = now, time.monotonic()
        elif size > before and time.monotonic() - grew > _STACK_ENDS_AFTER_S:
            break
        time.sleep(0.01)
    with log.open("rb") as file:
        file.seek(before)
        return file.read(size - before).decode(errors="replace").rstrip()
