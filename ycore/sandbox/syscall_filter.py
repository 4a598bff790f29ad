"""Refuse system calls to confined code: the bytes of a seccomp filter (classic BPF, linux/filter.h).

The filter is a list of refusals: everything that Python and its libraries use stays allowed. What is refused reaches
for other processes, mounts, namespaces, keys, memory that no limit counts, or parts of the kernel with a long history
of holes. The architecture is checked first, because the numbers differ.

syscalls.json has the calls with their numbers on x86-64 and on arm64, null where there is none (Linux's
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h): those that are refused at any level,
those that an argument decides, and those that Landlock does not hold, which reach files and processes of the same user
where there is no namespace.
"""

import errno
import json
import platform
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ycore.sandbox import Level

_NEW_NAMESPACE = 0x7E020080  # every CLONE_NEW* bit that clone takes
_TERMINAL_INPUT = (0x5412, 0x541C, 0x5423)
"""TIOCSTI, TIOCLINUX, TIOCSETD: typing into the terminal of whoever watches."""

_AF_UNIX = 1
_AF_INET = 2
_AF_INET6 = 10
_AF_NETLINK = 16

# seccomp(2), linux/bpf_common.h; offsets into `struct seccomp_data`
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
_NUMBER_AT = 0
_ARCHITECTURE_AT = 4
_ARGUMENTS_AT = 16
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_REFUSE = 0x00050000
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column of each pair of numbers above, and AUDIT_ARCH_*."""

_X32 = 0x40000000  # the numbers of x86-64's second, 32-bit set of calls

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant."""

_ALLOWED = (_RETURN, 0, 0, _ALLOW)
_REFUSED = (_RETURN, 0, 0, _REFUSE | errno.EPERM)


def filter_bytes(
    level: Level,
    *,
    machine: str | None = None,
    network: bool = False,
    landlock_abi: int = 7,
    has_own_user: bool = False,
) -> bytes:
    """Return the filter for `prctl(PR_SET_SECCOMP)`, or for bwrap's `--seccomp`.

    Args:
        level: at `namespaces` sockets reach a network of the process' own; at `landlock` there is none, and what
            Landlock does not hold is refused too. At `none` no filter belongs.
        landlock_abi: the kernel's; the filter takes over what an older one lacks.
        has_own_user: the process has a user id that no other has, so that it cannot signal others.

    Raises:
        NotImplementedError: for an architecture without numbers here.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise NotImplementedError(
            f"the filter of system calls knows {', '.join(_ARCHITECTURES)}, not {machine}"
        )
    column, architecture = _ARCHITECTURES[machine]
    calls = json.loads(Path(__file__).with_name("syscalls.json").read_text(encoding="utf-8"))
    groups = [(group, errno.EPERM) for group in calls["always"].values()]
    # The flags of clone3 cannot be read; libc then takes clone.
    groups.append((calls["clone3"], errno.ENOSYS))
    families = [_AF_INET, _AF_INET6]
    if level is Level.LANDLOCK:
        families = [*families, _AF_NETLINK] if network else []
        groups += _beyond_landlock(calls, landlock_abi, has_own_user=has_own_user)
    else:
        families += [_AF_UNIX, _AF_NETLINK] if network else [_AF_UNIX]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]  # fmt: skip
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), _refuse(errno.ENOSYS)]
    # Each is answered at once, because a jump reaches no further than 255 instructions.
    for group, error in groups:
        for numbers in group.values():
            if numbers[column] is not None:
                program += [(_EQUAL, 0, 1, numbers[column]), _refuse(error)]
    number_of = {name: numbers[column] for name, numbers in calls["by argument"].items()}
    program += _decide(number_of["clone"], 0, _ANY_BIT, [_NEW_NAMESPACE], _REFUSED, _ALLOWED)
    program += _decide(number_of["ioctl"], 1, _EQUAL, _TERMINAL_INPUT, _REFUSED, _ALLOWED)
    program += _decide(number_of["socket"], 0, _EQUAL, families, _ALLOWED, _REFUSED)
    only_own = [0]
    program += _decide(number_of["prlimit64"], 0, _EQUAL, only_own, _ALLOWED, _REFUSED)
    program.append(_ALLOWED)
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _decide(
    number: int,
    argument: int,
    test: int,
    values: Sequence[int],
    if_any: Instruction,
    if_none: Instruction,
) -> list[Instruction]:
    """Answer one call by whether the low 32 bits of an argument match any of the values."""
    body: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument)]
    for value in values:
        body += [(test, 0, 1, value), if_any]
    body.append(if_none)
    return [(_EQUAL, 0, len(body), number), *body]


def _beyond_landlock(
    calls: Mapping[str, Any], landlock_abi: int, *, has_own_user: bool
) -> Iterator[tuple[Any, int]]:
    """Yield the calls that Landlock does not hold, with the error that answers them."""
    yield calls["file attributes"], 0  # they only seem to work, or shutil.copy fails
    yield calls["extended attributes"], errno.EOPNOTSUPP
    yield calls["shared system"], errno.EPERM
    if landlock_abi < 3:
        yield calls["truncate"], errno.EPERM
    if landlock_abi < 6 and not has_own_user:  # a user of its own holds them on any kernel
        yield calls["signals"], errno.EPERM


def _refuse(error: int) -> Instruction:
    return (_RETURN, 0, 0, _REFUSE | error)
