"""The level `landlock`: a process that confines itself, for machines that make no namespaces.

Landlock bounds which files can be opened, a filter of system calls the rest of the kernel, resource limits each
process, and a watch the sum. Root first becomes a user that nobody else is. What stays open: names, sizes and times of
files can be learned; and sockets fail, those on loopback too. The stage (`main`) is trusted: it starts the confined
process, counts what it holds, and ends all that it left. Only the standard library.

Source: the Landlock documentation of the kernel (Documentation/userspace-api/landlock.rst).
"""

import ctypes
import json
import os
import resource
import runpy
import signal
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

from ycore.sandbox import Level, Limits, View
from ycore.sandbox.drop_rights import (
    LIBC,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    become,
    checked,
    install_filter,
    limit_resources,
    prctl,
)
from ycore.sandbox.syscall_filter import filter_bytes
from ycore.sandbox.watch import INTERVAL_S, below, end_all_below, usage

LEAST_ABI = 3
"""The oldest version that confines a user: below it, a file that may be read can be emptied (`open` with O_TRUNC)."""

EXIT_EXCESS = 240
"""The stage's exit status where the tree held too much; a confined process's own status is cut to less than it."""

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_MAKE_CHAR, _MAKE_BLOCK, _TRUNCATE, _IOCTL_DEV = 1 << 6, 1 << 11, 1 << 14, 1 << 15
_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}  # by ABI; from 5 on the same
_TCP = 3  # bind and connect, from ABI 4 on
_SCOPES = 3  # abstract sockets and signals, from ABI 6 on
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_DEVICES = {
    "/dev/null": _READ_FILE | _WRITE_FILE,
    "/dev/zero": _READ_FILE,
    "/dev/urandom": _READ_FILE,
}
_SYSTEM = tuple(
    Path(name)
    for name in (
        *("/usr", "/bin", "/lib", "/lib32", "/lib64"),
        *("/etc/ld.so.cache", "/etc/localtime"),
        *_DEVICES,
    )
)


@dataclass(frozen=True, slots=True)
class LandlockRules:
    """The settings of a process that confines itself, as JSON values.

    `files`: files and folders to read and execute; of a folder with a slash at its end, names can be listed, and no
    more. `scratch`: the one folder to write in. `working`: where it starts. `uid`: whom root becomes; None for a user.
    `keep`: a capability that root keeps, to read what is closed to others.
    `program`: the filter's instructions, as hexadecimal digits.
    """

    files: list[str]
    scratch: str
    working: str
    uid: int | None
    keep: int | None
    program: str
    limits: dict[str, int]


def rules_of(
    view: View,
    limits: Limits,
    *,
    scratch: Path,
    python: Iterable[Path],
    uid: int | None,
    keep: int | None = None,
) -> LandlockRules:
    """Return the rules of a process that may see `view` and Python, and write in `scratch` alone.

    Landlock has no rule that takes back what another gives. So a folder with something hidden in it is given by its
    entries, those that are there now, and for the rest its names can be listed.
    """
    program = filter_bytes(
        Level.LANDLOCK, network=view.network, landlock_abi=abi(), has_own_user=uid is not None
    )
    hidden = frozenset(path.resolve() for path in view.hidden)
    readable = [path.resolve() for path in (*_SYSTEM, *python, *view.read) if path.exists()]
    return LandlockRules(
        files=sorted({name for path in readable for name in _around(path, hidden)}),
        scratch=str(scratch),
        working=str(view.working or scratch),
        uid=uid,
        keep=keep,
        program=program.hex(),
        limits=asdict(limits),
    )


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


def abi() -> int:
    """Return the kernel's version of Landlock, 0 where it has none."""
    return max(0, int(LIBC.syscall(_CREATE, None, ctypes.c_size_t(0), 1)))


def landlock_refusal() -> str | None:
    """Return why this level is not available here, or None."""
    version = abi()
    if version == 0:
        return f"the kernel has no Landlock ({os.strerror(ctypes.get_errno())})"
    if version < LEAST_ABI and os.geteuid() != 0:
        return f"Landlock ABI {version}, and as a user at least {LEAST_ABI} is needed"
    return None


class OpenPaths:
    """Files and folders held open from before the change of user, for those that lie behind a closed folder.

    Root's Python often lies in a home of mode 0700. After the change of user it cannot be found by name any more, but
    by the descriptor, as /proc/self/fd/N. Processes that it starts do not get these.
    """

    def __init__(self, rules: LandlockRules) -> None:
        self.descriptors: dict[str, int] = {}
        for search_path in _search_paths():
            search_path[:] = map(os.path.realpath, search_path)
        for name in (*rules.files, rules.scratch, rules.working):
            with suppress(OSError):
                self.descriptors[name] = os.open(name, os.O_PATH | os.O_CLOEXEC)

    def reroute_imports(self) -> None:
        """Once the user is changed: close what can be found by name, and import from the rest by descriptor."""
        for name, descriptor in list(self.descriptors.items()):
            if os.access(name, os.R_OK):
                os.close(descriptor)
                del self.descriptors[name]
        if self.descriptors:
            for search_path in _search_paths():
                search_path[:] = map(self._reachable, search_path)
            sys.path_importer_cache.clear()

    def _reachable(self, path: str) -> str:
        """Return a path as it can be opened from now on."""
        for name in sorted(self.descriptors, key=len, reverse=True):
            folder = name.rstrip(os.sep)
            if path == folder or path.startswith(folder + os.sep):
                return f"/proc/self/fd/{self.descriptors[name]}{path[len(folder) :]}"
        return path


def _search_paths() -> list[list[str]]:
    """Return where imports look: `sys.path`, and the path of each package."""
    packages = [getattr(module, "__path__", None) for module in list(sys.modules.values())]
    return [sys.path, *(path for path in packages if isinstance(path, list))]


def change_user(rules: LandlockRules) -> OpenPaths:
    """Become the rules' user where this is root; return what was opened before. Then `confine`."""
    open_paths = OpenPaths(rules)
    if rules.uid is not None:
        become(rules.uid, keep=rules.keep)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    return open_paths


def confine(rules: LandlockRules, open_paths: OpenPaths) -> None:
    """Confine the calling process, which has one thread, and all that it will start. It cannot be undone."""
    # The kernel counts processes by user; our own count is by tree.
    num_others = _num_tasks_of(os.getuid()) if rules.uid is None else 2
    _restrict_files(rules, open_paths)
    open_paths.reroute_imports()
    limits = Limits(**rules.limits)
    limit_resources(replace(limits, processes=limits.processes + num_others))
    install_filter(bytes.fromhex(rules.program))


def main(arguments: list[str]) -> NoReturn:
    """`[confinement as JSON, module, its arguments]`: run the module confined, and end as it did.

    Standard input, output and error are the module's, and so is every descriptor that was inherited. The stage ends
    all that is left when the module ends, when it holds too much (`EXIT_EXCESS`, and a line on standard error), and
    when the stage's parent is gone.
    """
    rules = LandlockRules(**json.loads(arguments[0]))
    parent = os.getppid()
    open_paths = change_user(rules)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, _end)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    child = start_confined(rules, open_paths, lambda: _run_module(arguments[1], arguments[2:]))
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (
        0,
        1,
    ):  # they are the child's: its parent must see them close when it ends
        os.dup2(nothing, descriptor)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _end_as(_watch_over(child, rules))


def _run_module(name: str, arguments: list[str]) -> None:
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def start_confined(
    rules: LandlockRules, open_paths: OpenPaths, work: Callable[[], object]
) -> int:
    """Do the work in a new process that is confined first; return its id, for which the caller waits."""
    stage = os.getpid()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != stage:
            return os._exit(1)
        with suppress(KeyError):
            os.fchdir(open_paths.descriptors[rules.working])
        confine(rules, open_paths)
        work()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 (the border of a process)
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
        os._exit(status & 0xFF)


def _watch_over(child: int, rules: LandlockRules) -> int:
    """Wait until the process has ended or its tree holds too much, end what is left, and return its exit code."""
    limits = Limits(**rules.limits)
    code: int | None = None
    excess = None
    while code is None and excess is None:
        signal.sigtimedwait([signal.SIGCHLD], INTERVAL_S)
        excess = usage(below(os.getpid()), limits, rules.scratch).excess(limits)
        with suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG):
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
                if ended[0] == 0:
                    break
    end_all_below(os.getpid())
    if excess is not None:
        os.write(2, f"sandbox: ended, because it held {excess}\n".encode())
        return EXIT_EXCESS
    assert code is not None
    return min(code, EXIT_EXCESS - 1)


def _restrict_files(rules: LandlockRules, open_paths: OpenPaths) -> None:
    version = abi()
    handled = _RIGHTS.get(version, _RIGHTS[5])
    scopes = _SCOPES if version >= 6 else 0
    attributes = struct.pack("<QQQ", handled, _TCP if version >= 4 else 0, scopes)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _call(_CREATE, attributes[:size], ctypes.c_size_t(size), 0)
    for name in (*rules.files, rules.scratch):
        descriptor = open_paths.descriptors.get(name)
        if descriptor is None:
            continue  # gone since it was named
        rights = _READ
        if name == rules.scratch:
            rights = handled & ~(_MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV)
        elif name.endswith(os.sep):
            rights = _READ_DIR
        elif name in _DEVICES:
            rights = _DEVICES[name]
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("<Qi", rights & handled, descriptor)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    _call(_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _num_tasks_of(uid: int) -> int:
    """Count the processes and threads of a user now, which its limit counts too."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _end(*_signal: object) -> NoReturn:
    end_all_below(os.getpid())
    os._exit(1)


def _end_as(code: int) -> NoReturn:
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _call(number: int, *arguments: object) -> int:
    return checked(int(LIBC.syscall(number, *arguments)), "landlock")


if __name__ == "__main__":
    main(sys.argv[1:])
