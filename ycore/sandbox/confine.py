"""Start a module of ours confined, at a level that was chosen before; the one way into the sandbox.

The module is trusted until it loads foreign code. It gets its arguments, the descriptors that it is passed, a scratch
folder, and an environment of a few harmless variables.
"""

import json
import os
import signal
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import Popen
from typing import Any

from ycore.errors import RunError
from ycore.run.reports import RUN_MARKER, kill_tree
from ycore.sandbox import MIB, Confinement, Level, Limits, View
from ycore.sandbox.drop_rights import (
    CAP_DAC_OVERRIDE,
    CAP_DAC_READ_SEARCH,
    Steps,
    capabilities,
    missing_rights,
)
from ycore.sandbox.landlock import LEAST_ABI, abi, rules_of
from ycore.sandbox.namespaces import SCRATCH, bwrap_command, find_bwrap, python_paths
from ycore.sandbox.syscall_filter import filter_bytes
from ycore.sandbox.watch import remove_tree

FIRST_UID, NUM_UIDS = (
    61184,
    4336,
)  # the range that systemd sets apart for users that exist only while they run
_PASSED_ON = frozenset(
    {"LANG", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONHASHSEED", "OMP_NUM_THREADS"}
)
_WITH_NETWORK = frozenset({"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"})
_SHARED_MEMORY = 16 * MIB


@dataclass(frozen=True, slots=True)
class Launch:
    """All that starts a confined process: `Popen(command, env=environment, cwd=working)`, in a session of its own.

    `scratch` is a folder to remove afterwards, where the scratch is not in memory. `description` says what holds it.
    `has_stage`: the process that is started is ours, and ends what it confines when it gets SIGTERM (`landlock`).
    """

    command: list[str]
    environment: dict[str, str]
    working: Path | None
    scratch: Path | None
    description: str
    has_stage: bool = False

    def start(self, **descriptors: Any) -> "Popen[bytes]":
        """Start it; `stdin`, `stdout`, `stderr` and `pass_fds` are those of Popen."""
        return Popen(
            self.command,
            env=self.environment,
            cwd=self.working,
            start_new_session=True,
            **descriptors,
        )

    def end(self, pid: int) -> None:
        """End the started process with all below it. Our own stage does so itself: no new process escapes it."""
        if not self.has_stage:
            return kill_tree(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)

    def clear(self) -> None:
        """Remove what the process left, once it is gone."""
        if self.scratch is not None:
            remove_tree(self.scratch)


def confined_launch(
    module: str, arguments: Sequence[str], held: Confinement, *, name: str = ""
) -> Launch:
    """How to start `python -m module arguments...` confined.

    `name` tells one confined process of a run from another: where ycore is root, each is another user.
    """
    view, limits, run_id = held.view, held.limits, held.run_id
    uid = None
    if os.geteuid() == 0 and (held.level is not Level.NONE or held.own_user):
        uid = FIRST_UID + zlib.crc32(f"{run_id} {os.getpid()} {name}".encode()) % NUM_UIDS
    if held.level is Level.NAMESPACES:
        return _in_namespaces(module, arguments, held, uid)
    scratch = Path(
        tempfile.mkdtemp(prefix=f"ycore-{run_id}-scratch-")
    )  # the guardian knows it by this name
    environment = confined_environment(view, run_id=run_id, scratch=scratch)
    python = [sys.executable, "-P", "-m"]
    if uid is not None:
        os.chown(scratch, uid, uid)
    if held.level is Level.LANDLOCK:
        keep = None if uid is None or closed_path(view.read) is None else _reading_right()
        rules = rules_of(view, limits, scratch=scratch, python=python_paths(), uid=uid, keep=keep)
        stage = ["ycore.sandbox.landlock", json.dumps(asdict(rules))]
        command = [*python, *stage, module, *arguments]
        return Launch(
            command, environment, scratch, scratch, "confined by Landlock", has_stage=True
        )
    steps, words = unconfined(view, limits, uid)
    stage = ["ycore.sandbox.drop_rights", json.dumps(steps)]
    return Launch(
        [*python, *stage, module, *arguments], environment, view.working or scratch, scratch, words
    )


def _in_namespaces(
    module: str, arguments: Sequence[str], held: Confinement, uid: int | None
) -> Launch:
    bwrap = find_bwrap()
    if bwrap is None:
        raise RunError(
            "no bwrap is installed; install the package bubblewrap, or --sandbox landlock"
        )
    view, limits, python = held.view, held.limits, python_paths()
    closed = uid is not None and closed_path(
        (*python, *_interpreter(), *view.read), roots=(*python, *view.read)
    )
    steps = Steps(
        tmpfs={
            str(SCRATCH): (limits.scratch, limits.files),
            "/dev/shm": (_SHARED_MEMORY, limits.files),
        },
        limits=asdict(limits),
        uid=uid,
        keep=CAP_DAC_READ_SEARCH if closed else None,
        filter=filter_bytes(Level.NAMESPACES, network=view.network).hex(),
    )
    program = [
        sys.executable,
        "-P",
        "-m",
        "ycore.sandbox.drop_rights",
        json.dumps(steps),
        module,
        *arguments,
    ]
    command = bwrap_command(program, view, bwrap=bwrap, as_root=uid is not None, python=python)
    environment = confined_environment(view, run_id=held.run_id, scratch=SCRATCH)
    return Launch(command, environment, None, None, "confined in namespaces of its own")


def unconfined(view: View, limits: Limits, uid: int | None) -> tuple[Steps, str]:
    """Nothing confines here. Root still becomes a user of its own, wherever it then can read what it needs."""
    keep, words = None, f"not confined: runs as the user who started the run (uid {os.geteuid()})"
    if uid is not None:
        closed = closed_path((*python_paths(), *_interpreter(), *view.read))
        keep = CAP_DAC_READ_SEARCH if closed else None
        missing = missing_rights(keep)
        words = f"not confined, but runs as uid {uid}, without any right of root's"
        if missing and closed:
            words = f"not confined, and stays root: {closed} is closed to others; `chmod o+rx` it and what it lies in"
        elif missing:
            words = "not confined, and stays root: this system gives no right to change the user"
        elif closed:
            words = f"not confined, but runs as uid {uid}; because {closed} is closed to others, it may read every file"
        if missing:
            uid = keep = None
    if uid is None:
        limits = replace(
            limits, processes=2**22
        )  # a user's limit would count all of their processes
    return Steps(
        tmpfs={}, limits=asdict(replace(limits, scratch=2**62)), uid=uid, keep=keep, filter=""
    ), words


def confined_environment(
    view: View, *, run_id: str, scratch: Path, parent: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """A few variables of `parent`, never a token or a key; home and temporary files are the scratch folder."""
    names = _PASSED_ON | _WITH_NETWORK if view.network else _PASSED_ON
    kept = {
        name: value for name, value in parent.items() if name in names or name.startswith("LC_")
    }
    cache = Path(parent.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    if any(cache.is_relative_to(path) for path in view.read):
        kept["HF_HOME"] = str(cache)
    if not view.network:
        kept["HF_HUB_OFFLINE"] = "1"  # else libraries wait for a network that is not there
    return {**kept, **base_variables(run_id, scratch), "PYTHONDONTWRITEBYTECODE": "1"}


def base_variables(run_id: str, scratch: Path) -> dict[str, str]:
    """What every confined process has: home and temporary files in its scratch folder, programs, and the run's mark."""
    folders = [os.path.dirname(sys.executable), "/usr/local/bin", "/usr/bin", "/bin"]
    own = {"HOME": str(scratch), "TMPDIR": str(scratch), "PATH": os.pathsep.join(folders)}
    return {**own, RUN_MARKER: run_id}


def closed_path(paths: Iterable[Path], *, roots: Sequence[Path] = ()) -> Path | None:
    """The first path that not everybody may read, by its own mode and that of every folder above it.

    Above `roots` modes do not count, because there the sandbox has folders of its own.
    """
    for path in paths:
        path = path.absolute()
        above = [
            step
            for step in path.parents
            if not roots or any(step.is_relative_to(root) for root in roots)
        ]
        for step in (path, *above):
            with suppress(OSError):  # what is not there need not be read
                mode = step.stat().st_mode
                enters = stat.S_IXOTH if stat.S_ISDIR(mode) else 0
                wanted = enters | (stat.S_IROTH if step == path or not enters else 0)
                if mode & wanted != wanted:
                    return step
    return None


def _reading_right() -> int | None:
    """A capability that reads the files of a closed folder under Landlock's rules, which it does not lift.

    Containers leave root CAP_DAC_OVERRIDE of the two. It would also let an older Landlock's gaps be used for emptying
    files (`landlock.LEAST_ABI`).
    """
    if capabilities() >> CAP_DAC_READ_SEARCH & 1:
        return CAP_DAC_READ_SEARCH
    return (
        CAP_DAC_OVERRIDE if capabilities() >> CAP_DAC_OVERRIDE & 1 and abi() >= LEAST_ABI else None
    )


def _interpreter() -> list[Path]:
    """Files without which this Python does not start or import."""
    entries = [Path(entry) for entry in sys.path if os.path.isabs(entry)]
    return [Path(sys.executable).resolve(), Path(os.__file__), *entries]
