"""Start a module of ours confined, at a level that was chosen before; the one way into the sandbox.

The module is trusted until it loads foreign code. It gets its arguments, the descriptors that it is passed, a scratch
folder, and an environment of a few harmless variables.

`python_paths` are Python, its environment and ycore. `source_paths` are where a person keeps code that this Python
imports from its place: editable installs, `.pth` files, PYTHONPATH, zip archives. Inside, Python reads the same `.pth`
files when it starts, so that its import system finds all that it may read.
"""

import ctypes
import json
import os
import signal
import stat
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import NamedTuple

import ycore
from ycore.run.reports import RUN_MARKER, kill_tree
from ycore.sandbox import SCRATCH, Confinement, Level, Limits, View
from ycore.sandbox.namespaces import bwrap_command
from ycore.sandbox.stage import (
    CAP_DAC_OVERRIDE,
    CAP_DAC_READ_SEARCH,
    DEVICES,
    StageSteps,
    capabilities,
    landlock_abi,
    missing_rights,
)
from ycore.sandbox.syscall_filter import filter_bytes
from ycore.sandbox.watch import remove_tree


def site_packages() -> list[str]:
    """Return where this environment's packages are, those of a user or of another environment too."""
    return [entry for entry in sys.path if "-packages" in entry]


def python_paths(*, packages: bool = True) -> tuple[Path, ...]:
    """Return the paths that this Python reads to start and, with `packages`, to import what is installed."""
    names = [
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        sys.base_exec_prefix,
        *sysconfig.get_paths().values(),
        *(site_packages() if packages else []),
        sys.executable,
        os.path.realpath(sys.executable),
        os.path.dirname(ycore.__file__),
    ]
    paths = dict.fromkeys(Path(name).absolute() for name in names if os.path.exists(name))
    return tuple(path for path in paths if not path.is_relative_to("/usr"))


def source_paths() -> tuple[Path, ...]:
    """Return the files and folders outside of `python_paths` that every Python of this environment imports from."""
    of_this_process = {os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0]))}
    of_this_process -= set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    entries = [
        entry for entry in sys.path if os.path.isabs(entry) and entry not in of_this_process
    ]
    # A strict editable install of setuptools is a folder of links; flit links whole packages.
    links = [path for path in map(Path, entries) if path.name.startswith("__editable__")]
    linked = [file.resolve().parent for folder in links for file in folder.rglob("*.*")]
    linked += [
        path.resolve()
        for folder in site_packages()
        for path in Path(folder).glob("*")
        if path.is_symlink()
    ]
    python = [*python_paths(), Path("/usr")]
    return tuple(
        path
        for path in dict.fromkeys([*map(Path, (*entries, *_mapped_paths())), *linked])
        if path.exists() and not any(path.is_relative_to(folder) for folder in python)
    )


def _mapped_paths() -> Iterator[str]:
    """Yield where the finders of editable installs look: those of setuptools, and of `editables`, which hatch uses."""
    for finder in sys.meta_path:
        module = sys.modules.get(getattr(finder, "__module__", ""))
        for path in getattr(module, "MAPPING", {}).values():
            yield from (f"{path}{suffix}" for suffix in ("", *all_suffixes()))
        for folders in getattr(module, "NAMESPACES", {}).values():
            yield from folders
        for file in getattr(finder, "_redirections", {}).values():
            yield file.removesuffix(f"{os.sep}__init__.py")


# -- starting a module -------------------------------------------------------------------------------------------------

FIRST_UID = 61184
NUM_UIDS = 4336
"""The range that systemd sets apart for users that exist only while they run."""

LEAST_ABI = 3
"""The oldest Landlock that confines a user: below it, a file that may be read can be emptied (`open` with O_TRUNC)."""

_SYSTEM = (
    "/usr",
    "/bin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
)
# Of a process with the network: how names are looked up, and whose certificates count; no private key is among them.
_NETWORK_FILES = (
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/host.conf",
    "/etc/gai.conf",
    "/etc/ssl/certs",
    "/etc/ssl/cert.pem",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/certs",
    "/etc/pki/tls/cert.pem",
    "/etc/pki/ca-trust/extracted",
    "/etc/ca-certificates",
)
_PASSED_ON = frozenset(
    {"LANG", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONHASHSEED", "OMP_NUM_THREADS"}
)
_WITH_NETWORK = frozenset({"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"})


class Launch(NamedTuple):
    """How to start a confined process: `Popen(command, env=environment, cwd=working)`, in a session of its own.

    `scratch` is a folder to remove afterwards, and None where it is in memory, in namespaces. Elsewhere the process that
    is started is our own stage, and ends what it confines when it gets SIGTERM.
    """

    command: list[str]
    environment: dict[str, str]
    working: Path | None
    scratch: Path | None

    def end(self, pid: int) -> None:
        """End the started process with all below it. Our own stage does so itself: no new process escapes it."""
        if self.scratch is None:
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
    network = map(Path, _NETWORK_FILES if view.network else ())
    view = view._replace(read=(*python_paths(), *network, *view.read))
    run_id = confinement.run_id
    uid = None
    if os.geteuid() == 0 and confinement.level is not Level.NONE:
        uid = FIRST_UID + zlib.crc32(f"{run_id} {os.getpid()} {name}".encode()) % NUM_UIDS
    steps = stage_steps(confinement.level, view, confinement.limits, uid)
    scratch = None
    if confinement.level is not Level.NAMESPACES:
        # The guardian knows scratch folders by this name.
        scratch = Path(tempfile.mkdtemp(prefix=f"ycore-{run_id}-scratch-"))
        steps["scratch"] = str(scratch)
        if steps["uid"] is not None:
            os.chown(scratch, steps["uid"], steps["uid"])
    command = [*_stage_command(steps), module, *arguments]
    if scratch is None:
        command = bwrap_command(command, view)
    return Launch(
        command,
        confined_environment(confinement.view, run_id=run_id, scratch=scratch or SCRATCH),
        working=scratch and (view.working or scratch),
        scratch=scratch,
    )


def _stage_command(steps: StageSteps) -> list[str]:
    return [sys.executable, "-P", "-m", "ycore.sandbox.stage", json.dumps(steps)]


def stage_steps(level: Level, view: View, limits: Limits, uid: int | None) -> StageSteps:
    """Return the steps of a process that sees `view`; where there is a scratch folder, it is named later.

    A user of its own keeps a right to read where something of these is closed to others. At `none`, root stays root
    where no other user could read it, or become one.
    """
    keep = None
    # In namespaces, what lies above is made anew, open to all.
    roots = view.read if level is Level.NAMESPACES else ()
    if uid is not None and closed_path(view.read, roots=roots) is not None:
        keep = _reading_right() if level is Level.LANDLOCK else CAP_DAC_READ_SEARCH
    if level is Level.NONE:
        if uid is None or missing_rights(keep):
            limits = replace(limits, processes=2**22)  # a user's limit counts all of theirs
            uid = None
            keep = None
        limits = replace(limits, scratch=2**62)
    refused = b""
    if level is not Level.NONE:
        refused = filter_bytes(
            level,
            network=view.network,
            landlock_abi=landlock_abi(),
            has_own_user=uid is not None,
        )
    return StageSteps(
        files=_readable_files(view) if level is Level.LANDLOCK else None,
        scratch="",
        limits=asdict(limits),
        uid=uid,
        keep=keep,
        filter=refused.hex(),
        in_namespaces=level is Level.NAMESPACES,
    )


def _readable_files(view: View) -> list[str]:
    """Return the files and folders to read at the level `landlock`, as the stage takes them.

    Landlock has no rule that takes back what another gives. So a folder with something hidden in it is given by its
    entries, those that are there now, and for the rest its names can be listed.
    """
    system = map(Path, (*_SYSTEM, *DEVICES))
    hidden = frozenset(path.resolve() for path in view.hidden)
    readable = [path.resolve() for path in (*system, *view.read) if path.exists()]
    return sorted({name for path in readable for name in _around(path, hidden)})


def _around(path: Path, hidden: frozenset[Path]) -> Iterator[str]:
    if path in hidden:
        return
    if not any(path in inner.parents for inner in hidden):
        yield str(path)
        return
    yield f"{path}{os.sep}"
    with suppress(OSError):
        for entry in path.iterdir():
            if not entry.is_symlink():
                yield from _around(entry, hidden)


def landlock_refusal() -> str | None:
    """Return why the level `landlock` is not available here, or None."""
    version = landlock_abi()
    if version == 0:
        return f"the kernel has no Landlock ({os.strerror(ctypes.get_errno())})"
    if version < LEAST_ABI and os.geteuid() != 0:
        return f"Landlock ABI {version}, and as a user at least {LEAST_ABI} is needed"
    return None


def confined_environment(view: View, *, run_id: str, scratch: Path) -> dict[str, str]:
    """Return a few of our variables, never a token or a key; home and temporary files are the scratch folder."""
    names = _PASSED_ON | _WITH_NETWORK if view.network else _PASSED_ON
    variables = {
        name: value
        for name, value in os.environ.items()
        if name in names or name.startswith("LC_")
    }
    cache = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
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
    files (`LEAST_ABI`).
    """
    permitted = capabilities()
    if permitted >> CAP_DAC_READ_SEARCH & 1:
        return CAP_DAC_READ_SEARCH
    can_override = permitted >> CAP_DAC_OVERRIDE & 1 and landlock_abi() >= LEAST_ABI
    return CAP_DAC_OVERRIDE if can_override else None
