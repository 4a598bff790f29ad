"""The machines of a run: they meet before anything heavy starts, and each knows within seconds that another has ended.

Every launcher keeps a connection to the first machine's, which passes on whatever one of them says. A message is a line
of JSON, and there is one a second in any case. So a machine that is gone is told from a slow one, whatever ranks do.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any

import psutil

from ycore.errors import ConfigError, Interrupted, MachineLost, RunError
from ycore.foreign import foreign_json
from ycore.launch.layout import MEETING_SECRET, Layout
from ycore.run.claim import contents_that_differ, settings_that_differ

_BEAT_S = 1.0
_SILENT_S = 5.0
_NAMED_EVERY_S = 10.0  # machines that have not come yet
_MEET_WITHIN_S = 300.0
_CONNECT_S = 3.0
_LOOK_S = 0.2
_LINE_BYTES = 2**20
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_MAY_DIFFER = ("accelerate", "output")


@dataclass(eq=False)
class Machines:
    """This machine among the others of its run. A run on one machine has nobody to wait for."""

    layout: Layout
    say: Callable[[str], None]
    _: KW_ONLY
    secret: str = ""
    """A machine that does not know it is not let in."""
    on_end: Callable[[], None] = lambda: None
    """Called in another thread when another machine ends, or is asked to stop."""

    def __post_init__(self) -> None:
        settings = self.layout.accelerate
        self.rank = self.layout.machine_rank
        self.count = self.layout.num_machines
        self._host = str(settings.get("main_process_ip"))
        self._port = int(settings.get("main_process_port") or 0)
        self._lock = threading.RLock()
        self._links: dict[int, socket.socket] = {}
        # What every machine has said, by its kind.
        self._said = defaultdict[str, dict[int, Any]](dict)
        self._closed = threading.Event()
        self._problem = ""  # of reaching the first machine

    # -- what they say -------------------------------------------------------------------------------------------------

    def tell(self, kind: str, value: Any = None) -> None:
        """Say something to all other machines."""
        self._take(self.rank, kind, value, link=None)

    def gather(
        self, kind: str, value: Any = None, *, look: Callable[[], None]
    ) -> dict[int, Any]:
        """Tell the value, wait until every machine has told its own, and return all by machine.

        `look` raises what ends the wait: a machine whose command has ended tells nothing more.
        """
        self.tell(kind, value)
        while len(self._said[kind]) < self.count:
            look()
            time.sleep(_LOOK_S)
        return dict(sorted(self._said[kind].items()))

    def check(self) -> None:
        """Raise RunError where another machine has failed, MachineLost where it is gone."""
        for machine, (exit_code, reason) in self._of_others("end").items():
            if exit_code != Interrupted.exit_code:
                kind = MachineLost if exit_code is None else RunError
                raise kind(f"{self.name(machine)}: {reason}")

    def _check_meeting(self) -> None:
        """Raise RunError where another machine has failed, Interrupted where it was stopped: they cannot meet."""
        self.check()
        if stopped := self._of_others("end"):
            raise Interrupted(f"{self.name(min(stopped))} was stopped")

    def failure(self, attempt: int) -> str | None:
        """Return why another machine's trainer failed at this attempt, where that does not follow from others' ends."""
        for machine, (reason, is_cause) in self._of_others(f"failed {attempt}").items():
            if is_cause:
                return f"{self.name(machine)}: {reason}"
        return None

    @property
    def num_stops(self) -> int:
        """How often another machine was asked to stop: once, or a second time, which means at once."""
        if self._of_others("stop 2"):
            return 2
        if self._of_others("stop 1"):
            return 1
        ends = self._of_others("end").values()
        return int(any(code == Interrupted.exit_code for code, _ in ends))

    @property
    def has_ended(self) -> bool:
        """Whether another machine's command has ended."""
        return bool(self._of_others("end"))

    def name(self, machine: int) -> str:
        place = self._said["place"].get(machine)
        return f"machine {machine}" + (f" ({place['host']})" if place else "")

    def _of_others(self, kind: str) -> dict[int, Any]:
        with self._lock:
            return {
                machine: value
                for machine, value in self._said[kind].items()
                if machine != self.rank
            }

    def _take(self, sender: int, kind: str, value: Any, link: socket.socket | None) -> None:
        """Remember a message, and pass it on to all but the link that it came by; of several, the first counts."""
        with self._lock:
            self._said[kind].setdefault(sender, value)
            if self.rank == 0 or sender == self.rank:
                for other in self._links.values():
                    if other is not link:
                        _send(other, sender, kind, value)
        if sender != self.rank and kind in ("end", "stop 1", "stop 2"):
            self.on_end()

    def _listen(self, link: socket.socket, machine: int | None) -> None:
        """Take what comes by a link until it closes. A machine's first message says which it is, None as yet."""
        link.settimeout(_SILENT_S)
        reason = "its command was killed, or the machine went down"
        try:
            with link.makefile("rb") as lines:
                while line := lines.readline(_LINE_BYTES):
                    sender, kind, value = foreign_json(line)
                    if machine is None:
                        machine = self._admit(link, int(sender), dict(value).get("secret"))
                    if kind != "beat":
                        self._take(sender, kind, value, link)
        except TimeoutError:
            reason = f"silent for {_SILENT_S:.0f} s; the machine, or the network to it, is down"
        except (
            OSError,
            ValueError,
            TypeError,
        ):  # a stranger's, where it has not said who it is
            pass
        if machine not in self._said["place"]:  # an earlier run's store, at the same port
            with self._lock:
                self._links.pop(0, None)
            return
        is_done = self._closed.is_set() or machine in self._said.get("done", ())
        if not is_done:
            self._take(machine, "end", [None, reason], link)

    def _admit(self, link: socket.socket, sender: int, secret: Any) -> int:
        """Let a machine in, and tell it what was said before it came; ValueError where it has no place here."""
        with self._lock:
            reason = ""
            if not secrets.compare_digest(secret, self.secret):
                reason = f"{MEETING_SECRET} is another there; say the same on all machines"
            elif not 0 < sender < self.count or sender in self._links:
                reason = f"machine_rank {sender} of {self.count} is taken, or too large; each machine has its own"
            if reason:
                _send(link, 0, "end", [1, reason])
                raise ValueError(reason)
            self._links[sender] = link
            for kind, values in self._said.items():
                for machine, value in values.items():
                    _send(link, machine, kind, value)
        return sender

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_S):
            with self._lock:
                for link in self._links.values():
                    _send(link, self.rank, "beat", None)

    # -- how they meet -------------------------------------------------------------------------------------------------

    def meet(self, facts: Mapping[str, Any]) -> None:
        """Wait until all machines have come; ConfigError where their facts differ, or one cannot reach another."""
        if self.count == 1:
            return
        threading.Thread(target=self._beat, daemon=True).start()
        place = {"host": socket.gethostname(), "facts": dict(facts), "secret": self.secret}
        places = self._said["place"]
        with ExitStack() as door:
            if self.rank == 0:
                server = door.enter_context(self._open_door())
                # Before it is closed: a thread that still waits for a guest would keep the port.
                door.callback(server.shutdown, socket.SHUT_RDWR)
                self.tell("place", place)
            began = named = time.monotonic()
            while len(places) < self.count:
                if self.rank and not self._links:
                    self._call_first(place)
                with (
                    self._lock
                ):  # where all have come, this machine says by itself why another ended
                    if len(places) < self.count:
                        self._check_meeting()
                now = time.monotonic()
                if now - began > _MEET_WITHIN_S:
                    raise RunError(self._who_is_missing())
                if now - named > _NAMED_EVERY_S:
                    named = now
                    self.say(self._who_is_missing())
                time.sleep(_LOOK_S)
        # The first machine's address is the one at which the second has reached it.
        first = places[1]["first"]
        address = places[self.rank].get("address", first)
        self._check_agreement(places)
        self._check_reach(address)
        if interface := _interface_of(address):
            for name in _INTERFACES:
                os.environ.setdefault(name, interface)
        hosts = ", ".join(place["host"] for _, place in sorted(places.items()))
        self.say(f"{self.count} machines have met at {first}: {hosts}")

    def _open_door(self) -> socket.socket:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            server = socket.create_server(("", self._port), family=family, dualstack_ipv6=both)
        except OSError as error:
            raise ConfigError(
                f"the machines meet at main_process_port {self._port} of this one, which cannot be opened "
                f"({error.strerror}); say another on all of them"
            ) from None
        threading.Thread(target=self._let_in, args=(server,), daemon=True).start()
        return server

    def _let_in(self, server: socket.socket) -> None:
        with suppress(OSError):  # it is closed when all have come
            while True:
                link, _ = server.accept()
                threading.Thread(target=self._listen, args=(link, None), daemon=True).start()

    def _call_first(self, place: dict[str, Any]) -> None:
        """Try to connect to the first machine, which may start later, and tell it this machine's place."""
        try:
            link = socket.create_connection((self._host, self._port), timeout=_CONNECT_S)
        except OSError as error:
            self._problem = f" ({error.strerror or error})"
            return
        with self._lock:
            self._links[0] = link
        place |= {"address": link.getsockname()[0], "first": link.getpeername()[0]}
        self.tell("place", place)
        threading.Thread(target=self._listen, args=(link, 0), daemon=True).start()

    def _who_is_missing(self) -> str:
        missing = sorted({*range(self.count)} - self._said["place"].keys())
        if self.rank and not self._links:
            missing = [0]
        names = (f"machine {m} (from rank {m * self.layout.local} on)" for m in missing)
        return (
            f"{', '.join(names)} of {self.count} cannot be reached: all meet at {self._host}, port {self._port}"
            f"{self._problem}; does the command run there, is that the first machine's address, and does a firewall let "
            "the port pass?"
        )

    def _check_agreement(self, places: Mapping[int, Any]) -> None:
        """Say a line for each difference between the first machine and another; ConfigError where there is any."""
        names: list[str] = []
        first = places[0]["facts"]
        for machine, place in places.items():
            theirs = place["facts"]
            differences = [
                *settings_that_differ(first["config"], theirs["config"]),
                *contents_that_differ(first["contents"], theirs["contents"]),
            ]
            for difference in differences:
                if difference.name not in _MAY_DIFFER:
                    names.append(difference.name)
                    self.say(
                        f"{difference.name}: {difference.old} on {self.name(0)}, {difference.new} on {self.name(machine)}"
                    )
        if names:
            listed = ", ".join(dict.fromkeys(names))
            raise ConfigError(f"the machines differ in {listed}; make these the same on all")

    def _check_reach(self, address: str) -> None:
        """Connect to every other machine, as ranks will; ConfigError where that cannot be."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=128) as server:
            doors = self.gather("door", server.getsockname()[:2], look=self._check_meeting)
            for machine, (host, port) in doors.items():
                try:
                    socket.create_connection((host, port), timeout=_CONNECT_S).close()
                except OSError as error:
                    raise ConfigError(
                        f"{self.name(self.rank)} cannot connect to {self.name(machine)} at {host}, port {port} "
                        f"({error.strerror or error}); ranks take any port: let a firewall pass all between the machines"
                    ) from None
            self.gather("reach", look=self._check_meeting)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            for link in self._links.values():
                with suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
                link.close()


@contextmanager
def meeting(
    layout: Layout, facts: Mapping[str, Any], *, say: Callable[[str], None]
) -> Iterator[Machines]:
    """Meet the other machines, and tell them how this one ends, if not well. `facts`: as `claim.run_facts` returns."""
    secret = os.environ.pop(MEETING_SECRET, "")
    machines = Machines(layout, say, secret=secret)
    try:
        machines.meet(facts)
        yield machines
        machines.tell("done")
    except BaseException as error:
        exit_code = getattr(error, "exit_code", 1)
        if isinstance(error, KeyboardInterrupt):
            exit_code = Interrupted.exit_code
        machines.tell("end", [exit_code, str(error) or type(error).__name__])
        raise
    finally:
        machines.close()
        os.environ[MEETING_SECRET] = secret  # of the next meeting, where a machine was lost


def _send(link: socket.socket, sender: int, kind: str, value: Any) -> None:
    with suppress(OSError):  # its reader notices
        link.sendall(json.dumps([sender, kind, value]).encode() + b"\n")


def _interface_of(address: str) -> str | None:
    """Return the name of the network interface that has the address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name.partition(":")[0]
    return None
