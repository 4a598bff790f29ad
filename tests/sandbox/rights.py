"""`python -m tests.sandbox.rights LABEL COMMAND...`: run a command with other rights than root's, as far as root can.

`root` changes nothing. `user` is a plain user. `root in a container` and `user in a container` have the 14 capabilities
of Docker's default, and its refusals of system calls: `unshare`, `mount`, `setns`, `clone` with namespaces, keyrings,
`bpf`, io_uring and the like. The container itself is not imitated: its files, /proc and /sys are the machine's.
"""

import ctypes
import os
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ycore.sandbox.stage import install_filter

UID = 4242
# Docker's default: moby/moby, profiles/seccomp/default.json and oci/caps/defaults.go
_KEPT = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31})
_REFUSED = (
    *(272, 308, 165, 166, 155, 428, 429, 430, 431, 432, 433, 442),  # namespaces and mounts
    *(250, 248, 249, 321, 425, 426, 427, 298, 323),  # keys, bpf, io_uring, perf, userfaultfd
    *(
        304,
        163,
        103,
        169,
        167,
        168,
        175,
        313,
        176,
        246,
        170,
        171,
        179,
        300,
    ),  # what needs capabilities that it lacks
)
_CLONE, _CLONE3, _PERSONALITY, _NEW_NAMESPACE = 56, 435, 135, 0x7E020080
_PR_CAPBSET_DROP = 24
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS = 0x20000


def main() -> None:
    rights, command = sys.argv[1], sys.argv[2:]
    if os.geteuid() != 0:
        assert rights.startswith("user"), "only root can have root's rights"
    is_user = rights.startswith("user") and os.geteuid() == 0
    if is_user:
        _open_closed_homes()
    if rights.endswith("container"):
        _contain()
    if is_user:
        os.setgroups([])
        os.setresgid(UID, UID, UID)
        os.setresuid(UID, UID, UID)
    os.execve(
        command[0],
        command,
        {**os.environ, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"},
    )


def _contain() -> None:
    """Refuse what Docker's default refuses. A plain user can take this upon themselves too."""
    program = [(0x20, 0, 0, 0)]
    for number in _REFUSED:
        program += [(0x15, 0, 1, number), (0x06, 0, 0, 0x50001)]
    allow, refuse = (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x50001)
    program += [(0x15, 0, 1, _CLONE3), (0x06, 0, 0, 0x50026)]
    program += [
        (0x15, 0, 4, _CLONE),
        (0x20, 0, 0, 16),
        (0x45, 0, 1, _NEW_NAMESPACE),
        refuse,
        allow,
    ]
    program += [(0x15, 0, 4, _PERSONALITY), (0x20, 0, 0, 16), (0x15, 1, 0, 0), refuse, allow]
    program.append(allow)
    if os.geteuid() == 0:
        for number in set(range(64)) - _KEPT:
            _LIBC.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    install_filter(b"".join(struct.pack("<HBBI", *instruction) for instruction in program))


def _open_closed_homes() -> None:
    """Let another user reach this Python, which may lie in root's home, without a change to anybody's files."""
    closed = sorted({folder for path in _python() for folder in _closed_above(path)})
    if not closed:
        return
    assert _LIBC.unshare(_CLONE_NEWNS) == 0
    _mount("--make-rprivate", "/")
    for folder in closed:
        within = [path for path in _python() if path.is_relative_to(folder)]
        aside = [Path(tempfile.mkdtemp(prefix="ycore-aside-")) for _ in within]
        for path, place in zip(within, aside, strict=True):
            _mount("--bind", str(path), str(place))
        _mount("-t", "tmpfs", "-o", "mode=0755", "none", str(folder))
        for path, place in zip(within, aside, strict=True):
            path.mkdir(parents=True)
            _mount("--move", str(place), str(path))
            place.rmdir()


def _python() -> list[Path]:
    prefixes = {
        sys.prefix,
        sys.base_prefix,
        *(entry for entry in sys.path if os.path.isdir(entry)),
    }
    paths = sorted(Path(prefix).resolve() for prefix in prefixes)
    return [
        path
        for path in paths
        if not any(path != other and path.is_relative_to(other) for other in paths)
    ]


def _closed_above(path: Path) -> Iterator[Path]:
    for folder in path.parents:
        if not folder.stat().st_mode & stat.S_IXOTH:
            yield folder


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    main()
