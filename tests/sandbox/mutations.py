"""Defects for the sandbox, each with the probe that must find it: a catalogue that finds none proves nothing."""

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

from ycore.sandbox import Limits, confine


class Mutation(NamedTuple):
    """A defect of the level `namespaces`. `rights`: with whose the probe finds it; None is anybody's."""

    name: str
    probe: str
    make: Callable[[], None]
    rights: str | None = None


def _no_filter() -> None:
    confine.filter_bytes = lambda *_, **__: b""  # type: ignore[attr-defined]


def _steps(**changes: object) -> Callable[[], None]:
    def make() -> None:
        made = confine._stage_command
        confine._stage_command = lambda steps: made({**steps, **changes})  # type: ignore[assignment, typeddict-item]

    return make


def _inherited_environment() -> None:
    made = confine.confined_environment
    confine.confined_environment = lambda *a, **k: {**os.environ, **made(*a, **k)}  # type: ignore[attr-defined]


def _command(change: Callable[[list[str]], list[str]]) -> Callable[[], None]:
    def make() -> None:
        made = confine.bwrap_command
        confine.bwrap_command = lambda *a, **k: change(made(*a, **k))  # type: ignore[attr-defined]

    return make


def _wide(line: list[str]) -> list[str]:
    at = line.index("--chdir")
    wide = [
        part for name in ("/etc", "/home", "/var") for part in ("--ro-bind-try", name, name)
    ]
    return [*line[:at], *wide, *line[at:]]


def _writable_root(line: list[str]) -> list[str]:
    at = len(line) - 1 - line[::-1].index("--remount-ro")
    return [*line[:at], *line[at + 2 :]]


def _own_network(line: list[str]) -> list[str]:
    return [part for part in line if part != "--unshare-net"]


MUTATIONS = [
    Mutation("no filter", "memfd: memory of no process", _no_filter),
    Mutation("no change of user", "root again by a set-user program", _steps(uid=None), "root"),
    Mutation(
        "inherited environment", "a secret in its own environment", _inherited_environment
    ),
    Mutation("a wide tree of files", "read /etc/passwd", _command(_wide)),
    Mutation(
        "a root that can be written to",
        "a file in the sandbox's root",
        _command(_writable_root),
        "user",
    ),
    Mutation(
        "no size of the scratch folder",
        "three times the disk",
        _steps(limits=asdict(Limits(scratch=2**40))),
    ),
    Mutation("the host's network", "a server on loopback", _command(_own_network)),
]
