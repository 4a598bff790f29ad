"""Machines with a network between them: network namespaces that a bridge joins, as a person with root may make them.

`with network(2) as hosts:` gives hosts `node0` and `node1`, each with an address of its own (IPv4 and IPv6), a hostname,
and a file of hosts in which, as on Debian, its own name is 127.0.1.1. All share this machine's files. Every process in
them and every interface is gone at the end.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

_NAMED_FILES = Path("/etc/netns")
_AS = 'hostname "$0"; exec "$@"'


@dataclass(frozen=True)
class Host:
    """One machine. `space`: the name of its namespace."""

    name: str
    space: str
    address: str
    address6: str

    def start(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Start a command on it, whose process is the one that is returned; what it prints goes to `log`."""
        inside = ["ip", "netns", "exec", self.space, "unshare", "-u", "sh", "-c", _AS]
        with log.open("ab") as output:
            return subprocess.Popen(
                [*inside, self.name, *command],
                cwd=cwd,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def cut(self) -> None:
        """Pull the cable."""
        _ip("-n", self.space, "link", "set", "eth0", "down")

    def drop_packets(self) -> None:
        """Lose all packets without a word, as a firewall or a switch does."""
        self._refuse("add", "action", "block")
        self._queue("add", "tbf", "rate", "8bit", "burst", "1", "limit", "1")  # no packet fits

    def _refuse(self, change: str, *action: str) -> None:
        """Change the policy of what comes in."""
        for everywhere in ("0.0.0.0/0", "::/0"):
            words = ["policy", change, "src", everywhere, "dst", everywhere, "dev", "eth0"]
            _ip("-n", self.space, "xfrm", *words, "dir", "in", *action)

    def _queue(self, change: str, *discipline: str) -> None:
        """Change the queue of what goes out."""
        words = ("tc", "qdisc", change, "dev", "eth0", "root", *discipline)
        _run("ip", "netns", "exec", self.space, *words)

    def join(self) -> None:
        """Plug it in again, and let packets pass."""
        with suppress(subprocess.CalledProcessError):  # none was dropped
            self._refuse("delete")
            self._queue("delete")
        _ip("-n", self.space, "link", "set", "eth0", "up")

    def limit(self, interface: str, rate: str) -> None:
        """Limit what it sends by an interface to a rate, such as `1gbit`."""
        command = (
            f"tc qdisc replace dev {interface} root tbf rate {rate} burst 256kb latency 200ms"
        )
        _run("ip", "netns", "exec", self.space, *command.split())

    def sent_bytes(self, interface: str) -> int:
        words = f"cat /sys/class/net/{interface}/statistics/tx_bytes"
        return int(_run("ip", "netns", "exec", self.space, *words.split()))

    def pids(self) -> list[int]:
        """All processes on it."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.space).split()]


@contextmanager
def network(count: int) -> Iterator[list[Host]]:
    """Make the machines; the test is skipped where this process may not."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    key = secrets.token_hex(3)
    hosts = [
        Host(f"node{n}", f"y{key}-{n}", f"10.41.0.{n + 1}", f"fd41::{n + 1}")
        for n in range(count)
    ]
    try:
        _ip("link", "add", f"y{key}", "type", "bridge")
        _ip("link", "set", f"y{key}", "up")
        for host in hosts:
            _make(host, hosts, bridge=f"y{key}")
        yield hosts
    finally:
        for host in hosts:
            _remove(host)
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", f"y{key}")


@contextmanager
def slow_link(first: Host, second: Host, *, rate: str, delay_ms: float) -> Iterator[str]:
    """Join two hosts by one more cable, `slow`, with a rate and a delay each way; yields the first's address on it."""
    ends = [first.space, "10.42.0.1", second.space, "10.42.0.2"]
    module = [sys.executable, "-m", "tests.distributed.slow_link", *ends, str(delay_ms)]
    with subprocess.Popen(module, stdout=subprocess.PIPE, text=True) as relay:
        try:
            assert relay.stdout is not None and relay.stdout.readline() == "ready\n"
            for host in (first, second):
                host.limit("slow", rate)
            yield ends[1]
        finally:
            relay.kill()


def _make(host: Host, hosts: Sequence[Host], *, bridge: str) -> None:
    files = _NAMED_FILES / host.space
    files.mkdir(parents=True)
    names = "".join(
        f"{other.address if other is not host else '127.0.1.1'} {other.name}\n"
        for other in hosts
    )
    (files / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    _ip("netns", "add", host.space)
    _ip("link", "add", host.space, "type", "veth", "peer", "name", "eth0", "netns", host.space)
    _ip("link", "set", host.space, "master", bridge, "up")
    _ip("-n", host.space, "address", "add", f"{host.address}/24", "dev", "eth0")
    _ip("-n", host.space, "address", "add", f"{host.address6}/64", "dev", "eth0", "nodad")
    for name in ("lo", "eth0"):
        _ip("-n", host.space, "link", "set", name, "up")


def _remove(host: Host) -> None:
    with suppress(subprocess.CalledProcessError):
        for pid in host.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _ip("netns", "del", host.space)
    shutil.rmtree(_NAMED_FILES / host.space, ignore_errors=True)
    with suppress(subprocess.CalledProcessError):
        _ip("link", "del", host.space)


@cache
def why_not() -> str | None:
    """Return why no namespaces can be made here."""
    for tool in ("ip", "unshare", "hostname"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    name = f"y{secrets.token_hex(3)}"
    try:
        _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces need root: {error.stderr.strip()}"
    try:
        _ip("link", "add", name, "type", "bridge")
        _ip("link", "del", name)
    except subprocess.CalledProcessError as error:
        return f"no bridge can be made: {error.stderr.strip()}"
    finally:
        _ip("netns", "del", name)
    return None


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> str:
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=30
    ).stdout
