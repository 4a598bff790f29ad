"""`ycore resume RUN`: go on with a run, from its folder alone.

Not here: from which checkpoint, and what may have changed (`ycore.run_folder.resume`); the run itself (`training`).
"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from ycore_cli import options as o

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder; e.g. runs/first.")]


def resume(
    context: typer.Context,
    run: Run,
    resume_from: o.ResumeFrom = None,
    accept_changes: o.AcceptChanges = False,
    steps: o.Steps = None,
    set_: o.Set = None,
    dry_run: o.DryRun = False,
    json: o.Json = False,
) -> None:
    """Go on with a run that was stopped, from its newest whole checkpoint.

    \b
    The run continues exactly, to the bit. What would make it another run (settings, dataset,
    model, rewards) is an error that names it; --accept-changes goes on all the same.
    Fields of TRL's config of that run are options too; see docs/reliability.md.

    \b
    ycore resume runs/first
    ycore resume runs/first --resume-from 40 --learning-rate 1e-6 --accept-changes
    """
    from ycore_cli.options import config_keys
    from ycore_cli.resolve import declared_options, stored_config
    from ycore_cli.training import plan_and_train
    from ycore_cli.trl_options import trl_options
    from ycore_cli.tune import plan_and_tune

    from ycore.config.kinds import is_tuning, kind_of, tune_kind
    from ycore.config.overrides import resolve, resolve_as

    folder = Path(run).expanduser().absolute()
    if resume_from is not None and not resume_from.isdigit():
        resume_from = str(Path(resume_from).expanduser().absolute())
    stored = _trained(folder, stored_config(str(folder)))
    options = config_keys(context.params) | {"output": str(folder)}
    kind = kind_of(str(stored["algorithm"]))
    trl = trl_options(context.args, declared=declared_options(context), trl_class=kind.trl_class)
    options |= {"trl": trl} if trl else {}
    if is_tuning(stored["algorithm"]):
        tuned = resolve_as(tune_kind(stored["algorithm"]), recipe=stored, sets=set_ or (), options=options)
        plan_and_tune(
            tuned, resume=True, resume_from=resume_from, accept_changes=accept_changes, dry_run=dry_run, json=json
        )
        return
    config = resolve(recipe=stored, sets=set_ or (), options=options)
    plan_and_train(
        config, resume=True, resume_from=resume_from, accept_changes=accept_changes, dry_run=dry_run, json=json
    )


def _trained(folder: Path, stored: dict[str, Any]) -> dict[str, Any]:
    """The settings of a training run; from here on the paths in them mean what they meant when it was started."""
    from ycore.errors import RunFolderError
    from ycore.run_folder.files import read_json
    from ycore.run_folder.paths import RunFolder

    if not stored:
        raise RunFolderError(f"{folder} holds no run.json, so no run that could go on; see `ycore resume --help`")
    if stored.get("algorithm") == "eval":
        raise RunFolderError(f"{folder} holds an evaluation, which does not go on; run `ycore eval` again")
    began_in = read_json(RunFolder(folder).config).get("directory")
    if isinstance(began_in, str) and Path(began_in).is_dir():
        os.chdir(began_in)
    return stored
