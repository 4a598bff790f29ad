"""Confined processes for code that nobody has read. This file has the values that all parts of the sandbox share.

A person's functions run in one process for many calls (`confined_worker`). A program that a model wrote runs in a new
process each time (`program_pool`). A `Level` confines them: the namespaces of bubblewrap, or Landlock where no
namespace can be made. `level` finds out by trying which.

Outside, and trusted: `confine` (how to start a module confined), `namespaces` (bubblewrap's command line), `user_code`
(what it may read), `syscall_filter`, `watch`, `confined_worker`, `program_pool`.
Inside, and trusted, before foreign code is there or
beside it: `stage`, `program_server`. Inside, with foreign code in the process or at the other end of a socket:
`remote_calls`, `unit_tests`. What these write is checked outside.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

GIB = 2**30
MIB = 2**20
SCRATCH = Path("/tmp")  # the scratch folder of confined code in namespaces, as it sees it
EXIT_EXCESS = 240
"""The stage's exit status where the tree held too much; a confined process's own status is cut to less than it."""

END_S = 60.0  # for the end of a tree of processes; an honest one takes milliseconds


class Level(StrEnum):
    """A kind of confinement, from the strongest to nothing. `auto` of a recipe becomes one of these once."""

    NAMESPACES = "namespaces"
    """Its own mounts, network and processes; a filter of system calls; limits."""

    LANDLOCK = "landlock"
    """Rules on files instead of mounts: names, sizes and times of files can still be learned."""

    NONE = "none"
    """Limits, and for programs of root a user of their own; every file that this user may read is open to it."""


@dataclass(frozen=True)
class Limits:
    """The most that one confined process and all that it starts may hold at once."""

    memory: int = 4 * GIB  # bytes, of private and shared memory together
    scratch: int = 256 * MIB  # bytes in files of its own, all of which are gone when it ends
    files: int = 10_000  # files of its own
    processes: int = 512  # processes and threads
    output: int = 16 * MIB  # bytes that it may print; what it prints beyond is dropped

    @property
    def mounts(self) -> dict[str, str]:
        """The folders in memory that it may write in namespaces, where the kernel counts each, by their mount options."""
        shared_files = self.files // 8
        own_files = self.files - shared_files
        return {
            str(SCRATCH): f"size={self.scratch},nr_inodes={own_files},mode=1777",
            "/dev/shm": f"size=16m,nr_inodes={shared_files},mode=1777",
        }


class View(NamedTuple):
    """The files and devices that a confined process may see. Python itself is part of it; it may write a scratch folder.

    `read` are files and folders to see, at their own paths and read-only; `hidden` are files and folders within those
    that stay empty. A path that does not exist is left out.
    """

    read: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()
    network: bool = False
    devices: bool = False  # GPUs, with the parts of /proc and /sys that their drivers read
    working: Path | None = None  # where it starts; None is the scratch folder


class Confinement(NamedTuple):
    """How to confine a process, what it may see, and the run whose mark it carries, so that it is found."""

    level: Level
    run_id: str
    view: View = View()
    limits: Limits = Limits()
