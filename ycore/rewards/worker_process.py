"""WorkerProcess: one `ycore.rewards.worker` seen from its parent: started when needed, asked with a deadline, killed.

Not here: which items to ask it for, and what a failure costs (`pool`).
"""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from ycore.config.run import RewardConfig
from ycore.errors import RewardError
from ycore.rewards.descendants import kill_group_and_below
from ycore.rewards.environment import reward_environment
from ycore.rewards.inputs import Inputs

START_TIMEOUT_S = 120.0
MAX_STARTS = 3
_REAP_TIMEOUT_S = 5.0
_LONGEST_LINE = 64 * 2**20


class CallFailed(Exception):
    """One call gave no list of rewards; the message is the problem that its items will carry."""


class WorkerProcess:
    """Holds no process until `ready`, which replaces one that is gone; none any more after `close`."""

    def __init__(
        self,
        specs: Sequence[RewardConfig],
        *,
        deadline_s: float,
        log: Path,
        run_id: str,
        run_as: Literal["auto", "same"] = "auto",
    ) -> None:
        self._specs = [spec.model_dump(mode="json") for spec in specs]
        self._deadline_s = deadline_s
        self._log = log
        self._run_id = run_id
        self._run_as = run_as
        self._process: Process | None = None
        self._killed: Process | None = None
        self._is_closed = False
        self._num_calls = 0
        self._inputs: list[Inputs] = []
        self._was_ready = False
        self.restarts = 0
        """How often a process took the place of one that had been ready."""

    async def ready(self) -> list[Inputs]:
        """Have a process with the rewards loaded; what each asks for. RewardError after 3 failed starts in a row."""
        if self._process is not None and self._process.returncode is None:
            return self._inputs
        self._kill()
        reason = ""
        for attempt in range(MAX_STARTS):
            try:
                await asyncio.sleep(0.2 * attempt)
                self._inputs = await self._launch()
                self.restarts += self._was_ready
                self._was_ready = True
                return self._inputs
            except CallFailed as failure:
                reason = str(failure)
        raise RewardError(
            f"a reward worker did not start in {MAX_STARTS} attempts: {reason}; its output is in {self._log}"
        )

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One call's answer; CallFailed where it raised, or hung or ended the process (which is then gone)."""
        if self._process is None:
            raise RuntimeError("ask a reward worker only when it is ready")
        self._num_calls += 1
        reply = await self._exchange(self._process, {**request, "id": self._num_calls}, self._deadline_s)
        if "failed" in reply:
            raise CallFailed(reply["failed"])
        return reply

    async def close(self) -> None:
        """Kill the process and all that it started, and wait until it is gone."""
        self._is_closed = True
        self._kill()
        await self._reap()

    async def _launch(self) -> list[Inputs]:
        await self._reap()
        if self._is_closed:
            raise RuntimeError("this reward worker is closed")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "ycore.rewards.worker"),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env=reward_environment(self._run_id),
                start_new_session=True,
                limit=_LONGEST_LINE,
            )
        if self._is_closed:  # closed while the process was being made
            self._kill()
            raise RuntimeError("this reward worker is closed")
        reply = await self._exchange(
            process, {"specs": self._specs, "run_as": self._run_as, "id": None}, START_TIMEOUT_S
        )
        if "error" in reply:
            self._kill()
            raise CallFailed(reply["error"])
        return [Inputs(**inputs) for inputs in reply["ready"]]

    async def _exchange(self, process: Process, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one line, read the line that answers it. A process that did not answer is never asked again."""
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._send_and_read(process, message)
            answered = True
        except TimeoutError:
            raise CallFailed(f"timeout after {timeout_s:g} s") from None
        except (ConnectionError, asyncio.IncompleteReadError):
            raise CallFailed(f"worker died ({await self._how_it_ended(process)})") from None
        except (ValueError, asyncio.LimitOverrunError) as error:
            raise CallFailed(f"no answer of a worker: {error}") from None
        finally:
            if not answered:
                self._kill()
        return reply

    async def _send_and_read(self, process: Process, message: dict[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(message).encode() + b"\n")
        await process.stdin.drain()
        while True:
            reply = json.loads(await process.stdout.readuntil(b"\n"))
            if isinstance(reply, dict) and reply.get("id") == message["id"]:
                return reply

    async def _how_it_ended(self, process: Process) -> str:
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await process.wait()
        if process.returncode is None:
            return "it closed its output"
        return f"signal {-process.returncode}" if process.returncode < 0 else f"exit status {process.returncode}"

    def _kill(self) -> None:
        if self._process is None:
            return
        kill_group_and_below(self._process.pid)
        self._process, self._killed = None, self._process

    async def _reap(self) -> None:
        if self._killed is not None:
            # Bounded: what a reward detached from its group may hold the pipes that `wait` also waits for.
            with suppress(TimeoutError):
                async with asyncio.timeout(_REAP_TIMEOUT_S):
                    await self._killed.wait()
            self._killed = None
