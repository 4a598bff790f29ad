"""Run a command on several hosts from one terminal: `--hosts a,b`, over ssh.

`run_on_hosts` is the terminal's side: an ssh to each host, where `join` waits for the command on its standard input. So
no list of processes shows the command, its variables, or the secret with which the machines meet. Later a byte is an
order to stop; others say that the terminal is still there, and a host that hears nothing for a while stops as well.
"""

import json
import os
import secrets
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, TextIO

from ycore import __version__
from ycore.errors import ConfigError, Interrupted
from ycore.foreign import foreign_json
from ycore.launch.layout import MEETING_SECRET, SSH, WAITS
from ycore.run.interrupt import StopRequests

_JOIN = "import ycore_cli; from ycore_cli.hosts import join; join(); ycore_cli.start()"
_GREETING = b"ycore-host"
_BEAT = b"."
_STOP = b"!"
_BEAT_S = 0.5
_SILENT_S = 4.5  # before the other machines know that this one is silent, and wait for it
_PAUSE_S = 2  # after a loss: the host's earlier command ends too
_NO_CONNECTION = 255  # ssh's own exit status


@dataclass(eq=False)
class Host:
    """A host by its name for ssh. Errors of all but the first are shown with their names."""

    name: str
    is_first: bool
    said: set[bytes]  # lines of any host
    waits: list[bytes]  # those in which a host says that it waits for a lost one
    without: str
    place: Mapping[str, str] = field(default_factory=dict)  # its variables among the hosts
    num_waits = 0  # of `waits` when this host was reached the last time

    @property
    def is_lost(self) -> bool:
        """Whether it has not been reached since another host said that it waits for a lost one."""
        return self.ssh.poll() == _NO_CONNECTION and self.num_waits < len(self.waits)

    def connect(self, pause_s: int = 0) -> None:
        """Let the host wait for its command."""
        join = shlex.join([sys.executable, "-P", "-c", _JOIN])
        self.ssh = subprocess.Popen(
            [
                *SSH.split(),
                self.name,
                f"sleep {pause_s}; cd {shlex.quote(os.getcwd())} && exec {join}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C reaches this process only
        )

    def address(self) -> str:
        """Return where ssh has reached it; ConfigError where it cannot run the command."""
        needs = f"ycore {__version__} at {sys.executable}, and the folder {os.getcwd()}"
        for line in self.ssh.stdout or ():  # a shell may print words of its own first
            if line.startswith(_GREETING):
                _, version, address = line.decode().split()
                if version != __version__:
                    raise ConfigError(f"host {self.name} has ycore {version}; it needs {needs}")
                return address
        _, errors = self.ssh.communicate()
        reason = errors.decode(errors="replace").strip().rpartition("\n")[2].strip()
        if self.ssh.returncode == _NO_CONNECTION:
            needs = f"an answer to `ssh {self.name}` without a question"
        raise ConfigError(f"host {self.name} cannot start: {reason}; it needs {needs}")

    def send(self, orders: bytes) -> None:
        assert self.ssh.stdin is not None, "it is a pipe"
        with suppress(OSError):  # an end is seen in the status
            self.ssh.stdin.write(orders)

    def start(self, words: Sequence[str]) -> None:
        """Give it the command, its variables and its place among the hosts, and show what it prints."""
        self.send(json.dumps([words, dict(os.environ), self.place]).encode() + b"\n")
        self.readers = [
            threading.Thread(target=self._show, args=streams, daemon=True)
            for streams in ((self.ssh.stdout, sys.stdout), (self.ssh.stderr, sys.stderr))
        ]
        for reader in self.readers:
            reader.start()

    def _show(self, source: IO[bytes] | None, target: TextIO) -> None:
        """Print the lines of its output or errors; of another than the first, only errors that no host has said yet."""
        prefix = "" if self.is_first else f"{self.name}: "
        for line in source or ():
            is_new = target is sys.stderr and line not in self.said
            if WAITS.encode() in line and line not in self.said:
                self.waits.append(line)
            if line.startswith(b"going on from"):
                line = self.without.encode() + line
            if line.startswith(_GREETING):
                self.num_waits = len(self.waits)
            elif self.is_first or is_new:
                print(
                    f"{prefix}{line.decode(errors='replace')}", end="", file=target, flush=True
                )
            self.said.add(line)


def run_on_hosts(
    names: Sequence[str], words: Sequence[str], *, min_hosts: int = 0, without: str = ""
) -> int:
    """Run `ycore WORDS` on all hosts, the first of which shows its output; return the exit status.

    ConfigError where a host cannot be reached, or has not what this machine has; nothing was started then.

    Args:
        min_hosts: how many suffice to resume on, where others were lost and stayed away; 0 resumes on all or none.
        without: said before the step from which a run goes on that has lost hosts.
    """
    if shutil.which("ssh") is None:
        raise ConfigError(
            "--hosts needs OpenSSH's client, and there is no ssh here; install it"
        )
    said: set[bytes] = set()
    waits: list[bytes] = []
    hosts = [Host(name, name == names[0], said, waits, without) for name in names]
    with StopRequests() as stops:
        try:
            for host in hosts:
                host.connect()
            with stops.at_once():
                common = _meeting_place(hosts)
            for number, host in enumerate(hosts):
                host.place = common | {"NODE_RANK": str(number)}
                host.start(words)
            status = _follow(hosts, stops, words)
        finally:
            for host in hosts:
                host.ssh.kill()
    gone = [host.name for host in hosts if host.is_lost]
    rest = [name for name in names if name not in gone]
    if not gone or stops.count or status != 1 or not 0 < min_hosts <= len(rest):
        return status
    if names[0] in gone:
        os.environ.pop("MASTER_ADDR", None)
    without = f"without {', '.join(gone)}, on {', '.join(rest)}: "
    return run_on_hosts(rest, _resumed(words), min_hosts=min_hosts, without=without)


def _meeting_place(hosts: Sequence[Host]) -> dict[str, str]:
    """Return the variables that all hosts have in common; every host that cannot run is named."""
    addresses = []
    problems = []
    for host in hosts:
        try:
            addresses.append(host.address())
        except ConfigError as error:
            problems.append(error)
    for problem in problems[:-1]:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        raise problems[-1]
    address = os.environ.get("MASTER_ADDR", addresses[0])
    if address.startswith(("127.", "::1")) and len(hosts) > 1:
        raise ConfigError(
            f"host {hosts[0].name} is {address} here, where others cannot reach it; name it by an address that they can"
        )
    secret = secrets.token_hex(16)
    return {"NNODES": str(len(hosts)), "MASTER_ADDR": address, MEETING_SECRET: secret}


def _follow(hosts: Sequence[Host], stops: StopRequests, words: Sequence[str]) -> int:
    """Pass on output and requests to stop until all have ended; one that ends badly stops the others.

    A host that is gone is tried again when another says that it waits for it (`--restarts`).
    """
    num_stops = 0
    while None in (codes := [host.ssh.poll() for host in hosts]):
        has_failed = any(code not in (None, 0, _NO_CONNECTION) for code in codes)
        wanted = max(stops.count, has_failed)
        for host in hosts:
            if wanted > 2:  # it may be frozen
                host.ssh.kill()
            host.send(_BEAT + _STOP * (wanted - num_stops))
            if host.is_lost and not wanted:
                host.connect(_PAUSE_S)
                host.start(_resumed(words))
        num_stops = wanted
        time.sleep(_BEAT_S)
    for host in hosts:
        for reader in host.readers:
            reader.join()
        if host.ssh.returncode == _NO_CONNECTION:
            print(
                f"error: no connection to host {host.name} any more; it stops by itself after {_SILENT_S:g} s",
                file=sys.stderr,
            )
    ends = {host.ssh.returncode for host in hosts}
    if 2 in ends:
        return 2
    return max(ends) if ends <= {0, Interrupted.exit_code} else 1


def _resumed(words: Sequence[str]) -> list[str]:
    """Return the command with which a host comes back: it goes on from the newest checkpoint, as the others do."""
    kept = without_options(words, "--resume-from")
    kept = [word for word in kept if word.replace("_", "-") != "--accept-changes"]
    if kept[0] != "resume" and "--resume" not in kept:
        kept.append("--resume")
    return kept


def without_options(words: Sequence[str], *names: str) -> list[str]:
    """Return the words without these options and their values."""
    kept = []
    rest = iter(words)
    for word in rest:
        name, _, value = word.replace("_", "-").partition("=")
        if name not in names:
            kept.append(word)
        elif not value:
            next(rest, None)
    return kept


def join() -> None:
    """Take the place of the command that comes by standard input, and follow the orders that come after it."""
    connection = os.environ.get("SSH_CONNECTION", "")  # client, port, server, port
    print(f"\n{_GREETING.decode()} {__version__} {connection.split()[2]}", flush=True)
    orders = os.fdopen(os.dup(0), "rb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if not (line := orders.readline()):  # another host cannot run it
        sys.exit(2)
    words, variables, place = foreign_json(line)
    os.environ.update(variables | dict(os.environ) | place)
    sys.argv = ["ycore", *words]
    threading.Thread(target=_obey, args=(orders,), daemon=True).start()


def _obey(orders: IO[bytes]) -> None:
    while select.select([orders], [], [], _SILENT_S)[0] and (order := orders.read(1)):
        if order == _STOP:
            os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGHUP)
