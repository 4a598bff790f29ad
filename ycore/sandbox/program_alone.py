"""A place for programs where no namespaces can be made: a newly started, confined process for each program."""

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from typing import Any

from ycore.run.process_tree import kill_tree
from ycore.sandbox import Level, Limits, View
from ycore.sandbox.confine import Launch, launch_of
from ycore.sandbox.landlock import EXIT_EXCESS
from ycore.sandbox.program_place import Job, Lost, Place

_GRACE_S = 5.0


class AlonePlace(Place):
    """Starts each program through `confine`, at `landlock` and `none`. Python's start is part of its time."""

    def __init__(self, level: Level, number: int, log: Path, *, run_id: str, limits: Limits) -> None:
        self._level, self._number, self._log, self._run_id, self._limits = level, number, log, run_id, limits
        self._running: list[_Started] = []

    async def ready(self) -> int:
        return 0

    def send(self, job: Job) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        try:
            for index, (kind, fds) in enumerate(zip(job.kinds, job.fds, strict=True)):
                self._running.append(self._start(kind, fds, index))
        except OSError as error:
            self.close()
            raise Lost(str(error)) from None

    async def ended(self, job: Job) -> list[dict[str, Any]]:
        running = self._running
        try:
            async with asyncio.timeout(job.deadline_s):
                await running[0].wait()
        except TimeoutError:
            for one in running:
                one.kill("deadline")
        for one in running:
            one.kill("leader ended")
            await one.wait()
        self._running = []
        return [one.told() for one in running]

    def kill_job(self) -> None:
        for one in self._running:
            one.kill("parent")

    def close(self) -> None:
        self.kill_job()
        self._running = []

    def _start(self, kind: str, fds: Sequence[int], index: int) -> "_Started":
        report, written = os.pipe()
        try:
            launch = launch_of(
                "ycore.sandbox.program_run",
                [kind, str(written), *map(str, fds[3:])],
                level=self._level,
                view=View(),
                limits=self._limits,
                run_id=self._run_id,
                name=f"program-{self._number}-{index}",
            )
            process = Popen(
                launch.command,
                env={**launch.environment, "PYTHONHASHSEED": "0"},
                cwd=launch.working,
                stdin=fds[0],
                stdout=fds[1],
                stderr=fds[2],
                pass_fds=(written, *fds[3:]),
                start_new_session=True,
            )
        except BaseException:
            os.close(report)
            raise
        finally:
            os.close(written)
        return _Started(process, launch, report, has_stage=self._level is Level.LANDLOCK)


class _Started:
    """One program's process, and the process that confines it."""

    def __init__(self, process: "Popen[bytes]", launch: Launch, report: int, *, has_stage: bool) -> None:
        self._process, self._launch, self._report, self._has_stage = process, launch, report, has_stage
        self._reason: str | None = None
        self._began = False
        self._ended_fd = os.pidfd_open(process.pid)

    async def wait(self) -> None:
        """Until the process and all that it started are gone."""
        if self._ended_fd < 0:
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._ended_fd, ended.set)
        try:
            while not ended.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), _GRACE_S)
                if self._reason is not None and not ended.is_set():
                    kill_tree(self._process.pid)
        finally:
            loop.remove_reader(self._ended_fd)
        os.close(self._ended_fd)
        self._ended_fd = -1
        kill_tree(self._process.pid)
        self._process.wait()
        with os.fdopen(self._report, "rb") as file:
            os.set_blocking(self._report, False)
            self._began = bool(file.read())
        self._launch.clear()

    def kill(self, reason: str) -> None:
        if self._ended_fd >= 0 and self._reason is None:
            self._reason = reason
            if self._has_stage:
                os.kill(self._process.pid, signal.SIGTERM)  # it then ends all that the program left, and itself
            else:
                kill_tree(self._process.pid)

    def told(self) -> dict[str, Any]:
        status = self._process.returncode
        reason = "memory" if status == EXIT_EXCESS else self._reason
        problem = None if self._began or reason else f"the process could not be confined: exit status {status}"
        return {"status": status, "reason": reason, "peak": 0, "problem": problem}
