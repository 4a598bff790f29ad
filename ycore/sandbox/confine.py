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
    DropRightsSteps,
    capabilities,
    missing_rights,
)
from ycore.sandbox.landlock import LEAST_ABI, abi, rules_of
from ycore.sandbox.namespaces import SCRATCH, bwrap_command, find_bwrap, python_paths
from ycore.sandbox.syscall_filter import filter_bytes
from ycore.sandbox.watch import remove_tree

FIRST_UID = 61184
NUM_UIDS = 4336
"""The range that systemd sets apart for users that exist only while they run."""

_PASSED_ON = frozenset(
    {"LANG", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONHASHSEED", "OMP_NUM_THREADS"}
)
_WITH_NETWORK = frozenset({"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"})
_SHARED_MEMORY = 16 * MIB


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a confined process: `Popen(command, env=environment, cwd=working)`, in a session of its own.

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
    module: str, arguments: Sequence[str], confinement: Confinement, *, name: str = ""
) -> Launch:
    """Return how to start `python -m module arguments...` confined.

    `name` tells one confined process of a run from another: where ycore is root, each is another user.
    """
    view = confinement.view
    limits = confinement.limits
    run_id = confinement.run_id
    uid = None
    if os.geteuid() == 0 and (confinement.level is not Level.NONE or confinement.own_user):
        uid = FIRST_UID + zlib.crc32(f"{run_id} {os.getpid()} {name}".encode()) % NUM_UIDS
    if confinement.level is Level.NAMESPACES:
        return _launch_in_namespaces([module, *arguments], confinement, uid)
    prefix = f"ycore-{run_id}-scratch-"  # the guardian knows scratch folders by this name
    scratch = Path(tempfile.mkdtemp(prefix=prefix))
    environment = confined_environment(view, run_id=run_id, scratch=scratch)
    if uid is not None:
        os.chown(scratch, uid, uid)
    if confinement.level is Level.LANDLOCK:
        keep = None if uid is None or closed_path(view.read) is None else _reading_right()
        rules = rules_of(
            view, limits, scratch=scratch, python=python_paths(), uid=uid, keep=keep
        )
        return Launch(
            [*_python_module("ycore.sandbox.landlock", asdict(rules)), module, *arguments],
            environment,
            working=scratch,
            scratch=scratch,
            description="confined by Landlock",
            has_stage=True,
        )
    steps, description = unconfined_steps(view, limits, uid)
    return Launch(
        [*_python_module("ycore.sandbox.drop_rights", steps), module, *arguments],
        environment,
        working=view.working or scratch,
        scratch=scratch,
        description=description,
    )


def _launch_in_namespaces(
    command: Sequence[str], confinement: Confinement, uid: int | None
) -> Launch:
    bwrap = find_bwrap()
    if bwrap is None:
        raise RunError(
            "no bwrap is installed; install the package bubblewrap, or --sandbox landlock"
        )
    view = confinement.view
    limits = confinement.limits
    python = python_paths()
    readable = (*python, *view.read)
    is_closed = closed_path((*readable, *_interpreter()), roots=readable) is not None
    steps = DropRightsSteps(
        tmpfs={
            str(SCRATCH): (limits.scratch, limits.files),
            "/dev/shm": (_SHARED_MEMORY, limits.files),
        },
        limits=asdict(limits),
        uid=uid,
        keep=CAP_DAC_READ_SEARCH if is_closed and uid is not None else None,
        filter=filter_bytes(Level.NAMESPACES, network=view.network).hex(),
    )
    program = [*_python_module("ycore.sandbox.drop_rights", steps), *command]
    return Launch(
        bwrap_command(program, view, bwrap=bwrap, as_root=uid is not None, python=python),
        confined_environment(view, run_id=confinement.run_id, scratch=SCRATCH),
        working=None,
        scratch=None,
        description="confined in namespaces of its own",
    )


def _python_module(module: str, argument: Any) -> list[str]:
    return [sys.executable, "-P", "-m", module, json.dumps(argument)]


def unconfined_steps(
    view: View, limits: Limits, uid: int | None
) -> tuple[DropRightsSteps, str]:
    """Return the steps at the level `none`, with their description.

    Root still becomes a user of its own, wherever it then can read what it needs.
    """
    keep = None
    description = f"not confined: runs as the user who started the run (uid {os.geteuid()})"
    if uid is not None:
        closed = closed_path((*python_paths(), *_interpreter(), *view.read))
        keep = None if closed is None else CAP_DAC_READ_SEARCH
        description = f"not confined, but runs as uid {uid}, without any right of root's"
        if closed:
            description = (
                f"not confined, but runs as uid {uid}; because {closed} is closed to others, "
                "it may read every file"
            )
        if missing_rights(keep):
            description = (
                f"not confined, and stays root: {closed} is closed to others; `chmod o+rx` it and what it lies in"
                if closed
                else "not confined, and stays root: this system gives no right to change the user"
            )
            uid = None
            keep = None
    if uid is None:
        limits = replace(limits, processes=2**22)  # a user's limit would count all of theirs
    steps = DropRightsSteps(
        tmpfs={}, limits=asdict(replace(limits, scratch=2**62)), uid=uid, keep=keep, filter=""
    )
    return steps, description


def confined_environment(
    view: View, *, run_id: str, scratch: Path, parent: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return a few variables of `parent`, never a token or a key; home and temporary files are the scratch folder."""
    names = _PASSED_ON | _WITH_NETWORK if view.network else _PASSED_ON
    variables = {
        name: value for name, value in parent.items() if name in names or name.startswith("LC_")
    }
    cache = Path(parent.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    if any(cache.is_relative_to(path) for path in view.read):
        variables["HF_HOME"] = str(cache)
    if not view.network:
        variables["HF_HUB_OFFLINE"] = "1"  # else libraries wait for a network that is not there
    return {**variables, **base_variables(run_id, scratch), "PYTHONDONTWRITEBYTECODE": "1"}


def base_variables(run_id: str, scratch: Path) -> dict[str, str]:
    """Return the variables of every confined process: its scratch folder, where programs are, and the run's mark."""
    folders = [os.path.dirname(sys.executable), "/usr/local/bin", "/usr/bin", "/bin"]
    return {
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "PATH": os.pathsep.join(folders),
        RUN_MARKER: run_id,
    }


def closed_path(paths: Iterable[Path], *, roots: Sequence[Path] = ()) -> Path | None:
    """Return the first path that not everybody may read, by its own mode and that of every folder above it.

    Above `roots` modes do not count, because there the sandbox has folders of its own.
    """
    for path in paths:
        path = path.absolute()
        for part in (path, *path.parents):
            if part != path and roots and not any(part.is_relative_to(root) for root in roots):
                continue
            with suppress(OSError):  # what is not there need not be read
                mode = part.stat().st_mode
                needed = stat.S_IROTH if part == path else 0
                needed |= stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH
                if mode & needed != needed:
                    return part
    return None


def _reading_right() -> int | None:
    """Return a capability that reads the files of a closed folder under Landlock's rules, which it does not lift.

    Containers leave root CAP_DAC_OVERRIDE of the two. It would also let an older Landlock's gaps be used for emptying
    files (`landlock.LEAST_ABI`).
    """
    permitted = capabilities()
    if permitted >> CAP_DAC_READ_SEARCH & 1:
        return CAP_DAC_READ_SEARCH
    return (
        CAP_DAC_OVERRIDE if permitted >> CAP_DAC_OVERRIDE & 1 and abi() >= LEAST_ABI else None
    )


def _interpreter() -> list[Path]:
    """Return the files without which this Python does not start or import."""
    entries = [Path(entry) for entry in sys.path if os.path.isabs(entry)]
    return [Path(sys.executable).resolve(), Path(os.__file__), *entries]
