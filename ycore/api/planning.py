"""Plan the memory and time of a run from the model's config.json alone: on any devices, or on this machine's."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ycore.api.run_settings import keys_of
from ycore.api.tables import Planned, aligned
from ycore.config.resolve import require_rollouts, resolve
from ycore.config.schema import (
    BaseConfig,
    ExperimentalConfig,
    RewardConfig,
    RunConfig,
    TuneConfig,
)
from ycore.config.trl_arguments import BatchPlan, TuneBatch
from ycore.errors import ConfigError
from ycore.judge.declaration import JUDGE_PREFIX, with_declarations
from ycore.launch import device_memory, engines, machine_checks
from ycore.launch.device_memory import rank_strategy
from ycore.launch.layout import Machine, Site, sharding_named, visible_gpus
from ycore.models.model_facts import ModelFacts, hub_id_of
from ycore.plan.devices import GIB, Fleet, device_called, measured_core
from ycore.plan.memory import Workload, workload_of
from ycore.plan.planner import Plan, StepForecast, forecast_step, make_plan, why_too_large
from ycore.plan.timing import efficiency_of, train_s
from ycore.scoring.scorers import first_scorer, served_models
from ycore.types import JsonObject, Record

_SCORER = {"judge": "judge", "reward_model": "scorer", "teacher": "teacher"}
_EXAMPLE: JsonObject = {
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
    if config.accelerate is not None:
        config = config.model_copy(update={"accelerate": sharding_named(config.accelerate)})
    known = cache(device_memory.facts_here)

    def check(strategy: RunConfig, fleet: Fleet) -> None:
        machine_checks.check_described(with_declarations(strategy), fleet, known=known)

    declared = with_declarations(config)
    hosts = engines.arrange_hosts(declared, known)
    return make_plan(
        config,
        devices=devices,
        check=check,
        scorer=first_scorer(served_models(declared)),
        away=sum(len(host.slots) * device_memory.slot_width(host.models) for host in hosts),
        **lengths,
    )


def plan_in_words(made: Plan, *, top: int) -> tuple[JsonObject, list[str]]:
    """Put a plan into JSON values, and into lines for a person."""
    return made.as_json(top=top), list(_lines(made, top=top))


# -- the seconds of a run on this machine ------------------------------------------------------------------------------

_BRIEF = 0.25  # share of --max-tokens that a mean completion has at the fast end of a forecast; at the slow end 1
_SPREAD = 1.4  # either way, of a step on given examples: their lengths are estimated


def run_length(
    config: RunConfig | TuneConfig, site: Site, batch: BatchPlan | TuneBatch, details: Record
) -> JsonObject:
    """Count the prompts, epochs and tokens of a run, and forecast its seconds, from what a plan knows of its rows."""
    length = _counts(config, batch, details["dataset"])
    engine = details.get("engine", "vllm")
    no_forecast = None
    if engine != "vllm":
        no_forecast = f"the speed of {engine} is not known beforehand"
    elif site.layout.num_machines > 1:
        no_forecast = "the speed of the network between machines is not known"
    elif (policy := device_memory.facts_here(config.model)) is None:
        no_forecast = f"the sizes of {config.model} are not known here"
    elif (fleet := _fleet(config, site.machine)) is None:
        no_forecast = "the speed of this device is not known"
    elif isinstance(config, ExperimentalConfig) and config.writes:
        no_forecast = (
            "the trainer writes completions by transformers, at a speed that is not known"
        )
    elif isinstance(config, RunConfig):
        assert isinstance(batch, BatchPlan)
        length["time"] = _rollouts_time(config, site, batch, policy, fleet, details)
    else:
        assert isinstance(batch, TuneBatch)
        tokens = length["tokens_per_step"] // batch.batch_size
        length["time"] = _examples_time(config, site, batch, policy, fleet, tokens)
    return length | {"no_forecast": no_forecast}


def _counts(
    config: RunConfig | TuneConfig, batch: BatchPlan | TuneBatch, dataset: Record
) -> JsonObject:
    """Count steps, epochs and the tokens of a step; of a run with rollouts, also rounds and the prompts they draw."""
    if isinstance(batch, TuneBatch):
        row_tokens = dataset["reading"]["mean_tokens"]
        if config.trl.get("packing"):
            row_tokens = batch.max_length or row_tokens
        tokens = batch.batch_size * min(row_tokens, batch.max_length or row_tokens)
        return {"steps": batch.steps, "epochs": batch.epochs, "tokens_per_step": tokens}
    assert isinstance(config, RunConfig)
    rounds = batch.num_rounds(config)
    per_round = config.prompts_per_step * batch.steps_per_round
    # The first round has no groups of earlier ones to take again. Several ranks round down, each for itself.
    prompts = rounds * per_round - int(config.sampling.reuse * per_round) * (rounds - 1)
    return {
        "steps": config.steps,
        "rounds": rounds,
        "prompts": prompts,
        "epochs": prompts / dataset["rows"] if dataset["rows"] else None,
        "tokens_per_step": config.prompts_per_step * config.group_size * config.max_tokens,
    }


def _rollouts_time(
    config: RunConfig,
    site: Site,
    batch: BatchPlan,
    policy: ModelFacts,
    fleet: Fleet,
    details: Record,
) -> JsonObject:
    """Forecast the seconds of a run with rollouts, without evaluations, by the formulas of `ycore plan`.

    At the fast end completions are brief and every group teaches; at the slow end they are as long as they may be.
    Slots on other machines are taken for as fast as those here.
    """
    arrangements = engines.arrange_all(config, site, device_memory.facts_here)
    _, models, slots, sharing = arrangements[0]
    scorer = first_scorer(models)
    facts = None if scorer is None else device_memory.facts_here(scorer.name)
    prompt_tokens = details["dataset"]["reading"]["mean_tokens"]
    work = workload_of(config, policy, scorer=scorer, judge=facts, prompt_tokens=prompt_tokens)
    strategy = replace(
        rank_strategy(config, site.layout, batch),
        slots=len(slots),
        away=sum(len(served.slots) for served in arrangements[1:]),
        apart=int(site.apart is not None),
        tensor_parallel=models[0].width,
        judge_tensor_parallel=max((model.width for model in models[1:]), default=1),
    )
    if sharing is not None:
        strategy = replace(strategy, sleeps=sharing.sleeps, offload=sharing.offload)
    brief = replace(work, completion_tokens=max(1, round(_BRIEF * work.max_tokens)), draws=1.0)
    step_s = [
        _mean_step_s(config, batch, forecast_step(kind, strategy, fleet))
        for kind in (brief, work)
    ]
    return _time(fleet, config.steps, step_s)


def _mean_step_s(config: RunConfig, batch: BatchPlan, forecast: StepForecast) -> float:
    """Return the seconds of a step with its share of a round, from which several steps may learn."""
    seconds = forecast.seconds
    rounds = batch.num_rounds(config)
    # Before the first of several steps, the probabilities are computed once more.
    train_s = seconds["train"] * (4 / 3 if rounds < config.steps else 1)
    round_s = batch.steps_per_round * seconds["round"] * rounds / config.steps
    writes_ahead = forecast.strategy.engines_are_apart and config.sampling.max_staleness
    busy_s = max(train_s, round_s) if writes_ahead else train_s + round_s
    return busy_s + seconds["sync"] * rounds / config.steps


def _examples_time(
    config: TuneConfig,
    site: Site,
    batch: TuneBatch,
    policy: ModelFacts,
    fleet: Fleet,
    tokens: int,
) -> JsonObject:
    """Forecast the seconds of a run on given examples, without those of evaluations."""
    sequences = config.algorithm_row.sequences_per_row
    strategy = rank_strategy(config, site.layout, batch)
    strategy = replace(strategy, micro_batch=strategy.micro_batch * sequences)
    work = Workload(
        policy,
        prompts_per_step=batch.batch_size * sequences,
        group_size=1,
        prompt_tokens=0,
        completion_tokens=max(1, tokens),
        max_tokens=max(1, tokens),
        lora_rank=None if config.lora is None else config.lora.r,
        quantized=config.quantize is not None,
        bytes_per_value=config.value_bytes,
    )
    cores = fleet.count // strategy.ranks if fleet.device.on_cpu else 1
    step_s = train_s(work, strategy, fleet.device, cores=cores)
    step_range = (step_s / _SPREAD, step_s * _SPREAD)
    return _time(fleet, batch.steps, step_range, start=0.5)  # no engines


def _time(
    fleet: Fleet, steps: int, step_s: Sequence[float], *, start: float = 1.0
) -> JsonObject:
    """Return the parts of a run's seconds and their sum, at the fast end and at the slow end."""
    start_s = start * efficiency_of(fleet.device).start_s
    run_s = [start_s + steps * seconds for seconds in step_s]
    return {"start_s": start_s, "step_s": step_s, "run_s": run_s, "speeds": fleet.device.source}


def _fleet(config: BaseConfig, machine: Machine) -> Fleet | None:
    """Describe this machine's devices or cores; None where the speed of its devices is not known."""
    if not machine.devices:
        return Fleet(measured_core(config.dtype), len(machine.cores))
    gpus = visible_gpus()
    device = device_called(gpus[0].name) if gpus else None
    return None if device is None else Fleet(device, len(machine.devices))


def planned_config(base: Record, options: Record, *, sets: Sequence[str] = ()) -> RunConfig:
    """Resolve these keys, with examples of the keys that only a real run needs."""

    return require_rollouts(resolve(recipe={**_EXAMPLE, **base}, sets=sets, options=options))


def _with_judge(config: RunConfig, judge: str | None) -> RunConfig:
    """Give models their full names, and the first judge, or a new one, the model `judge`."""

    rewards = list(config.rewards)
    if judge is not None:
        first = next(
            (number for number, reward in enumerate(rewards) if reward.kind == JUDGE_PREFIX),
            None,
        )
        if first is None:
            first = 0
            rewards = [RewardConfig(reward="judge:cheerful")]
        args = {**rewards[first].args, "model": hub_id_of(judge)}
        rewards[first] = rewards[first].model_copy(update={"args": args})
    return config.model_copy(update={"model": hub_id_of(config.model), "rewards": rewards})


def _lines(made: Plan, *, top: int) -> Iterator[str]:
    yield from _job_lines(made)
    yield ""
    if made.fitting:
        best = made.fitting[0]
        rows = [("step", "tokens/s", "fullest phase", "strategy")]
        for forecast in made.fitting[:top]:
            phase, peak = forecast.peak
            fullest = f"{peak / GIB:.1f} of {forecast.capacity / GIB:.1f} GiB, {phase}"
            speed = f"{forecast.tokens_per_step / forecast.step_s:,.0f}"
            rows.append(
                (f"{forecast.step_s:.1f} s", speed, fullest, forecast.strategy.in_words)
            )
        yield from aligned(rows)
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
        where = f" on each of {made.fleet.machines} machines" if made.fleet.machines > 1 else ""
        yield from [
            "",
            f"the first runs with these options{where}",
            f"  {made.options or 'none'}",
        ]
    else:
        yield (
            "take a smaller --per-device-train-batch-size, --lora or --quantize 4bit, fewer --max-tokens, more devices "
            "or a smaller model"
        )


def _job_lines(made: Plan) -> Iterator[str]:
    work = made.work
    device = made.fleet.device
    trained = "every weight" if work.lora_rank is None else f"LoRA r={work.lora_rank}"
    yield f"model    {work.policy.name}: {work.policy.num_params / 1e9:.2f} billion parameters, {trained}"
    if work.judge is not None:
        yield f"{_SCORER[work.judge_role]:<8} {work.judge.name}: {work.judge.num_params / 1e9:.2f} billion parameters"
    count = f"{made.fleet.count // made.fleet.machines} x {device.name}"
    if made.fleet.machines > 1:
        count = f"{made.fleet.machines} machines of {count}, {8 * device.network / 1e9:.0f} Gb a second between them"
    yield f"devices  {count}: {device.memory_bytes / GIB:.0f} GiB; {device.in_words}"
    yield (
        f"step     {work.prompts_per_step} prompts of {work.prompt_tokens} tokens x {work.group_size} completions "
        f"of {work.completion_tokens}, {work.max_tokens} at most; {work.draws:g} groups for each kept"
    )


def _memory_lines(forecast: StepForecast) -> Iterator[str]:
    roles = list(dict.fromkeys(role for phase in forecast.phases.values() for role in phase))
    where = "all processes of a role" if "all at once" in forecast.phases else "one device"
    yield f"memory of the first, GiB of {where}"
    rows = [["  phase", *roles, "all"]]
    for phase, sizes in forecast.phases.items():
        cells = [*(sizes.get(role, 0) for role in roles), sum(sizes.values())]
        rows.append([f"  {phase}", *(f"{size / GIB:.1f}" for size in cells)])
    yield from aligned(rows)
    parts = ", ".join(
        f"{part} {size / GIB:.2f}"
        for part, size in forecast.trainer.items()
        if size >= 0.005 * GIB
    )
    yield from textwrap.wrap(
        f"trainer of a rank: {parts}", 80, initial_indent="  ", subsequent_indent="    "
    )
    for role, engine in forecast.engines.items():
        yield (
            f"  {role} engine: weights {engine.weights / GIB:.2f}, cache {engine.kv_cache / GIB:.2f} "
            f"for {engine.at_once} sequences at once, workspace {engine.workspace / GIB:.2f}"
        )
