"""Split a device's memory between trainer and engines: sleep mode, CPU offload, gpu_memory_utilization.

vLLM takes `gpu_memory_utilization` of the whole device, and refuses to start where less is free (vLLM 0.31,
`request_memory` in v1/worker/utils.py). What its process held before it looked is not in that share.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ycore.config.schema import Offload
from ycore.errors import ConfigError
from ycore.placement.placement import JUDGE, ROLLOUT
from ycore.plan.devices import GIB
from ycore.plan.memory import (
    ASLEEP_BYTES,
    DEVICE_SHARE,
    NO_TRAINER,
    OFFLOADED,
    EngineMemory,
    EngineNeed,
    Parts,
    Strategy,
    TrainerMemory,
    Workload,
    engines_on_gpu,
    gpu_phases,
)

_CONTEXT = 0.5 * GIB  # of an engine's overhead, what is outside of its share
_ENOUGH = 64  # sequences at once, from which on a decoding step takes longer with each
_SHARE_BESIDE_TRAINER = 0.3  # of engines with unknown sizes
_SHARE_ALONE = 0.9

SharingOption = tuple[bool, Offload]
"""Whether engines sleep while the trainer trains, and what leaves the device for a round."""

Needs = Mapping[str, Sequence[EngineNeed]]
"""The engines that a device has, by role."""


def sharing_options(work: Workload, strategy: Strategy) -> list[SharingOption]:
    """Return the ways to share a device, the cheapest first, each with more room for engines than the one before."""
    options: list[SharingOption] = [(False, "none"), (True, "none"), (True, "optimizer")]
    has_frozen = work.lora_rank is not None or work.has_reference
    if has_frozen and not strategy.shards_weights:
        options.append((True, "weights"))
    return options


class DeviceSharing(NamedTuple):
    """`shares`: by role, vLLM's `gpu_memory_utilization` of each of its models. `line`: the decision in words."""

    sleeps: bool
    offload: Offload
    shares: Mapping[str, Sequence[float]]
    line: str


def usable_bytes(device_bytes: float, free_bytes: float | None) -> float:
    """Return the bytes of a device that may be planned for; `free_bytes` where others hold some of it."""
    most = DEVICE_SHARE * device_bytes
    return most if free_bytes is None else min(most, free_bytes)


def share_device(
    needs: Needs,
    trainer: TrainerMemory,
    options: Sequence[SharingOption],
    *,
    device_bytes: float,
    free_bytes: float | None,
    share: float | None,
) -> DeviceSharing:
    """Take the first of `options` in which all fits, else the last, which leaves engines most.

    Args:
        trainer: NO_TRAINER where nothing trains on it.
        share: `engine.gpu_memory_utilization`, where the user has set it.

    Raises:
        ConfigError: there is too little memory for one sequence of an engine.
    """
    capacity = usable_bytes(device_bytes, free_bytes)
    for sleeps, offload in options:
        split = _Split(needs, trainer, sleeps, offload, capacity, device_bytes, share)
        if split.fits:
            break
    split.check()
    shares = {
        role: [
            min(DEVICE_SHARE, math.ceil(1000 * (engine.awake - _CONTEXT) / device_bytes) / 1000)
            for engine in engines
        ]
        for role, engines in split.engines.items()
    }
    return DeviceSharing(split.sleeps, split.offload, shares, split.line)


@dataclass(frozen=True)
class _Split:
    """One way to divide a device."""

    _needs: Needs
    _trainer: TrainerMemory
    sleeps: bool
    offload: Offload
    _capacity: float
    _device_bytes: float
    _share: float | None

    @cached_property
    def _phases(self) -> Mapping[str, Parts]:
        return gpu_phases(self.engines, self._trainer, sleeps=self.sleeps, offload=self.offload)

    @property
    def _num_models(self) -> Mapping[str, int]:
        return {role: len(models) for role, models in self._needs.items()}

    @cached_property
    def engines(self) -> Mapping[str, list[EngineMemory]]:
        if self._share is None:
            return engines_on_gpu(
                self._needs,
                self._trainer,
                self._capacity,
                sleeps=self.sleeps,
                offload=self.offload,
            )
        engines = {}
        for role, models in self._needs.items():
            size = self._device_bytes * self._share_of_engine(role) + _CONTEXT
            engines[role] = [need.engine(size - need.without_cache) for need in models]
        return engines

    def _share_of_engine(self, role: str) -> float:
        return _divide_share(self._share or 0.0, role, self._num_models, sleeps=self.sleeps)

    @property
    def _fullest(self) -> tuple[str, float]:
        sizes = {name: sum(roles.values()) for name, roles in self._phases.items()}
        name = max(sizes, key=lambda phase: sizes[phase])
        return name, sizes[name]

    @property
    def _placed(self) -> list[tuple[str, EngineNeed, EngineMemory]]:
        return [
            (role, need, engine)
            for role in self._needs
            for need, engine in zip(self._needs[role], self.engines[role], strict=True)
        ]

    @property
    def fits(self) -> bool:
        has_enough = all(
            engine.at_once >= min(need.sequences, _ENOUGH) for _, need, engine in self._placed
        )
        return has_enough and self._fullest[1] <= self._capacity

    def check(self) -> None:
        """Raise ConfigError for engines that take too much together, or for one that has no room for a sequence."""
        engines_need = max(
            sum(roles[role] for role in self._needs) for roles in self._phases.values()
        )
        if self._share is not None and engines_need > self._capacity:
            raise ConfigError(
                f"engines take {engines_need / GIB:.1f} GiB at once with engine.gpu_memory_utilization="
                f"{self._share:g}, and {self._capacity / GIB:.1f} of a device's {self._device_bytes / GIB:.1f} can be "
                "used; lower that, or leave it out"
            )
        for role, need, engine in self._placed:
            if engine.at_once < 1:
                raise ConfigError(self._why_no_room(role, need))

    def _why_no_room(self, role: str, need: EngineNeed) -> str:
        """Say which engine does not fit, what it needs, what there is, and the way out."""
        devices = (
            f" on each of {need.tensor_parallel} devices" if need.tensor_parallel > 1 else ""
        )
        problem = (
            f"{role} {need.facts.name}: an engine needs {need.least / GIB:.1f} GiB{devices} (weights "
            f"{need.weights / GIB:.1f}, a sequence of {need.longest} tokens {need.least_cache / GIB:.2f})"
        )
        beside = self._trainer.peak + sum(
            other.least for _, other, _ in self._placed if other is not need
        )
        if self.sleeps:
            num_asleep = sum(self._num_models.values()) - self._num_models[role]
            beside = self._trainer.resting[self.offload] + ASLEEP_BYTES * num_asleep
        left = self._capacity - beside
        billions = (left - (need.least - need.weights)) * need.tensor_parallel
        billions /= need.bytes_per_value * 1e9
        way_out = "take larger devices"
        if billions > 0.1:
            way_out = f"take a model of {billions:.2g} billion parameters or fewer"
        if self._share is not None:
            left = min(left, self._device_bytes * self._share_of_engine(role) + _CONTEXT)
            way_out = "raise engine.gpu_memory_utilization, or leave it out"
        if role == JUDGE:
            way_out += ", or a judge with a base_url"
        problem += f", and {max(0.0, left) / GIB:.1f} of a device's {self._device_bytes / GIB:.1f} GiB are left"
        if beside:
            problem += f" beside the {beside / GIB:.1f} that the trainer and other engines hold"
        return f"{problem}; {way_out}"

    @property
    def line(self) -> str:
        words = []
        if self._trainer is not NO_TRAINER:
            words.append(f"trainer {self._trainer.peak / GIB:.1f}")
        for role, engines in self.engines.items():
            awake = sum(engine.awake for engine in engines)
            words.append(f"{role.replace('_', ' ')} {awake / GIB:.1f}")
        line = f"of a device's {self._device_bytes / GIB:.1f} GiB: {', '.join(words)}"
        if self._trainer is not NO_TRAINER:
            line += f"; {_describe(self.sleeps, self.offload)}"
        phase, needed = self._fullest
        if needed > self._capacity:
            line += (
                f"; {phase} needs {needed / GIB:.1f} and {self._capacity / GIB:.1f} can be used: "
                "lower --per-device-train-batch-size or ask `ycore plan`"
            )
        return line


def share_unknown(
    num_models: Mapping[str, int], options: Sequence[SharingOption], *, share: float | None
) -> DeviceSharing:
    """Share a device where sizes are not known: engines sleep and the optimizer leaves, unless the user says otherwise."""
    sleeps, offload = next(
        (option for option in reversed(options) if option[1] != "weights"), options[-1]
    )
    trains = options != [(False, "none")]
    shares = {}
    for role, count in num_models.items():
        if share is None and not trains:
            engine_share = _SHARE_ALONE / sum(num_models.values())
        else:
            most = share or _SHARE_BESIDE_TRAINER
            engine_share = _divide_share(most, role, num_models, sleeps=sleeps)
        shares[role] = [engine_share] * count
    line = "the sizes of a model or device are not known"
    if trains:
        line += f"; {_describe(sleeps, offload)}"
    return DeviceSharing(sleeps, offload, shares, line)


def _divide_share(
    share: float, role: str, num_models: Mapping[str, int], *, sleeps: bool
) -> float:
    """Return one engine's part of the share that the user gives to each role; scorers awake together divide it."""
    if role == ROLLOUT:
        return share
    if sleeps:
        return share / num_models[role]
    return share / sum(count for scorer, count in num_models.items() if scorer != ROLLOUT)


def _describe(sleeps: bool, offload: Offload) -> str:
    if not sleeps:
        return "engines stay awake beside the trainer, and the optimizer's state stays on the device"
    words = "engines sleep while the trainer trains"
    if offload == "none":
        return words
    verb = "is" if offload == "optimizer" else "are"
    return f"{words}, and the {OFFLOADED[offload]} {verb} in host memory during a round"
