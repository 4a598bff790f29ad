"""What a machine cannot run: one check for a dry run, a launch, and each way that `ycore plan` lists.

The bounds on memory are the certain part of the plan's formulas: what does not pass must fail, while what passes may
still run out of memory.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from ycore.config.batch import derive_batch
from ycore.config.schema import RunConfig
from ycore.errors import ConfigError
from ycore.launch import engines
from ycore.launch.layout import Machine, Site, check_deepspeed, layout_of
from ycore.launch.scoring_models import ScoringModel, check_run_placement, scoring_models
from ycore.launch.widths import FactsOf, Widths, facts_here, run_widths, served_models
from ycore.placement.placement import JUDGE, REWARD_MODEL
from ycore.plan.devices import GIB, Fleet
from ycore.plan.memory import ON_GPU, engine_weights
from ycore.plan.model_facts import ModelFacts
from ycore.run.paths import RunFolder

_MOST_UTILIZATION = 0.95  # the share of a device that the plan gives to everything


def check_run(config: RunConfig, site: Site, *, known: FactsOf = facts_here, vllm: bool | None = None) -> None:
    """ConfigError where the site's machine cannot run the config: ranks, slots, placement, batch, memory.

    Args:
        vllm: whether vLLM is installed on the machine; by default, on this one.
    """
    if config.algorithm != "eval":
        derive_batch(config, world_size=site.layout.world, on_cpu=not site.machine.devices)
    if config.replay is not None:
        return check_run_placement(config)
    is_installed = engines.is_vllm_installed() if vllm is None else vllm
    kind, _ = engines.choose_kind(config.engine.kind, vllm_installed=is_installed)
    if kind == "transformers":
        if site.layout.shards_weights:
            raise ConfigError(
                "transformers generates with the trainer's own weights, which no rank has whole under zero3 or fsdp2; "
                "install vLLM (pip install 'ycore[cpu]' or 'ycore[gpu]'), or take --accelerate zero2"
            )
        return check_run_placement(config)
    scorers = scoring_models(config)
    widths = run_widths(config, site.machine, scorers, known)
    num_slots = len(engines.slots_of(config, site, widths.slot))
    check_run_placement(config, num_slots=num_slots, models=scorers)
    if site.machine.devices:
        _check_devices(config, site.machine, scorers, widths, known)
    else:
        _check_host(config, site.machine, num_slots, scorers, widths, known)
    if config.algorithm != "eval" and config.sync_weights:
        _check_shared_memory(config, site.machine, known)
    return None


def check_described(config: RunConfig, fleet: Fleet, *, known: FactsOf = facts_here) -> None:
    """The same on described devices, or on cores of this machine, with what is installed here."""
    device, machine = fleet.device, described(fleet)
    layout = layout_of(config, machine)
    if device.on_cpu:
        check_deepspeed(config, layout)
    site = Site(RunFolder(Path(config.output)), layout, machine)
    check_run(config, site, known=known, vllm=None if device.on_cpu else True)


def described(fleet: Fleet) -> Machine:
    device, count = fleet.device, fleet.count
    if device.on_cpu:
        return Machine(tuple(range(count)), (), host_bytes=device.memory_bytes)
    devices = tuple(map(str, range(count)))
    old = () if device.has_bfloat16 else (device.name,)
    return Machine(tuple(range(count)), devices, device_bytes=device.memory_bytes, without_bfloat16=old)


def _weights(role: str, facts: ModelFacts, config: RunConfig) -> float:
    """Bytes of an engine's weights on a device; a reward model has a score in place of the output head."""
    head = facts.head_params if role == REWARD_MODEL and not facts.tied else 0
    whole = engine_weights(facts, _value_bytes(config), tensor_parallel=1)
    return whole * (1 - head / facts.num_params)


def _value_bytes(config: RunConfig) -> int:
    return 4 if config.dtype == "float32" else 2


def _check_devices(
    config: RunConfig, machine: Machine, scorers: Sequence[ScoringModel], widths: Widths, known: FactsOf
) -> None:
    """vLLM takes no more of a device than it is told, so the weights must fit into that share."""
    share, whole = config.engine.gpu_memory_utilization, machine.device_bytes
    if whole is None:
        return
    for role, name, sharing in served_models(config, scorers):
        facts = known(name)
        if facts is None:
            continue
        width = widths.of(role, name)
        weights = _weights(role, facts, config) / width
        if weights < share / sharing * whole:
            continue
        each = f" on each of {width} devices" if width > 1 else ""
        needed = math.ceil(100 * sharing * (weights + ON_GPU.engine) / whole) / 100
        way_out = f"say --set engine.gpu_memory_utilization={needed:g}"
        if needed > _MOST_UTILIZATION:
            most = width * (_MOST_UTILIZATION * whole / sharing - ON_GPU.engine) / _value_bytes(config) / 1e9
            way_out = f"take a model of {most:.2g} billion parameters or fewer" if most > 0.1 else "take larger devices"
            way_out += ", or a judge with a base_url" if role == JUDGE else ""
        raise ConfigError(
            f"{role} {name}: its weights take {weights / GIB:.1f} GiB{each}, and an engine gets {share / sharing:.2g} "
            f"of a device's {whole / GIB:.1f} GiB, which is {share / sharing * whole / GIB:.1f}; {way_out}"
        )
    if share > 0.5 and scorers and not config.engine.sleep:
        raise ConfigError(
            f"with engine.sleep=false the engines of all roles hold their memory at once, and twice "
            f"engine.gpu_memory_utilization {share:g} is more than a device; take 0.45, or leave engine.sleep out"
        )


def _check_host(
    config: RunConfig,
    machine: Machine,
    num_slots: int,
    scorers: Sequence[ScoringModel],
    widths: Widths,
    known: FactsOf,
) -> None:
    """On a CPU the engines of all roles and slots stay up."""
    sizes = [(role, name, known(name)) for role, name, _ in served_models(config, scorers)]
    weights = {
        f"{role} {name}": _weights(role, facts, config) * (widths.slot // widths.of(role, name))
        for role, name, facts in sizes
        if facts
    }
    total = sum(weights.values())
    if machine.host_bytes is None or num_slots * total <= machine.host_bytes:
        return
    fits = int(machine.host_bytes // total)
    largest = max(weights, key=lambda name: weights[name])
    way_out = f"say --set engine.count={fits}" if fits else f"take a smaller model than {largest}"
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in weights.items())
    raise ConfigError(
        f"the engines' weights take {num_slots * total / GIB:.1f} GiB ({num_slots} of each: {parts}), and this machine "
        f"has {machine.host_bytes / GIB:.1f} GiB; {way_out}"
    )


def _check_shared_memory(config: RunConfig, machine: Machine, known: FactsOf) -> None:
    facts = known(config.model)
    if facts is None or machine.shm_bytes is None:
        return
    needed = facts.num_params * _value_bytes(config)
    if needed > machine.shm_bytes:
        gib = max(8, math.ceil(1.1 * needed / GIB))
        raise ConfigError(
            f"/dev/shm must hold the policy's weights: {needed:.0f} bytes; "
            f"{machine.shm_bytes:.0f} are free; make it larger, e.g. docker run --shm-size={gib}g"
        )
