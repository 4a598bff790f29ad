"""Keeping a run's engines alive, whatever their roles: one that dies or hangs is killed and started again.

An engine that was never ready is not: what stopped it then would stop it again. Who asks an engine gives the new
process what it needs before asking it anything (`roles.server`).

Whether an engine answers: one request over its unix socket, with the standard library.

Starting engines: all at once, or where they share a device by sleeping, one after the other.

Not here: which engines there are (`engine_processes`), the trainer (`supervise`).
"""

import http.client
import socket
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import psutil

from ycore.engine.sleeping import SLEEP, asleep_file, mark_asleep
from ycore.errors import EngineError
from ycore.launch.processes import ManagedProcess, StopWatch, is_stopped
from ycore.launch.scoring_models import EngineProcess
from ycore.placement.learning import DROP, KEEP
from ycore.placement.placement import ROLLOUT
from ycore.run.paths import RunFolder
from ycore.run.process_tree import is_alive, kill_tree


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, *, timeout_s: float) -> None:
        super().__init__("engine", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        self.sock.connect(str(self._path))


def is_healthy(path: Path, *, timeout_s: float = 1.0) -> bool:
    """Whether the server behind the socket says it is ready, within `timeout_s`; one that sleeps is."""
    return path.exists() and says_ok(path, "GET", "/health", timeout_s=timeout_s)


def says_ok(path: Path, method: str, route: str, *, timeout_s: float) -> bool:
    """Whether it answers this with status 200, within `timeout_s`."""
    connection = _UnixConnection(path, timeout_s=timeout_s)
    try:
        connection.request(method, route)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


_ASK_STARTING_EVERY_S = 1.0
_ASK_READY_EVERY_S = 5.0
_GONE_WITHIN_S = 10.0


class Trouble(NamedTuple):
    """What is wrong with an engine, for a sentence that begins with its name; `hangs` where it is there and silent."""

    what: str
    hangs: bool = False


class LiveEngine:
    """One engine, through all the processes that it has been."""

    def __init__(self, planned: EngineProcess, folder: RunFolder, *, health_timeout_s: float) -> None:
        self.name, self.role = planned.name, planned.role
        self.log = folder.log(planned.name)
        self.is_ready = self.was_ready = False
        self._planned = planned
        self._folder = folder
        self._health_timeout_s = health_timeout_s
        self._stopped = StopWatch(health_timeout_s)
        self._parts: dict[str, psutil.Process] = {}
        self._start()

    def _start(self) -> None:
        self._planned.socket.unlink(missing_ok=True)  # of a process that was killed; nobody can listen there again
        asleep_file(self._planned.socket).unlink(missing_ok=True)
        self._process = ManagedProcess.start(
            self.name,
            list(self._planned.command),
            environment=self._planned.environment,
            run_id=self._folder.run_id,
            log=self.log,
            cores=self._planned.cores,
        )
        self.is_ready = False
        self._seen_starting: list[psutil.Process] | None = None
        self._silent_since: float | None = None
        self.started = self._asked = time.monotonic()

    def processes(self) -> list[psutil.Process]:
        """Its living processes."""
        return [process for process in [*self._process.tree(), *self._parts.values()] if is_alive(process)]

    def last_line(self) -> str:
        return self._process.last_line()

    def trouble(self) -> Trouble | None:
        """What is wrong with it; None where nothing is.

        vLLM's server outlives its engine core and lets requests wait for ever, so a ready engine is gone as soon as
        any of its processes is. One that sleeps is left alone until it is woken: others have its device by then, and
        started again it would find no room there.
        """
        if asleep_file(self._planned.socket).exists():
            return None
        if self._process.exit_code is not None:
            line = self.last_line()
            return Trouble(f"ended with {self._process.how_it_ended()}" + (f": {line}" if line else ""))
        for name, part in self._parts.items():
            if not is_alive(part):
                return Trouble(f"lost its process {name}, killed or out of memory")
        pids = [self._process.pid, *(part.pid for part in self._parts.values())]
        stopped_s = self._stopped.look(pids)
        silent_s = 0.0 if self._silent_since is None else time.monotonic() - self._silent_since
        if stopped_s is not None or (self._is_silent(silent_s) and any(is_stopped(pid) for pid in pids)):
            return Trouble(f"has been stopped (SIGSTOP) for {max(stopped_s or 0.0, silent_s):.0f} s", hangs=True)
        if self._is_silent(silent_s):
            return Trouble(f"has not answered /health for {silent_s:.0f} s (engine.health_timeout_s)", hangs=True)
        return None

    def _is_silent(self, for_s: float) -> bool:
        return self.is_ready and for_s > self._health_timeout_s

    def ask(self) -> bool:
        """Ask now and then how it is; True when it has just become ready."""
        now = time.monotonic()
        every_s = min(_ASK_READY_EVERY_S, self._health_timeout_s / 4) if self.is_ready else _ASK_STARTING_EVERY_S
        if now - self._asked < every_s:
            return False
        self._asked = now
        if not is_healthy(self._planned.socket):
            self._silent_since = self._silent_since or now
            if not self.is_ready:
                self._seen_starting = self._process.tree()[1:]
            return False
        self._silent_since = None
        if self.is_ready:
            return False
        self.is_ready = self.was_ready = True
        self._parts = self._lasting_parts()
        return True

    def _lasting_parts(self) -> dict[str, psutil.Process]:
        """Its children that were there before it was ready: a compiler that a first request started comes and goes."""
        before = self._seen_starting
        parts = [part for part in self._process.tree()[1:] if before is None or part in before]
        try:
            return {f"{part.name()} ({part.pid})": part for part in parts}
        except psutil.Error:
            return {}

    def restart(self) -> None:
        """Kill what is left of it, and start it anew."""
        kill_tree(self._process.pid, also=self.processes(), wait_s=_GONE_WITHIN_S)
        self._process.wait(timeout_s=5.0)
        self._parts = {}
        self._stopped = StopWatch(self._health_timeout_s)
        self._start()


class EngineWatch:
    """All engines of a run, with `budget` restarts between them."""

    def __init__(
        self,
        engines: Sequence[LiveEngine] = (),
        *,
        budget: int = 0,
        start_timeout_s: float = 0.0,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._engines = engines
        self._budget = budget
        self._start_timeout_s = start_timeout_s
        self._say = say
        self._began = time.monotonic()
        self.num_restarts = 0
        self.on_hang: Callable[[str], object] = lambda why: None

    def look(self) -> None:
        """Ask all of them; start again what died. EngineError for what cannot be mended."""
        for engine in self._engines:
            if engine.ask():
                self._tell_ready(engine)
            trouble = engine.trouble()
            if trouble is not None:
                self._restart(engine, trouble)
            elif not engine.is_ready and time.monotonic() - engine.started > self._start_timeout_s:
                why = f"{engine.name} was not ready after {self._start_timeout_s:.0f} s: {engine.last_line()}"
                self.on_hang(why)
                raise EngineError(f"{why} (see {engine.log}, or raise engine.start_timeout_s)")

    def check(self) -> None:
        """EngineError where one is in trouble; nothing is started."""
        for engine in self._engines:
            trouble = engine.trouble()
            if trouble is not None:
                raise EngineError(f"{engine.name} {trouble.what} (see {engine.log})")

    def processes(self) -> list[psutil.Process]:
        return [process for engine in self._engines for process in engine.processes()]

    @property
    def are_ready(self) -> bool:
        return all(engine.is_ready for engine in self._engines)

    def _restart(self, engine: LiveEngine, trouble: Trouble) -> None:
        if trouble.hangs:
            self.on_hang(f"{engine.name} {trouble.what}")
        if not engine.was_ready or self.num_restarts >= self._budget:
            spent = f"; the run's {self._budget} restarts are used up (engine.restarts)" if self._budget else ""
            raise EngineError(f"{engine.name} {trouble.what} (see {engine.log}){spent if engine.was_ready else ''}")
        self.num_restarts += 1
        self._say(f"{engine.name} {trouble.what}; starting it again ({self.num_restarts} of {self._budget})")
        engine.restart()

    def _tell_ready(self, engine: LiveEngine) -> None:
        if self.num_restarts:
            self._say(f"{engine.name} is back after {time.monotonic() - engine.started:.0f} s")
        elif self.are_ready:
            many = "engine" if len(self._engines) == 1 else f"{len(self._engines)} engines"
            self._say(f"{many} ready after {time.monotonic() - self._began:.0f} s")


_LOOK_EVERY_S = 0.2


def start_in_turn(
    planned: Sequence[EngineProcess],
    start: Callable[[EngineProcess], LiveEngine],
    *,
    start_timeout_s: float,
    say: Callable[[str], None],
) -> list[LiveEngine]:
    """The engines in their order; those that sleep are ready and asleep, others have just been started."""
    if not any(one.sleeps for one in planned):
        return [start(one) for one in planned]
    started: dict[str, LiveEngine] = {}
    for turn in turns(planned):
        begun = {one.name: start(one) for one in turn}
        watch = EngineWatch(list(begun.values()), start_timeout_s=start_timeout_s, say=say)
        while not watch.are_ready:
            watch.look()
            time.sleep(_LOOK_EVERY_S)
        for one in turn:
            _put_to_sleep(one, timeout_s=start_timeout_s)
        started |= begun
    return [started[one.name] for one in planned]


def turns(planned: Sequence[EngineProcess]) -> list[list[EngineProcess]]:
    """The first engine of every device together, then the second of each, and so on."""
    by_device: dict[str | None, list[EngineProcess]] = {}
    for one in planned:
        by_device.setdefault(one.device, []).append(one)
    return [[one for one in turn if one is not None] for turn in zip_longest(*by_device.values())]


def _put_to_sleep(engine: EngineProcess, *, timeout_s: float) -> None:
    """The policy's weights are sent before they are used first; frozen ones are kept."""
    level = DROP if engine.role == ROLLOUT else KEEP
    if not says_ok(engine.socket, "POST", SLEEP.format(level=level), timeout_s=timeout_s):
        raise EngineError(
            f"{engine.name} does not sleep; see logs/{engine.name}.log, or let engines stay awake: engine.sleep=false"
        )
    mark_asleep(engine.socket, level)
