"""The parent's side of a reward worker (`ycore.rewards.worker`): `RewardWorker` asks it for scores, `check_reward`
asks it before a run.

This is the only way in which a person's reward file is ever imported: a run's workers and the check before a run,
also under `--dry-run`, are the same process.
"""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ycore.config.schema import RewardConfig, RewardSettings, SandboxSettings
from ycore.errors import RewardError
from ycore.rewards.loading import Inputs, inputs_of, load_reward, require_reward_columns
from ycore.rewards.replies import BYTES_PER_VALUE, MAX_BYTES, inputs_in, scores_in
from ycore.sandbox import Confinement
from ycore.sandbox.confined_worker import (
    MAX_STARTS,
    START_TIMEOUT_S,
    CallFailed,
    ConfinedWorker,
)
from ycore.sandbox.user_code import user_code_confinement
from ycore.types import Score

_CHECK_DEADLINE_S = 60.0
"""A file that imports trl, as TRL's examples do, takes long where a machine is busy."""

_SETTINGS = RewardSettings()
AUTO = SandboxSettings()
"""The strongest level that works here."""


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
    deadline_s: float = _CHECK_DEADLINE_S,
) -> None:
    """Raise RewardError for a reward that cannot be loaded, or that needs a column which the dataset lacks.

    Args:
        spec: a rule, and not a judge or a reward model.
        deadline_s: the limit of importing the user's code, which happens in a worker.
    """
    if spec.range is not None and spec.range[0] >= spec.range[1]:
        raise RewardError(
            f"range of reward {spec.reward!r} must be its lowest value, then its highest: {spec.range}"
        )
    if ":" in spec.reward:
        confinement = reward_confinement(
            [spec], settings=settings, sandbox=sandbox, run_folder=run_folder, run_id="check"
        )
        inputs = asyncio.run(_inputs_from_worker(spec, confinement, deadline_s))
        require_reward_columns(spec.reward, inputs.required, columns)
    else:
        require_reward_columns(spec.reward, inputs_of(load_reward(spec)).required, columns)


async def _inputs_from_worker(
    spec: RewardConfig, confinement: Confinement, deadline_s: float
) -> Inputs:
    for _ in range(MAX_STARTS):
        worker = RewardWorker(
            [spec], confinement, log=None, name="check", start_timeout_s=deadline_s
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
            f"importing reward {spec.reward!r} did not end within {deadline_s:g} s; "
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
            lambda line, nonce: inputs_in(line, nonce=nonce, count=len(specs)),
            confinement,
            log=log,
            name=name,
            start_timeout_s=start_timeout_s,
        )
        self._ranges = [spec.range for spec in specs]

    async def ask(
        self, source: int, request: dict[str, Any], *, count: int, deadline_s: float
    ) -> list[Score]:
        """Return one call's scores; CallFailed where it raised, or hung or ended the process (which is then gone)."""
        return await self.exchange(
            {**request, "source": source, "count": count},
            lambda line, nonce: scores_in(
                line, nonce=nonce, count=count, allowed_range=self._ranges[source]
            ),
            max_bytes=MAX_BYTES + BYTES_PER_VALUE * count,
            timeout_s=deadline_s,
        )
