"""Plan the memory and time of a run from the model's config.json alone, without its devices."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from ycore.api.run_settings import keys_of
from ycore.api.tables import Planned
from ycore.config.resolve import require_rollouts, resolve
from ycore.config.schema import RewardConfig, RunConfig
from ycore.errors import ConfigError
from ycore.judge.sources import is_judge, with_declarations
from ycore.launch import device_memory, machine_checks
from ycore.plan.devices import Fleet
from ycore.plan.model_facts import hub_id_of
from ycore.plan.planner import Plan, StepForecast, make_plan, why_too_large
from ycore.scoring.scorers import served_models

_GIB = 2**30
_SCORER = {"judge": "judge", "reward_model": "scorer", "teacher": "teacher"}
_EXAMPLE: dict[str, Any] = {
    "dataset": "task:addition",
    "rewards": ["exact_answer"],
    "output": "runs/planned",
}


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
    """Plan the memory and time of a run with rollouts on any devices, as `ycore plan` does; see docs/plan.md.

    Args:
        devices: `8x80GB`, `4xH100`, or `cpu`, which is the default.
        judge: the model of a judge.
        prompt_tokens: the mean length of a prompt.
        completion_tokens: the mean length of a completion; without it, `max_tokens`.
        algorithm: `ppo` and `distill` take more than the others.
        settings: those of `grpo` that matter to sizes.
    """

    made = make_run_plan(
        planned_config({}, keys_of(algorithm, {**settings, "model": model})),
        devices=devices,
        judge=judge,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )
    return Planned(*plan_in_words(made, top=5))


def make_run_plan(
    config: RunConfig, *, devices: str | None, judge: str | None, **lengths: Any
) -> Plan:
    """Make the plan, with the checks of a launch; `lengths` are those of `make_plan`."""

    for name, tokens in lengths.items():
        if tokens is not None and tokens < 1:
            raise ConfigError(f"{name} must be 1 or more; it is {tokens}; e.g. 256")
    config = _with_judge(config, judge)
    declared = with_declarations(config)
    known = cache(device_memory.facts_here)

    def check(strategy: RunConfig, fleet: Fleet) -> None:
        machine_checks.check_described(with_args(declared, strategy), fleet, known=known)

    return make_plan(config, devices=devices, check=check, **_first_scorer(declared), **lengths)


def plan_in_words(made: Plan, *, top: int) -> tuple[dict[str, Any], list[str]]:
    """Put a plan into JSON values, and into lines for a person."""
    return made.as_json(top=top), list(_lines(made, top=top))


def planned_config(
    base: Mapping[str, Any], options: Mapping[str, Any], *, sets: Sequence[str] = ()
) -> RunConfig:
    """Resolve these keys, with examples of the keys that only a real run needs."""

    return require_rollouts(resolve(recipe={**_EXAMPLE, **base}, sets=sets, options=options))


def _with_judge(config: RunConfig, judge: str | None) -> RunConfig:
    """Give models their full names, and the first judge, or a new one, the model `judge`."""

    rewards = list(config.rewards)
    if judge is not None:
        first = next(
            (number for number, reward in enumerate(rewards) if is_judge(reward)), None
        )
        if first is None:
            first, rewards = 0, [RewardConfig(reward="judge:cheerful")]
        args = {**rewards[first].args, "model": hub_id_of(judge)}
        rewards[first] = rewards[first].model_copy(update={"args": args})
    return config.model_copy(update={"model": hub_id_of(config.model), "rewards": rewards})


def with_args(declared: RunConfig, strategy: RunConfig) -> RunConfig:
    """Put the declarations of judges into a strategy's config, so that their files are read once."""
    rewards = [
        spec.model_copy(update={"args": {**spec.args, **reward.args}})
        for spec, reward in zip(declared.rewards, strategy.rewards, strict=True)
    ]
    return strategy.model_copy(update={"rewards": rewards})


def _first_scorer(config: RunConfig) -> dict[str, Any]:
    """Describe the first model that scores in engines, as arguments of `make_plan`; a judge comes before any other."""

    model = min(
        served_models(config)[1:], key=lambda model: model.role != "judge", default=None
    )
    if model is None:
        return {}
    return {
        "judge": model.name,
        "judge_role": model.role,
        "judge_tokens": model.max_new_tokens or None,
    }


def _lines(made: Plan, *, top: int) -> Iterator[str]:
    yield from _job_lines(made)
    yield ""
    if made.fitting:
        best = made.fitting[0]
        yield f"{'step':>9}  {'tokens/s':>9}  {'fullest phase':<28}  strategy"
        for forecast in made.fitting[:top]:
            phase, peak = forecast.peak
            fullest = f"{peak / _GIB:.1f} of {forecast.capacity / _GIB:.1f} GiB, {phase}"
            speed = f"{forecast.step_s:>7.1f} s  {forecast.tokens_per_step / forecast.step_s:>9,.0f}"
            yield f"{speed}  {fullest:<28}  {forecast.strategy.in_words}"
        yield from ["", *_memory_lines(best), "", "seconds of a step of the first"]
        yield "  " + ", ".join(
            f"{name} {seconds:.1f}" for name, seconds in best.seconds.items()
        )
    unfit = made.too_large[: 2 if made.fitting else top]
    if unfit:
        yield from ["", "does not fit"] if made.fitting else ["nothing fits"]
        yield from (
            f"  {forecast.strategy.in_words}: {why_too_large(forecast)}" for forecast in unfit
        )
    if made.refused:
        yield from ["", "fits, and cannot be run"]
        fastest = {why: forecast for forecast, why in reversed(made.refused)}  # for each reason
        shown = sorted(fastest.items(), key=lambda pair: pair[1].step_s)[:2]
        yield from (f"  {forecast.strategy.in_words}: {why}" for why, forecast in shown)
    if made.options is not None:
        yield from ["", "the first runs with these options", f"  {made.options or 'none'}"]
    else:
        yield (
            "take a smaller --per-device-train-batch-size, --lora or --quantize 4bit, fewer --max-tokens, more devices "
            "or a smaller model"
        )


def _job_lines(made: Plan) -> Iterator[str]:
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


def _memory_lines(forecast: StepForecast) -> Iterator[str]:
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
