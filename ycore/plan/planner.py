"""Plan a run on some devices: the strategies that fit, the fastest first, and the options that run one."""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from ycore.config.schema import SHARDS_WEIGHTS, RewardConfig, RunConfig
from ycore.config.trl_arguments import derive_batch, micro_batch_sizes
from ycore.errors import ConfigError
from ycore.judge.declaration import JUDGE_PREFIX
from ycore.models.model_facts import model_facts
from ycore.plan.devices import (
    GIB,
    Fleet,
    check_replicas,
    format_on,
    measured_core,
    parse_devices,
    usable_cores,
)
from ycore.plan.memory import (
    MAX_ENGINES_ON_CPU,
    SHARDINGS,
    EngineMemory,
    Parts,
    Strategy,
    Workload,
    capacity_of,
    step_memory,
    workload_of,
)
from ycore.plan.sharing import sharing_options
from ycore.plan.timing import step_seconds
from ycore.run.claim import flat
from ycore.scoring.scoring import ServedModel
from ycore.types import JsonObject

_OTHER_WIDTH = "these engines would span another number of devices; leave it out"

Check = Callable[[RunConfig, Fleet], None]
"""Raises ConfigError where a machine of these devices cannot run the config."""


class StepForecast(NamedTuple):
    """The memory and time of a step.

    Attributes:
        trainer: one rank's trainer at its peak.
        phases: bytes by phase and role, on the fullest device.
        capacity: bytes that a plan may use of a device, or of the machine for a CPU.
        seconds: see `timing.step_seconds`.
        tokens_per_step: tokens of the completions that are trained on.
    """

    strategy: Strategy
    trainer: Parts
    engines: Mapping[str, EngineMemory]
    phases: Mapping[str, Parts]
    capacity: float
    seconds: Mapping[str, float]
    tokens_per_step: float

    @property
    def peak(self) -> tuple[str, float]:
        """The fullest phase and its bytes."""
        phase = max(self.phases, key=lambda name: sum(self.phases[name].values()))
        return phase, sum(self.phases[phase].values())

    @property
    def fits(self) -> bool:
        has_room = all(engine.at_once >= 1 for engine in self.engines.values())
        return has_room and self.peak[1] <= self.capacity

    @property
    def step_s(self) -> float:
        return self.seconds["step"]

    def as_json(self) -> JsonObject:
        phase, peak = self.peak
        return {
            "strategy": asdict(self.strategy) | {"in_words": self.strategy.in_words},
            "peak_phase": phase,
            "peak_bytes": round(peak),
            "capacity_bytes": round(self.capacity),
            "memory": dict(self.phases),
            "trainer": dict(self.trainer),
            "engines": {role: engine._asdict() for role, engine in self.engines.items()},
            "seconds": dict(self.seconds),
        }


def forecast_step(work: Workload, strategy: Strategy, fleet: Fleet) -> StepForecast:
    trainer, engines, phases = step_memory(work, strategy, fleet)
    at_once = {role: max(1, engine.at_once) for role, engine in engines.items()}
    return StepForecast(
        strategy,
        trainer,
        engines,
        phases,
        capacity_of(fleet),
        step_seconds(work, strategy, fleet, at_once=at_once),
        tokens_per_step=float(work.completions * work.completion_tokens),
    )


@dataclass
class Plan:
    """Forecasts of all strategies of a run.

    Attributes:
        fitting: those that fit and can be run, fastest first.
        too_large: those that do not fit, the nearest to fitting first.
        refused: those that fit and that no command can start, and why.
    """

    config: RunConfig
    work: Workload
    fleet: Fleet
    away: int = 0
    fitting: list[StepForecast] = field(default_factory=list)
    too_large: list[StepForecast] = field(default_factory=list)
    refused: list[tuple[StepForecast, str]] = field(default_factory=list)

    @property
    def options(self) -> str | None:
        """The options that run the fastest strategy; None where none fits."""
        if not self.fitting:
            return None
        return layout_options(
            self.config, with_layout(self.config, self.fitting[0], self.fleet)
        )

    def as_json(self, *, top: int) -> JsonObject:
        """Return JSON values, in bytes and seconds, with the first `top` strategies of each kind."""
        work = asdict(self.work)
        del work["policy"], work["judge"]
        return {
            "model": asdict(self.work.policy) | {"num_params": self.work.policy.num_params},
            "judge": None if self.work.judge is None else self.work.judge.name,
            "devices": asdict(self.fleet.device)
            | {"count": self.fleet.count, "machines": self.fleet.machines},
            "work": work,
            "fits": [forecast.as_json() for forecast in self.fitting[:top]],
            "does_not_fit": [
                forecast.as_json() | {"why": why_too_large(forecast)}
                for forecast in self.too_large[:top]
            ],
            "cannot_be_run": [
                forecast.as_json() | {"why": why} for forecast, why in self.refused[:top]
            ],
            "options": self.options,
        }


def make_plan(
    config: RunConfig,
    *,
    devices: str | None,
    check: Check,
    scorer: ServedModel | None = None,
    prompt_tokens: int | None = None,
    completion_tokens: int | None = None,
    away: int = 0,
) -> Plan:
    """Plan a run; UserError where a model, a device or a size is not known.

    Args:
        devices: as `--devices`; by default every core of this machine.
        scorer: a model that scores in engines.
        prompt_tokens, completion_tokens: mean lengths; by default 256, and the longest.
        away: the devices or shares of cores on other machines (`engine.hosts`).
        check: what a launch checks; a strategy that does not pass is not among those that fit.
    """
    fleet = parse_devices(
        devices or "cpu",
        core=lambda: measured_core(config.dtype),
        num_cores=len(usable_cores()),
    )
    on_cpu = fleet.device.on_cpu
    work = workload_of(
        config.model_copy(update={"dtype": format_on(fleet.device, config.dtype)}),
        model_facts(config.model),
        scorer=scorer,
        judge=None if scorer is None else model_facts(scorer.name),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )
    plan = Plan(config, work, fleet, away)
    ranks = most_ranks(work, fleet)
    usual, *smaller = micro_batch_sizes(config, world_size=ranks, on_cpu=on_cpu)
    _add_strategies(plan, check, usual)
    too_large = list(plan.too_large)
    for size in () if on_cpu else smaller:
        if plan.fitting:  # a larger micro-batch is faster
            break
        _add_strategies(plan, check, size)
    plan.too_large = too_large
    plan.refused.sort(key=lambda refusal: refusal[0].step_s)
    reasons = {why for _, why in plan.refused}
    if not plan.fitting and len(reasons) == 1:
        raise ConfigError(*reasons)  # whatever the strategy, the run itself is refused
    return plan


def most_ranks(work: Workload, fleet: Fleet) -> int:
    """Return the most devices that can train with equally many prompts."""
    return max(
        (
            ranks
            for ranks in range(fleet.machines, fleet.count + 1, fleet.machines)
            if not work.prompts_per_step % ranks
        ),
        default=fleet.machines,
    )


# -- ranking -----------------------------------------------------------------------------------------------------------


def _add_strategies(plan: Plan, check: Check, micro_batch: int) -> None:
    """Add forecasts of the strategies that the config allows, with micro-batches of at most this size."""
    allowed = allowed_strategies(plan.config, plan.work, plan.fleet, micro_batch)
    forecasts = [
        forecast_step(
            plan.work, replace(strategy, away=plan.away // strategy.slot_width), plan.fleet
        )
        for strategy in allowed
    ]
    # Strategies within a hundredth stay in the order in which they are allowed.
    forecasts.sort(key=lambda forecast: round(100 * math.log(forecast.step_s)))
    for forecast in forecasts:
        if not forecast.fits:
            plan.too_large.append(forecast)
            continue
        try:
            check(with_layout(plan.config, forecast, plan.fleet), plan.fleet)
        except ConfigError as problem:
            plan.refused.append((forecast, str(problem)))
        else:
            plan.fitting.append(forecast)
    plan.too_large.sort(key=lambda forecast: forecast.peak[1] - forecast.capacity)


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
    shardings: set[str] = set(SHARDINGS)
    if config.accelerate is not None:
        shardings = {config.accelerate}
    if config.accelerate == "hsdp":
        check_replicas(fleet.machines, most_ranks(work, fleet))
    if work.quantized:
        shardings -= {*SHARDS_WEIGHTS}
    checkpointing = config.trl.get("gradient_checkpointing")
    allowed = [
        strategy
        for apart in _devices_apart(config, fleet)
        for strategy in strategies(work, fleet, micro_batch=micro_batch, apart=apart)
        if (strategy.ranks == 1 or strategy.sharding in shardings)
        and checkpointing in (None, strategy.checkpointing)
    ]
    if config.engine.count == 0:
        allowed = [replace(strategy, slots=0) for strategy in allowed if not strategy.sleeps]
    return allowed


def _devices_apart(config: RunConfig, fleet: Fleet) -> list[int]:
    """Return the numbers of devices that engines may have alone, which pays where they write ahead of training."""
    if config.engine.devices != "shared":
        return [config.engine.devices]
    may_overlap = config.sampling.max_staleness > 0 and fleet.machines == 1
    if fleet.device.on_cpu or not may_overlap:
        return [0]
    return list(range(fleet.count))


def strategies(
    work: Workload, fleet: Fleet, *, micro_batch: int, apart: int = 0
) -> list[Strategy]:
    """Return every strategy worth a forecast.

    They differ in sharding, in the devices that an engine spans, and in which role has which slots. `micro_batch` is
    the most completions in one forward pass of a rank; `apart`: devices that engines have alone.
    """
    rest = replace(fleet, count=fleet.count - apart)
    bases = _cpu_bases(work, rest) if fleet.device.on_cpu else _gpu_bases(work, rest, apart)
    found = []
    for base in bases:
        size = min(micro_batch, work.completions // base.ranks)
        found.append(replace(base, micro_batch=size))
        if work.judge is not None and base.slots > 1:
            found.append(replace(base, micro_batch=size, kind="dynamic"))
    return found


def _cpu_bases(work: Workload, fleet: Fleet) -> Iterator[Strategy]:
    for ranks in sorted({1, most_ranks(work, fleet)}):
        slots = max(min(fleet.count, MAX_ENGINES_ON_CPU), ranks)
        # The last two are FSDP's, which shards nothing on a CPU.
        for sharding in SHARDINGS[:-2] if ranks > 1 else SHARDINGS[:1]:
            yield Strategy(ranks, slots, sharding)


def _gpu_bases(work: Workload, fleet: Fleet, apart: int) -> Iterator[Strategy]:
    ranks = most_ranks(work, fleet)
    num_devices = apart or fleet.count
    for sharding in SHARDINGS if ranks > 1 else SHARDINGS[:1]:
        if sharding == "hsdp" and not 1 < fleet.machines < ranks:
            continue
        for policy_width, judge_width in engine_widths(work, num_devices // fleet.machines):
            for checkpointing in (True, False):
                base = Strategy(
                    ranks,
                    num_devices // max(policy_width, judge_width),
                    sharding,
                    checkpointing=checkpointing,
                    tensor_parallel=policy_width,
                    judge_tensor_parallel=judge_width,
                    apart=apart,
                    replicas=fleet.machines if sharding == "hsdp" else 1,
                )
                if apart:
                    yield base
                    continue
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


# -- settings ----------------------------------------------------------------------------------------------------------


def with_layout(config: RunConfig, forecast: StepForecast, fleet: Fleet) -> RunConfig:
    """Return the config that runs with a forecast's strategy.

    Raises:
        ConfigError: the config fixes a tensor-parallel size other than the strategy's.
    """
    strategy = forecast.strategy
    on_cpu = fleet.device.on_cpu
    changes = {
        "processes": strategy.ranks // fleet.machines,
        "accelerate": None,
        "engine": _engine_settings(config, strategy, on_cpu),
        "rewards": [_with_width(spec, strategy) for spec in config.rewards],
        "trl": dict(config.trl),
    }
    if strategy.ranks > 1 and strategy.sharding != "ddp":
        changes["accelerate"] = strategy.sharding
    if len(forecast.engines) > 1:
        changes["placement"] = strategy.kind
    if strategy.checkpointing != config.trl.get("gradient_checkpointing", not on_cpu):
        changes["trl"]["gradient_checkpointing"] = strategy.checkpointing
    planned = config.model_copy(update=changes)
    batch = derive_batch(planned, world_size=strategy.ranks, on_cpu=on_cpu)
    if batch.per_device_train_batch_size != strategy.micro_batch:
        planned.trl["per_device_train_batch_size"] = strategy.micro_batch
    return planned


def _engine_settings(config: RunConfig, strategy: Strategy, on_cpu: bool) -> Any:
    engine = config.engine
    if engine.tensor_parallel not in ("auto", strategy.tensor_parallel):
        raise ConfigError(
            f"engine.tensor_parallel is {engine.tensor_parallel}, and {_OTHER_WIDTH}"
        )
    changes: JsonObject = {}
    if strategy.apart:
        changes["devices"] = strategy.apart
    if engine.count != "auto":
        changes["count"] = strategy.slots
    if strategy.slot_width > 1:
        changes["tensor_parallel"] = strategy.tensor_parallel
    if not on_cpu:
        changes["sleep"] = strategy.sleeps
        changes["offload"] = strategy.offload
    return engine.model_copy(update=changes)


def _with_width(spec: RewardConfig, strategy: Strategy) -> RewardConfig:
    """Let a judge's engines span the strategy's devices; other rewards stay as they are."""
    if spec.kind != JUDGE_PREFIX or strategy.slot_width == 1:
        return spec
    width = strategy.judge_tensor_parallel
    declared = spec.args.get("tensor_parallel", "auto")
    if declared not in ("auto", width):
        raise ConfigError(f"tensor_parallel of {spec.reward} is {declared}, and {_OTHER_WIDTH}")
    return spec.model_copy(update={"args": {**spec.args, "tensor_parallel": width}})


def layout_options(config: RunConfig, planned: RunConfig) -> str:
    """Return the options that make a command of `config` run as `planned`, which `with_layout` gave."""
    before = _settings_by_name(config)
    options = list[str]()
    sets = list[str]()
    for name, value in _settings_by_name(planned).items():
        text = "ddp" if value is None else str(value).lower()
        if value == before.get(name):
            continue
        if "." in name and not name.startswith("trl."):
            sets += ["--set", f"{name}={text}"]
        else:
            options += [f"--{name.removeprefix('trl.').replace('_', '-')}", text]
    return shlex.join([*options, *sets])


def _settings_by_name(config: RunConfig) -> JsonObject:
    settings = config.model_dump(mode="json")
    return flat({**settings, "rewards": dict(enumerate(settings["rewards"]))})
