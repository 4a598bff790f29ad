"""`python -m tests.sandbox.trial`: every probe, without a sandbox and within it, with the rights of this process.

A probe first has to get through without a sandbox, as a child of a plain process of the same user. Then it is part of a
reward function in the run's own worker, and a program that a model wrote in the server for these. At each level honest
work runs first. Prints JSON lines: `Result`s.
"""

import argparse
import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.sandbox.mutations import MUTATIONS
from tests.sandbox.probes import PRELUDE, PROBES, Probe
from tests.sandbox.targets import CANARY, LIMITS, Targets
from tests.scoring.pools import pool_in
from ycore.config.schema import RewardConfig, RewardSettings
from ycore.sandbox import Level, user_code
from ycore.sandbox.level import LevelChoice, level_refusal
from ycore.sandbox.program_pool import ProgramPool
from ycore.scoring import scoring

HONEST = """
import asyncio, decimal, json, multiprocessing, os, re, sqlite3, subprocess, sys, tempfile, threading
import numpy
assert numpy.allclose(numpy.linalg.inv(numpy.eye(3) * 2) * 2, numpy.eye(3))
assert subprocess.run(["sh", "-c", "echo a"], capture_output=True, text=True).stdout == "a\\n"
with tempfile.TemporaryDirectory() as folder:
    with sqlite3.connect(os.path.join(folder, "x.db")) as database:
        database.execute("create table a (b)")
    with open(os.path.join(folder, "file"), "w+") as file:
        file.write("x")
    os.chmod(os.path.join(folder, "file"), 0o600)
seen = []
threads = [threading.Thread(target=seen.append, args=(n,)) for n in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
child = multiprocessing.get_context("fork").Process(target=os._exit, args=(7,))
child.start(), child.join()
assert sorted(seen) == [0, 1, 2, 3] and child.exitcode == 7
ended = subprocess.Popen(["sleep", "60"])
ended.kill()
assert ended.wait() == -9
held = bytearray(os.urandom(1)) * (t.memory // 8)
return True
"""
REWARD = f"""
import json, os
from types import SimpleNamespace

def attack(completions, **columns):
    return [_try(*json.loads(text)) for text in completions]

def _try(told, code):
    space = {{}}
    os.chdir(os.environ.get("TMPDIR", "."))  # where it may write: being stopped elsewhere proves nothing
    exec({PRELUDE!r} + "\\ndef attack(t):\\n" + code, space)
    try:
        got = space["attack"](SimpleNamespace(**told))
    except OSError as error:
        return -float(error.errno or 1000)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        return -1000.0
    return 2.0 if got == "check" else 1.0 if got else 0.0
"""
CONTROL = f"""
import json, os, sys, time
from types import SimpleNamespace
exec({REWARD!r})
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        value = -1001.0
        try:
            value = _try(*json.loads(line))
        finally:
            os.write(1, json.dumps(value).encode() + b"\\n")
            os._exit(0)
    os.waitpid(child, 0)
"""
DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Result:
    """One attempt. `control`: it got through without a sandbox. `through`: and within it. `note` says more."""

    rights: str
    level: str
    where: str
    probe: str
    control: bool
    through: bool
    note: str = ""


class Trial:
    """The probes of one process' rights."""

    def __init__(self, rights: str, probes: list[Probe]) -> None:
        self.rights, self.probes = rights, probes
        self.targets = Targets(REWARD)
        self.controls: dict[str, bool] = {}

    def control(self) -> None:
        """Each probe without a sandbox; a plain process forks a child for each."""
        folder = self.targets.base / "control"
        folder.mkdir()
        line = [sys.executable, "-c", CONTROL]
        environment = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
        plain = subprocess.Popen(
            line,
            stdin=-1,
            stdout=-1,
            cwd=folder,
            env=environment,
            text=True,
            start_new_session=True,
        )
        assert plain.stdin is not None and plain.stdout is not None
        try:
            for probe in self.probes:
                self.targets.reset()
                plain.stdin.write(self.text(probe) + "\n")
                plain.stdin.flush()
                ready, _, _ = select.select([plain.stdout], [], [], DEADLINE_S)
                value = float(plain.stdout.readline()) if ready else -1002.0
                through = value == 1.0 or (
                    value == 2.0 and self.targets.harmed(within_s=0.0) is not None
                )
                self.controls[probe.name] = through
                if not ready:
                    raise RuntimeError(f"the control of {probe.name!r} hangs")
        finally:
            with suppress(OSError):
                os.killpg(plain.pid, signal.SIGKILL)
            plain.communicate()
            self.targets.reset()

    def text(self, probe: Probe) -> str:
        return json.dumps([self.targets.for_probes(), textwrap.indent(probe.code, "    ")])

    async def as_rewards(self, level: Level) -> Iterator[Result]:
        """The probes in the worker of a run that has this reward file."""
        project = self.targets.base / "project"
        run = project / "runs" / "mine"
        os.chdir(project)
        specs = [RewardConfig(reward=f"{project}/rewards/attack.py:attack")]
        settings = RewardSettings(workers=1, deadline_s=DEADLINE_S)
        results = []
        log = run / "logs" / "rewards.log"
        async with pool_in(run, *specs, settings=settings, level=level) as scorer:

            async def value_of(probe: Probe) -> tuple[float, str]:
                offered = {
                    "prompts": [""],
                    "completions": [self.text(probe)],
                    "completion_ids": [[1]],
                }
                (score,) = await scorer.score(0, offered, step=0)
                return (-1003.0 if score.value is None else score.value), score.problem or ""

            value, problem = await value_of(Probe("honest", "", HONEST.strip()))
            if value != 1.0:
                printed = log.read_text()[-2000:] if log.exists() else ""
                raise RuntimeError(
                    f"honest work fails at {level} as a reward: {value} {problem}\n{printed}"
                )
            last = [
                probe for probe in self.probes if "daemon" in probe.name
            ]  # these live as long as their worker
            for probe in self.probes:
                if probe not in last:
                    value, problem = await value_of(probe)
                    results.append(
                        self.judge(probe, level, "worker", value, problem, daemons=False)
                    )
            for probe in last:
                await value_of(probe)
        harm = self.targets.harmed()
        results += [
            Result(self.rights, level, "worker", probe.name, True, harm is not None, harm or "")
            for probe in last
        ]
        self.targets.reset()
        return iter(results)

    async def as_programs(self, level: Level) -> Iterator[Result]:
        """The probes as programs, each in a fresh process."""
        results = []
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "programs.log"
            programs = ProgramPool(
                level, at_once=1, log=log, run_id="trial", limits=LIMITS, packages=["numpy"]
            )
            try:
                for probe in [Probe("honest", "", HONEST.strip()), *self.probes]:
                    source = f"{REWARD}\nvalue = _try(*json.loads({self.text(probe)!r}))\nprint('\\n{CANARY}', value)"
                    outcome = await programs.run(source, deadline_s=DEADLINE_S)
                    last = outcome.output.decode(errors="replace").strip().splitlines()[
                        -1:
                    ] or [""]
                    value = float(last[0].split()[1]) if last[0].startswith(CANARY) else -1003.0
                    note = f"{outcome.status} {outcome.problem or ''}".strip()
                    if probe.name == "honest":
                        if value != 1.0:
                            text = f"{value} {outcome}\n{log.read_text()[-2000:]}"
                            raise RuntimeError(
                                f"honest work fails at {level} as a program: {text}"
                            )
                        continue
                    if outcome.status == "infra_error":
                        note += log.read_text()[-500:]
                    results.append(
                        self.judge(probe, level, "program", value, note, daemons=True)
                    )
            finally:
                await programs.close()
        return iter(results)

    def judge(
        self, probe: Probe, level: Level, where: str, value: float, note: str, *, daemons: bool
    ) -> Result:
        """Whether a probe got through, by its own account or by what it has done outside."""
        harm = self.targets.harmed(daemons=daemons)
        if harm is not None:
            self.targets.reset()
        through = value == 1.0 or harm is not None
        note = harm or (note if value == -1003.0 else f"{value:g}")
        return Result(
            self.rights,
            level,
            where,
            probe.name,
            self.controls[probe.name],
            through,
            note[:300],
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rights", default="root" if os.geteuid() == 0 else "user")
    parser.add_argument("--levels", default="namespaces,landlock")
    parser.add_argument("--where", default="worker,program")
    parser.add_argument("--only", default="")
    parser.add_argument(
        "--mutation",
        help="break the sandbox in this way first, and try the probe that must find it",
    )
    parser.add_argument("--no-control", action="store_true")
    options = parser.parse_args()
    user_code.Limits = lambda memory: LIMITS  # type: ignore[attr-defined]
    probes = [probe for probe in PROBES if options.only in probe.name]
    for mutation in MUTATIONS:
        if mutation.name == options.mutation:
            probes = [probe for probe in PROBES if probe.name == mutation.probe]
            mutation.make()
            # its self-test finds some of them
            user_code.choose_level = scoring.choose_level = lambda wanted: LevelChoice(
                Level(wanted), {}
            )
    began = time.monotonic()
    trial = Trial(options.rights, probes)
    try:
        if options.no_control:
            trial.controls = {probe.name: True for probe in probes}
        else:
            trial.control()
        print(
            json.dumps({"controls": trial.controls, "seconds": time.monotonic() - began}),
            flush=True,
        )
        for level in map(Level, options.levels.split(",")):
            if options.mutation is None and (answer := level_refusal(level)) is not None:
                print(
                    json.dumps({"rights": options.rights, "level": level, "refused": answer}),
                    flush=True,
                )
                continue
            for where in options.where.split(","):
                began = time.monotonic()
                attempt = trial.as_rewards if where == "worker" else trial.as_programs
                for result in asyncio.run(attempt(level)):
                    print(json.dumps(asdict(result)), flush=True)
                labels: dict[str, Any] = {
                    "rights": options.rights,
                    "level": level,
                    "where": where,
                }
                print(json.dumps({**labels, "seconds": time.monotonic() - began}), flush=True)
    finally:
        trial.targets.close()


if __name__ == "__main__":
    main()
