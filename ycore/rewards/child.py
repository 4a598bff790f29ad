"""Giving up root in a reward's process: other people's Python needs no more than to read and to compute.

Where ycore runs as root, a worker becomes a user of the run's own: it can no longer write the run's files, signal or
look into the run's processes, and RLIMIT_NPROC, which root is exempt from, bounds how many processes it starts. Python
and the reward may lie where only root can read (a virtual environment under `/root`, a private folder); then the right
to read every file is kept (CAP_DAC_READ_SEARCH), and nothing else of root's.

What a reward's process may see of its parent's environment: a short allow-list, never a token or a key.

The two sides of a child process that speaks JSON lines: its pipes, and its tie to its parent.

Not here: the environment (`environment`), deadlines (`worker_process`). Linux only; elsewhere nothing changes.
"""

import ctypes
import json
import os
import resource
import signal
import stat
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

_ALLOWED = frozenset(
    {"PATH", "HOME", "LANG", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONHASHSEED", "SSL_CERT_FILE"}
)


def reward_environment(run_id: str, *, parent: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The allowed variables of `parent`, and `YCORE_RUN`, which marks every process of a run."""
    allowed = {name: value for name, value in parent.items() if name in _ALLOWED or name.startswith("LC_")}
    return {**allowed, "YCORE_RUN": run_id}


_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on a daemon that is started here stays below this process, so that it is found and ends with it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


_PR_SET_PDEATHSIG = 1


class Channel:
    """This process's standard input and output, taken for the protocol alone.

    Afterwards file descriptor 0 is empty and 1 is standard error, so that nothing that is printed, by Python, C or a
    child process, can come between the answers.
    """

    def __init__(self) -> None:
        self._requests: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._replies: BinaryIO = os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        sys.stdout = sys.stderr

    def __iter__(self) -> Iterator[Any]:
        return map(json.loads, self._requests)

    def reply(self, answer: dict[str, Any]) -> None:
        self._replies.write(json.dumps(answer).encode() + b"\n")
        self._replies.flush()


def end_with_parent() -> None:
    """Where the kernel can (Linux), die with the parent, even in the middle of a call that never ends.

    Also be the first that the kernel kills when memory runs out: a reward can be masked, a trainer cannot.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


_FIRST_UID, _NUM_UIDS = 61184, 4336  # the range that systemd sets apart for users that exist only while they run
_MOST_TASKS = 4096  # processes and threads: numerical libraries start a thread a core in each worker

_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 4, 8, 38, 47
_PR_CAP_AMBIENT_RAISE = 2
_CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION_3 = 0x20080522


def drop_root(run_id: str, needed: Iterable[Path]) -> str:
    """Become a user of the run's own, in this process and all that it starts; what came of it, in words.

    Args:
        run_id: two runs get two users, so that neither's processes count for the other's limit.
        needed: files and folders that must stay readable.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return f"runs as the user who started the run (uid {os.geteuid()})"
    uid = _FIRST_UID + zlib.crc32(run_id.encode()) % _NUM_UIDS
    closed = next((path for path in needed if not readable_by_all(path)), None)
    try:
        _become(uid, reads_all=closed is not None)
    except OSError as error:
        return f"stays root, because this system does not let it go: {error}"
    if closed is None:
        return f"runs as uid {uid}, without any right of root's"
    return f"runs as uid {uid}; because {closed} is closed to others, it may still read every file, as root can"


def readable_by_all(path: Path) -> bool:
    """Whether anybody may read it: its own mode, and that of every folder on the way."""
    for step in (path, *path.absolute().parents):
        try:
            status = step.stat()
        except OSError:
            continue  # what is not there need not be read
        wanted = stat.S_IXOTH | (stat.S_IROTH if step == path else 0) if stat.S_ISDIR(status.st_mode) else stat.S_IROTH
        if status.st_mode & wanted != wanted:
            return False
    return True


def python_files() -> list[Path]:
    """Where this Python looks for modules, itself included."""
    return [Path(sys.executable), Path(os.__file__), *(Path(entry) for entry in sys.path if entry), Path.cwd()]


def _become(uid: int, *, reads_all: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def prctl(*arguments: int) -> None:
        padded = [*arguments, 0, 0, 0, 0, 0][:5]
        if libc.prctl(*(ctypes.c_ulong(value) for value in padded)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    resource.setrlimit(resource.RLIMIT_NPROC, (_MOST_TASKS, _MOST_TASKS))
    if reads_all:
        prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if reads_all:
        _keep_only(libc, _CAP_DAC_READ_SEARCH)
        prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)  # nor does sudo give anything back
    prctl(_PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root, and libraries that read it fail


def _keep_only(libc: ctypes.CDLL, capability: int) -> None:
    """capset(2): one capability effective, permitted and inheritable; the second triple is for numbers from 32 on."""
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
    bit = 1 << capability
    if libc.capset(header, struct.pack("<6I", bit, bit, bit, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
