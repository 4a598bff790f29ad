"""`ycore plan`: the memory and time of a run, from the model's config.json alone and without its devices.

From Python it is `plan_run`, beside `dry_run`, which is `--dry-run` of every command.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer
from ycore_cli import options as o
from ycore_cli.output import aligned, print_json, print_line, stdout_for_json

from ycore.errors import ConfigError

if TYPE_CHECKING:
    from ycore_cli.from_python import Reward, Rows

    from ycore.config.schema import RunConfig
    from ycore.plan.devices import Fleet
    from ycore.plan.planner import Plan
    from ycore.plan.step_forecast import StepForecast

Top = Annotated[str, typer.Option(metavar="N", help="Ways to show.")]

_GIB = 2**30
_SCORER = {"judge": "judge", "reward_model": "scorer", "teacher": "teacher"}
_EXAMPLE: dict[str, Any] = {
    "dataset": "task:addition",
    "rewards": ["exact_answer"],
    "output": "runs/planned",
}


@dataclass(frozen=True, slots=True, repr=False)
class Planned:
    """What a command would print: as text when it is shown or printed, and in `values` as `--json` has it."""

    values: Mapping[str, Any]
    lines: Sequence[str]

    def __repr__(self) -> str:
        return "\n".join(self.lines)


def plan(
    context: typer.Context,
    model: o.Model = None,
    devices: o.Devices = None,
    judge: o.Judge = None,
    prompts_per_step: o.PromptsPerStep = None,
    group_size: o.GroupSize = None,
    max_tokens: o.MaxTokens = None,
    prompt_tokens: o.PromptTokens = None,
    completion_tokens: o.CompletionTokens = None,
    lora: o.Lora = None,
    quantize: o.Quantize = None,
    accelerate: o.Accelerate = None,
    dynamic_sampling: o.DynamicSampling = None,
    set_: o.Set = None,
    recipe: o.Recipe = None,
    top: Top = "5",
    json: o.Json = False,
) -> None:
    """Memory and time of a run, before it starts, on any devices.

    \b
    Reads the model's config.json alone, see docs/plan.md. Fields of TRL's GRPOConfig are options too.

    \b
    ycore plan --model Qwen/Qwen2.5-7B-Instruct --devices 8x80GB --max-tokens 1024 --prompts-per-step 64
    ycore plan --recipe quickstart --devices cpu
    """
    with stdout_for_json(json):
        made = planned(
            sizes_of(context, recipe),
            devices=devices,
            judge=judge,
            prompt_tokens=None
            if prompt_tokens is None
            else whole_number("--prompt-tokens", prompt_tokens),
            completion_tokens=None
            if completion_tokens is None
            else whole_number("--completion-tokens", completion_tokens),
        )
    values, lines = shown(made, recipe, top=whole_number("--top", top))
    if json:
        print_json(values)
    else:
        for line in lines:
            print_line(line)
    if not made.ranking.fitting:
        raise typer.Exit(1)


def dry_run(
    algorithm: str,
    *,
    model: str,
    dataset: "Rows" = "",
    reward: "Reward | Sequence[Reward]" = (),
    **settings: Any,
) -> Planned:
    """Check a run as `--dry-run` does, and start nothing; rows and functions are written into files all the same.

    Args:
        algorithm: the command: `grpo`, `sft`, `online-dpo`, `reward`, `eval`, ...
        model, dataset, reward, settings: those of the command.

    Raises:
        YcoreError: what the command says in one line.
    """
    from ycore_cli.checks import checked_plan, plan_rows
    from ycore_cli.from_python import asking, config_of, outside_a_loop

    config = config_of(algorithm, asking(model, dataset, reward, settings), resume=False)
    plan = outside_a_loop(lambda: checked_plan(config, trains=algorithm != "eval"))
    return Planned(plan, list(aligned(plan_rows(plan))))


def plan_run(
    *,
    model: str,
    devices: str | None = None,
    judge: str | None = None,
    prompt_tokens: int | None = None,
    completion_tokens: int | None = None,
    algorithm: str = "grpo",
    **settings: Any,
) -> Planned:
    """The memory and time of a run with rollouts on any devices, as `ycore plan` shows them; see docs/plan.md.

    Args:
        devices: `8x80GB`, `4xH100`, or `cpu`, which is the default.
        judge: the model of a judge.
        prompt_tokens: the mean length of a prompt.
        completion_tokens: the mean length of a completion; without it, `max_tokens`.
        algorithm: `ppo` and `distill` take more than the others.
        settings: those of `grpo` that matter to sizes.
    """
    from ycore_cli.from_python import keys_of

    made = planned(
        example_of({}, keys_of(algorithm, {**settings, "model": model})),
        devices=devices,
        judge=judge,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )
    return Planned(*shown(made, None, top=5))


def planned(
    config: "RunConfig", *, devices: str | None, judge: str | None, **lengths: Any
) -> "Plan":
    """The plan, with what a launch checks; `lengths` are those of `make_plan`."""
    from ycore.judge.sources import with_declarations
    from ycore.launch import device_memory, machine_checks
    from ycore.plan.planner import make_plan

    config = _with_judge(config, judge)
    declared = with_declarations(config)
    known = cache(device_memory.facts_here)

    def check(one: "RunConfig", fleet: "Fleet") -> None:
        machine_checks.check_described(with_args(declared, one), fleet, known=known)

    return make_plan(config, devices=devices, check=check, **_first_scorer(declared), **lengths)


def shown(made: "Plan", recipe: str | None, *, top: int) -> tuple[dict[str, Any], list[str]]:
    """A plan as JSON values, and as lines for a person."""
    command = _command(made, recipe)
    start = ["", "start the first with", f"  {command}"] if command else []
    return made.as_json(top=top) | {"command": command}, [*_lines(made, top=top), *start]


def sizes_of(context: typer.Context, recipe: str | None, **fill_in: str) -> "RunConfig":
    """The run whose sizes the options and the recipe give; what only a real run needs is filled in."""
    from ycore.config.algorithms import find_algorithm
    from ycore.config.recipe_files import load_recipe

    base = fill_in | (load_recipe(recipe) if recipe else {})
    find_algorithm(base.get("algorithm", "grpo"))
    algorithm = _algorithm_of(base)
    options = o.typed_keys(context, algorithm=algorithm) | {"algorithm": algorithm}
    return example_of(base, options, sets=context.params.get("set_") or ())


def example_of(
    base: Mapping[str, Any], options: Mapping[str, Any], *, sets: Sequence[str] = ()
) -> "RunConfig":
    """The run of these keys, with an example in the place of what only a real run needs."""
    from ycore.config.resolve import require_rollouts, resolve

    return require_rollouts(resolve(recipe={**_EXAMPLE, **base}, sets=sets, options=options))


def _algorithm_of(recipe: Mapping[str, Any]) -> str:
    """A critic and a teacher cost memory and time; the others that have rollouts are planned as GRPO."""
    return recipe["algorithm"] if recipe.get("algorithm") in ("ppo", "distill") else "grpo"


def _with_judge(config: "RunConfig", judge: str | None) -> "RunConfig":
    """The config with full names of its models, and with `judge` as the model of its first judge, or of a new one."""
    from ycore.config.schema import RewardConfig
    from ycore.judge.sources import is_judge
    from ycore.plan.model_facts import hub_id_of

    rewards = list(config.rewards)
    if judge is not None:
        first = next((number for number, reward in enumerate(rewards) if is_judge(reward)), None)
        rewards = rewards if first is not None else [RewardConfig(reward="judge:cheerful")]
        one = rewards[first or 0]
        rewards[first or 0] = one.model_copy(
            update={"args": {**one.args, "model": hub_id_of(judge)}}
        )
    return config.model_copy(update={"model": hub_id_of(config.model), "rewards": rewards})


def _command(made: "Plan", recipe: str | None) -> str | None:
    """The command line that starts the first way; None where there is none."""
    from ycore.config.recipe_files import load_recipe
    from ycore.config.resolve import require_rollouts, resolve
    from ycore.plan.strategy_settings import command_line

    if made.first is None:
        return None
    base = {"model": made.first.model} | _EXAMPLE | (load_recipe(recipe) if recipe else {})
    preset = {"preset": made.first.preset} if made.first.preset else {}
    alone = require_rollouts(
        resolve(recipe=base, options=preset | {"algorithm": made.first.algorithm})
    )
    if made.fleet.device.on_cpu or made.fleet.count == 1:
        alone = alone.model_copy(update={"processes": 1})  # what `auto` is there
    return command_line(made.first, alone, recipe=recipe)


def with_args(declared: "RunConfig", strategy: "RunConfig") -> "RunConfig":
    """The config of a way with its judges' declarations, which need not be read again for each way."""
    rewards = [
        spec.model_copy(update={"args": {**spec.args, **one.args}})
        for spec, one in zip(declared.rewards, strategy.rewards, strict=True)
    ]
    return strategy.model_copy(update={"rewards": rewards})


def whole_number(option: str, text: str) -> int:
    """An option's value, 1 or more."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigError(
            f"{option} takes a whole number of 1 or more; it is {text!r}; e.g. {option} 8"
        )
    return int(text)


def _first_scorer(config: "RunConfig") -> dict[str, Any]:
    """The first model that scores in engines of ycore's, as `make_plan` takes it: a judge before any other."""
    from ycore.launch.scoring_models import served_models

    model = min(served_models(config)[1:], key=lambda model: model.role != "judge", default=None)
    if model is None:
        return {}
    return {
        "judge": model.name,
        "judge_role": model.role,
        "judge_tokens": model.max_new_tokens or None,
    }


def _lines(made: "Plan", *, top: int) -> Iterator[str]:
    from ycore.plan.planner import why_too_large

    yield from _job_lines(made)
    yield ""
    if made.ranking.fitting:
        best = made.ranking.fitting[0]
        yield f"{'step':>9}  {'tokens/s':>9}  {'fullest phase':<28}  strategy"
        for forecast in made.ranking.fitting[:top]:
            phase, peak = forecast.peak
            fullest = f"{peak / _GIB:.1f} of {forecast.capacity / _GIB:.1f} GiB, {phase}"
            speed = (
                f"{forecast.step_s:>7.1f} s  {forecast.tokens_per_step / forecast.step_s:>9,.0f}"
            )
            yield f"{speed}  {fullest:<28}  {forecast.strategy.in_words}"
        yield from ["", *_memory_lines(best), "", "seconds of a step of the first"]
        yield "  " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in best.seconds.items())
    unfit = made.ranking.too_large[: 2 if made.ranking.fitting else top]
    if unfit:
        yield from ["", "does not fit"] if made.ranking.fitting else ["nothing fits"]
        yield from (
            f"  {forecast.strategy.in_words}: {why_too_large(forecast)}" for forecast in unfit
        )
    if made.ranking.refused:
        yield from ["", "fits, and cannot be run"]
        fastest = {
            why: forecast for forecast, why in reversed(made.ranking.refused)
        }  # for each reason
        shown = sorted(fastest.items(), key=lambda pair: pair[1].step_s)[:2]
        yield from (f"  {forecast.strategy.in_words}: {why}" for why, forecast in shown)
    if made.ranking.fitting:
        return
    if not made.nearest:
        yield "no change of batch, length, LoRA, devices or model would fit"
        return
    yield "what would fit, nearest first"
    for near in made.nearest:
        yield f"  {near.option}: {near.forecast.step_s:.1f} s a step, {near.forecast.strategy.in_words}"


def _job_lines(made: "Plan") -> Iterator[str]:
    work, device = made.work, made.fleet.device
    trained = "every weight" if work.lora_rank is None else f"LoRA r={work.lora_rank}"
    yield f"model    {work.policy.name}: {work.policy.num_params / 1e9:.2f} billion parameters, {trained}"
    if work.policy.eyes_params:
        tokens = (
            f"{work.policy.image_tokens} tokens of a prompt"
            if work.policy.image_tokens
            else "tokens by its size"
        )
        yield f"pictures {work.policy.eyes_params / 1e6:.1f} million of these parameters see; a picture is {tokens}"
    if work.judge is not None:
        yield f"{_SCORER[work.judge_role]:<8} {work.judge.name}: {work.judge.num_params / 1e9:.2f} billion parameters"
    yield f"devices  {made.fleet.count} x {device.name}: {device.memory_bytes / _GIB:.0f} GiB; {device.in_words}"
    yield (
        f"step     {work.prompts_per_step} prompts of {work.prompt_tokens} tokens x {work.group_size} completions "
        f"of {work.completion_tokens}, {work.max_tokens} at most; {work.draws:g} groups for each kept"
    )


def _memory_lines(forecast: "StepForecast") -> Iterator[str]:
    roles = list(dict.fromkeys(role for phase in forecast.phases.values() for role in phase))
    where = "all processes of a role" if "all at once" in forecast.phases else "one device"
    yield f"memory of the first, GiB of {where}"
    yield f"  {'phase':<18}" + "".join(f"{role:>13}" for role in [*roles, "all"])
    for phase, sizes in forecast.phases.items():
        cells = [*(sizes.get(role, 0) for role in roles), sum(sizes.values())]
        yield f"  {phase:<18}" + "".join(f"{size / _GIB:>13.1f}" for size in cells)
    parts = ", ".join(
        f"{part} {size / _GIB:.2f}"
        for part, size in forecast.trainer.items()
        if size >= 0.005 * _GIB
    )
    yield f"  trainer of a rank: {parts}"
    for role, engine in forecast.engines.items():
        yield (
            f"  {role} engine: weights {engine.weights / _GIB:.2f}, cache {engine.kv_cache / _GIB:.2f} "
            f"for {engine.at_once} sequences at once, workspace {engine.workspace / _GIB:.2f}"
        )
