"""The last steps of a confined process before foreign code: limits, another user, no rights, Landlock, the filter.

`python -m ycore.sandbox.stage STEPS MODULE ARGUMENTS...` takes the steps (JSON, `StageSteps`) and runs the module; the
server of programs calls `take_steps` in each program's process. Where no namespace of processes ends what the module
leaves behind, the stage takes the steps in a child, waits for it, and ends all that is left. Every step raises OSError
where the kernel refuses it: what is confined by half must not go on. Standard library only.

Source of Landlock's rules: the kernel's Documentation/userspace-api/landlock.rst.
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
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypedDict

from ycore.sandbox import EXIT_EXCESS, Limits
from ycore.sandbox.watch import INTERVAL_S, below, end_all_below, excess_of

# Linux: mount(2), prctl(2), capset(2)
MS_NOSUID = 2
MS_NODEV = 4
_MS_REMOUNT = 32
PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_KEEPCAPS = 8
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_OVERRIDE = 1
CAP_DAC_READ_SEARCH = 2
CAP_SETGID = 6
CAP_SETUID = 7

# Linux: linux/landlock.h
_CREATE = 444
_ADD_RULE = 445
_RESTRICT = 446
_PATH_BENEATH = 1
_EXECUTE = 1
_WRITE_FILE = 2
_READ_FILE = 4
_READ_DIR = 8
_MAKE_CHAR = 1 << 6
_MAKE_BLOCK = 1 << 11
_TRUNCATE = 1 << 14
_IOCTL_DEV = 1 << 15
_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}  # by ABI; from 5 on the same
_TCP = 3  # bind and connect, from ABI 4 on
_SCOPES = 3  # abstract sockets and signals, from ABI 6 on
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
DEVICES = {
    "/dev/null": _READ_FILE | _WRITE_FILE,
    "/dev/zero": _READ_FILE,
    "/dev/urandom": _READ_FILE,
}

_MANY_FILES = 4096  # descriptors of one process
_SPARE_TASKS = 64  # for a user's processes and threads that start later, elsewhere
LIBC = ctypes.CDLL(None, use_errno=True)


class StageSteps(TypedDict):
    """The steps before foreign code runs."""

    files: list[str] | None  # what Landlock lets it read; None where Landlock has no part
    scratch: (
        str  # its folder, the one that Landlock lets it write in; empty where that is in memory
    )
    limits: dict[str, int]  # the fields of `Limits`
    uid: int | None  # whom root becomes; None for a user, who stays who they are
    keep: int | None  # a capability that is kept all the same
    filter: str  # of system calls, as hexadecimal digits; empty for none
    in_namespaces: bool


def run_stage() -> None:
    steps: StageSteps = json.loads(sys.argv[1])
    del sys.argv[:2]
    if not steps["in_namespaces"]:
        _supervise_child(steps)
    take_steps(steps)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def take_steps(steps: StageSteps) -> None:
    """Take all steps, in the one order that works: each takes away what an earlier one needs.

    The process has one thread. Nothing of this can be undone.
    """
    limits = Limits(**steps["limits"])
    if steps["in_namespaces"]:  # bwrap bounds the bytes of these folders alone
        for folder, options in limits.mounts.items():
            mount(None, folder, None, MS_NOSUID | MS_NODEV | _MS_REMOUNT, options)
    ruleset = None
    if steps["files"] is not None:
        # The kernel counts the processes of a user, whose others come and go; the limit is of this tree's, which the
        # watch counts.
        num_others = 2
        if steps["uid"] is None:
            num_others = _num_tasks_of(os.getuid()) + min(_SPARE_TASKS, limits.processes)
        limits = replace(limits, processes=limits.processes + num_others)
        ruleset = _ruleset(steps["files"], steps["scratch"])
    _limit_resources(limits)
    give_up_rights(steps["uid"], keep=steps["keep"])
    if ruleset is not None:
        _landlock(_RESTRICT, ruleset, 0)
        os.close(ruleset)
    if steps["filter"]:
        install_filter(bytes.fromhex(steps["filter"]))
    end_with_parent()  # the kernel forgets this with a change of user


def _supervise_child(steps: StageSteps) -> None:
    """Return in a new process. This one waits for that, ends all that it left and ends as it did.

    It also ends everything when that holds too much (`EXIT_EXCESS`, and a line on standard error), at SIGTERM and when
    its own parent is gone. Only the child keeps standard input, standard output and the other descriptors.
    """
    parent = os.getppid()
    checked_prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, end_everything)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if (
        steps["uid"] is not None
    ):  # in a container, root may not look at another user's processes
        give_up_rights(steps["uid"], keep=steps["keep"])
    checked_prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        end_everything()
    code = _watch_over(child, Limits(**steps["limits"]), steps["scratch"])
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _watch_over(child: int, limits: Limits, scratch: str) -> int:
    """Wait until the child has ended or its tree holds too much, end what is left, and return its exit code."""
    code: int | None = None
    excess: str | None = None
    while code is None and excess is None:
        signal.sigtimedwait([signal.SIGCHLD], INTERVAL_S)
        excess = excess_of(below(os.getpid()), limits, scratch)
        pid = child
        while pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                break
    end_all_below(os.getpid())
    if excess is not None:
        os.write(2, f"sandbox: ended, because it held {excess}\n".encode())
        return EXIT_EXCESS
    assert code is not None
    return min(code, EXIT_EXCESS - 1)


def end_everything(*_signal: object) -> NoReturn:
    """End all processes below this one, and then this one."""
    end_all_below(os.getpid())
    os._exit(1)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str) -> None:
    """mount(2); OSError with the target where the kernel refuses it."""
    names = [None if name is None else name.encode() for name in (source, target, kind)]
    checked(LIBC.mount(*names, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def _limit_resources(limits: Limits) -> None:
    """Set the kernel's limits of this process and each that it starts.

    RLIMIT_DATA counts private writable memory and lets large libraries be mapped. RLIMIT_NPROC counts by user, and
    nothing for root. What several processes hold together is the watch's to see.
    """
    for kind, limit in (
        (resource.RLIMIT_DATA, limits.memory),
        (resource.RLIMIT_AS, 4 * limits.memory),
        (resource.RLIMIT_FSIZE, limits.scratch),
        (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_NOFILE, _MANY_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 2**20),
    ):
        hard = resource.getrlimit(kind)[1]
        bounded = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (bounded, bounded))


def _num_tasks_of(uid: int) -> int:
    """Count the processes and threads of a user now, which its limit counts too."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def give_up_rights(uid: int | None, *, keep: int | None) -> None:
    """Become `uid` and its group where this is root, and keep no capability but `keep` (a number).

    PermissionError where a right that this takes is missing; nothing has been changed then.
    """
    if uid is not None and (missing := missing_rights(keep)):
        raise PermissionError(f"capabilities {missing} are missing")
    with suppress(OSError):  # EPERM without CAP_SETPCAP; EINVAL behind the kernel's last one
        for number in set(range(64)) - {keep}:
            checked_prctl(_PR_CAPBSET_DROP, number)
    if uid is None:  # every capability of a user namespace, the ambient ones too
        checked_prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
        set_capabilities(0)
    else:
        checked_prctl(_PR_SET_KEEPCAPS, int(keep is not None))
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        if keep is not None:
            set_capabilities(1 << keep, inheritable=1 << keep)
            checked_prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, keep)
        # Else /proc/self belongs to root, and libraries that read it fail.
        checked_prctl(_PR_SET_DUMPABLE, 1)
    checked_prctl(_PR_SET_NO_NEW_PRIVS, 1)  # nor does sudo give anything back


def missing_rights(keep: int | None) -> list[int]:
    """Return the capabilities that a change of user needs and that this process lacks."""
    needed = [CAP_SETUID, CAP_SETGID, *([] if keep is None else [keep])]
    permitted = capabilities()
    return [number for number in needed if not permitted >> number & 1]


def capabilities() -> int:
    """Return the permitted capabilities of this process, a bit each."""
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    checked(LIBC.capget(header, data), "capget")
    _, low, _, _, high, _ = struct.unpack("<6I", data)
    return int(low) | int(high) << 32


def set_capabilities(bits: int, *, inheritable: int = 0) -> None:
    """Make these the effective and permitted capabilities of this process."""
    sets = (bits, bits, inheritable)
    parts = [*(bits & 0xFFFFFFFF for bits in sets), *(bits >> 32 for bits in sets)]
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
    checked(LIBC.capset(header, struct.pack("<6I", *parts)), "capset")


def landlock_abi() -> int:
    """Return the kernel's version of Landlock, 0 where it has none."""
    return max(0, int(LIBC.syscall(_CREATE, None, ctypes.c_size_t(0), 1)))


def _ruleset(files: list[str], scratch: str) -> int:
    """Return Landlock's rules as a descriptor: read and execute these files and folders, write in the scratch folder.

    Of a folder with a slash at its end names can be listed, and no more.
    """
    version = landlock_abi()
    handled = _RIGHTS.get(version, _RIGHTS[5])
    scopes = _SCOPES if version >= 6 else 0
    attributes = struct.pack("<QQQ", handled, _TCP if version >= 4 else 0, scopes)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _landlock(_CREATE, attributes[:size], ctypes.c_size_t(size), 0)
    for name in (*files, scratch):
        rights = DEVICES.get(name, _EXECUTE | _READ_FILE | _READ_DIR)
        if name == scratch:
            rights = handled & ~(_MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV)
        elif name.endswith(os.sep):
            rights = _READ_DIR
        with suppress(FileNotFoundError):  # gone since it was named
            descriptor = os.open(name, os.O_PATH | os.O_CLOEXEC)
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                rights &= _OF_FILES
            rule = struct.pack("<Qi", rights & handled, descriptor)
            _landlock(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
            os.close(descriptor)
    return ruleset


def _landlock(number: int, *arguments: object) -> int:
    return checked(int(LIBC.syscall(number, *arguments)), "landlock")


def install_filter(program: bytes) -> None:
    """Refuse system calls from now on, here and in everything that is started (`syscall_filter.filter_bytes`)."""
    checked_prctl(_PR_SET_NO_NEW_PRIVS, 1)
    code = ctypes.create_string_buffer(program, len(program))

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    described = Filter(len(program) // 8, ctypes.addressof(code))
    checked_prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(described))


def end_with_parent() -> None:
    """Die with the parent, even in the middle of a call that never ends, and take along all daemons.

    Also be the first that the kernel kills when memory runs out: a reward can be masked, a trainer cannot.
    """
    with suppress(OSError):
        checked_prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError):  # daemons stay below this process, so that they are found
        checked_prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def checked_prctl(*arguments: int) -> None:
    """prctl(2) with up to five numbers."""
    padded = [*arguments, 0, 0, 0, 0, 0][:5]
    checked(LIBC.prctl(*map(ctypes.c_ulong, padded)), "prctl")


def checked(status: int, call: str) -> int:
    """Return the status of a system call; OSError, with the call's name, where that is -1."""
    if status < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return status


if __name__ == "__main__":
    run_stage()
