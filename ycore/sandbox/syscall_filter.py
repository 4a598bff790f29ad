"""The system calls that confined code is refused, as the bytes of a seccomp filter (classic BPF, linux/filter.h).

The filter is a list of refusals: everything that Python and its libraries use stays allowed. What is refused reaches
for other processes, mounts, namespaces, keys, memory that no limit counts, or parts of the kernel with a long history
of holes. The architecture is checked first, because the numbers differ.
"""

import errno
import platform
import struct
from collections.abc import Iterable, Mapping

from ycore.sandbox import Level

# Every call that is refused at any level: its number on x86-64, and on arm64 (None where it has none). From Linux's
# arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
_ALWAYS: Mapping[str, tuple[int, int | None]] = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "pidfd_send_signal": (424, 424),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "open_tree_attr": (467, 467), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # keys, tracing, queues into the kernel
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_setup": (206, 0),
    # memory that belongs to no process
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180),
    # files by number instead of by name, and device nodes
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "mknod": (133, None), "mknodat": (259, 33),
    # the machine
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "acct": (163, 89), "syslog": (103, 116),
    "personality": (135, 92), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162), "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}  # fmt: skip

# Landlock does not hold these. Where there is no namespace, they reach files and processes of the same user.
_FILE_ATTRIBUTES: Mapping[str, tuple[int | None, int | None]] = {  # these only seem to work, or shutil.copy fails
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88),
}  # fmt: skip
_EXTENDED_ATTRIBUTES: Mapping[str, tuple[int, int]] = {
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "getxattr": (191, 8), "lgetxattr": (192, 9),
    "fgetxattr": (193, 10), "listxattr": (194, 11), "llistxattr": (195, 12), "flistxattr": (196, 13),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "setxattrat": (463, 463),
    "getxattrat": (464, 464), "listxattrat": (465, 465), "removexattrat": (466, 466),
}  # fmt: skip
_SHARED_SYSTEM: Mapping[str, tuple[int | None, int | None]] = {
    "inotify_init": (253, None), "inotify_init1": (294, 26), "setpriority": (141, 140),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "pidfd_open": (434, 434),
}  # fmt: skip
_TRUNCATE = {"truncate": (76, 45)}  # Landlock knows it from ABI 3 on
_SIGNALS = {  # Landlock holds them from ABI 6 on; a user of its own holds them on any kernel
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}  # fmt: skip

_CLONE, _CLONE3, _SOCKET, _IOCTL, _PRLIMIT = (56, 220), (435, 435), (41, 198), (16, 29), (302, 261)
_NEW_NAMESPACE = 0x7E020080  # every CLONE_NEW* bit that clone takes
_TERMINAL_INPUT = (0x5412, 0x541C, 0x5423)  # TIOCSTI, TIOCLINUX, TIOCSETD: typing into the terminal of whoever watches
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16

# seccomp(2), linux/bpf_common.h; offsets into `struct seccomp_data`
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # the column above, AUDIT_ARCH_*
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
        machine: `platform.machine()` of the kernel.
        network: whether sockets to the outside are wanted.
        landlock_abi: the kernel's; the filter takes over what an older one lacks.
        own_user: the process has a user id that no other has, so that it cannot signal others.

    Raises:
        NotImplementedError: for an architecture without numbers here.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise NotImplementedError(f"the filter of system calls knows {', '.join(_ARCHITECTURES)}, not {machine}")
    column, architecture = _ARCHITECTURES[machine]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]  # fmt: skip
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), _refuse(errno.ENOSYS)]
    program += _refusals(_ALWAYS, column, errno.EPERM)
    program += _refusals({"clone3": _CLONE3}, column, errno.ENOSYS)  # its flags cannot be read; libc then takes clone
    families = [_AF_INET, _AF_INET6]
    if level is Level.LANDLOCK:
        families = [*families, _AF_NETLINK] if network else []
        program += _refusals(_FILE_ATTRIBUTES, column, 0)
        program += _refusals(_EXTENDED_ATTRIBUTES, column, errno.EOPNOTSUPP)
        program += _refusals(_SHARED_SYSTEM, column, errno.EPERM)
        program += _refusals(_TRUNCATE if landlock_abi < 3 else {}, column, errno.EPERM)
        program += _refusals(_SIGNALS if landlock_abi < 6 and not own_user else {}, column, errno.EPERM)
    else:
        families += [_AF_UNIX, _AF_NETLINK] if network else [_AF_UNIX]
    program += _checked(_CLONE[column], 0, [(_ANY_BIT, _NEW_NAMESPACE)], refuse_on_match=True)
    program += _checked(_SOCKET[column], 0, [(_EQUAL, family) for family in families], refuse_on_match=False)
    program += _checked(_IOCTL[column], 1, [(_EQUAL, request) for request in _TERMINAL_INPUT], refuse_on_match=True)
    program += _checked(_PRLIMIT[column], 0, [(_EQUAL, 0)], refuse_on_match=False)  # its own limits only
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _refusals(calls: Mapping[str, tuple[int | None, int | None]], column: int, error: int) -> Iterable[Instruction]:
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
