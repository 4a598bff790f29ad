"""The most memory that each role of a run has held, read from /proc while it runs and left in `memory.json`.

A process's peak is the kernel's own, `VmHWM` of /proc/PID/status: a look every second misses no peak of a process that
lives longer than that. A role's is the largest sum over those of its processes that live at the same time. Pages that
several processes share are counted in each.

At a run's end: what the plan's formulas say of it, beside what it took.

Not here: what was expected (`ycore.plan`), and devices' memory, of which the engine and torch tell.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from ycore.config.batch import derive_batch
from ycore.config.schema import RunConfig
from ycore.errors import YcoreError
from ycore.launch.engines import Site
from ycore.launch.layout import Layout
from ycore.launch.scoring_models import scoring_models
from ycore.placement.placement import JUDGE
from ycore.plan import devices as machine
from ycore.plan.devices import Device
from ycore.plan.job import Sharding, job_of
from ycore.plan.measured import Ran, Row, compare
from ycore.plan.model_facts import ModelFacts, facts_of
from ycore.run.files import read_json, write_json_atomic
from ycore.run.reports import RUN_MARKER

_LOOK_EVERY_S = 1.0
_HELPER = "helper"
_HELPERS = ("accelerate.commands.launch", "ycore.launch.guardian", "resource_tracker", "ycore.models")
"""What is in the command line of a process that starts others or clears up after them."""

_KNOWN_AFTER_S = 1.0
"""Until then a process may still have the command line of the one that started it."""


class RunProcesses:
    """The processes that carry a run's mark, by role."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._roles: dict[int, str | None] = {}

    def by_role(self) -> list[tuple[str, psutil.Process]]:
        """Those that live now; helpers, which hold nothing of the run, are left out."""
        found = ((self._role(process), process) for process in psutil.process_iter())
        return [(role, process) for role, process in found if role is not None and role != _HELPER]

    def _role(self, process: psutil.Process) -> str | None:
        """The role of a process of this run, or its parent's where its own command line does not say; else None."""
        if process.pid in self._roles:
            return self._roles[process.pid]
        try:
            mine = process.pid != os.getpid() and process.environ().get(RUN_MARKER) == self._run_id
            if time.time() - process.create_time() < _KNOWN_AFTER_S:
                return None
            role = (role_of(process.cmdline()) or self._roles.get(process.ppid()) or _HELPER) if mine else None
        except psutil.Error:
            return None  # ended, or another user's
        self._roles[process.pid] = role
        return role


class MemoryPeaks:
    """Within `with MemoryPeaks(run_id, file):`, the peaks of every process of the run."""

    def __init__(self, run_id: str, file: Path) -> None:
        self._processes = RunProcesses(run_id)
        self._file = file
        self._peaks: dict[str, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        write_json_atomic(self._file, self._peaks)

    @property
    def now(self) -> Mapping[str, int]:
        """Bytes by role, so far."""
        return dict(self._peaks)

    def _watch(self) -> None:
        while not self._done.wait(_LOOK_EVERY_S):
            self.look()

    def look(self) -> None:
        """Read every process of the run once."""
        now: Counter[str] = Counter()
        for role, process in self._processes.by_role():
            now[role] += peak_bytes(process.pid) or 0
        for role, total in now.items():
            self._peaks[role] = max(total, self._peaks.get(role, 0))


def role_of(command: Sequence[str]) -> str | None:
    """Whose process a command line is: `trainer`, `rewards`, an engine by its socket; None where it is silent."""
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
    """The kernel's peak of a process's resident memory; None where it is gone or the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return None if line is None else int(line.split()[1]) * 1024


def plan_and_measured(config: RunConfig, site: Site, metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each figure: what, unit, planned, measured, error; none where nothing can be compared."""
    files = (site.folder.memory, site.folder.root / "engines.json")
    if config.algorithm != "grpo" or site.machine.devices or not metrics or not all(file.is_file() for file in files):
        return []
    try:
        rows = compared(config, site, metrics, core=machine.processor())
    except YcoreError:
        return []  # a model that cannot be planned was trained all the same
    return [row.as_json() for row in rows]


def compared(config: RunConfig, site: Site, metrics: Sequence[Mapping[str, Any]], *, core: Device) -> list[Row]:
    """The rows of a run that lies in the site's folder; `core` is one core of the machine that it ran on."""
    told = read_json(site.folder.root / "engines.json")
    facts = facts_of(read_json(Path(told["model"]) / "config.json"), name=config.model)
    judge, judge_tokens = _judge(config, told)
    job = job_of(config, facts, judge=judge, judge_tokens=judge_tokens)
    return compare(job, _ran(config, site, told), core, peaks=read_json(site.folder.memory), metrics=metrics)


def _judge(config: RunConfig, engines: Mapping[str, Any]) -> tuple[ModelFacts | None, int | None]:
    """The run's first judge and the tokens that it may write."""
    judges = [scorer for scorer in engines.get("scorers", []) if scorer["role"] == JUDGE]
    models = [model for model in scoring_models(config) if model.role == JUDGE]
    if not judges or not models:
        return None, None
    facts = facts_of(read_json(Path(judges[0]["model"]) / "config.json"), name=models[0].name)
    return facts, models[0].max_new_tokens


def _ran(config: RunConfig, site: Site, engines: Mapping[str, Any]) -> Ran:
    batch = derive_batch(config, world_size=site.layout.world, on_cpu=True)
    return Ran(
        ranks=site.layout.local,
        sharding=sharding_of(site.layout),
        engines=len(engines["engines"]),
        at_once=engines.get("max_num_seqs") or 1,
        micro_batch=batch.per_device_train_batch_size,
        checkpointing=bool(config.trl.get("gradient_checkpointing")),
        num_cores=len(site.machine.cores),
    )


def sharding_of(layout: Layout) -> Sharding:
    """How an accelerate config cuts up training."""
    told = layout.accelerate or {}
    stage = (told.get("deepspeed_config") or {}).get("zero_stage")
    by_stage: dict[int, Sharding] = {1: "zero1", 2: "zero2", 3: "zero3"}
    return "fsdp2" if told.get("distributed_type") == "FSDP" else by_stage.get(stage or 0, "ddp")
