"""Which ways of running a job fit, the fastest first; and for what does not fit, why, and the nearest way that does.

A whole plan: the job of a run on some devices, the ways that fit, the ways that do not, and what would mend them.

Not here: what a way takes (`phases`).
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ycore.config.schema import RunConfig
from ycore.plan import devices as machine
from ycore.plan.devices import GIB, Device, Fleet, parse_devices
from ycore.plan.job import SHARDINGS, Job, Sharding, Way, asks_checkpointing, job_of, micro_batch_of
from ycore.plan.model_facts import known_models, model_facts
from ycore.plan.phases import Forecast, forecast, simulated

_WORTH_PLAYING = 1.5  # of the fastest: placements beyond it by the simple bound are not simulated
_MOST_ON_CPU = 2  # engines that a run starts by itself (`launch.engines`)
_ALONE: list[Sharding] = ["ddp"]


@dataclass(frozen=True, slots=True)
class Mend:
    """A change to what was asked, and the forecast with it."""

    change: str
    forecast: Forecast


def ways(job: Job, fleet: Fleet, *, micro_batch: int, shardings: Iterable[str] | None = None) -> list[Way]:
    """Every way worth a look: how training is cut up, how wide an engine is, and who has which slots."""
    on_cpu, count = fleet.device.on_cpu, fleet.count
    known = [name for name in SHARDINGS if shardings is None or name in set(shardings)]
    cuts: list[Sharding] = [name for name in known if not (on_cpu and name == "fsdp2")]
    found: list[Way] = []
    for ranks in {1, count} if on_cpu else {count}:
        if job.prompts_per_step % ranks:
            continue
        for sharding in cuts if ranks > 1 else _ALONE:
            for wide in [1] if on_cpu else _powers_dividing(count):
                slots = min(count, _MOST_ON_CPU) if on_cpu else count // wide
                mine = min(micro_batch, job.completions // ranks)
                base = Way(ranks, max(slots, ranks) if on_cpu else slots, sharding, mine, tensor_parallel=wide)
                for checkpointing in (False,) if on_cpu else (True, False):
                    found += _placed(job, replace(base, checkpointing=checkpointing), fleet)
    return found


def ranked(job: Job, fleet: Fleet, candidates: Iterable[Way]) -> tuple[list[Forecast], list[Forecast]]:
    """Forecasts that fit, fastest first, and those that do not, least over first."""
    forecasts = [forecast(job, way, fleet) for way in candidates]
    fitting = _by_time(one for one in forecasts if one.fits)
    if job.judge is not None:
        fitting = _by_time(simulated(job, one, fleet) for one in _one_of_a_kind(fitting))
    others = sorted((one for one in forecasts if not one.fits), key=lambda one: one.peak[1] - one.capacity)
    return fitting, others


def _by_time(forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Fastest first; of ways within a hundredth, the simpler first, as `ways` has them."""
    return sorted(forecasts, key=lambda one: round(100 * math.log(one.step_s)))


def _one_of_a_kind(fitting: Iterable[Forecast]) -> list[Forecast]:
    """The best way to train for each placement of the engines: rounds do not depend on how training is cut up."""
    best: dict[tuple[object, ...], Forecast] = {}
    for one in fitting:
        way = one.way
        best.setdefault((way.kind, way.judge_slots, way.slots, way.tensor_parallel, way.sleeps), one)
    fastest = min((one.step_s for one in best.values()), default=0.0)
    return [one for one in best.values() if one.step_s <= _WORTH_PLAYING * fastest]


def why_not(one: Forecast) -> str:
    """What of a way does not fit, in a line: the phase, what it needs, what there is, and the largest part."""
    phase, bytes_needed = one.peak
    if bytes_needed <= one.capacity:
        role = next(role for role, engine in one.engines.items() if engine.at_once < 1)
        return f"no room for one sequence of the {role} engine beside the trainer"
    roles = one.phases[phase]
    role = max(roles, key=lambda name: roles[name])
    part = max(one.trainer, key=lambda name: one.trainer[name]) if role == "trainer" else "weights and cache"
    return (
        f"{phase}: {bytes_needed / GIB:.1f} GiB of {one.capacity / GIB:.1f}; most of it the {role}, "
        f"{roles[role] / GIB:.1f} GiB, and of that {part}"
    )


def mends(job: Job, fleet: Fleet, *, micro_batch: int, limit: int = 3) -> list[Mend]:
    """The nearest settings that fit, one change each, the smallest change first; two changes where none is enough."""
    singles = _changes(job, fleet, micro_batch)
    found = _working(singles)
    if not found:
        found = _working(
            (f"{first} and {second}", after_second)
            for first, (a_job, a_fleet, a_micro) in singles
            for second, after_second in _changes(a_job, a_fleet, a_micro)
            if first.partition(" ")[0] < second.partition(" ")[0]
        )
    return found[:limit]


_Asked = tuple[Job, Fleet, int]


def _changes(job: Job, fleet: Fleet, micro_batch: int) -> list[tuple[str, _Asked]]:
    """What could be asked instead, from least to most of a loss."""
    found: list[tuple[str, _Asked]] = []
    size = micro_batch // 2
    while size >= 1:
        found.append((f"--per-device-train-batch-size {size}", (job, fleet, size)))
        size //= 2
    if job.lora_rank is None:
        found.append(("--lora", (replace(job, lora_rank=16), fleet, micro_batch)))
    if job.judge is None and job.max_tokens > 256:
        half = job.max_tokens // 2
        shorter = replace(job, max_tokens=half, completion_tokens=min(half, job.completion_tokens))
        found.append((f"--max-tokens {half}", (shorter, fleet, micro_batch)))
    for count in (2, 4, 8, 16, 32):
        more = fleet.count * count
        if more <= 64 and not fleet.device.on_cpu and job.prompts_per_step % more == 0:
            found.append((f"--devices {more}x of the same", (job, replace(fleet, count=more), micro_batch)))
    return found


def _working(changes: Iterable[tuple[str, _Asked]]) -> list[Mend]:
    found: list[Mend] = []
    seen: set[str] = set()
    for change, (job, fleet, micro_batch) in changes:
        kind = " ".join(word for word in change.split() if word.startswith("--"))
        if kind in seen:
            continue  # a smaller step of the same kind is enough
        fitting, _ = ranked(job, fleet, ways(job, fleet, micro_batch=micro_batch))
        if fitting:
            seen.add(kind)
            found.append(Mend(change, fitting[0]))
    return found


def _placed(job: Job, base: Way, fleet: Fleet) -> list[Way]:
    sleeps = (False,) if fleet.device.on_cpu else (True, False)
    found = [replace(base, sleeps=asleep) for asleep in sleeps]
    if job.judge is None or base.slots < 2:
        return found
    found += [replace(base, kind="dynamic", sleeps=asleep) for asleep in sleeps]
    splits = {1, base.slots // 4, base.slots // 2, base.slots - 1} - {0}
    apart = [replace(base, kind="split", judge_slots=a, sleeps=asleep) for a in sorted(splits) for asleep in sleeps]
    return found + apart


def _powers_dividing(count: int) -> list[int]:
    sizes: list[int] = []
    size = 1
    while size <= count:
        if count % size == 0:
            sizes.append(size)
        size *= 2
    return sizes


@dataclass(frozen=True, slots=True)
class Plan:
    """`fitting` are ways that fit, fastest first; `others` those that do not, least over first."""

    job: Job
    fleet: Fleet
    fitting: tuple[Forecast, ...]
    others: tuple[Forecast, ...]
    mends: tuple[Mend, ...]
    """Nearest settings that fit, where nothing does."""

    def as_json(self, *, top: int) -> dict[str, Any]:
        """JSON values; bytes are bytes and seconds seconds."""
        return {
            "model": asdict(self.job.policy) | {"num_params": self.job.policy.num_params},
            "judge": None if self.job.judge is None else self.job.judge.name,
            "devices": asdict(self.fleet.device) | {"count": self.fleet.count},
            "job": {key: value for key, value in asdict(self.job).items() if key not in ("policy", "judge")},
            "fits": [_as_json(one) for one in self.fitting[:top]],
            "does_not_fit": [_as_json(one) | {"why": why_not(one)} for one in self.others[:top]],
            "nearest": [{"change": mend.change} | _as_json(mend.forecast) for mend in self.mends],
        }


def make_plan(
    config: RunConfig,
    *,
    devices: str | None = None,
    judge: str | None = None,
    judge_tokens: int | None = None,
    prompt_tokens: int | None = None,
    completion_tokens: int | None = None,
    processor: Device | None = None,
) -> Plan:
    """The plan of a run; UserError where a model, a device or a size is not to be had.

    Args:
        devices: as `--devices`; None is every core of this machine.
        judge: a model's name; `judge_tokens` is what it may write.
        processor: one core of this machine; measured where it is needed and not given.
    """
    policy = model_facts(config.model)
    judged = None if judge is None else model_facts(judge)
    fleet = _fleet(devices, processor)
    job = job_of(
        config, policy, judge=judged, judge_tokens=judge_tokens,
        prompt_tokens=prompt_tokens, completion_tokens=completion_tokens,
    )  # fmt: skip
    micro_batch = micro_batch_of(config, ranks=fleet.count, on_cpu=fleet.device.on_cpu)
    shardings = [config.accelerate] if config.accelerate in SHARDINGS else None
    candidates = ways(job, fleet, micro_batch=micro_batch, shardings=shardings)
    wanted = asks_checkpointing(config.trl)
    candidates = [way for way in candidates if wanted is None or way.checkpointing == wanted]
    fitting, others = ranked(job, fleet, candidates)
    nearest: tuple[Mend, ...] = ()
    if not fitting:
        nearest = tuple(mends(job, fleet, micro_batch=micro_batch) or _smaller_model(job, fleet, micro_batch))
    return Plan(job, fleet, tuple(fitting), tuple(others), nearest)


def _smaller_model(job: Job, fleet: Fleet, micro_batch: int) -> list[Mend]:
    """The largest model of the table that fits in this one's place."""
    known = sorted((model_facts(name) for name in known_models()), key=lambda facts: -facts.num_params)
    for facts in known:
        if facts.num_params < job.policy.num_params:
            smaller = replace(job, policy=facts)
            fitting, _ = ranked(smaller, fleet, ways(smaller, fleet, micro_batch=micro_batch))
            if fitting:
                return [Mend(f"--model {facts.name}", fitting[0])]
    return []


def _fleet(devices: str | None, core: Device | None) -> Fleet:
    """What `--devices` means; the processor is measured only where the plan is for it."""
    asked = devices or "cpu"
    on_cpu = asked.strip().lower().endswith("cpu")
    measured = core or (machine.processor() if on_cpu else _NOT_ASKED_FOR)
    return parse_devices(asked, processor=measured, num_cores=machine.num_cores())


_NOT_ASKED_FOR = Device("core", GIB, 1e9, 1e9, 1e9, "not measured", on_cpu=True)


def _as_json(one: Forecast) -> dict[str, Any]:
    phase, peak = one.peak
    return {
        "way": asdict(one.way) | {"in_words": one.way.in_words},
        "peak_phase": phase,
        "peak_bytes": round(peak),
        "capacity_bytes": round(one.capacity),
        "memory": {name: {role: round(size) for role, size in roles.items()} for name, roles in one.phases.items()},
        "trainer": {part: round(size) for part, size in one.trainer.items()},
        "engines": {role: asdict(engine) for role, engine in one.engines.items()},
        "seconds": {name: round(seconds, 3) for name, seconds in one.seconds.items()},
    }
