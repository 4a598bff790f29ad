"""Plan a run on some devices: the strategies that fit, fastest first, or the nearest changes after which one fits."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ycore.config.schema import RunConfig
from ycore.errors import ConfigError
from ycore.placement.placement import JUDGE
from ycore.plan.devices import (
    GIB,
    Device,
    Fleet,
    format_on,
    measured_core,
    parse_devices,
    usable_cores,
)
from ycore.plan.model_facts import KNOWN_CONFIGS, model_facts
from ycore.plan.sharing import sharing_options
from ycore.plan.step_forecast import StepForecast, forecast_step
from ycore.plan.strategy_settings import config_of
from ycore.plan.workload import SHARDINGS, Strategy, Workload, micro_batch_of, workload_of

MAX_ENGINES_ON_CPU = 2
"""Engines that a run starts by default (ycore/launch/engines.py)."""

MAX_CHANGES = 3
MAX_DEVICES = 64

Check = Callable[[RunConfig, Fleet], None]
"""Raises ConfigError where a machine of these devices cannot run the config."""


@dataclass(frozen=True, slots=True)
class Change:
    """One option that makes a run fit, and the fastest strategy after it."""

    option: str
    forecast: StepForecast


@dataclass(slots=True)
class Ranking:
    """Forecasts of all strategies.

    Attributes:
        fitting: those that fit and can be run, fastest first.
        too_large: those that do not fit, the nearest to fitting first.
        refused: those that fit and that no command can start, and why.
    """

    fitting: list[StepForecast] = field(default_factory=list)
    too_large: list[StepForecast] = field(default_factory=list)
    refused: list[tuple[StepForecast, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    """`first` is the run with the fastest strategy; `nearest` is empty where something fits."""

    work: Workload
    fleet: Fleet
    ranking: Ranking
    nearest: tuple[Change, ...] = ()
    first: RunConfig | None = None

    def as_json(self, *, top: int) -> dict[str, Any]:
        """Return JSON values, in bytes and seconds, with the first `top` strategies of each kind."""
        work = asdict(self.work)
        del work["policy"], work["judge"]
        return {
            "model": asdict(self.work.policy) | {"num_params": self.work.policy.num_params},
            "judge": None if self.work.judge is None else self.work.judge.name,
            "devices": asdict(self.fleet.device) | {"count": self.fleet.count},
            "work": work,
            "fits": [forecast.as_json() for forecast in self.ranking.fitting[:top]],
            "does_not_fit": [
                forecast.as_json() | {"why": why_too_large(forecast)}
                for forecast in self.ranking.too_large[:top]
            ],
            "cannot_be_run": [
                forecast.as_json() | {"why": why}
                for forecast, why in self.ranking.refused[:top]
            ],
            "nearest": [
                {"change": change.option} | change.forecast.as_json() for change in self.nearest
            ],
        }


def make_plan(
    config: RunConfig,
    *,
    devices: str | None = None,
    judge: str | None = None,
    judge_role: str = JUDGE,
    judge_tokens: int | None = None,
    prompt_tokens: int | None = None,
    completion_tokens: int | None = None,
    core: Device | None = None,
    check: Check = lambda config, fleet: None,
) -> Plan:
    """Plan a run; UserError where a model, a device or a size is not known.

    Args:
        devices: as `--devices`; by default every core of this machine.
        judge: the name of a model that scores in engines; `judge_tokens` is the length of its longest verdict.
        prompt_tokens, completion_tokens: mean lengths; by default 256, and the longest.
        core: one core of this machine; by default measured where the plan is for cores.
        check: what a launch checks; a strategy that does not pass is not among those that fit.
    """
    fleet = _parse_fleet(devices or "cpu", config, core)
    work = workload_of(
        config.model_copy(update={"dtype": format_on(fleet.device, config.dtype)}),
        model_facts(config.model),
        judge=None if judge is None else model_facts(judge),
        judge_role=judge_role,
        judge_tokens=judge_tokens,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )
    ranks, on_cpu = most_ranks(work, fleet), fleet.device.on_cpu
    micro_batch = micro_batch_of(config, ranks=ranks, on_cpu=on_cpu)
    ranking = _rank(config, check, work, fleet, micro_batch)
    if "per_device_train_batch_size" not in config.trl and not on_cpu:
        for size in _divisors_below(micro_batch, work.completions // ranks):
            if ranking.fitting:  # a larger one is faster
                break
            smaller = _rank(config, check, work, fleet, size)
            ranking.fitting = smaller.fitting
            ranking.refused += smaller.refused
    ranking.refused.sort(key=lambda refusal: refusal[0].step_s)
    if ranking.fitting:
        first = config_of(config, work, ranking.fitting[0], fleet)
        return Plan(work, fleet, ranking, first=first)
    reasons = {why for _, why in ranking.refused}
    if len(reasons) == 1:
        raise ConfigError(*reasons)  # whatever the strategy, the run itself is refused
    nearest = nearest_changes(config, check, work, fleet, micro_batch)
    return Plan(work, fleet, ranking, nearest=tuple(nearest))


def _parse_fleet(devices: str, config: RunConfig, core: Device | None) -> Fleet:
    if core is None:
        if devices.strip().lower().endswith("cpu"):
            core = measured_core(config.dtype)
        else:  # measuring takes a moment, and the plan does not need it
            core = Device("core", GIB, 1e9, 1e9, 1e9, "not measured", on_cpu=True)
    return parse_devices(devices, core=core, num_cores=len(usable_cores()))


def most_ranks(work: Workload, fleet: Fleet) -> int:
    """Return the most devices that can train with equally many prompts."""
    return max(
        ranks for ranks in range(1, fleet.count + 1) if not work.prompts_per_step % ranks
    )


def _divisors_below(bound: int, number: int) -> list[int]:
    return [size for size in range(bound - 1, 0, -1) if number % size == 0]


# -- ranking -----------------------------------------------------------------------------------------------------------


def _rank(
    config: RunConfig, check: Check, work: Workload, fleet: Fleet, micro_batch: int
) -> Ranking:
    """Rank the strategies that the config allows."""
    allowed = allowed_strategies(config, work, fleet, micro_batch)
    fitting, too_large = rank_by_time(work, fleet, allowed)
    ranking = Ranking(too_large=too_large)
    for forecast in fitting:
        try:
            check(config_of(config, work, forecast, fleet), fleet)
        except ConfigError as problem:
            ranking.refused.append((forecast, str(problem)))
        else:
            ranking.fitting.append(forecast)
    return ranking


def rank_by_time(
    work: Workload, fleet: Fleet, candidates: Iterable[Strategy]
) -> tuple[list[StepForecast], list[StepForecast]]:
    """Return forecasts that fit, fastest first, and those that do not, least over first.

    Strategies within a hundredth stay in the order of `candidates`.
    """
    forecasts = [forecast_step(work, strategy, fleet) for strategy in candidates]
    fitting = [forecast for forecast in forecasts if forecast.fits]
    fitting.sort(key=lambda forecast: round(100 * math.log(forecast.step_s)))
    too_large = [forecast for forecast in forecasts if not forecast.fits]
    too_large.sort(key=lambda forecast: forecast.peak[1] - forecast.capacity)
    return fitting, too_large


def why_too_large(forecast: StepForecast) -> str:
    """Name in one line the phase that does not fit, what it needs, what there is, and its largest part."""
    phase, bytes_needed = forecast.peak
    if bytes_needed <= forecast.capacity:
        role = next(role for role, engine in forecast.engines.items() if engine.at_once < 1)
        return f"no room for one sequence of the {role} engine beside the trainer"
    roles = forecast.phases[phase]
    role = max(roles, key=lambda name: roles[name])
    part = "weights and cache"
    if role == "trainer":
        part = max(forecast.trainer, key=lambda name: forecast.trainer[name])
    return (
        f"{phase}: {bytes_needed / GIB:.1f} GiB of {forecast.capacity / GIB:.1f}; most of it the {role}, "
        f"{roles[role] / GIB:.1f} GiB, and of that {part}"
    )


# -- strategies --------------------------------------------------------------------------------------------------------


def allowed_strategies(
    config: RunConfig, work: Workload, fleet: Fleet, micro_batch: int
) -> list[Strategy]:
    shardings = set(SHARDINGS)
    if config.accelerate in SHARDINGS:
        shardings = {config.accelerate}
    if work.quantized:
        shardings -= {"zero3", "fsdp2"}
    checkpointing = config.trl.get("gradient_checkpointing")
    return [
        strategy
        for strategy in strategies(work, fleet, micro_batch=micro_batch)
        if (strategy.ranks == 1 or strategy.sharding in shardings)
        and checkpointing in (None, strategy.checkpointing)
    ]


def strategies(work: Workload, fleet: Fleet, *, micro_batch: int) -> list[Strategy]:
    """Return every strategy worth a forecast.

    They differ in sharding, in the devices that an engine spans, and in which role has which slots. `micro_batch` is
    the most completions in one forward pass of a rank.
    """
    bases = _cpu_bases(work, fleet) if fleet.device.on_cpu else _gpu_bases(work, fleet)
    return [
        placed
        for base in bases
        for placed in _placements(
            work, replace(base, micro_batch=min(micro_batch, work.completions // base.ranks))
        )
    ]


def _cpu_bases(work: Workload, fleet: Fleet) -> Iterator[Strategy]:
    for ranks in sorted({1, most_ranks(work, fleet)}):
        slots = max(min(fleet.count, MAX_ENGINES_ON_CPU), ranks)
        for sharding in SHARDINGS if ranks > 1 else SHARDINGS[:1]:
            if sharding != "fsdp2":
                yield Strategy(ranks, slots, sharding)


def _gpu_bases(work: Workload, fleet: Fleet) -> Iterator[Strategy]:
    ranks = most_ranks(work, fleet)
    for sharding in SHARDINGS if ranks > 1 else SHARDINGS[:1]:
        for policy_width, judge_width in engine_widths(work, fleet.count):
            for checkpointing in (True, False):
                base = Strategy(
                    ranks,
                    fleet.count // max(policy_width, judge_width),
                    sharding,
                    checkpointing=checkpointing,
                    tensor_parallel=policy_width,
                    judge_tensor_parallel=judge_width,
                )
                for sleeps, offload in sharing_options(work, base):
                    yield replace(base, sleeps=sleeps, offload=offload)


def engine_widths(work: Workload, num_devices: int) -> list[tuple[int, int]]:
    """Return the devices that an engine of the policy and one of the judge may span: equally many, or one is 1."""
    powers = [2**power for power in range(num_devices.bit_length())]
    widths = [width for width in powers if not num_devices % width]
    policy_widths = [width for width in widths if not work.policy.undivided(width)]
    if work.judge is None:
        return [(width, width) for width in policy_widths]
    judge_widths = [width for width in widths if not work.judge.undivided(width)]
    return [
        (policy, judge)
        for policy in policy_widths
        for judge in judge_widths
        if policy == judge or 1 in (policy, judge)
    ]


def _placements(work: Workload, base: Strategy) -> Iterator[Strategy]:
    yield base
    if work.judge is None or base.slots < 2:
        return
    yield replace(base, kind="dynamic")
    for judge_slots in sorted({1, base.slots // 4, base.slots // 2, base.slots - 1} - {0}):
        yield replace(base, kind="split", judge_slots=judge_slots)


# -- what would fit ----------------------------------------------------------------------------------------------------


def nearest_changes(
    config: RunConfig, check: Check, work: Workload, fleet: Fleet, micro_batch: int
) -> list[Change]:
    """Return a few single changes after which a strategy fits, the least loss first."""
    changes: dict[str, Change] = {}
    for option, value, new_work, new_fleet, new_size in _changes(work, fleet, micro_batch):
        if option not in changes and len(changes) < MAX_CHANGES:
            ranking = _rank(config, check, new_work, new_fleet, new_size)
            if ranking.fitting:
                changes[option] = Change(f"{option} {value}".strip(), ranking.fitting[0])
    return list(changes.values())


def _changes(
    work: Workload, fleet: Fleet, micro_batch: int
) -> Iterator[tuple[str, object, Workload, Fleet, int]]:
    """Yield an option, its value, and the settings after it."""
    for size in _divisors_below(micro_batch, micro_batch):
        yield "--per-device-train-batch-size", size, work, fleet, size
    if work.lora_rank is None:
        yield "--lora", "", replace(work, lora_rank=16), fleet, micro_batch
    elif not (work.quantized or fleet.device.on_cpu):
        yield "--quantize", "4bit", replace(work, quantized=True), fleet, micro_batch
    if work.judge is None and work.max_tokens > 256:
        half = work.max_tokens // 2
        mean = min(half, work.completion_tokens)
        shorter = replace(work, max_tokens=half, completion_tokens=mean)
        yield "--max-tokens", half, shorter, fleet, micro_batch
    for factor in (2, 4, 8, 16, 32):
        count = fleet.count * factor
        if (
            count <= MAX_DEVICES
            and not fleet.device.on_cpu
            and not work.prompts_per_step % count
        ):
            larger = replace(fleet, count=count)
            yield "--devices", f"{count}x of the same", work, larger, micro_batch
    known = sorted(map(model_facts, KNOWN_CONFIGS), key=lambda facts: -facts.num_params)
    for facts in known:
        if facts.num_params < work.policy.num_params:
            yield "--model", facts.name, replace(work, policy=facts), fleet, micro_batch
