"""Start a run's engines and keep them alive: one that dies or hangs is killed and started again.

An engine that was never ready is not started again, since the same would stop it again. The clients in the trainer
prepare a new process, for example with the policy's weights, before they use it (`ycore.engine.server`).

`python -m ycore.launch.engine_watch` is the host's side of an engine on another machine (`ssh_command`).
"""

import json
import os
import secrets
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import psutil
from pydantic import TypeAdapter

from ycore import __version__
from ycore.config.schema import EngineSettings
from ycore.engine import commands
from ycore.engine.server import (
    DROP,
    KEEP,
    SLEEP,
    asleep_file,
    is_healthy,
    mark_asleep,
    own_socket,
    request_succeeds,
)
from ycore.errors import EngineError, YcoreError
from ycore.launch.guardian import guarded
from ycore.launch.layout import on_host, this_machine
from ycore.launch.processes import ForkServer, ManagedProcess
from ycore.models.fetch import fetch_named
from ycore.run.files import RunFolder
from ycore.run.reports import is_alive, kill_tree
from ycore.run.text import Say

_POLL_S = 0.2
_POLL_STARTING_S = 1.0
_POLL_READY_S = 5.0
_GONE_WITHIN_S = 10.0
_SILENT_S = 15.0  # after which an engine takes its launcher on another machine for gone
_TRY_AGAIN_S = 10.0  # between starts of a lost engine on another machine


class EngineFault(NamedTuple):
    """A fault of an engine, in words that follow its name. `hangs`: its process is there and does not answer."""

    problem: str
    hangs: bool = False


@dataclass(eq=False)
class LiveEngine:
    """An engine across its restarts, each with a new process."""

    engine: commands.EngineSpec
    folder: RunFolder
    _: KW_ONLY
    health_timeout_s: float
    fork_server: ForkServer | None = None
    """Forks its first process."""

    def __post_init__(self) -> None:
        self.name = self.engine.name
        self.log = self.folder.log(self.name)
        self.was_ready = False
        self.is_lost = False  # on another machine, and the run goes on without it
        socket = self.engine.socket
        self.socket = own_socket(socket) if self.engine.host else socket
        self._start()

    def _start(self) -> None:
        self.socket.unlink(missing_ok=True)  # left by a killed process; nobody listens on it
        asleep_file(self.socket).unlink(missing_ok=True)
        if self.engine.host:
            if not self.is_lost:
                self.lead_to(self.socket)
            command = ssh_command(self.engine)
            environment = dict(os.environ)
        else:
            command = commands.engine_command(self.engine)
            environment = commands.engine_environment(self.engine)
        self._process = ManagedProcess(
            self.name,
            command,
            environment=environment,
            run_id=self.folder.run_id,
            log=self.log,
            cores=() if self.engine.host else self.engine.cores,
            takes_beats=bool(self.engine.host),
            fork_server=self.fork_server,
        )
        self.fork_server = None
        self.is_ready = False
        self.started = self._polled = time.monotonic()
        self._parts: dict[str, psutil.Process] = {}
        self._seen_starting: list[psutil.Process] | None = None
        self._silent_since: float | None = None

    def restart(self) -> None:
        """Kill what is left of it, and start it again."""
        kill_tree(self._process.pid, also=self.processes(), wait_s=_GONE_WITHIN_S)
        self._process.wait(timeout_s=5.0)
        self._start()

    def processes(self) -> list[psutil.Process]:
        return [
            process
            for process in [*self._process.tree(), *self._parts.values()]
            if is_alive(process)
        ]

    def last_line(self) -> str:
        return self._process.last_line()

    @property
    def can_be_lost(self) -> bool:
        """Whether a run that has begun goes on without it."""
        return bool(self.engine.host) and self.was_ready

    def lead_to(self, socket: Path) -> None:
        """Let an engine on another machine be reached at this socket, its own or another engine's."""
        link = self.engine.socket.with_suffix(".link")
        link.symlink_to(socket)
        link.replace(self.engine.socket)

    def poll(self) -> bool:
        """Ask the server for its health when it is time to; True when it has just become ready."""
        now = time.monotonic()
        interval_s = _POLL_STARTING_S
        if self.is_ready:
            interval_s = min(_POLL_READY_S, self.health_timeout_s / 4)
        if now - self._polled < interval_s:
            return False
        self._polled = now
        if not is_healthy(self.socket):
            self._silent_since = self._silent_since or now
            if not self.is_ready:
                self._seen_starting = self._process.tree()[1:]
            return False
        self._silent_since = None
        if self.is_ready:
            return False
        self.is_ready = self.was_ready = True
        # Only children that were there before it was ready: a compiler for a first request comes and goes.
        starting = self._seen_starting
        parts = [
            part for part in self._process.tree()[1:] if starting is None or part in starting
        ]
        with suppress(psutil.Error):
            self._parts = {f"{part.name()} ({part.pid})": part for part in parts}
        return True

    def find_fault(self) -> EngineFault | None:
        """Return what is wrong with it; None where nothing is.

        vLLM's server outlives its engine core and then never answers, so a ready engine that loses any process is
        dead. A sleeping engine is left alone until it is woken: others use its device, so a new one would find no room.
        """
        if asleep_file(self.engine.socket).exists():
            return None
        if self._process.exit_code is not None:
            return EngineFault(f"ended with {self._process.ended.ending}")
        for name, part in self._parts.items():
            if not is_alive(part):
                return EngineFault(f"lost its process {name}, killed or out of memory")
        silent_s = 0.0 if self._silent_since is None else time.monotonic() - self._silent_since
        if self.is_ready and silent_s > self.health_timeout_s:
            return EngineFault(
                f"has not answered /health for {silent_s:.0f} s (engine.health_timeout_s)",
                hangs=True,
            )
        return None


@dataclass(eq=False)
class EngineWatch:
    """All engines of a run. `max_restarts` is for all of them together; `on_hang` is called before a hung one ends."""

    engines: Sequence[LiveEngine] = ()
    _: KW_ONLY
    max_restarts: int = 0
    start_timeout_s: float = 0.0
    say: Say = print
    on_hang: Callable[[str], object] = lambda why: None
    num_restarts: int = field(default=0, init=False)
    _began: float = field(default_factory=time.monotonic, init=False)

    @property
    def are_ready(self) -> bool:
        """Whether all are, but for those that are lost."""
        return all(engine.is_ready or engine.is_lost for engine in self.engines)

    def processes(self) -> list[psutil.Process]:
        return [process for engine in self.engines for process in engine.processes()]

    def look(self) -> None:
        """Poll all engines, and start again what died; EngineError for what cannot be mended."""
        for engine in self.engines:
            if engine.poll():
                self._say_ready(engine)
            fault = engine.find_fault()
            starting_s = 0.0 if engine.is_ready else time.monotonic() - engine.started
            if fault is None and starting_s > self.start_timeout_s:
                limit = f"{self.start_timeout_s:.0f} s (engine.start_timeout_s)"
                problem = f"was not ready after {limit}: {engine.last_line()}"
                fault = EngineFault(problem, hangs=True)
            if fault is not None and engine.can_be_lost:
                self._go_on_without(engine, fault)
            elif fault is not None:
                self._restart(engine, fault)
            if engine.is_lost:
                self._lead_on(engine)

    def check(self) -> None:
        """Raise EngineError where an engine has a fault; nothing is started."""
        for engine in self.engines:
            if not engine.can_be_lost and (fault := engine.find_fault()) is not None:
                raise EngineError(f"{engine.name} {fault.problem} (see {engine.log})")

    def _go_on_without(self, engine: LiveEngine, fault: EngineFault) -> None:
        """Let another engine answer for one of another machine, and try to start it again now and then."""
        if not engine.is_lost:
            engine.is_lost = True
            self.say(
                f"{engine.name} on {engine.engine.host} {fault.problem}; the run goes on without it until it is back"
            )
        engine.is_ready = False
        engine.socket.unlink(missing_ok=True)
        if time.monotonic() - engine.started > _TRY_AGAIN_S:
            engine.restart()

    def _lead_on(self, engine: LiveEngine) -> None:
        """Let a lost engine be reached at another of its model that is ready."""
        wanted = (engine.engine.role, engine.engine.model)
        ready = [
            other.socket
            for other in self.engines
            if other.is_ready and (other.engine.role, other.engine.model) == wanted
        ]
        if ready and engine.engine.socket.readlink() not in ready:
            engine.lead_to(ready[0])

    def _restart(self, engine: LiveEngine, fault: EngineFault) -> None:
        problem = f"{engine.name} {fault.problem}"
        if fault.hangs:
            self.on_hang(problem)
        if not engine.was_ready or self.num_restarts >= self.max_restarts:
            why = ""
            if engine.was_ready and self.max_restarts:
                why = f"; the run's {self.max_restarts} restarts are used up (engine.restarts)"
            raise EngineError(f"{problem} (see {engine.log}){why}")
        self.num_restarts += 1
        self.say(f"{problem}; starting it again ({self.num_restarts} of {self.max_restarts})")
        engine.restart()

    def _say_ready(self, engine: LiveEngine) -> None:
        if engine.is_lost:
            engine.lead_to(engine.socket)
        if self.num_restarts or engine.is_lost:
            engine.is_lost = False
            self.say(f"{engine.name} is back after {time.monotonic() - engine.started:.0f} s")
        elif self.are_ready:
            engines = "engine" if len(self.engines) == 1 else f"{len(self.engines)} engines"
            self.say(f"{engines} ready after {time.monotonic() - self._began:.0f} s")


def start_engines(
    planned: Sequence[commands.EngineSpec],
    folder: RunFolder,
    settings: EngineSettings,
    *,
    say: Say,
) -> EngineWatch:
    """Start engines on cores at once; those on devices in turn, each ready, or asleep, before the next one starts.

    vLLM takes for its own what its neighbours allocate while it measures (`determine_available_memory`), so no two
    engines of a device start at once, and the trainer starts when all engines are ready.
    """
    start_timeout_s = settings.start_timeout_s
    on_cpu = all(engine.on_cpu for engine in planned)
    started: list[LiveEngine] = []
    for batch in start_order(planned):
        fork_server = _fork_server(batch, folder)
        live = [
            LiveEngine(
                engine,
                folder,
                health_timeout_s=settings.health_timeout_s,
                fork_server=fork_server,
            )
            for engine in batch
        ]
        watch = EngineWatch(live, start_timeout_s=start_timeout_s, say=say)
        while not (watch.are_ready or on_cpu):
            watch.look()
            time.sleep(_POLL_S)
        for engine in (engine for engine in batch if engine.sleeps):
            # The policy's weights are sent before their first use anyway; frozen ones are kept.
            level = DROP if engine.is_policy else KEEP
            if not request_succeeds(
                engine.socket, "POST", SLEEP.format(level=level), timeout_s=start_timeout_s
            ):
                raise EngineError(
                    f"{engine.name} does not sleep; see logs/{engine.name}.log, or let engines stay awake: "
                    "engine.sleep=false"
                )
            mark_asleep(engine.socket, level)
        started += live
    return EngineWatch(
        started, max_restarts=settings.restarts, start_timeout_s=start_timeout_s, say=say
    )


def _fork_server(
    engines: Sequence[commands.EngineSpec], folder: RunFolder
) -> ForkServer | None:
    """Return what forks the engines; None where each is better started by itself."""
    first = engines[0]
    kinds = {
        (engine.on_cpu, engine.host, engine.tensor_parallel, len(engine.cores))
        for engine in engines
    }
    is_served_by_vllm = "ycore.engine.serve" in commands.engine_command(first)
    can_fork = is_served_by_vllm and kinds == {(True, "", 1, len(first.cores))}
    if sys.platform != "linux" or not can_fork or len(engines) == 1:
        return None
    return ForkServer(commands.engine_environment(first), folder.log(first.name))


def start_order(planned: Sequence[commands.EngineSpec]) -> list[list[commands.EngineSpec]]:
    """Return the first engine of every device together, then the second of each, and so on; one may span several."""
    num_started: dict[str, int] = {}  # by host and device
    batches: dict[int, list[commands.EngineSpec]] = {}
    for engine in planned:
        devices = [f"{engine.host} {device}" for device in engine.devices]
        position = max((num_started.get(device, 0) for device in devices), default=0)
        num_started |= dict.fromkeys(devices, position + 1)
        batches.setdefault(position, []).append(engine)
    return [batches[position] for position in sorted(batches)]


def ssh_command(engine: commands.EngineSpec) -> list[str]:
    """Return the command that runs the engine on its host, and forwards its socket."""
    folder = Path("/tmp") / f"ycore-{secrets.token_hex(6)}"
    # As ssh reads a path: a colon ends it, and a percent sign begins a name.
    local = str(own_socket(engine.socket)).replace(":", r"\:").replace("%", "%%")
    forward = f"{local}:{_host_socket(folder)}"
    spec = TypeAdapter(commands.EngineSpec).dump_json(engine).decode()
    words = on_host(engine.host, "serve", str(folder), spec)
    return ["ssh", "-oStreamLocalBindUnlink=yes", "-L", forward, *words[1:]]


def _host_socket(folder: Path) -> Path:
    """Return an engine's socket in its folder on a host."""
    return folder / "sockets" / "engine.sock"


def run_on_host(arguments: Sequence[str]) -> None:
    """Say what this machine has (`machine`), or run an engine (`serve FOLDER SPEC`) for a launcher on another one."""
    if arguments[0] == "machine":
        print(json.dumps([__version__, asdict(this_machine())]))  # as `machine_of` reads it
        return
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(1))
    root = Path(arguments[1])
    try:
        _run_engine(root, TypeAdapter(commands.EngineSpec).validate_json(arguments[2]))
    except YcoreError as error:
        sys.exit(f"error: {error}")
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _run_engine(root: Path, engine: commands.EngineSpec) -> None:
    """Run it until it has a fault, which is an EngineError."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    folder = RunFolder(root)
    root.mkdir(mode=0o700)
    folder.logs.mkdir(mode=0o700)
    model = fetch_named(
        engine.model_name,
        trust_remote_code=engine.trust_remote_code,
        log=folder.log("model"),
    )
    local = replace(
        engine,
        host="",
        model=model,
        socket=_host_socket(root),
        temporary=folder.temporary,
        run_id=folder.run_id,
    )
    with guarded(folder):
        live = LiveEngine(local, folder, health_timeout_s=float("inf"))
        try:
            while True:
                live.poll()
                EngineWatch([live]).check()
                time.sleep(_POLL_S)
        finally:  # the host keeps no log
            sys.stderr.write(live.log.read_text(errors="replace"))


def _end_with_launcher() -> None:
    """End this process when its standard input has been silent for a while."""
    while select.select([0], [], [], _SILENT_S)[0] and os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    run_on_host(sys.argv[1:])
