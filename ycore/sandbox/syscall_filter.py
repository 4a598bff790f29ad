"""The system calls that confined code is refused, as the bytes of a seccomp filter (classic BPF, linux/filter.h).

The filter is a list of refusals: everything that Python and its libraries use stays allowed. What is refused reaches
for other processes, mounts, namespaces, keys, memory that no limit counts, or parts of the kernel with a long history
of holes. The architecture is checked first, because the numbers differ.

syscalls.json has the calls with their numbers on x86-64 and on arm64, null where there is none (Linux's
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h): those that are refused at any level, and
those that Landlock does not hold, which reach files and processes of the same user where there is no namespace.
"""

import errno
import json
import platform
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ycore.sandbox import Level

_CLONE, _CLONE3, _SOCKET, _IOCTL, _PRLIMIT = (56, 220), (435, 435), (41, 198), (16, 29), (302, 261)
_NEW_NAMESPACE = 0x7E020080  # every CLONE_NEW* bit that clone takes
_TERMINAL_INPUT = (
    0x5412,
    0x541C,
    0x5423,
)  # TIOCSTI, TIOCLINUX, TIOCSETD: typing into the terminal of whoever watches
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16

# seccomp(2), linux/bpf_common.h; offsets into `struct seccomp_data`
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_ARCHITECTURES = {
    "x86_64": (0, 0xC000003E),
    "aarch64": (1, 0xC00000B7),
}  # the column above, AUDIT_ARCH_*
_X32 = 0x40000000  # the numbers of x86-64's second, 32-bit set of calls

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant."""


def filter_bytes(
    level: Level,
    *,
    machine: str | None = None,
    network: bool = False,
    landlock_abi: int = 7,
    own_user: bool = False,
) -> bytes:
    """The filter for `prctl(PR_SET_SECCOMP)`, or for bwrap's `--seccomp`.

    Args:
        level: at `namespaces` sockets reach a network of the process' own; at `landlock` there is none, and what
            Landlock does not hold is refused too. At `none` no filter belongs.
        landlock_abi: the kernel's; the filter takes over what an older one lacks.
        own_user: the process has a user id that no other has, so that it cannot signal others.

    Raises:
        NotImplementedError: for an architecture without numbers here.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise NotImplementedError(
            f"the filter of system calls knows {', '.join(_ARCHITECTURES)}, not {machine}"
        )
    column, architecture = _ARCHITECTURES[machine]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]  # fmt: skip
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), _refuse(errno.ENOSYS)]
    calls = json.loads(Path(__file__).with_name("syscalls.json").read_text(encoding="utf-8"))
    for group in calls["always"].values():
        program += _refusals(group, column, errno.EPERM)
    program += _refusals(
        {"clone3": _CLONE3}, column, errno.ENOSYS
    )  # its flags cannot be read; libc then takes clone
    families = [_AF_INET, _AF_INET6]
    if level is Level.LANDLOCK:
        families = [*families, _AF_NETLINK] if network else []
        program += _refusals(
            calls["file attributes"], column, 0
        )  # these only seem to work, or shutil.copy fails
        program += _refusals(calls["extended attributes"], column, errno.EOPNOTSUPP)
        program += _refusals(calls["shared system"], column, errno.EPERM)
        if landlock_abi < 3:
            program += _refusals(calls["truncate"], column, errno.EPERM)
        if landlock_abi < 6 and not own_user:  # a user of its own holds them on any kernel
            program += _refusals(calls["signals"], column, errno.EPERM)
    else:
        families += [_AF_UNIX, _AF_NETLINK] if network else [_AF_UNIX]
    program += _checked(_CLONE[column], 0, [(_ANY_BIT, _NEW_NAMESPACE)], refuse_on_match=True)
    program += _checked(
        _SOCKET[column], 0, [(_EQUAL, family) for family in families], refuse_on_match=False
    )
    program += _checked(
        _IOCTL[column], 1, [(_EQUAL, request) for request in _TERMINAL_INPUT], refuse_on_match=True
    )
    program += _checked(
        _PRLIMIT[column], 0, [(_EQUAL, 0)], refuse_on_match=False
    )  # its own limits only
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _refusals(
    calls: Mapping[str, Sequence[int | None]], column: int, error: int
) -> Iterable[Instruction]:
    """Answer each call with an error at once, because a jump reaches no further than 255 instructions."""
    for numbers in calls.values():
        number = numbers[column]
        if number is not None:
            yield from ((_EQUAL, 0, 1, number), _refuse(error))


def _checked(
    number: int, argument: int, tests: list[tuple[int, int]], *, refuse_on_match: bool
) -> Iterable[Instruction]:
    """Decide one call by the low 32 bits of one argument: refuse or allow what matches any test, and the rest not."""
    matched, otherwise = (_refuse(errno.EPERM), (_RETURN, 0, 0, _ALLOW))
    if not refuse_on_match:
        matched, otherwise = otherwise, matched
    body = [instruction for code, value in tests for instruction in ((code, 0, 1, value), matched)]
    yield (_EQUAL, 0, len(body) + 2, number)
    yield (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument)
    yield from body
    yield otherwise


def _refuse(error: int) -> Instruction:
    return (_RETURN, 0, 0, _REFUSE | error)
