"""The last steps of a confined process before foreign code: scratch, limits, another user, no rights, the filter.

As a module it is what `confine` starts first: `python -m ycore.sandbox.drop_rights STEPS MODULE ARGUMENTS...` takes
the steps (JSON, `DropRightsSteps`) and runs the module. The server of programs and the stage of Landlock call its
functions. Standard library only. Every step raises OSError where the kernel refuses it: what is confined by half must
not go on.
"""

import ctypes
import json
import os
import resource
import runpy
import signal
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from ycore.sandbox import Limits

# Linux: mount(2), prctl(2), capset(2)
MS_NOSUID = 2
MS_NODEV = 4
_MS_REMOUNT = 32
PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_KEEPCAPS = 8
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
_MANY_FILES = 4096  # descriptors of one process
CAP_DAC_OVERRIDE = 1
CAP_DAC_READ_SEARCH = 2
CAP_SETGID = 6
CAP_SETUID = 7
LIBC = ctypes.CDLL(None, use_errno=True)


class DropRightsSteps(TypedDict):
    """The steps that the stage takes before it runs the module."""

    tmpfs: dict[str, tuple[int, int]]  # folder: bytes, files
    limits: dict[str, int]  # the fields of `Limits`
    uid: int | None  # whom root becomes; None for a user, who stays who they are
    keep: int | None  # a capability that is kept all the same
    filter: str  # of system calls, as hexadecimal digits; empty for none


def take_steps(steps: DropRightsSteps) -> None:
    """Take all steps, in the one order that works: each takes away what an earlier one needs."""
    for folder, (size, files) in steps["tmpfs"].items():
        # bwrap bounds its bytes, and not its files
        mount(
            None,
            folder,
            None,
            MS_NOSUID | MS_NODEV | _MS_REMOUNT,
            f"size={size},nr_inodes={files}",
        )
    limit_resources(Limits(**steps["limits"]))
    give_up_rights(steps["uid"], keep=steps["keep"], refused=bytes.fromhex(steps["filter"]))
    end_with_parent()  # the kernel forgets this with a change of user


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str) -> None:
    """mount(2); OSError with the target where the kernel refuses it."""
    names = [None if name is None else name.encode() for name in (source, target, kind)]
    checked(LIBC.mount(*names, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def limit_resources(limits: Limits) -> None:
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


def give_up_rights(uid: int | None, *, keep: int | None = None, refused: bytes = b"") -> None:
    """Become `uid` where this is root; keep no right but `keep`, and no system call that is `refused`."""
    if (
        uid is None
    ):  # every capability of a user namespace, the ambient and the bounding ones too
        _empty_bounding_set()
        prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
        _set_capabilities(0)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
    else:
        become(uid, keep=keep)
    if refused:
        install_filter(refused)


def become(uid: int, *, keep: int | None = None) -> None:
    """Become this user and group, from root, without any capability but `keep` (a number).

    PermissionError where a right that this takes is missing; nothing has been changed then.
    """
    if missing := missing_rights(keep):
        raise PermissionError(f"capabilities {missing} are missing")
    _empty_bounding_set(keep)
    if keep is not None:
        prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if keep is not None:
        _set_capabilities(1 << keep)
        prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, keep)
    prctl(PR_SET_NO_NEW_PRIVS, 1)  # nor does sudo give anything back
    prctl(
        _PR_SET_DUMPABLE, 1
    )  # else /proc/self belongs to root, and libraries that read it fail


def missing_rights(keep: int | None) -> list[int]:
    """Return the capabilities that `become` needs and that this process lacks."""
    needed = [CAP_SETUID, CAP_SETGID, *([] if keep is None else [keep])]
    permitted = capabilities()
    return [number for number in needed if not permitted >> number & 1]


def install_filter(program: bytes) -> None:
    """Refuse system calls from now on, here and in everything that is started (`syscall_filter.filter_bytes`)."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    code = ctypes.create_string_buffer(program, len(program))

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    described = Filter(len(program) // 8, ctypes.addressof(code))
    prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(described))


def capabilities() -> int:
    """Return the permitted capabilities of this process, a bit each."""
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    checked(LIBC.capget(header, data), "capget")
    _, low, _, _, high, _ = struct.unpack("<6I", data)
    return int(low) | int(high) << 32


def end_with_parent() -> None:
    """Die with the parent, even in the middle of a call that never ends, and take along all daemons.

    Also be the first that the kernel kills when memory runs out: a reward can be masked, a trainer cannot.
    """
    with suppress(OSError):
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError):
        prctl(
            PR_SET_CHILD_SUBREAPER, 1
        )  # daemons stay below this process, so that they are found
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _empty_bounding_set(keep: int | None = None) -> None:
    with suppress(
        OSError
    ):  # EPERM without CAP_SETPCAP; EINVAL behind the last one that the kernel knows
        for number in set(range(64)) - {keep}:
            prctl(_PR_CAPBSET_DROP, number)


def _set_capabilities(bits: int) -> None:
    # capset(2): effective, permitted and inheritable; the second triple is for numbers from 32 on.
    low = bits & 0xFFFFFFFF
    high = bits >> 32
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
    checked(LIBC.capset(header, struct.pack("<6I", low, low, low, high, high, high)), "capset")


def prctl(*arguments: int) -> None:
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
    take_steps(json.loads(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
