"""`ycore eval`: measure a model on held-out prompts, with the engines and rewards that training uses.

Not here: the measuring (`ycore.launch`) and pass@k itself (`ycore.telemetry.passk`).
"""

from collections.abc import Mapping
from typing import Any

import typer
from ycore_cli import options as o


def evaluate(
    context: typer.Context,
    model: o.Model = None,
    dataset: o.Dataset = None,
    reward: o.Reward = None,
    split: o.Split = None,
    prompt_column: o.PromptColumn = None,
    answer_column: o.AnswerColumn = None,
    system_prompt: o.SystemPrompt = None,
    trust_remote_code: o.TrustRemoteCode = None,
    num_samples: o.NumSamples = None,
    limit: o.Limit = None,
    max_tokens: o.MaxTokens = None,
    engine: o.EngineKind = None,
    seed: o.Seed = None,
    set_: o.Set = None,
    recipe: o.Recipe = None,
    output: o.Output = None,
    dry_run: o.DryRun = False,
    json: o.Json = False,
) -> None:
    """Measure a model: mean reward, pass@1, pass@k.

    \b
    pass@k is the unbiased estimate of arXiv 2107.03374.
    Sampling fields of TRL's GRPOConfig are options too: --temperature 0.7, --top-p 0.95.
    All of them are in docs/options.md.

    \b
    ycore eval --model smollm2-135m --dataset 'task:addition?digits=1' --reward exact_answer
    ycore eval --model runs/first/model --dataset openai/gsm8k:main --split test \\
               --reward math --num-samples 8 --limit 200
    """
    from ycore_cli.output import print_json, print_table, stdout_for_json
    from ycore_cli.plan import checked_plan, plan_rows
    from ycore_cli.resolve import resolve_config, unused_folder

    with stdout_for_json(json):
        config = resolve_config(context, algorithm="eval")
        if output is None:
            config = config.model_copy(update={"output": unused_folder(config.output)})
        result = checked_plan(config)
        if not (json and dry_run):
            print_table(plan_rows(result))
        if not dry_run:
            from ycore.launch import evaluate as measure

            result = measure(config)
    if json:
        print_json(result)
    elif dry_run:
        print("Nothing was started; leave out --dry-run to measure.")
    else:
        print_table(_rows(result))


def _rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    from ycore_cli.output import number

    return [(key, number(value)) for key, value in result.items() if isinstance(value, int | float | str)]
