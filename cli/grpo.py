"""`ycore grpo`: train a model with group relative policy optimization (arXiv 2402.03300).

Not here: what the options mean (`options`), the checks (`plan`) and the run (`ycore.launch`).
"""

import typer
from ycore_cli import options as o


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
    from ycore_cli.resolve import resolve_config
    from ycore_cli.training import plan_and_train

    told = context.params
    resume = told["resume"] or told["resume_from"] is not None
    config = resolve_config(context, algorithm=algorithm, resume=resume)
    if told["preflight"] and not told["dry_run"] and not resume:
        from ycore_cli.preflight import fly_first

        fly_first(config)
    how = {key: told[key] for key in ("resume_from", "accept_changes", "dry_run", "json")}
    plan_and_train(config, resume=resume, **how)
