"""`ycore plan`: what a run will need and take on devices that need not be here, from the model's config.json alone.

Not here: the arithmetic (`ycore.planning`), and the plan that a dry run shows (`plan`).
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from ycore_cli import options as o

from ycore.errors import ConfigError

if TYPE_CHECKING:
    from ycore.config.run import RunConfig

Devices = Annotated[
    str | None,
    typer.Option(metavar="NxKIND", help="8x80GB, 4xH100, cpu (every core here), 2xcpu; the default is this machine."),
]
Judge = Annotated[
    str | None, typer.Option(metavar="MODEL", help="A generative judge beside the policy; e.g. Qwen3-8B.")
]
PromptTokens = Annotated[str | None, typer.Option(metavar="N", help="Tokens of a prompt; 256 unless told.")]
CompletionTokens = Annotated[
    str | None, typer.Option(metavar="N", help="Mean tokens of a completion; as many as it may have, unless told.")
]
_FILLED_IN = {"dataset": "task:addition", "rewards": ["exact_answer"], "output": "runs/planned"}

Top = Annotated[str, typer.Option(metavar="N", help="Ways to show.")]


def plan(
    context: typer.Context,
    model: o.Model = None,
    devices: Devices = None,
    judge: Judge = None,
    prompts_per_step: o.PromptsPerStep = None,
    group_size: o.GroupSize = None,
    max_tokens: o.MaxTokens = None,
    prompt_tokens: PromptTokens = None,
    completion_tokens: CompletionTokens = None,
    lora: o.Lora = None,
    accelerate: o.Accelerate = None,
    dynamic_sampling: o.DynamicSampling = None,
    set_: o.Set = None,
    recipe: o.Recipe = None,
    top: Top = "5",
    json: o.Json = False,
) -> None:
    """Memory and time of a run, before it and without its devices.

    \b
    Reads the model's config.json and nothing else. Fields of TRL's GRPOConfig are options too.
    The formulas are in docs/plan.md.

    \b
    ycore plan --model Qwen/Qwen2.5-7B-Instruct --devices 8x80GB --max-tokens 1024 --prompts-per-step 64
    ycore plan --recipe quickstart --devices cpu
    """
    from ycore_cli.output import print_json, stdout_for_json
    from ycore_cli.plan_view import print_plan

    from ycore.planning.make import make_plan

    with stdout_for_json(json):
        config = _config(context)
        named, judge_tokens = _judge(config)
        made = make_plan(
            config,
            devices=devices,
            judge=judge or named,
            judge_tokens=judge_tokens,
            prompt_tokens=_number("--prompt-tokens", prompt_tokens),
            completion_tokens=_number("--completion-tokens", completion_tokens),
        )
    shown = _number("--top", top) or 1
    if json:
        print_json(made.as_json(top=shown))
    else:
        print_plan(made, top=shown)
    if not made.fitting:
        raise typer.Exit(1)


def _config(context: typer.Context) -> "RunConfig":
    """The run that is asked for; what only a real run needs, data and rewards, is filled in where not told."""
    from ycore_cli.options import config_keys
    from ycore_cli.resolve import declared_options
    from ycore_cli.trl_options import trl_options

    from ycore.config.overrides import resolve
    from ycore.config.recipes import load_recipe

    params = context.params
    options: dict[str, Any] = {**config_keys(params), "algorithm": "grpo"}
    trl = trl_options(context.args, declared=declared_options(context))
    recipe = params.get("recipe")
    base = {**_FILLED_IN, **(load_recipe(recipe) if recipe else {})}
    return resolve(recipe=base, sets=params.get("set_") or (), options=options | ({"trl": trl} if trl else {}))


def _judge(config: "RunConfig") -> tuple[str | None, int | None]:
    """The model of the run's first judge and the tokens that it may write, where the rewards name one."""
    from ycore.judging.loading import with_declarations
    from ycore.launch.scorers import scoring_models

    judges = [model for model in scoring_models(with_declarations(config)) if model.role == "judge"]
    return (judges[0].name, judges[0].max_new_tokens) if judges else (None, None)


def _number(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or int(text) == 0:
        raise ConfigError(f"{option} takes a whole number above 0; it is {text!r}; e.g. {option} 256")
    return int(text)
