"""Check and run a training run in the foreground: what every command that trains and every function calls."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ycore.api.checks import checked_plan
from ycore.config.schema import AnyConfig, RunConfig
from ycore.errors import ConfigError
from ycore.launch.launcher import TRAINER, run_worker
from ycore.run.checkpoints import MIN_KEPT
from ycore.run.claim import Resume
from ycore.run.paths import RunFolder
from ycore.run.resuming import check_checkpoint, check_replay, check_world, settle


def training_plan(config: AnyConfig, *, resume: bool, how: Resume) -> dict[str, Any]:
    """Plan a training run as `checked_plan` does; UserError also where a checkpoint or journal cannot be used."""
    plan = checked_plan(config, resume=resume, how=how)
    folder = RunFolder(Path(config.output))
    if how.step is not None:
        check_checkpoint(folder, how.step)
    if resume:
        check_world(folder, how, world=plan["ranks"]["world"])
    if isinstance(config, RunConfig):
        _check_kept_rounds(config)
    return plan


def _check_kept_rounds(config: RunConfig) -> None:
    limit = config.trl.get("save_total_limit")
    if limit is not None and limit < MIN_KEPT:
        raise ConfigError(
            f"save_total_limit must be {MIN_KEPT} or more, so that one checkpoint is whole where another is damaged; "
            f"it is {limit}"
        )
    if config.replay is not None:
        replayed = RunFolder(Path(config.replay).expanduser())
        check_replay(replayed.root, replayed.journal)


def run_training(
    config: AnyConfig, plan: Mapping[str, Any], *, resume: bool, how: Resume
) -> dict[str, Any]:
    """Train as the `training_plan` says, and return the run's summary."""
    if resume:
        settle(RunFolder(Path(config.output)), config, how, world=plan["ranks"]["world"], say=print)
    return run_worker(
        TRAINER,
        config,
        resume=resume,
        num_steps=plan["trl"]["max_steps"],
        planned=plan.get("forecast"),
    )
