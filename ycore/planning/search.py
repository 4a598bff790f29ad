"""Which ways of running a job fit, the fastest first; and for what does not fit, why, and the nearest way that does.

Not here: what a way takes (`phases`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ycore.planning.devices import GIB, Fleet
from ycore.planning.job import SHARDINGS, Job, Sharding, Way
from ycore.planning.phases import Forecast, forecast, simulated

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
