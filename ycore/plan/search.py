"""The plan of a run on some devices: the ways that fit, fastest first, and otherwise the nearest change that fits."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
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
from ycore.plan.job import SHARDINGS, Job, Way, job_of, micro_batch_of
from ycore.plan.model_facts import KNOWN_CONFIGS, model_facts
from ycore.plan.sharing import sharings
from ycore.plan.step_forecast import Forecast, forecast
from ycore.plan.way_settings import config_of

_MOST_ON_CPU = 2  # engines that a run starts by default (ycore/launch/engines.py)


Check = Callable[[RunConfig, Fleet], None]
"""Raises ConfigError where a machine of these devices cannot run the config."""

CanRun = Callable[[Job, Fleet, Forecast], bool]


@dataclass(frozen=True, slots=True)
class Change:
    change: str
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class Plan:
    job: Job
    fleet: Fleet
    fitting: tuple[Forecast, ...]  # ways that fit, fastest first
    others: tuple[Forecast, ...]  # those that do not, least over first
    nearest: tuple[Change, ...]  # where nothing fits, the nearest settings that do
    refused: tuple[
        tuple[Forecast, str], ...
    ] = ()  # ways that fit and that no command starts, and why
    first: RunConfig | None = None  # the run that goes the first way

    def as_json(self, *, top: int) -> dict[str, Any]:
        """JSON values, in bytes and seconds, with the first `top` ways that fit and that do not."""
        return {
            "model": asdict(self.job.policy) | {"num_params": self.job.policy.num_params},
            "judge": None if self.job.judge is None else self.job.judge.name,
            "devices": asdict(self.fleet.device) | {"count": self.fleet.count},
            "job": {
                key: value
                for key, value in asdict(self.job).items()
                if key not in ("policy", "judge")
            },
            "fits": [_as_json(one) for one in self.fitting[:top]],
            "does_not_fit": [_as_json(one) | {"why": why_not(one)} for one in self.others[:top]],
            "cannot_be_run": [_as_json(one) | {"why": why} for one, why in self.refused[:top]],
            "nearest": [{"change": near.change} | _as_json(near.forecast) for near in self.nearest],
        }


def _as_json(one: Forecast) -> dict[str, Any]:
    phase, peak = one.peak
    return {
        "way": asdict(one.way) | {"in_words": one.way.in_words},
        "peak_phase": phase,
        "peak_bytes": round(peak),
        "capacity_bytes": round(one.capacity),
        "memory": {
            name: {role: round(size) for role, size in roles.items()}
            for name, roles in one.phases.items()
        },
        "trainer": {part: round(size) for part, size in one.trainer.items()},
        "engines": {role: asdict(engine) for role, engine in one.engines.items()},
        "seconds": {name: round(seconds, 3) for name, seconds in one.seconds.items()},
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
    """The plan of a run; UserError where a model, a device or a size is not known.

    Args:
        devices: as `--devices`; by default every core of this machine.
        judge: the name of a model that scores in engines; `judge_tokens` is the length of its longest verdict.
        prompt_tokens, completion_tokens: mean lengths; by default 256, and the longest.
        core: one core of this machine; by default measured where the plan is for cores.
        check: what a launch checks; a way that does not pass is not among those that fit.
    """
    policy, judge_facts = model_facts(config.model), None if judge is None else model_facts(judge)
    devices = devices or "cpu"
    if core is None:  # measured only where the plan is for cores, since that takes a moment
        unused = Device("core", GIB, 1e9, 1e9, 1e9, "not measured", on_cpu=True)
        core = measured_core(config.dtype) if devices.strip().lower().endswith("cpu") else unused
    fleet = parse_devices(devices, core=core, num_cores=len(usable_cores()))
    settled = {"dtype": format_on(fleet.device, config.dtype)}
    job = job_of(
        config.model_copy(update=settled), policy, judge=judge_facts, judge_role=judge_role,
        judge_tokens=judge_tokens, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens,
    )  # fmt: skip
    micro_batch = micro_batch_of(config, ranks=most_ranks(job, fleet), on_cpu=fleet.device.on_cpu)
    refused: list[tuple[Forecast, str]] = []

    def can_run(job: Job, fleet: Fleet, one: Forecast) -> bool:
        try:
            check(config_of(config, job, one, fleet), fleet)
        except ConfigError as problem:
            refused.append((one, str(problem)))
            return False
        return True

    fitting, others = ranked(
        job, fleet, _candidates(config, job, fleet, micro_batch), can_run=can_run
    )
    if "per_device_train_batch_size" not in config.trl and not fleet.device.on_cpu:
        for size in _divisors(
            config.prompts_per_step * config.group_size // most_ranks(job, fleet), micro_batch
        ):
            if fitting:  # a larger one is faster
                break
            smaller = [
                way
                for way in _candidates(config, job, fleet, size)
                if way.ranks == most_ranks(job, fleet)
            ]
            fitting, _ = ranked(job, fleet, smaller, can_run=can_run)
    left_out = tuple(sorted(refused, key=lambda pair: pair[0].step_s))
    near: list[Change] = []
    if not fitting:
        reasons = {why for _, why in left_out}
        if len(reasons) == 1:
            raise ConfigError(*reasons)  # whatever the way, the run itself is refused
        near = nearest(job, fleet, micro_batch=micro_batch, can_run=can_run)
        near = near or _smaller_model(job, fleet, micro_batch, can_run)
    first = config_of(config, job, fitting[0], fleet) if fitting else None
    return Plan(job, fleet, tuple(fitting), tuple(others), tuple(near), left_out, first)


def _candidates(config: RunConfig, job: Job, fleet: Fleet, micro_batch: int) -> list[Way]:
    """The ways that the config allows."""
    shardings = [
        name
        for name in SHARDINGS
        if config.accelerate in (None, name) or config.accelerate not in SHARDINGS
    ]
    if job.quantized:
        shardings = [name for name in shardings if name not in ("zero3", "fsdp2")]
    found, told = (
        ways(job, fleet, micro_batch=micro_batch, shardings=shardings),
        config.trl.get("gradient_checkpointing"),
    )
    return found if told is None else [way for way in found if way.checkpointing == bool(told)]


def _divisors(of: int, below: int) -> list[int]:
    """The micro-batches below `below` that fill `of` completions, largest first."""
    return [size for size in range(below - 1, 0, -1) if of % size == 0]


def most_ranks(job: Job, fleet: Fleet) -> int:
    """The most devices that can train, each with as many prompts."""
    return max(ranks for ranks in range(1, fleet.count + 1) if not job.prompts_per_step % ranks)


def ways(
    job: Job, fleet: Fleet, *, micro_batch: int, shardings: Iterable[str] | None = None
) -> list[Way]:
    """Every way worth a forecast: how training is sharded, how many devices an engine spans, who has which slots.

    `micro_batch`: completions in one forward pass of a rank, at most. `shardings`: only these; by default all.
    """
    on_cpu, count = fleet.device.on_cpu, fleet.count
    chosen = set(SHARDINGS if shardings is None else shardings) - ({"fsdp2"} if on_cpu else set())
    sharded = [name for name in SHARDINGS if name in chosen]
    widths = [(1, 1)] if on_cpu else widths_of(job, count)
    found: list[Way] = []
    most = most_ranks(job, fleet)
    for ranks in {1, most} if on_cpu else {most}:
        size = min(micro_batch, job.completions // ranks)
        for sharding in sharded if ranks > 1 else SHARDINGS[:1]:
            for policy, judge in widths:
                slots = (
                    max(min(count, _MOST_ON_CPU), ranks) if on_cpu else count // max(policy, judge)
                )
                base = Way(
                    ranks,
                    slots,
                    sharding,
                    size,
                    tensor_parallel=policy,
                    judge_tensor_parallel=judge,
                )
                for checkpointing in (False,) if on_cpu else (True, False):
                    found += _placed(job, replace(base, checkpointing=checkpointing), on_cpu)
    return found


def widths_of(job: Job, count: int) -> list[tuple[int, int]]:
    """Devices that an engine of the policy and one of the judge span: equally many, or one where the other has more."""
    widths = [2**power for power in range(count.bit_length()) if not count % 2**power]
    alone = [width for width in widths if not job.policy.undivided(width)]
    if job.judge is None:
        return [(width, width) for width in alone]
    judges = [width for width in widths if not job.judge.undivided(width)]
    return [
        (policy, judge)
        for policy in alone
        for judge in judges
        if policy == judge or 1 in (policy, judge)
    ]


def _placed(job: Job, base: Way, on_cpu: bool) -> list[Way]:
    """The way with its engines awake or asleep while training, and with a judge under each placement."""
    shared = (
        [base]
        if on_cpu
        else [replace(base, sleeps=asleep, offload=away) for asleep, away in sharings(job, base)]
    )
    if job.judge is None or base.slots < 2:
        return shared
    found = [*shared, *(replace(one, kind="dynamic") for one in shared)]
    splits = sorted({1, base.slots // 4, base.slots // 2, base.slots - 1} - {0})
    return found + [
        replace(one, kind="split", judge_slots=alone) for alone in splits for one in shared
    ]


def ranked(
    job: Job,
    fleet: Fleet,
    candidates: Iterable[Way],
    *,
    can_run: CanRun = lambda job, fleet, one: True,
) -> tuple[list[Forecast], list[Forecast]]:
    """Forecasts that fit and that a run can take, fastest first, and those that do not fit, least over first."""
    forecasts = [forecast(job, way, fleet) for way in candidates]
    fitting = _by_time(one for one in forecasts if one.fits and can_run(job, fleet, one))
    others = sorted(
        (one for one in forecasts if not one.fits), key=lambda one: one.peak[1] - one.capacity
    )
    return fitting, others


def _by_time(forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Fastest first; ways within a hundredth stay in the order of `ways`, the simpler first."""
    return sorted(forecasts, key=lambda one: round(100 * math.log(one.step_s)))


def why_not(one: Forecast) -> str:
    """Why a way does not fit, in one line: the phase, what it needs, what there is, and the largest part."""
    phase, bytes_needed = one.peak
    if bytes_needed <= one.capacity:
        role = next(role for role, engine in one.engines.items() if engine.at_once < 1)
        return f"no room for one sequence of the {role} engine beside the trainer"
    roles = one.phases[phase]
    role = max(roles, key=lambda name: roles[name])
    part = (
        max(one.trainer, key=lambda name: one.trainer[name])
        if role == "trainer"
        else "weights and cache"
    )
    return (
        f"{phase}: {bytes_needed / GIB:.1f} GiB of {one.capacity / GIB:.1f}; most of it the {role}, "
        f"{roles[role] / GIB:.1f} GiB, and of that {part}"
    )


_Settings = tuple[Job, Fleet, int]  # and the micro-batch


def nearest(
    job: Job, fleet: Fleet, *, micro_batch: int, can_run: CanRun = lambda job, fleet, one: True
) -> list[Change]:
    """The nearest settings that fit, the smallest change first; two changes at once where no single one is enough."""
    singles = _changes(job, fleet, micro_batch)
    found = _fitting(singles, can_run)
    if not found:
        pairs = (
            (f"{first} and {second}", after_both)
            for first, after_first in singles
            for second, after_both in _changes(*after_first)
            if first.partition(" ")[0] < second.partition(" ")[0]
        )
        found = _fitting(pairs, can_run)
    return found[:3]


def _changes(job: Job, fleet: Fleet, micro_batch: int) -> list[tuple[str, _Settings]]:
    """Single changes, the least loss first."""
    sizes = _divisors(micro_batch, micro_batch)
    found = [(f"--per-device-train-batch-size {size}", (job, fleet, size)) for size in sizes]
    if job.lora_rank is None:
        found.append(("--lora", (replace(job, lora_rank=16), fleet, micro_batch)))
    elif not (job.quantized or fleet.device.on_cpu):
        found.append(("--quantize 4bit", (replace(job, quantized=True), fleet, micro_batch)))
    if job.judge is None and job.max_tokens > 256:
        half = job.max_tokens // 2
        shorter = replace(job, max_tokens=half, completion_tokens=min(half, job.completion_tokens))
        found.append((f"--max-tokens {half}", (shorter, fleet, micro_batch)))
    for factor in (2, 4, 8, 16, 32):
        more = fleet.count * factor
        if more <= 64 and not fleet.device.on_cpu and job.prompts_per_step % more == 0:
            found.append(
                (f"--devices {more}x of the same", (job, replace(fleet, count=more), micro_batch))
            )
    return found


def _fitting(changes: Iterable[tuple[str, _Settings]], can_run: CanRun) -> list[Change]:
    """The changes after which a way fits; of several with the same options, the first."""
    found: dict[str, Change] = {}
    for change, (job, fleet, micro_batch) in changes:
        options = " ".join(word for word in change.split() if word.startswith("--"))
        if options not in found:
            fitting, _ = ranked(
                job, fleet, ways(job, fleet, micro_batch=micro_batch), can_run=can_run
            )
            if fitting:
                found[options] = Change(change, fitting[0])
    return list(found.values())


def _smaller_model(job: Job, fleet: Fleet, micro_batch: int, can_run: CanRun) -> list[Change]:
    for facts in sorted(
        map(model_facts, sorted(KNOWN_CONFIGS)), key=lambda facts: -facts.num_params
    ):
        change = (f"--model {facts.name}", (replace(job, policy=facts), fleet, micro_batch))
        if facts.num_params < job.policy.num_params and (found := _fitting([change], can_run)):
            return found
    return []
