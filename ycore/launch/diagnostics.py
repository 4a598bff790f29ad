"""What is recorded about a run: its plan, before it and beside what was measured; and of its processes the most memory
of each role, and every stack when one of them hangs.

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from ycore.config.batch import derive_batch
from ycore.config.schema import RunConfig
from ycore.errors import YcoreError
from ycore.judge.sources import judge_of
from ycore.launch.device_memory import facts_here
from ycore.launch.engines import slots_of
from ycore.launch.layout import Site, on_machine
from ycore.launch.processes import is_stopped
from ycore.launch.scoring_models import served_models
from ycore.placement.placement import JUDGE
from ycore.plan.devices import Device, Fleet, measured_core
from ycore.plan.model_facts import ModelFacts, facts_of
from ycore.plan.step_forecast import (
    PlannedAndMeasured,
    as_it_was,
    compare,
    figures_on_cpu,
    forecast_step,
)
from ycore.plan.workload import Strategy, Workload, workload_of
from ycore.run.files import read_json
from ycore.run.metrics import read_metrics
from ycore.run.reports import RUN_MARKER
from ycore.run.text import as_duration
from ycore.scoring.scorers import is_rule
from ycore.scoring.scoring import ServedModel

_LOOK_EVERY_S = 1.0
_SETTLED_AFTER_S = (
    1.0  # until then a new process may still have the command line of the one that started it
)
_HELPER = "helper"
_HELPERS = (
    "accelerate.commands.launch",
    "ycore.launch.guardian",
    "resource_tracker",
    "ycore.models",
)
_STACK_WITHIN_S = 1.0
_STACK_ENDS_AFTER_S = 0.05  # a stack is complete when its log has not grown for so long
_LABEL_TOKENS = 16  # a verdict by labels: `{"code": "7f3ab2", "label": "positive"}`
_PLANNED = ("grpo", "rloo", "ppo")  # the algorithms whose steps the formulas count


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
            is_ours = (
                process.pid != os.getpid() and process.environ().get(RUN_MARKER) == self._run_id
            )
            if time.time() - process.create_time() < _SETTLED_AFTER_S:
                return None
            role = (
                (role_of(process.cmdline()) or self._roles.get(process.ppid()) or _HELPER)
                if is_ours
                else None
            )
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


def plan_steps(
    config: RunConfig, site: Site, *, prompt_tokens: int, done: int = 0, core: Device | None = None
) -> dict[str, Any] | None:
    """What the steps of a run will take, as JSON values; None where the formulas do not count them.

    They count completions of one turn that vLLM writes on the cores of this machine, and one model that scores there.

    Args:
        prompt_tokens: of a mean prompt. A run that goes on has the lengths and draws of its steps so far.
        done: the steps that it has taken.
        core: one core of this machine; by default measured, which takes a tenth of a second.
    """
    config = on_machine(config, site.machine)
    work = _counted_job(config, site, prompt_tokens)
    if work is None:
        return None
    before = read_metrics(site.folder.metrics, say=lambda line: None) if done else []
    work, strategy = as_it_was(work, before), _way(config, site, len(slots_of(config, site)))
    figures = figures_on_cpu(
        forecast_step(work, strategy, _fleet(site, core or measured_core(config.dtype)))
    )
    left, groups = max(0, config.steps - done), work.draws * work.prompts_per_step
    most = " (the most)" if work.completion_tokens == config.max_tokens else ""
    sizes = [
        f"prompts of {work.prompt_tokens} tokens",
        f"completions of {work.completion_tokens}{most}",
    ]
    sizes += (
        [f"verdicts of {work.judge_tokens}"]
        if work.judge is not None and work.judge_role == JUDGE
        else []
    )
    sizes += [f"{groups:.0f} groups drawn a step"] if groups > work.prompts_per_step else []
    step_s = figures["time/step"]
    return {
        "figures": {what: round(value, 3) for what, value in figures.items()},
        "prompt_tokens": work.prompt_tokens,
        "completion_tokens": work.completion_tokens,
        "groups": groups,
        "in_words": f"about {step_s:.1f} s a step, {as_duration(step_s * left)} for {left} step{'s' * (left != 1)}, "
        f"with {', '.join(sizes)}" + (", as so far" if before else ""),
    }


def _counted_job(config: RunConfig, site: Site, prompt_tokens: int) -> Workload | None:
    """A step's work; None where a step is more than to write a round, to score it by rules and at most one model in
    engines, and to learn from it, all on the cores of one machine."""
    policy, scorers = facts_here(config.model), served_models(config)[1:]
    known = [
        (scorer, facts) for scorer in scorers if (facts := facts_here(scorer.name)) is not None
    ]
    served = {source for scorer in scorers for source in scorer.sources}
    rules = {source for source, one in enumerate(config.rewards) if is_rule(one)}
    others = (
        config.algorithm not in _PLANNED,
        site.machine.devices or site.layout.num_machines > 1,
        config.has_turns,
        config.replay is not None,
        config.sampling.max_staleness or config.sampling.oversample > 1 or config.engine.drafts,
        derive_batch(config, world_size=site.layout.world, on_cpu=True).steps_per_round > 1,
        config.trl.get("num_iterations", 1) > 1,
        len(known) < len(scorers) or len(scorers) > 1,
        len(served | rules) < len(config.rewards),  # an address, the trainer, or programs that run
    )
    if policy is None or policy.eyes_params or any(others):
        return None
    work = _job(config, policy, known, prompt_tokens)
    if work.judge is None or work.judge_role != JUDGE:
        return work
    judge = judge_of(config.rewards[scorers[0].sources[0]])
    tokens = _LABEL_TOKENS if judge.verdict.kind == "labels" else judge.max_tokens
    work = replace(
        work, judge_prompt_tokens=prompt_tokens, judge_tokens=tokens
    )  # its own words are read once
    return work if judge.mode == "pointwise" else None


def plan_and_measured(
    config: RunConfig,
    site: Site,
    metrics: Sequence[Mapping[str, Any]],
    *,
    before: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """What a finished run took beside the plan, with the run's own lengths and `before` it (the figures of
    `plan_steps`); nothing where these cannot be compared."""
    files = (site.folder.memory, site.folder.engines)
    if (
        config.algorithm not in _PLANNED
        or site.machine.devices
        or not metrics
        or not all(file.is_file() for file in files)
    ):
        return []
    try:
        rows = compared(config, site, metrics, core=measured_core(config.dtype), before=before)
        return [row.as_json() for row in rows]
    except YcoreError:
        return []  # a model that cannot be planned was trained all the same


def compared(
    config: RunConfig,
    site: Site,
    metrics: Sequence[Mapping[str, Any]],
    *,
    core: Device,
    before: Mapping[str, float] | None = None,
) -> list[PlannedAndMeasured]:
    """Plan and measurement of the run in the site's folder; `core` is one core of the machine that it ran on."""
    engines = read_json(site.folder.engines)
    policy = facts_of(read_json(Path(engines["model"]) / "config.json"), name=config.model)
    scorers = [
        (declared, facts_of(read_json(Path(scorer["model"]) / "config.json"), name=declared.name))
        for scorer, declared in zip(
            engines.get("scorers", []), served_models(config)[1:], strict=False
        )
    ]
    work, strategy = (
        _job(config, policy, scorers),
        _way(config, site, max(1, len(engines["engines"]))),
    )
    return compare(
        work,
        strategy,
        _fleet(site, core),
        peaks=read_json(site.folder.memory),
        metrics=metrics,
        before=before,
    )


def _job(
    config: RunConfig,
    policy: ModelFacts,
    scorers: Iterable[tuple[ServedModel, ModelFacts | None]],
    prompt_tokens: int | None = None,
) -> Workload:
    """A step's work. Of several models that score, a judge counts before the others."""
    how: dict[str, Any] = {"prompt_tokens": prompt_tokens}
    for scorer, facts in sorted(scorers, key=lambda pair: pair[0].role != JUDGE)[:1]:
        how |= {
            "judge": facts,
            "judge_role": scorer.role,
            "judge_tokens": scorer.max_new_tokens or None,
        }
    return workload_of(config, policy, **how)


def _way(config: RunConfig, site: Site, slots: int) -> Strategy:
    """How a run on cores is run."""
    batch = derive_batch(config, world_size=site.layout.world, on_cpu=True)
    return Strategy(
        ranks=site.layout.local,
        slots=slots,
        sharding=site.layout.sharding,
        micro_batch=batch.per_device_train_batch_size,
        checkpointing=bool(config.trl.get("gradient_checkpointing")),
    )


def _fleet(site: Site, core: Device) -> Fleet:
    return Fleet(core, max(len(site.machine.cores), site.layout.local))


def write_stacks(processes: Iterable[psutil.Process], path: Path, *, why: str) -> Path:
    """Write the stack of each process to a file that only its owner can read; its first line is `why`.

    ycore's processes, and vLLM's engine core, write their stacks to their logs on SIGUSR2 (Python's faulthandler),
    even in the middle of a call that never ends. Of any other process, its state in the kernel is written instead.
    """
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8"
    ) as file:
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
    catches = (
        int(_status(pid, "SigCgt") or "0", 16) >> (signal.SIGUSR2 - 1) & 1
    )  # else the signal would end it
    log = Path(os.path.realpath(f"/proc/{pid}/fd/2"))  # of standard error
    if not catches or not os.path.isfile(log):
        return f"cannot be asked for its stack; {state}"
    before = log.stat().st_size
    os.kill(pid, signal.SIGUSR2)
    if is_stopped(pid):
        os.kill(pid, signal.SIGCONT)  # it is killed next in any case, and can say where it was
        state += "; continued, to write its stack"
    stack = _appended(log, before)
    return (
        f"{state}\n{stack}" if stack else f"wrote no stack within {_STACK_WITHIN_S:.0f} s; {state}"
    )


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
