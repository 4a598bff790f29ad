"""Shared memory that a run's processes have left in /dev/shm under names that libraries chose.

Users keep files there too, and a run maps its dataset. So a file counts as left by a run only where all of this is
true: a process of the run has held it (open or mapped); it was made after the run began; it belongs to a user of the
run's processes; its name is one that a library makes up. No living process may hold it when it is removed.
"""

import ctypes
import os
import re
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")

LIBRARY_NAME = re.compile(
    r"psm_[0-9a-f]{8}"  # Python's multiprocessing.shared_memory, and so vLLM's queues
    r"|sem\.(?:mp-|loky-)[\w-]+"  # Python's and joblib's semaphores
    r"|torch_\d+_\d+_\d+"  # torch's tensors between processes
    r"|vllm_(?:mm_|offload_|ec_)[\w.-]+|[\w:./-]+\[[\d-]+\]-cpushm[\w-]*"  # vLLM's inputs, caches, ranks
    r"|deepspeed_allreduce_buffer_[\w.-]+"
    r"|nccl-\w{6}"
    r"|__KMP_REGISTERED_LIB_\d+(?:_\d+)?"  # Intel's OpenMP
)

Segment = tuple[int, int]
"""Device and inode: the name in a process's map may differ from the file's, as a semaphore's does."""

_IN_CREATE = 0x100
_EVENT = struct.Struct("=iIII")  # inotify_event: watch, mask, cookie, length of the name that follows
_STATX_BTIME, _AT_FDCWD, _AT_SYMLINK_NOFOLLOW = 0x800, -100, 0x100
_BTIME_OFFSET = 80  # in struct statx, which has 256 bytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file at the top of /dev/shm. `born` in seconds since 1970, None where the system does not say."""

    name: str
    segment: Segment
    uid: int
    born: float | None


def is_left(file: Candidate, *, began: float, held: set[Segment], in_use: set[Segment], users: Iterable[int]) -> bool:
    """Whether a file was left by a run that began then. Pure.

    Args:
        held: what the run's processes had open or mapped, at any look.
        in_use: what living processes have open or mapped.
        users: the run's processes' user ids.
    """
    is_new = file.born is not None and file.born >= began
    is_the_runs = file.segment in held - in_use and file.uid in users
    return is_new and is_the_runs and LIBRARY_NAME.fullmatch(file.name) is not None


def remove_segments(held: set[Segment], *, began: float, users: Iterable[int]) -> None:
    """Unlink what a run has left, given what its processes had open or mapped."""
    if not held or not SHARED_MEMORY.is_dir():
        return
    in_use = {segment for pid in psutil.pids() for segment in held_segments(pid)}
    for path in SHARED_MEMORY.iterdir():
        status = path.lstat()
        segment = (status.st_dev, status.st_ino)
        if path.is_file() and segment in held:
            file = Candidate(path.name, segment, status.st_uid, born_at(path))
            if is_left(file, began=began, held=held, in_use=in_use, users=users):
                path.unlink(missing_ok=True)


def segments_changed_ns() -> int:
    """When a file was last made or removed in /dev/shm; 0 where there is none."""
    try:
        return SHARED_MEMORY.stat().st_mtime_ns
    except OSError:
        return 0


class Creations:
    """Files with a library's name, as they are made in /dev/shm: whose one is can be seen only while its maker lives.

    `descriptors` has one that is readable when there are new ones, or none where the kernel offers no inotify(7).
    """

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        with suppress(AttributeError):  # not Linux
            libc = ctypes.CDLL(None, use_errno=True)
            descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if libc.inotify_add_watch(descriptor, os.fsencode(SHARED_MEMORY), _IN_CREATE) >= 0:
                self.descriptors = [descriptor]
            elif descriptor >= 0:
                os.close(descriptor)

    def read(self) -> set[Segment]:
        """Those made since the last call that are still there."""
        found, events = set(), b""
        for descriptor in self.descriptors:
            with suppress(BlockingIOError):
                events = os.read(descriptor, 1 << 16)
        while events:
            length = _EVENT.unpack_from(events)[3]
            name = os.fsdecode(events[_EVENT.size : _EVENT.size + length].rstrip(b"\0"))
            events = events[_EVENT.size + length :]
            if LIBRARY_NAME.fullmatch(name):
                with suppress(OSError):  # gone again
                    status = (SHARED_MEMORY / name).lstat()
                    found.add((status.st_dev, status.st_ino))
        return found


def held_segments(pid: int) -> set[Segment]:
    """What a process has open or mapped of /dev/shm; nothing of an ended process, or of one that is another user's."""
    found, place, files = set[Segment](), f"{SHARED_MEMORY}/", f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(files):
            with suppress(OSError):  # closed meanwhile
                if os.readlink(f"{files}/{name}").startswith(place):
                    status = os.stat(f"{files}/{name}")
                    found.add((status.st_dev, status.st_ino))
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            if f" {place}" in line:
                device, inode = line.split()[3:5]
                major, minor = (int(part, 16) for part in device.split(":"))
                found.add((os.makedev(major, minor), int(inode)))
    return found


def born_at(path: Path) -> float | None:
    """When a file was made, by statx(2), which Python does not offer; None where kernel or file system does not say."""
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    answer = ctypes.create_string_buffer(256)
    if statx is None or statx(_AT_FDCWD, os.fsencode(path), _AT_SYMLINK_NOFOLLOW, _STATX_BTIME, answer):
        return None
    (mask,) = struct.unpack_from("=I", answer, 0)
    seconds, nanoseconds = struct.unpack_from("=qI", answer, _BTIME_OFFSET)
    return float(seconds + nanoseconds / 1e9) if mask & _STATX_BTIME else None
