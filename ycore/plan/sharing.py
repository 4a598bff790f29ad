"""How the engines and the trainer of a device share its memory: who sleeps, what leaves for the host, each one's share.

vLLM takes `gpu_memory_utilization` of the whole device, and refuses to start where less is free (vLLM 0.31,
`request_memory` in v1/worker/utils.py). What its process held before it looked is not in that share.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ycore.config.schema import Offload
from ycore.errors import ConfigError
from ycore.plan.devices import GIB
from ycore.plan.job import Job, Way
from ycore.plan.memory import (
    DEVICE_SHARE,
    NO_TRAINER,
    ON_GPU,
    Engine,
    Need,
    TrainerMemory,
    engines_on_gpu,
    gpu_phases,
    least_engine,
)  # fmt: skip

_CONTEXT = 0.5 * GIB  # of an engine's footing, what is outside of its share
_ENOUGH = 64  # sequences at once, from which on a decoding step takes longer with each
_UNKNOWN = (0.3, 0.9)  # of engines with unknown sizes, beside a trainer and without one

Shared = tuple[bool, Offload]
"""Whether engines sleep while the trainer trains, and what leaves the device for a round."""


def sharings(job: Job, way: Way) -> list[Shared]:
    """The ways to share a device, the cheapest first, each with more room for engines than the one before."""
    found: list[Shared] = [(False, "none"), (True, "none"), (True, "optimizer")]
    has_frozen = job.lora_rank is not None or job.has_reference
    return found + ([(True, "weights")] if has_frozen and not way.shards_weights else [])


@dataclass(frozen=True, slots=True)
class Sharing:
    """`shares`: by role, for each of its models, what vLLM is told. `line`: the decision in words."""

    sleeps: bool
    offload: Offload
    shares: Mapping[str, Sequence[float]]
    line: str
    has_trainer: bool = True  # on the device


def room_of(device_bytes: float, free_bytes: float | None = None) -> float:
    """Bytes of a device that may be planned for; `free_bytes` where others hold some of it."""
    most = DEVICE_SHARE * device_bytes
    return most if free_bytes is None else min(most, free_bytes)


def share_device(
    needs: Mapping[str, Sequence[Need]],
    trainer: TrainerMemory,
    ways: Sequence[Shared],
    *,
    device_bytes: float,
    free_bytes: float | None = None,
    share: float | None = None,
) -> Sharing:
    """The first of `ways` in which all fits, else the last, which leaves engines most; ConfigError where that is
    too little for one.

    Args:
        needs: by role, of the engines that a device has.
        trainer: NO_TRAINER where nothing trains on it.
        share: of `engine.gpu_memory_utilization`, where the user has set it.
    """
    capacity, counts = (
        room_of(device_bytes, free_bytes),
        {role: len(of_role) for role, of_role in needs.items()},
    )
    for sleeps, offload in ways:
        engines = engines_on_gpu(needs, trainer, capacity, sleeps=sleeps, offload=offload)
        if share is not None:
            told = {
                role: device_bytes * _told(share, role, counts, sleeps=sleeps) for role in needs
            }
            engines = {
                role: [
                    _as_told(*one, told[role])
                    for one in zip(engines[role], needs[role], strict=True)
                ]
                for role in needs
            }
        phases = gpu_phases(engines, trainer, sleeps=sleeps, offload=offload)
        fullest = max(phases, key=lambda name: sum(phases[name].values()))
        needed = sum(phases[fullest].values())
        placed = [
            (role, *pair) for role in needs for pair in zip(needs[role], engines[role], strict=True)
        ]
        if needed <= capacity and all(
            engine.at_once >= min(need.sequences, _ENOUGH) for _, need, engine in placed
        ):
            break
    engines_need = max(sum(roles[role] for role in needs) for roles in phases.values())
    if share is not None and engines_need > capacity:
        raise ConfigError(
            f"engines take {engines_need / GIB:.1f} GiB at once with engine.gpu_memory_utilization={share:g}, and "
            f"{capacity / GIB:.1f} of a device's {device_bytes / GIB:.1f} can be used; lower that, or leave it out"
        )
    for role, need, engine in placed:
        if engine.at_once < 1:
            asleep = ON_GPU.asleep * sum(
                number for other, number in counts.items() if other != role
            )
            beside = trainer.resting[offload] + asleep if sleeps else trainer.peak
            gets = None if share is None else _told(share, role, counts, sleeps=sleeps)
            together = 1 if sleeps else len(placed)
            raise ConfigError(
                _too_little(role, need, capacity, beside, device_bytes, gets, together)
            )
    shares = {
        role: [share_of(engine, device_bytes) for engine in of_role]
        for role, of_role in engines.items()
    }
    words = [
        f"{role.replace('_', ' ')} {sum(one.awake for one in engines[role]) / GIB:.1f}"
        for role in needs
    ]
    if trainer is not NO_TRAINER:
        words.insert(0, f"trainer {trainer.peak / GIB:.1f}")
    line = f"of a device's {device_bytes / GIB:.1f} GiB: {', '.join(words)}"
    if trainer is not NO_TRAINER:
        line += f"; {_in_words(sleeps, offload)}"
    if needed > capacity:
        line += (
            f"; {fullest} needs {needed / GIB:.1f} and {capacity / GIB:.1f} can be used: "
            "lower --per-device-train-batch-size or ask `ycore plan`"
        )
    return Sharing(sleeps, offload, shares, line)


def share_unknown(
    num_models: Mapping[str, int], ways: Sequence[Shared], *, share: float | None
) -> Sharing:
    """The same where sizes are not known: engines sleep and the optimizer leaves, unless the user says otherwise."""
    sleeps, offload = next((way for way in reversed(ways) if way[1] != "weights"), ways[-1])
    trains = ways != [(False, "none")]
    if share is None and not trains:
        shares = {
            role: [_UNKNOWN[1] / sum(num_models.values())] * number
            for role, number in num_models.items()
        }
    else:
        most = share or _UNKNOWN[0]
        shares = {
            r: [_told(most, r, num_models, sleeps=sleeps)] * number
            for r, number in num_models.items()
        }
    line = "the sizes of a model or device are not known"
    return Sharing(
        sleeps, offload, shares, f"{line}; {_in_words(sleeps, offload)}" if trains else line
    )


def share_of(engine: Engine, device_bytes: float) -> float:
    return min(DEVICE_SHARE, math.ceil(1000 * (engine.awake - _CONTEXT) / device_bytes) / 1000)


def _told(share: float, role: str, num_models: Mapping[str, int], *, sleeps: bool) -> float:
    """Of the share that the user gives to each role, one engine's; scorers that are awake together divide it."""
    if role == "rollout":
        return share
    return share / (
        num_models[role]
        if sleeps
        else sum(n for other, n in num_models.items() if other != "rollout")
    )


def _as_told(engine: Engine, need: Need, told: float) -> Engine:
    """The engine in so many bytes."""
    cache = told + _CONTEXT - engine.weights - engine.workspace - engine.footing
    holds_one = cache >= need.token_bytes * need.longest
    at_once = (
        int(min(need.sequences, cache // (need.token_bytes * need.tokens))) if holds_one else 0
    )
    return replace(engine, kv_cache=max(0.0, cache), at_once=at_once)


def _in_words(sleeps: bool, offload: Offload) -> str:
    if not sleeps:
        return (
            "engines stay awake beside the trainer, and the optimizer's state stays on the device"
        )
    away = {"none": "", "optimizer": ", and the optimizer's state is in host memory during a round"}
    return "engines sleep while the trainer trains" + away.get(
        offload, ", and the optimizer's state and frozen weights are in host memory during a round"
    )


def _too_little(
    role: str,
    need: Need,
    capacity: float,
    beside: float,
    device_bytes: float,
    gets: float | None,
    together: int,
) -> str:
    """Which engine does not fit, what it needs, what there is, and the way out."""
    least, (weights, _) = least_engine(need), need.fixed
    each = f" on each of {need.tensor_parallel} devices" if need.tensor_parallel > 1 else ""
    what = (
        f"{role} {need.facts.name}: an engine needs {least / GIB:.1f} GiB{each} (weights {weights / GIB:.1f}, a "
        f"sequence of {need.longest} tokens {need.token_bytes * need.longest / GIB:.2f})"
    )
    if gets is not None and least <= capacity - beside:
        enough = math.ceil(100 * (least - _CONTEXT) / device_bytes) / 100
        return (
            f"{what}, and gets {gets:.2g} of a device's {device_bytes / GIB:.1f} GiB; say "
            f"--set engine.gpu_memory_utilization={enough:g}, or leave that out"
        )
    left = f"and {max(0.0, capacity - beside) / GIB:.1f} of a device's {device_bytes / GIB:.1f} GiB are left"
    left += (
        f" beside the {beside / GIB:.1f} that the trainer and sleeping engines hold"
        if beside
        else ""
    )
    left += f" for {together} engines that stay awake" if together > 1 else ""
    most = (
        (capacity - beside - (least - weights)) * need.tensor_parallel / need.bytes_per_value / 1e9
    )
    way_out = (
        f"take a model of {most:.2g} billion parameters or fewer"
        if most > 0.1
        else "take larger devices"
    )
    if together > 1:
        way_out = "take a smaller model, or larger devices"
    return f"{what}, {left}; {way_out}" + (
        ", or a judge with a base_url" if role == "judge" else ""
    )
