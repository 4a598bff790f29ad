"""The last steps of a confined process before foreign code: scratch, limits, another user, no rights, the filter.

As a module it is the stage that `confine` starts: `python -m ycore.sandbox.inside STEPS MODULE ARGUMENTS...` takes the
steps (JSON, `Steps`) and runs the module. Standard library only, and nothing of ycore's, so that it can be loaded where
nothing else is. Every step raises OSError where the kernel refuses it: what is confined by half must not go on.
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

# Linux: mount(2), prctl(2), capset(2)
_MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 2, 4, 32
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 8, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 36, 38, 47
_PR_CAP_AMBIENT_RAISE, _PR_CAP_AMBIENT_CLEAR_ALL, _SECCOMP_MODE_FILTER = 2, 4, 2
_CAPABILITY_VERSION_3 = 0x20080522
_MANY_FILES = 4096  # descriptors of one process
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_SETGID, CAP_SETUID = 1, 2, 6, 7
_LIBC = ctypes.CDLL(None, use_errno=True)


class Steps(TypedDict):
    """What the stage does before it runs the module."""

    tmpfs: dict[str, tuple[int, int]]  # folder: bytes, files
    memory: int
    processes: int
    file_bytes: int
    uid: int | None  # whom root becomes; None for a user, who stays who they are
    keep: int | None  # a capability that is kept all the same
    filter: str  # of system calls, as hexadecimal digits; empty for none


def enter(steps: Steps) -> None:
    """Take all steps, in the one order that works: each takes away what an earlier one needs."""
    for folder, (size, files) in steps["tmpfs"].items():
        limit_tmpfs(folder, size=size, files=files)
    limit_resources(memory=steps["memory"], processes=steps["processes"], file_bytes=steps["file_bytes"])
    if steps["uid"] is None:
        drop_capabilities()
    else:
        become(steps["uid"], keep=steps["keep"])
    if steps["filter"]:
        install_filter(bytes.fromhex(steps["filter"]))
    end_with_parent()  # the kernel forgets this with a change of user


def limit_tmpfs(path: str, *, size: int, files: int) -> None:
    """Bound a tmpfs of this mount namespace, in bytes and files; bwrap knows the first of the two only."""
    options = f"size={size},nr_inodes={files}".encode()
    _check(_LIBC.mount(None, path.encode(), None, ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_REMOUNT), options))


def limit_resources(*, memory: int, processes: int, file_bytes: int) -> None:
    """The kernel's own limits, for this process and each that it starts.

    RLIMIT_DATA counts private writable memory and lets large libraries be mapped. RLIMIT_NPROC counts by user, and
    nothing for root. What several processes hold together is the watch's to see.
    """
    for kind, most in (
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_AS, 4 * memory),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, _MANY_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 2**20),
    ):
        hard = resource.getrlimit(kind)[1]
        bounded = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (bounded, bounded))


def become(uid: int, *, keep: int | None = None) -> None:
    """Root becomes this user and group, without any capability but `keep` (a number), or none.

    Raises:
        PermissionError: a right that this takes is missing; nothing has been changed then.
    """
    permitted = capabilities()
    needed = [CAP_SETUID, CAP_SETGID, *([] if keep is None else [keep])]
    if missing := [number for number in needed if not permitted >> number & 1]:
        raise PermissionError(f"capabilities {missing} are missing")
    _empty_bounding_set(keep)
    if keep is not None:
        _prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if keep is not None:
        _set_capabilities(1 << keep)
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, keep)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)  # nor does sudo give anything back
    _prctl(_PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root, and libraries that read it fail


def drop_capabilities() -> None:
    """Give up every capability of a user namespace, the ambient and the bounding ones too."""
    _empty_bounding_set()
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    _set_capabilities(0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def install_filter(program: bytes) -> None:
    """Refuse system calls from now on, here and in everything that is started (`syscall_filter.filter_bytes`)."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    code = ctypes.create_string_buffer(program, len(program))

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    described = Filter(len(program) // 8, ctypes.addressof(code))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(described))


def capabilities() -> int:
    """The permitted capabilities of this process, a bit each."""
    header, data = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0), ctypes.create_string_buffer(24)
    _check(_LIBC.capget(header, data))
    low, high = struct.unpack_from("<I", data, 4)[0], struct.unpack_from("<I", data, 16)[0]
    return int(low) | int(high) << 32


def end_with_parent() -> None:
    """Die with the parent, even in the middle of a call that never ends, and take along all daemons (on Linux).

    Also be the first that the kernel kills when memory runs out: a reward can be masked, a trainer cannot.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with suppress(OSError):
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # daemons stay below this process, so that they are found
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


def _empty_bounding_set(keep: int | None = None) -> None:
    with suppress(OSError):  # EPERM without CAP_SETPCAP; EINVAL behind the last one that the kernel knows
        for number in set(range(64)) - {keep}:
            _prctl(_PR_CAPBSET_DROP, number)


def _set_capabilities(bits: int) -> None:
    # capset(2): effective, permitted and inheritable; the second triple is for numbers from 32 on.
    low, high = bits & 0xFFFFFFFF, bits >> 32
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
    _check(_LIBC.capset(header, struct.pack("<6I", low, low, low, high, high, high)))


def _prctl(*arguments: int) -> None:
    padded = [*arguments, 0, 0, 0, 0, 0][:5]
    _check(_LIBC.prctl(*map(ctypes.c_ulong, padded)))


def _check(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    enter(json.loads(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
