"""What the commands that train have in common: the plan, from where a run goes on, the run, its closing words.

Not here: their options (`options`), the checks (`plan`) and the run (`ycore.launch`).
"""

from pathlib import Path
from typing import Any

from ycore.config.run import RunConfig
from ycore.errors import ConfigError
from ycore.run_folder.paths import RunFolder
from ycore.run_folder.prepare import Resume


def plan_and_train(
    config: RunConfig, *, resume: bool, resume_from: str | None, accept_changes: bool, dry_run: bool, json: bool
) -> None:
    """Check, show the plan, and unless it is a dry run train in the foreground."""
    from ycore_cli.output import print_json, print_table, stdout_for_json
    from ycore_cli.plan import checked_plan, plan_rows

    with stdout_for_json(json):
        how = how_to_resume(config.output, resume=resume, resume_from=resume_from, accept_changes=accept_changes)
        result = checked_plan(config, resume=resume, how=how)
        _check_durability(config, how)
        if not (json and dry_run):
            print_table(plan_rows(result, resume=resume))
        if not dry_run:
            result = _train(config, resume=resume, how=how)
    if json:
        print_json(result)
    elif dry_run:
        print("Nothing was started; leave out --dry-run to train.")
    else:
        from ycore_cli.closing import print_closing

        print_closing(config)


def how_to_resume(output: str, *, resume: bool, resume_from: str | None, accept_changes: bool) -> Resume:
    """From which checkpoint of the folder `output` a run goes on."""
    from ycore.run_folder.resume import parse_checkpoint

    if accept_changes and not resume:
        raise ConfigError("--accept-changes is about a run that goes on; say --resume too, or leave it out")
    step = None if resume_from is None else parse_checkpoint(resume_from, RunFolder(Path(output)))
    return Resume(step=step, accept_changes=accept_changes)


def _check_durability(config: RunConfig, how: Resume) -> None:
    """What can be refused of checkpoints and journals before anything is started."""
    from ycore.run_folder.checkpoints import FEWEST
    from ycore.run_folder.resume import check_checkpoint
    from ycore.run_folder.rounds import check_replay

    limit = config.trl.get("save_total_limit")
    if limit is not None and limit < FEWEST:
        raise ConfigError(
            f"save_total_limit must be {FEWEST} or more, so that one checkpoint is whole where another is damaged; "
            f"it is {limit}"
        )
    if how.step is not None:
        check_checkpoint(RunFolder(Path(config.output)), how.step)
    if config.replay is not None:
        run = RunFolder(Path(config.replay).expanduser())
        check_replay(run.root, run.journal)


def _train(config: RunConfig, *, resume: bool, how: Resume) -> dict[str, Any]:
    from ycore.launch import run
    from ycore.run_folder.resume import settle

    if resume:
        settle(RunFolder(Path(config.output)), config, how, say=print)
    return run(config, resume=resume)
