"""Shared memory that a run's processes have left in /dev/shm under names that libraries chose.

Users keep files there too, and a run maps its dataset. So a file counts as left by a run only where all of this is
true: a process of the run has held it (open or mapped); it was made after the run began; it belongs to a user of the
run's processes; its name is one that a library makes up. No living process may hold it when it is removed.
"""

import ctypes
import os
import re
import struct
from collections.abc import Iterable, Iterator
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

_CREATE = 0x100  # IN_CREATE and FAN_CREATE
_INOTIFY_EVENT = struct.Struct("=iIII")  # watch, mask, cookie, length of the name that follows
_FANOTIFY_EVENT = struct.Struct(
    "=IBBHQii"
)  # length, version, reserved, own length, mask, file, process id
_FAN_CLOEXEC, _FAN_NONBLOCK, _FAN_REPORT_DFID_NAME, _FAN_MARK_ADD = 0x1, 0x2, 0xC00, 0x1
_HANDLE = 12  # where a file's handle begins in the event's second part, behind a header and the file system's id
_STATX_BTIME, _AT_FDCWD, _AT_SYMLINK_NOFOLLOW = 0x800, -100, 0x100
_BTIME_OFFSET = 80  # in struct statx, which has 256 bytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file at the top of /dev/shm. `born` in seconds since 1970, None where the system does not say."""

    name: str
    segment: Segment
    uid: int
    born: float | None


def is_left(
    file: Candidate, *, began: float, held: set[Segment], in_use: set[Segment], users: Iterable[int]
) -> bool:
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
    """Files with a library's name, as they are made in /dev/shm.

    fanotify(7) tells root each one's maker, who may be gone by then. Where it is not there or not allowed, inotify(7)
    tells the names. `descriptors` has one that is readable when there are new ones; none where there is neither.
    """

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        self._events = _fanotify_events
        with suppress(AttributeError):  # not Linux
            libc, place = ctypes.CDLL(None, use_errno=True), os.fsencode(SHARED_MEMORY)
            flags = _FAN_CLOEXEC | _FAN_NONBLOCK | _FAN_REPORT_DFID_NAME
            descriptor, mask = libc.fanotify_init(flags, os.O_RDONLY), ctypes.c_uint64(_CREATE)
            if not self._keep(
                descriptor, libc.fanotify_mark(descriptor, _FAN_MARK_ADD, mask, _AT_FDCWD, place)
            ):
                self._events = _inotify_events
                descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
                self._keep(descriptor, libc.inotify_add_watch(descriptor, place, _CREATE))

    def _keep(self, descriptor: int, status: int) -> bool:
        if status >= 0:
            self.descriptors = [descriptor]
        elif descriptor >= 0:
            os.close(descriptor)
        return status >= 0

    def read(self) -> dict[Segment, int]:
        """Those made since the last call that are still there, and the process id of each one's maker, 0 if unknown."""
        found, events = dict[Segment, int](), b""
        for descriptor in self.descriptors:
            with suppress(BlockingIOError):
                events = os.read(descriptor, 1 << 16)
        for raw, maker in self._events(events):
            name = os.fsdecode(raw.partition(b"\0")[0])
            if LIBRARY_NAME.fullmatch(name):
                with suppress(OSError):  # gone again
                    status = (SHARED_MEMORY / name).lstat()
                    found[(status.st_dev, status.st_ino)] = maker
        return found


def _inotify_events(events: bytes) -> Iterator[tuple[bytes, int]]:
    while events:
        end = _INOTIFY_EVENT.size + _INOTIFY_EVENT.unpack_from(events)[3]
        yield events[_INOTIFY_EVENT.size : end], 0
        events = events[end:]


def _fanotify_events(events: bytes) -> Iterator[tuple[bytes, int]]:
    while events:
        end, _, _, start, _, _, maker = _FANOTIFY_EVENT.unpack_from(events)
        if end > start:  # else the queue was full
            (length,) = struct.unpack_from("=I", events, start + _HANDLE)
            yield events[start + _HANDLE + 8 + length : end], maker
        events = events[end:]


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
    if statx is None or statx(
        _AT_FDCWD, os.fsencode(path), _AT_SYMLINK_NOFOLLOW, _STATX_BTIME, answer
    ):
        return None
    (mask,) = struct.unpack_from("=I", answer, 0)
    seconds, nanoseconds = struct.unpack_from("=qI", answer, _BTIME_OFFSET)
    return float(seconds + nanoseconds / 1e9) if mask & _STATX_BTIME else None
