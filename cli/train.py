"""What the commands that train have in common: the plan, from where a run goes on, the run, its closing words.

`ycore grpo`: train a model with group relative policy optimization (arXiv 2402.03300).

`ycore rloo`: REINFORCE with a leave-one-out baseline (arXiv 2402.14740), by GRPO's trainer, engines and controller.

Not here: their options (`options`), the checks (`plan`) and the run (`ycore.launch`).
"""

from pathlib import Path
from typing import Any

import typer
from ycore_cli import options as o
from ycore_cli.options import takes_options_of

from ycore.config.schema import RunConfig
from ycore.errors import ConfigError
from ycore.run.claim import Resume
from ycore.run.paths import RunFolder


def plan_and_train(
    config: RunConfig, *, resume: bool, resume_from: str | None, accept_changes: bool, dry_run: bool, json: bool
) -> None:
    """Check, show the plan, and unless it is a dry run train in the foreground."""
    from ycore_cli.checks import checked_plan, plan_rows
    from ycore_cli.output import print_json, print_table, stdout_for_json

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
        from ycore_cli.output import print_closing

        print_closing(config)


def how_to_resume(output: str, *, resume: bool, resume_from: str | None, accept_changes: bool) -> Resume:
    """From which checkpoint of the folder `output` a run goes on."""
    from ycore.run.resuming import parse_checkpoint

    if accept_changes and not resume:
        raise ConfigError("--accept-changes is about a run that goes on; say --resume too, or leave it out")
    step = None if resume_from is None else parse_checkpoint(resume_from, RunFolder(Path(output)))
    return Resume(step=step, accept_changes=accept_changes)


def _check_durability(config: RunConfig, how: Resume) -> None:
    """What can be refused of checkpoints and journals before anything is started."""
    from ycore.run.checkpoints import MIN_KEPT
    from ycore.run.resuming import check_checkpoint, check_replay

    limit = config.trl.get("save_total_limit")
    if limit is not None and limit < MIN_KEPT:
        raise ConfigError(
            f"save_total_limit must be {MIN_KEPT} or more, so that one checkpoint is whole where another is damaged; "
            f"it is {limit}"
        )
    if how.step is not None:
        check_checkpoint(RunFolder(Path(config.output)), how.step)
    if config.replay is not None:
        run = RunFolder(Path(config.replay).expanduser())
        check_replay(run.root, run.journal)


def _train(config: RunConfig, *, resume: bool, how: Resume) -> dict[str, Any]:
    from ycore.launch import run
    from ycore.run.resuming import settle

    if resume:
        settle(RunFolder(Path(config.output)), config, how, say=print)
    return run(config, resume=resume)


def grpo(
    context: typer.Context,
    model: o.Model = None,
    dataset: o.Dataset = None,
    reward: o.Reward = None,
    prompt_column: o.PromptColumn = None,
    answer_column: o.AnswerColumn = None,
    system_prompt: o.SystemPrompt = None,
    trust_remote_code: o.TrustRemoteCode = None,
    prompts_per_step: o.PromptsPerStep = None,
    group_size: o.GroupSize = None,
    max_tokens: o.MaxTokens = None,
    steps: o.Steps = None,
    lora: o.Lora = None,
    preset: o.Preset = None,
    advantage: o.Advantage = None,
    divergence: o.Divergence = None,
    engine: o.EngineKind = None,
    dynamic_sampling: o.DynamicSampling = None,
    placement: o.Placement = None,
    processes: o.Processes = None,
    accelerate: o.Accelerate = None,
    merge: o.Merge = None,
    wandb_project: o.WandbProject = None,
    seed: o.Seed = None,
    set_: o.Set = None,
    recipe: o.Recipe = None,
    output: o.Output = None,
    preflight: o.Preflight = False,
    dry_run: o.DryRun = False,
    resume: o.Resume = False,
    resume_from: o.ResumeFrom = None,
    restarts: o.Restarts = None,
    accept_changes: o.AcceptChanges = False,
    keep_journal: o.KeepJournal = None,
    replay: o.Replay = None,
    json: o.Json = False,
) -> None:
    """Train a model on a reward with GRPO.

    \b
    Any field of TRL's GRPOConfig is an option too, e.g. --learning-rate 1e-5; see docs/options.md.

    \b
    ycore grpo --recipe quickstart
    ycore grpo --model Qwen/Qwen2.5-0.5B-Instruct --dataset train.jsonl \\
               --reward rewards.py:score --output runs/first --steps 200
    """
    train_on_rewards(context, algorithm="grpo")


def train_on_rewards(context: typer.Context, *, algorithm: str) -> None:
    """What every command does that learns from rewards."""
    from ycore_cli.configuration import resolve_config

    told = context.params
    resume = told["resume"] or told["resume_from"] is not None
    config = resolve_config(context, algorithm=algorithm, resume=resume)
    if told["preflight"] and not told["dry_run"] and not resume:
        from ycore_cli.measure import fly_first

        fly_first(config)
    how = {key: told[key] for key in ("resume_from", "accept_changes", "dry_run", "json")}
    plan_and_train(config, resume=resume, **how)


@takes_options_of(grpo, without=("preset", "advantage"))
def rloo(context: typer.Context, **options: Any) -> None:
    """Train a model on a reward with RLOO.

    \b
    It is `ycore grpo --preset rloo`, and takes every field of TRL's GRPOConfig; what differs from
    `trl rloo` is in docs/algorithms.md.

    \b
    ycore rloo --recipe quickstart
    ycore rloo --model Qwen/Qwen2.5-0.5B-Instruct --dataset train.jsonl \\
               --reward rewards.py:score --output runs/first --steps 200
    """
    context.params["preset"] = "rloo"
    train_on_rewards(context, algorithm="rloo")
