"""`ycore rloo`: REINFORCE with a leave-one-out baseline (arXiv 2402.14740), by GRPO's trainer, engines and controller.

Not here: what it sets (the preset `rloo`), what the options mean (`options`), the checks and the run (`training`).
"""

import typer
from ycore_cli import options as o


def rloo(
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
    engine: o.EngineKind = None,
    dynamic_sampling: o.DynamicSampling = None,
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
    """Train a model on a reward with RLOO.

    \b
    It is `ycore grpo --preset rloo`, and takes every field of TRL's GRPOConfig; what differs from
    `trl rloo` is in docs/algorithms.md.

    \b
    ycore rloo --recipe quickstart
    ycore rloo --model Qwen/Qwen2.5-0.5B-Instruct --dataset train.jsonl \\
               --reward rewards.py:score --output runs/first --steps 200
    """
    from ycore_cli.resolve import resolve_config
    from ycore_cli.training import plan_and_train

    goes_on = resume or resume_from is not None
    context.params["preset"] = "rloo"
    config = resolve_config(context, algorithm="rloo", resume=goes_on)
    plan_and_train(
        config, resume=goes_on, resume_from=resume_from, accept_changes=accept_changes, dry_run=dry_run, json=json
    )
