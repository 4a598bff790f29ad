"""The parent's side of a reward worker (`ycore.rewards.worker`): `RewardWorker` asks it for scores, `check_reward`
asks it before a run.

This is the only way in which a person's reward file is ever imported: a run's workers and the check before a run,
also under `--dry-run`, are the same process.
"""

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, FiniteFloat, TypeAdapter, ValidationError

from ycore.config.schema import RewardConfig, RewardSettings, SandboxSettings, Strict
from ycore.errors import RewardError
from ycore.foreign import LARGEST_REWARD, foreign_line
from ycore.rewards.loading import Inputs, inputs_of, load_reward, require_reward_columns
from ycore.sandbox import Confinement
from ycore.sandbox.confined_worker import (
    MAX_STARTS,
    START_TIMEOUT_S,
    CallFailed,
    ConfinedWorker,
)
from ycore.sandbox.user_code import user_code_confinement
from ycore.types import JsonObject, Record, Score

_CHECK_DEADLINE_S = 60.0
"""A file that imports trl, as TRL's examples do, takes long where a machine is busy."""

_SETTINGS = RewardSettings()
AUTO = SandboxSettings()
"""The strongest level that works here."""

MAX_BYTES = 4096
"""Bytes of a reply, besides `BYTES_PER_VALUE` for each completion."""

BYTES_PER_VALUE = 8192
"""A problem has 150 characters and a logged text 300, each of twelve bytes at most as JSON."""
_READY = TypeAdapter(list[Inputs])
_Line = Annotated[str, AfterValidator(foreign_line)]


class _Answer(Strict):
    nonce: str
    values: list[int | float | None]
    problems: list[_Line | None]
    logged: list[dict[_Line, FiniteFloat | _Line]]


def reward_confinement(
    specs: Sequence[RewardConfig],
    *,
    settings: RewardSettings,
    sandbox: SandboxSettings,
    run_folder: Path | None,
    run_id: str,
) -> Confinement:
    """Return the confinement of a worker of these rewards, which have the same `sandbox`."""
    allowed = specs[0].sandbox
    return user_code_confinement(
        [spec.reward for spec in specs],
        read=allowed.read,
        network=allowed.network,
        gpu=allowed.gpu,
        level=sandbox.level,
        memory_gib=settings.memory_gib,
        run_folder=run_folder,
        run_id=run_id,
    )


def check_reward(
    spec: RewardConfig,
    columns: Iterable[str],
    *,
    settings: RewardSettings = _SETTINGS,
    sandbox: SandboxSettings = AUTO,
    run_folder: Path | None = None,
) -> None:
    """Raise RewardError for a reward that cannot be loaded, or that needs a column which the dataset lacks.

    Args:
        spec: a rule, and not a judge or a reward model. The user's code is imported in a worker.
    """
    if spec.range is not None and spec.range[0] >= spec.range[1]:
        raise RewardError(
            f"range of reward {spec.reward!r} must be its lowest value, then its highest: {spec.range}"
        )
    if ":" in spec.reward:
        confinement = reward_confinement(
            [spec], settings=settings, sandbox=sandbox, run_folder=run_folder, run_id="check"
        )
        inputs = asyncio.run(_inputs_from_worker(spec, confinement))
    else:
        inputs = inputs_of(load_reward(spec))
    require_reward_columns(spec.reward, inputs.required, columns)


async def _inputs_from_worker(spec: RewardConfig, confinement: Confinement) -> Inputs:
    for _ in range(MAX_STARTS):
        worker = RewardWorker(
            [spec], confinement, log=None, name="check", start_timeout_s=_CHECK_DEADLINE_S
        )
        try:
            (inputs,) = await worker.start()
            return inputs
        except CallFailed as failure:
            reason = str(failure)
        finally:
            await worker.close()
        if not worker.last_line.startswith("bwrap: Can't create file"):
            break  # else a file that was to be hidden, such as one being written, was gone before it could be
    if reason.startswith("timeout"):
        reason = (
            f"importing reward {spec.reward!r} did not end within {_CHECK_DEADLINE_S:g} s; "
            "do slow work and slow imports inside the function"
        )
    elif reason.startswith("worker died"):
        ending = reason.removeprefix("worker died")
        reason = f"importing reward {spec.reward!r} ended its process{ending}; its last words: {worker.last_line}"
    raise RewardError(reason)


class RewardWorker(ConfinedWorker[list[Inputs]]):
    """One `ycore.rewards.worker`. Its first reply has the parameters of each of its rewards."""

    module = "ycore.rewards.worker"
    kind = "reward worker"

    def __init__(
        self,
        specs: Sequence[RewardConfig],
        confinement: Confinement,
        *,
        log: Path | None,
        name: str,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        super().__init__(
            {"specs": [spec.model_dump(mode="json") for spec in specs]},
            lambda ready: inputs_in(ready, count=len(specs)),
            confinement,
            log=log,
            name=name,
            start_timeout_s=start_timeout_s,
        )
        self._ranges = [spec.range for spec in specs]

    async def ask(
        self, source: int, request: JsonObject, *, count: int, deadline_s: float
    ) -> list[Score]:
        """Return one call's scores; CallFailed where it raised, or hung or ended the process (which is then gone)."""
        reply = await self.exchange(
            {**request, "source": source, "count": count},
            max_bytes=MAX_BYTES + BYTES_PER_VALUE * count,
            timeout_s=deadline_s,
        )
        return scores_in(reply, count=count, allowed_range=self._ranges[source])


# -- a worker's replies --------------------------------------------------------------------------------------------------
#
# They are read as something that anybody may have written: by their shape alone. The reward runs in the process that
# answers for it, so it can write an answer of its own. It gains no more than any reward can: a number for each completion
# of this call. Everything else masks the call's items.


def scores_in(
    reply: Record,
    *,
    count: int,
    allowed_range: tuple[float, float] | None = None,
) -> list[Score]:
    """Return the scores of one call; CallFailed where the reward failed, or where the reply is anything else.

    `allowed_range` is the lowest and the highest reward that the recipe allows.
    """
    try:
        answer = _Answer.model_validate(reply, strict=True)
        rows = list(
            zip(range(count), answer.values, answer.problems, answer.logged, strict=True)
        )
    except ValueError:
        raise CallFailed(
            f"no answer of a worker: not {count} values and {count} problems, or no numbers and texts where it logs"
        ) from None
    return [
        replace(_score(value, problem, allowed_range), logged=named)
        for _, value, problem, named in rows
    ]


def inputs_in(ready: object, *, count: int) -> list[Inputs]:
    """Return the parameters of each of `count` rewards; CallFailed for anything else."""
    try:
        inputs = _READY.validate_json(json.dumps(ready), strict=True)
    except ValidationError:
        inputs = []
    if len(inputs) != count:
        raise CallFailed("no answer of a worker: no list of parameters")
    return inputs


def _score(
    value: float | None, problem: str | None, allowed_range: tuple[float, float] | None
) -> Score:
    if value is None or problem is not None:
        return Score(None, problem=problem)
    if not -LARGEST_REWARD <= value <= LARGEST_REWARD:
        return Score(None, problem=f"too large: beyond {LARGEST_REWARD:g} either way")
    if allowed_range is not None and not allowed_range[0] <= value <= allowed_range[1]:
        return Score(
            None,
            problem=f"out of range: {value:g} is not within {allowed_range[0]:g} and {allowed_range[1]:g}",
        )
    return Score(float(value))
