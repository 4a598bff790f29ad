"""What `ycore sft`, `reward`, `dpo` and `kto` have in common: their options, once, and what they do with them.

Not here: a command's own words (`sft`, `reward`, `dpo`, `kto`), the checks (`tune_plan`) and the run (`ycore.launch`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from ycore_cli import options as o

if TYPE_CHECKING:
    from ycore.config.tune import Method, TuneConfig


def tuning_command(method: "Method", words: str) -> Callable[..., None]:
    """A command of that name; `words` are what its `--help` says."""

    def command(
        context: typer.Context,
        model: o.Model = None,
        dataset: o.Examples = None,
        split: o.Split = None,
        eval_dataset: o.EvalDataset = None,
        eval_split: o.EvalSplit = None,
        held_out: o.HeldOut = None,
        limit: o.Limit = None,
        trust_remote_code: o.TrustRemoteCode = None,
        batch_size: o.BatchSize = None,
        epochs: o.Epochs = None,
        steps: o.Steps = None,
        lora: o.Lora = None,
        processes: o.Processes = None,
        accelerate: o.Accelerate = None,
        merge: o.Merge = None,
        seed: o.Seed = None,
        set_: o.Set = None,
        recipe: o.Recipe = None,
        output: o.Output = None,
        dry_run: o.DryRun = False,
        resume: o.Resume = False,
        resume_from: o.ResumeFrom = None,
        accept_changes: o.AcceptChanges = False,
        json: o.Json = False,
    ) -> None:
        from ycore_cli.resolve import resolve_tuning

        goes_on = resume or resume_from is not None
        config = resolve_tuning(context, method=method, resume=goes_on)
        plan_and_tune(
            config, resume=goes_on, resume_from=resume_from, accept_changes=accept_changes, dry_run=dry_run, json=json
        )

    command.__doc__ = words
    return command


def plan_and_tune(
    config: "TuneConfig", *, resume: bool, resume_from: str | None, accept_changes: bool, dry_run: bool, json: bool
) -> None:
    """Check, show the plan, and unless it is a dry run train in the foreground."""
    from ycore_cli.output import print_json, print_table, stdout_for_json
    from ycore_cli.training import how_to_resume
    from ycore_cli.tune_plan import closing_rows, tune_plan, tune_rows

    with stdout_for_json(json):
        how = how_to_resume(config.output, resume=resume, resume_from=resume_from, accept_changes=accept_changes)
        result = tune_plan(config, resume=resume, how=how)
        if not (json and dry_run):
            print_table(tune_rows(result, resume=resume))
        if not dry_run:
            result = _tune(config, num_steps=result["batch"]["steps"], resume=resume, how=how)
    if json:
        print_json(result)
    elif dry_run:
        print("Nothing was started; leave out --dry-run to train.")
    else:
        print_table(closing_rows(config, result))


def _tune(config: "TuneConfig", *, num_steps: int, resume: bool, how: Any) -> dict[str, Any]:
    from ycore.launch import tune
    from ycore.run_folder.paths import RunFolder
    from ycore.run_folder.resume import settle

    if resume:
        settle(RunFolder(Path(config.output)), config, how, say=print)
    return tune(config, num_steps=num_steps, resume=resume)
