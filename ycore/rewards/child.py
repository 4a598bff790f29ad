"""The sandbox of a reward's process: its environment, its pipes, its tie to its parent, and the loss of root.

Other people's Python needs no more than to read and to compute. Where ycore runs as root, a worker becomes a user of
the run's own: it can no longer write the run's files or signal and inspect the run's processes, and RLIMIT_NPROC, from
which root is exempt, limits how many processes it starts. Where Python or the reward lies in a folder that only root
can read, the worker keeps the right to read every file (CAP_DAC_READ_SEARCH), and no other right of root's.
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

WORKER = (sys.executable, "-P", "-m", "ycore.rewards.worker")  # the command that starts a reward's process
_ALLOWED = frozenset(
    {"PATH", "HOME", "LANG", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONHASHSEED", "SSL_CERT_FILE"}
)

_FIRST_UID, _NUM_UIDS = 61184, 4336  # the range that systemd sets apart for users that exist only while they run
_MAX_TASKS = 4096  # processes and threads: numerical libraries start a thread per core in each worker

# Linux: prctl(2) and capset(2)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_CHILD_SUBREAPER = 1, 4, 8, 36
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 38, 47, 2
_CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION_3 = 0x20080522
_LIBC = ctypes.CDLL(None, use_errno=True)


def reward_environment(run_id: str, *, parent: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The allowed variables of `parent`, never a token or a key, and `YCORE_RUN`, which marks a run's processes."""
    allowed = {name: value for name, value in parent.items() if name in _ALLOWED or name.startswith("LC_")}
    return {**allowed, "YCORE_RUN": run_id}


class Channel:
    """This process's standard input and output, taken for messages in JSON lines alone.

    Afterwards file descriptor 0 is empty and 1 is standard error, so that nothing that Python, C or a child process
    prints can come between the messages.
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


def drop_root(run_id: str, needed: Iterable[Path]) -> str:
    """Become a user of the run's own, in this process and all that it starts; returns the outcome in words.

    Two runs get two users, so that neither's processes count for the other's limit. `needed` files stay readable.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return f"runs as the user who started the run (uid {os.geteuid()})"
    uid = _FIRST_UID + zlib.crc32(run_id.encode()) % _NUM_UIDS
    closed = next((path for path in needed if not readable_by_all(path)), None)
    try:
        _become(uid, reads_all=closed is not None)
    except OSError as error:
        return f"stays root, because this system refuses the change: {error}"
    if closed is None:
        return f"runs as uid {uid}, without any right of root's"
    return f"runs as uid {uid}; because {closed} is closed to others, it may still read every file, as root can"


def readable_by_all(path: Path) -> bool:
    """Whether anybody may read it, by its own mode and that of every folder above it."""
    for step in (path, *path.absolute().parents):
        try:
            mode = step.stat().st_mode
        except OSError:
            continue  # what is not there need not be read
        enters = stat.S_IXOTH if stat.S_ISDIR(mode) else 0
        wanted = enters | (stat.S_IROTH if step == path or not enters else 0)
        if mode & wanted != wanted:
            return False
    return True


def python_files() -> list[Path]:
    """Where this Python looks for modules, itself included."""
    return [Path(sys.executable), Path(os.__file__), *(Path(entry) for entry in sys.path if entry), Path.cwd()]


def _become(uid: int, *, reads_all: bool) -> None:
    resource.setrlimit(resource.RLIMIT_NPROC, (_MAX_TASKS, _MAX_TASKS))
    if reads_all:
        _prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if reads_all:
        # capset(2): one capability effective, permitted and inheritable; the second triple is for numbers from 32 on.
        bit = 1 << _CAP_DAC_READ_SEARCH
        _check(_LIBC.capset(struct.pack("<Ii", _CAPABILITY_VERSION_3, 0), struct.pack("<6I", bit, bit, bit, 0, 0, 0)))
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)  # nor does sudo give anything back
    _prctl(_PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root, and libraries that read it fail


def _prctl(*arguments: int) -> None:
    padded = [*arguments, 0, 0, 0, 0, 0][:5]
    _check(_LIBC.prctl(*map(ctypes.c_ulong, padded)))


def _check(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
