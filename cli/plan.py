"""`ycore plan`: what a run will need and take on devices that need not be here, from the model's config.json alone.

A plan as a person reads it: the ways ranked, the memory of the best by role and phase, its seconds by phase.

Not here: the arithmetic (`ycore.plan`), and the plan that a dry run shows (`plan`).
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from ycore_cli import options as o

from ycore.errors import ConfigError
from ycore.plan.devices import GIB, in_words
from ycore.plan.phases import Forecast
from ycore.plan.search import Plan, why_not

if TYPE_CHECKING:
    from ycore.config.schema import RunConfig

_WAYS_THAT_DO_NOT = 2


def print_plan(made: Plan, *, top: int) -> None:
    """To standard output."""
    for line in plan_lines(made, top=top):
        print(line)


def plan_lines(made: Plan, *, top: int) -> Iterator[str]:
    """The lines, one at a time."""
    yield from _head(made)
    yield ""
    if made.fitting:
        yield from _ranking(made.fitting[:top])
        yield ""
        yield from _memory(made.fitting[0])
        yield ""
        yield from _times(made.fitting[0])
    else:
        yield "nothing fits"
        for one in made.others[:top]:
            yield f"  {one.way.in_words}: {why_not(one)}"
        yield from _nearest(made)
    if made.fitting and made.others:
        yield ""
        yield "does not fit"
        for one in made.others[:_WAYS_THAT_DO_NOT]:
            yield f"  {one.way.in_words}: {why_not(one)}"


def _head(made: Plan) -> Iterator[str]:
    job, device = made.job, made.fleet.device
    trained = "every weight" if job.lora_rank is None else f"LoRA r={job.lora_rank}"
    yield f"model    {job.policy.name}: {job.policy.num_params / 1e9:.2f} billion parameters, {trained}"
    if job.judge is not None:
        yield f"judge    {job.judge.name}: {job.judge.num_params / 1e9:.2f} billion parameters"
    speed = in_words(device) if device.on_cpu else device.source
    yield f"devices  {made.fleet.in_words}: {device.memory_bytes / GIB:.0f} GiB; {speed}"
    yield (
        f"step     {job.prompts_per_step} prompts of {job.prompt_tokens} tokens x {job.group_size} completions "
        f"of {job.completion_tokens}, {job.max_tokens} at most; {job.draws:g} groups for each kept"
    )


def _ranking(ways: Sequence[Forecast]) -> Iterator[str]:
    yield f"{'step':>9}  {'tokens/s':>9}  {'fullest phase':<28}  way"
    for one in ways:
        phase, peak = one.peak
        full = f"{peak / GIB:.1f} of {one.capacity / GIB:.1f} GiB, {phase}"
        yield f"{one.step_s:>7.1f} s  {one.tokens_per_s:>9,.0f}  {full:<28}  {one.way.in_words}"


def _memory(one: Forecast) -> Iterator[str]:
    roles = list(dict.fromkeys(role for phase in one.phases.values() for role in phase))
    where = "all processes of a role" if "all at once" in one.phases else "one device"
    yield f"memory of the first, GiB of {where}"
    yield "  " + f"{'phase':<18}" + "".join(f"{role:>10}" for role in roles) + f"{'all':>10}"
    for phase, sizes in one.phases.items():
        cells = "".join(f"{sizes.get(role, 0) / GIB:>10.1f}" for role in roles)
        yield f"  {phase:<18}{cells}{sum(sizes.values()) / GIB:>10.1f}"
    parts = ", ".join(f"{part} {size / GIB:.2f}" for part, size in one.trainer.items() if size >= 0.005 * GIB)
    yield f"  trainer of a rank: {parts}"
    for role, engine in one.engines.items():
        yield (
            f"  {role} engine: weights {engine.weights / GIB:.2f}, cache {engine.kv_cache / GIB:.2f} "
            f"for {engine.at_once} sequences at once, workspace {engine.workspace / GIB:.2f}"
        )


def _times(one: Forecast) -> Iterator[str]:
    yield "seconds of a step of the first"
    yield "  " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in one.seconds.items())


def _nearest(made: Plan) -> Iterator[str]:
    if not made.mends:
        yield "no change of batch, length, LoRA or devices, nor two of them, nor a smaller model would fit"
        return
    yield "what would fit, nearest first"
    for mend in made.mends:
        yield f"  {mend.change}: {mend.forecast.step_s:.1f} s a step, {mend.forecast.way.in_words}"


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

    from ycore.plan.search import make_plan

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
    from ycore_cli.configuration import declared_options
    from ycore_cli.options import config_keys, trl_options

    from ycore.config.recipe_files import load_recipe
    from ycore.config.resolve import resolve

    params = context.params
    options: dict[str, Any] = {**config_keys(params), "algorithm": "grpo"}
    trl = trl_options(context.args, declared=declared_options(context))
    recipe = params.get("recipe")
    base = {**_FILLED_IN, **(load_recipe(recipe) if recipe else {})}
    return resolve(recipe=base, sets=params.get("set_") or (), options=options | ({"trl": trl} if trl else {}))


def _judge(config: "RunConfig") -> tuple[str | None, int | None]:
    """The model of the run's first judge and the tokens that it may write, where the rewards name one."""
    from ycore.judge.sources import with_declarations
    from ycore.launch.scoring_models import scoring_models

    judges = [model for model in scoring_models(with_declarations(config)) if model.role == "judge"]
    return (judges[0].name, judges[0].max_new_tokens) if judges else (None, None)


def _number(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or int(text) == 0:
        raise ConfigError(f"{option} takes a whole number above 0; it is {text!r}; e.g. {option} 256")
    return int(text)
