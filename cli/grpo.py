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
    from ycore_cli.output import print_json, print_table, stdout_for_json
    from ycore_cli.plan import checked_plan, plan_rows
    from ycore_cli.resolve import resolve_config

    with stdout_for_json(json):
        config = resolve_config(context, algorithm="grpo", resume=resume)
        result = checked_plan(config, resume=resume)
        if not (json and dry_run):
            print_table(plan_rows(result, resume=resume))
        if not dry_run:
            from ycore.launch import run

            result = run(config, resume=resume)
    if json:
        print_json(result)
    elif dry_run:
        print("Nothing was started; leave out --dry-run to train.")
    else:
        from ycore_cli.closing import print_closing

        print_closing(config)
