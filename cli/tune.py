"""`ycore resume RUN`: go on with a run, from its folder alone.

What `ycore sft`, `reward`, `dpo` and `kto` have in common: their options, once, and what they do with them.

`ycore sft`: supervised fine-tuning on given answers. Not here: its options and what it does with them (`tune`).

`ycore reward`: a reward model from preferences. Not here: its options and what it does with them (`tune`).

`ycore dpo`: direct preference optimization. Not here: its options and what it does with them (`tune`).

`ycore kto`: learning from good and bad answers. Not here: its options and what it does with them (`tune`).

Not here: from which checkpoint, and what may have changed (`ycore.run.resuming`); the run itself (`training`).
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from ycore_cli import options as o

if TYPE_CHECKING:
    from ycore.config.schema import Method, TuneConfig


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
        from ycore_cli.configuration import resolve_tuning

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
    from ycore_cli.checks import closing_rows, tune_plan, tune_rows
    from ycore_cli.output import print_json, print_table, stdout_for_json
    from ycore_cli.train import how_to_resume

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
    from ycore.run.paths import RunFolder
    from ycore.run.resuming import settle

    if resume:
        settle(RunFolder(Path(config.output)), config, how, say=print)
    return tune(config, num_steps=num_steps, resume=resume)


sft = tuning_command(
    "sft",
    """Fine-tune a model on given answers.

    \b
    Columns: messages; or prompt and completion (question and answer, instruction and output);
    or text. Any field of TRL's SFTConfig is an option too, e.g. --max-length 2048.

    \b
    ycore sft --recipe sft-chat
    ycore sft --model smollm2-135m --dataset chats.jsonl --output runs/sft
    """,
)


reward = tuning_command(
    "reward",
    """Train a reward model on pairs of answers, the better one known.

    \b
    Columns: chosen and rejected, with or without prompt. Dialogues written as one text,
    Human: ... Assistant: ..., are taken apart. The summary has the accuracy on held-out pairs.
    Any field of TRL's RewardConfig is an option too, e.g. --center-rewards-coefficient 0.01.

    \b
    ycore reward --recipe hh-reward
    ycore reward --model smollm2-135m --dataset pairs.jsonl --output runs/rm
    """,
)


dpo = tuning_command(
    "dpo",
    """Train a model on pairs of answers, the better one known, without a reward model.

    \b
    Columns: chosen and rejected, with or without prompt. Dialogues written as one text,
    Human: ... Assistant: ..., are taken apart.
    Any field of TRL's DPOConfig is an option too, e.g. --loss-type ipo, --beta 0.05.

    \b
    ycore dpo --recipe hh-dpo
    ycore dpo --model runs/sft/model --dataset pairs.jsonl --output runs/dpo
    """,
)


kto = tuning_command(
    "kto",
    """Train a model on answers that are good or bad, each for itself.

    \b
    Columns: prompt, completion and label (true or false); or those of pairs, which are split in two.
    Any field of TRL's KTOConfig is an option too, e.g. --undesirable-weight 1.5.

    \b
    ycore kto --model smollm2-135m --dataset labelled.jsonl --output runs/kto
    ycore kto --model runs/sft/model --dataset pairs.jsonl --dry-run
    """,
)


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
    from ycore_cli.configuration import declared_options, stored_config
    from ycore_cli.options import config_keys, trl_options
    from ycore_cli.train import plan_and_train

    from ycore.config.algorithms import is_tuning, kind_of, tune_kind
    from ycore.config.resolve import resolve, resolve_as

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
    from ycore.run.files import read_json
    from ycore.run.paths import RunFolder

    if not stored:
        raise RunFolderError(f"{folder} holds no run.json, so no run that could go on; see `ycore resume --help`")
    if stored.get("algorithm") == "eval":
        raise RunFolderError(f"{folder} holds an evaluation, which does not go on; run `ycore eval` again")
    began_in = read_json(RunFolder(folder).config).get("directory")
    if isinstance(began_in, str) and Path(began_in).is_dir():
        os.chdir(began_in)
    return stored
