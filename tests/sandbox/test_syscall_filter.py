"""The filter's bytes, read back by a small machine of their own, and the numbers against this system's headers."""

import errno
import json
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ycore.sandbox import Level, syscall_filter
from ycore.sandbox.syscall_filter import filter_bytes

ALLOWED, KILLED = 0x7FFF0000, 0x80000000
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
REFUSED = json.loads(Path(syscall_filter.__file__).with_name("syscalls.json").read_text())
ALWAYS: Mapping[str, list[int | None]] = {
    name: row for group in REFUSED["always"].values() for name, row in group.items()
}
TABLES: list[Mapping[str, Sequence[int | None]]] = [
    ALWAYS,
    *(table for name, table in REFUSED.items() if name != "always"),
]


def answer(program: bytes, number: int, *arguments: int, architecture: int = 0xC000003E) -> int:
    """Return what the kernel would: the filter runs over the call's `struct seccomp_data`."""
    data = struct.pack("<iIQ6Q", number, architecture, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    code = list(struct.iter_unpack("<HBBI", program))
    loaded = at = 0
    while True:
        operation, if_true, if_false, constant = code[at]
        at += 1
        if operation == 0x20:
            (loaded,) = struct.unpack_from("<I", data, constant)
        elif operation == 0x06:
            return int(constant)
        else:
            holds = {
                0x15: loaded == constant,
                0x35: loaded >= constant,
                0x45: bool(loaded & constant),
            }[operation]
            at += if_true if holds else if_false


def refused(error: int) -> int:
    return 0x00050000 | error


@pytest.mark.parametrize(
    ("machine", "column", "architecture"), [(m, *v) for m, v in MACHINES.items()]
)
@pytest.mark.parametrize("level", [Level.NAMESPACES, Level.LANDLOCK])
def test_every_call_of_the_table_is_refused_and_no_other(
    machine: str, column: int, architecture: int, level: Level
) -> None:
    program = filter_bytes(level, machine=machine)
    named = {numbers[column] for numbers in ALWAYS.values()}
    for number in named - {None}:
        assert number is not None and answer(
            program, number, architecture=architecture
        ) == refused(errno.EPERM)
    listed = {n[column] for table in TABLES for n in table.values()}
    for number in set(range(470)) - listed:
        assert answer(program, number, architecture=architecture) == ALLOWED


def test_another_architecture_is_killed_and_x32_is_not_there() -> None:
    program = filter_bytes(Level.NAMESPACES, machine="x86_64")
    assert answer(program, 39, architecture=0x40000003) == KILLED  # i386
    assert answer(program, 0x40000000 | 101) == refused(errno.ENOSYS)
    with pytest.raises(NotImplementedError, match="not riscv64"):
        filter_bytes(Level.NAMESPACES, machine="riscv64")


@pytest.mark.parametrize(
    ("level", "network", "families"),
    [
        (Level.NAMESPACES, False, {1, 2, 10}),
        (Level.NAMESPACES, True, {1, 2, 10, 16}),
        (Level.LANDLOCK, False, set()),
        (Level.LANDLOCK, True, {2, 10, 16}),
    ],
)
def test_only_the_families_of_the_level_make_sockets(
    level: Level, network: bool, families: set[int]
) -> None:
    program = filter_bytes(level, machine="x86_64", network=network)
    assert {
        family for family in range(50) if answer(program, 41, family) == ALLOWED
    } == families


def test_a_fork_is_allowed_and_a_namespace_is_not_even_with_high_bits_set() -> None:
    program = filter_bytes(Level.NAMESPACES, machine="x86_64")
    assert answer(program, 56, 0x01200011) == ALLOWED  # what fork passes
    for bit in (
        0x80,
        0x20000,
        0x2000000,
        0x4000000,
        0x8000000,
        0x10000000,
        0x20000000,
        0x40000000,
    ):
        assert answer(program, 56, 0xFFFFFFFF00000000 | bit | 17) == refused(errno.EPERM), hex(
            bit
        )
    assert answer(program, 435) == refused(errno.ENOSYS)


def test_limits_of_others_and_typing_into_a_terminal_are_refused() -> None:
    program = filter_bytes(Level.NAMESPACES, machine="x86_64")
    assert answer(program, 302, 0, 7) == ALLOWED and answer(program, 302, 1) == refused(
        errno.EPERM
    )
    assert answer(program, 16, 0, 0x5413) == ALLOWED
    assert (
        answer(program, 16, 0, 0x5412)
        == answer(program, 16, 0, 0xF00005412)
        == refused(errno.EPERM)
    )


def test_landlocks_gaps_are_closed_and_copying_a_file_seems_to_work() -> None:
    program = filter_bytes(Level.LANDLOCK, machine="x86_64", landlock_abi=7)
    assert answer(program, 90) == refused(0) and answer(program, 188) == refused(
        errno.EOPNOTSUPP
    )
    assert answer(program, 62) == answer(program, 76) == ALLOWED
    old = filter_bytes(Level.LANDLOCK, machine="x86_64", landlock_abi=2)
    assert answer(old, 62) == answer(old, 76) == refused(errno.EPERM)
    assert (
        answer(
            filter_bytes(Level.LANDLOCK, machine="x86_64", landlock_abi=2, has_own_user=True),
            62,
        )
        == ALLOWED
    )


@pytest.mark.parametrize(
    ("file", "column"),
    [
        ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 0),
        ("/usr/include/asm-generic/unistd.h", 1),
    ],
)
def test_the_numbers_are_the_kernels(file: str, column: int) -> None:
    if not Path(file).exists():
        pytest.skip("the kernel's headers are not installed")
    definitions = re.findall(r"#define\s+__NR(?:3264)?_(\w+)\s+(\d+)", Path(file).read_text())
    known = {name: int(number) for name, number in definitions}
    for table in TABLES:
        for name, numbers in table.items():
            if name in known and numbers[column] is not None:
                assert numbers[column] == known[name], name
