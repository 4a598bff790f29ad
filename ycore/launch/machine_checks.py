"""Refuse what a machine cannot run: one check for a dry run, a launch, and each strategy that `ycore plan` lists.

The bounds on memory are the certain part of the plan's formulas: what does not pass must fail, while what passes may
still run out of memory.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from ycore.config.schema import BaseConfig, RunConfig
from ycore.config.trl_arguments import BatchPlan, derive_batch
from ycore.engine.commands import ENGINE_RANKS, check_arguments
from ycore.engine.kinds import INSTALL_VLLM, EngineKind, choose_kind
from ycore.errors import ConfigError
from ycore.launch import engines
from ycore.launch.device_memory import Arrangement, FactsOf, facts_here
from ycore.launch.layout import (
    Machine,
    Site,
    check_deepspeed,
    on_machine,
    planned_site,
    this_machine,
)
from ycore.models.model_facts import ModelFacts, sighted_family
from ycore.placement.placement import REWARD_MODEL, better_divisions
from ycore.plan.devices import GIB, Fleet
from ycore.plan.memory import engine_weight_bytes
from ycore.plan.sharing import DeviceSharing
from ycore.run.metrics import read_metrics
from ycore.scoring.scorers import check_run_placement, served_models


def check_run(
    config: RunConfig, site: Site, *, known: FactsOf = facts_here, vllm: bool | None = None
) -> DeviceSharing | None:
    """Check that the site's machine can run the config: ranks, slots, placement, batch, memory; else ConfigError.

    Returns how engines and trainer share devices, where both are on some. `vllm`: whether it is installed there.
    """
    family = sighted_family(config.model)
    kind, _ = choose_kind(config.engine.kind, family=family, is_installed=vllm)
    _check_options(config, site, kind)
    if config.replay is None and kind.has_servers:
        return _check_engines(config, site, known)
    if config.replay is None:
        _check_in_process(config, site, kind)
    check_run_placement(config, served_models(config))
    return None


def _check_options(config: RunConfig, site: Site, kind: EngineKind) -> None:
    """Check the options that depend on the kind of engine and the ranks."""
    layout = site.layout
    if config.algorithm != "eval":
        batch = derive_batch(config, world_size=layout.world, on_cpu=not site.machine.devices)
        if config.sampling.max_staleness:
            _check_ahead(config, batch, kind)
    if config.algorithm == "ppo" and (layout.uses_deepspeed or layout.uses_fsdp):
        raise ConfigError(
            "ycore ppo clips and warms up its critic apart, which DeepSpeed and FSDP cannot; take --accelerate ddp"
        )
    if config.engine.rebalance and not _can_move(config, site):
        raise ConfigError(
            "engine.rebalance needs engine.devices, --max-staleness 1 or more, one machine, and --accelerate ddp without "
            "--deterministic; leave it out, or give these"
        )
    if not kind.has_servers:
        _check_needs_engines(config, kind)
    if config.deterministic and config.replay is None and layout.world > 1:
        rule = "ranks share out the draws as they become free, so --deterministic is for one"
        raise ConfigError(f"{rule}, not {layout.world}; take --processes 1")


def _check_engines(config: RunConfig, site: Site, known: FactsOf) -> DeviceSharing | None:
    """Check slots, placement and memory of a run with engines; return how they share devices with the trainer."""
    check_arguments(config.engine.args)
    if config.engine.hosts:
        _check_hosts(config, site)
    arrangements = engines.arrange_all(config, site, known)
    ours = arrangements[0]
    sharing = ours.sharing
    sleeps = sharing is not None and sharing.sleeps
    if config.engine.hosts and sleeps:
        raise ConfigError(
            "engine.hosts goes with engines that stay awake; take engine.count=0, or engine.devices=1"
        )
    if len({tuple(served.engines_by_slot) for served in arrangements if served.slots}) > 1:
        raise ConfigError(
            "engine.hosts: engines of a model span another share of a slot on each machine; set tensor_parallel of each "
            "model to 1"
        )
    num_slots = sum(len(served.slots) for served in arrangements)
    if not num_slots:
        raise ConfigError(
            "engine.count 0 leaves no engine; name machines that have some in engine.hosts"
        )
    check_run_placement(config, ours.models, num_slots=num_slots)
    if config.sampling.max_staleness and sleeps:
        raise ConfigError(
            f"{_AHEAD}, and here engines and trainer take turns on a device; leave --max-staleness out, or give "
            "engines some devices alone (--set engine.devices=N), or say --set engine.sleep=false where both fit"
        )
    drafts = config.engine.args.get("speculative_config")
    has_no_weights = any(method in str(drafts) for method in ("ngram", "suffix"))
    if sleeps and drafts is not None and not has_no_weights:
        raise ConfigError(
            "engines that sleep drop the weights of a draft model, and are sent the policy's alone; say "
            "--set engine.sleep=false where both fit, or leave engine.args.speculative_config out"
        )
    sync = config.engine.sync
    on_cpu = not site.machine.devices
    if sync in ("adapter", "ipc"):
        _check_sync(config, ours, sleeps=sleeps)
    if on_cpu:
        _check_host(config, ours, known)
    passes_files = sync in ("auto", "merged") or (sync == "ipc" and on_cpu)
    if config.algorithm != "eval" and passes_files:
        _check_shared_memory(config, site.machine, known)
    return sharing


def _check_hosts(config: RunConfig, site: Site) -> None:
    hosts = config.engine.hosts
    rule = None
    if len({*hosts}) < len(hosts):
        rule = f"must name each machine once; it is {hosts}"
    elif config.algorithm == "eval":
        rule = "has engines that are sent a training's weights, and an evaluation sends none; leave it out"
    elif site.layout.num_machines > 1:
        rule = "serves a trainer on one machine"
    elif config.engine.sync == "ipc":
        rule = "is sent files of weights; leave engine.sync=ipc out"
    elif sighted_family(config.model):
        rule = "takes models of text alone"
    if rule is not None:
        raise ConfigError(f"engine.hosts {rule}")


_INSTALL = f"install vLLM ({INSTALL_VLLM})"
_AHEAD = "with --max-staleness engines write later rounds while the trainer trains"


def _check_needs_engines(config: RunConfig, kind: EngineKind) -> None:
    """Refuse what only engines in processes of their own can do."""
    rule = None
    if config.sampling.reuse:
        rule = "with sampling.reuse engines record each token's log-probability"
    elif config.engine.devices != "shared":
        rule = "with engine.devices engines have devices of their own"
    elif config.engine.hosts:
        rule = "with engine.hosts engines are on other machines"
    elif config.sampling.oversample > 1:
        rule = "with --oversample engines give back what they have begun"
    if rule is not None:
        raise ConfigError(f"{rule}, and {kind.name} does not; leave it out, or {_INSTALL}")


def _check_ahead(config: RunConfig, batch: BatchPlan, kind: EngineKind) -> None:
    if config.replay is not None:
        raise ConfigError(f"{_AHEAD}, and --replay has no engines; leave --max-staleness out")
    if not kind.has_servers:
        rule = f"{_AHEAD}, and {kind.name} writes with the trainer's own model"
        raise ConfigError(f"{rule}; leave --max-staleness out, or {_INSTALL}")
    steps = batch.steps_per_round * int(config.trl.get("num_iterations", 1))
    if steps > 1:
        raise ConfigError(
            f"--max-staleness counts steps of one round each, and a round here has {steps}; leave it out, or leave "
            "steps_per_generation and num_iterations out"
        )


def _check_in_process(config: RunConfig, site: Site, kind: EngineKind) -> None:
    sync = config.engine.sync
    if sync in ("adapter", "ipc"):
        raise ConfigError(
            f"engine.sync={sync} cannot be used here: {kind.name} is sent no weights; leave it out"
        )
    if config.deterministic:
        rule = f"{kind.name} writes the requests that wait together from one seed, and which do depends on the machine"
        raise ConfigError(f"{rule}; leave --deterministic out, or {_INSTALL}")
    if site.layout.shards_weights:
        rule = f"{kind.name} generates with the trainer's own weights, which no rank has whole under zero3, fsdp2 or hsdp"
        raise ConfigError(f"{rule}; {_INSTALL}, or take --accelerate zero2")


def find_move(
    config: BaseConfig,
    site: Site,
    say: Callable[[str], object],
    *,
    step: int,
    cost_s: float,
) -> RunConfig | None:
    """Say which of `better_divisions` the machine can run, where the steps to come pay for the move; return its config.

    `processes` is then what `auto` gives; where that leaves a GPU idle, the division is passed over.
    """
    if not isinstance(config, RunConfig) or not _can_move(config, site) or step >= config.steps:
        return None
    # Engines and trainer hold memory now that they will have given back.
    before = site.machine
    machine = replace(this_machine(), free_bytes=before.free_bytes, shm_bytes=before.shm_bytes)
    for number, sentence in better_divisions(
        read_metrics(site.folder.metrics),
        int(config.engine.devices),
        len(machine.parts[0]),
        least_gain_s=cost_s / (config.steps - step),
    ):
        engine = config.engine.model_copy(update={"devices": number})
        changed = config.model_copy(update={"engine": engine, "processes": "auto"})
        other = on_machine(changed, machine)
        with suppress(ConfigError):
            planned = planned_site(other, machine)
            check_run(other, planned)
            if not machine.devices or planned.layout.local == len(planned.machine.devices):
                say(sentence)
                return other
    return None


def _can_move(config: RunConfig, site: Site) -> bool:
    """Whether devices can move between training and engines, which changes the number of ranks."""
    is_kept_whole = site.layout.sharding == "ddp" and not config.deterministic
    is_one_machine = site.layout.num_machines == 1 and not config.engine.hosts
    writes_ahead = site.apart is not None and config.sampling.max_staleness > 0
    return is_kept_whole and is_one_machine and writes_ahead


def check_described(config: RunConfig, fleet: Fleet, *, known: FactsOf = facts_here) -> None:
    """Check a run on described devices, or on cores of this machine with the packages that are installed here."""
    config.check()
    device = fleet.device
    machine = described(fleet)
    config = on_machine(config, machine)
    site = planned_site(config, machine, place={"num_machines": fleet.machines})
    if device.on_cpu:
        check_deepspeed(config, site.layout)
    check_run(config, site, known=known, vllm=None if device.on_cpu else True)


def described(fleet: Fleet) -> Machine:
    """Return a machine of the fleet, with its devices or cores."""
    device = fleet.device
    numbers = tuple(range(fleet.count // fleet.machines))
    if device.on_cpu:
        return Machine(
            numbers, (), host_bytes=device.memory_bytes, cores_have_bfloat16=device.has_bfloat16
        )
    return Machine(
        numbers,
        tuple(map(str, numbers)),
        device_bytes=device.memory_bytes,
        without_bfloat16=() if device.has_bfloat16 else (device.name,),
    )


def _weights(role: str, facts: ModelFacts, config: RunConfig) -> float:
    """Return the bytes of an engine's weights; a reward model has a score in place of the output head."""
    head = facts.head_params if role == REWARD_MODEL and not facts.tied else 0
    whole = engine_weight_bytes(facts, config.value_bytes, tensor_parallel=1)
    return whole * (1 - head / facts.num_params)


def _check_host(config: RunConfig, arrangement: Arrangement, known: FactsOf) -> None:
    """Check that the host has room for the weights: on a CPU the engines of all roles and slots stay up."""
    machine = arrangement.site.machine
    num_slots = len(arrangement.slots)
    weights: dict[str, float] = {}
    for model, num_engines in zip(arrangement.models, arrangement.engines_by_slot, strict=True):
        if facts := known(model.name):
            size = num_engines * _weights(model.role, facts, config)
            weights[f"{model.role} {model.name}"] = size
    total = sum(weights.values())
    if machine.host_bytes is None or num_slots * total <= machine.host_bytes:
        return
    fits = int(machine.host_bytes // total)
    largest = max(weights, key=lambda name: weights[name])
    way_out = (
        f"say --set engine.count={fits}" if fits else f"take a smaller model than {largest}"
    )
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in weights.items())
    raise ConfigError(
        f"the engines' weights take {num_slots * total / GIB:.1f} GiB ({num_slots} of each: {parts}), and this machine "
        f"has {machine.host_bytes / GIB:.1f} GiB; {way_out}"
    )


def _check_sync(config: RunConfig, arrangement: Arrangement, *, sleeps: bool) -> None:
    """Refuse a sync of adapters, or by CUDA IPC, that cannot work here."""
    site = arrangement.site
    layout = site.layout
    is_wide = arrangement.models[0].width > 1
    slot_devices = {device for slot in arrangement.slots for device in slot.devices}
    has_other_devices = not slot_devices <= {*site.machine.devices[:1]}
    reasons = {
        "adapter": {
            "all weights are trained (--full)": config.lora is None,
            "the trainer's base is quantised, and the engine's is not": config.quantize
            is not None,
            "zero3, fsdp2 and hsdp cut up the base, whose sums are compared": layout.shards_weights,
            "workers of a wide engine divide the adapters": is_wide,
            "engines that sleep drop their base (engine.sleep)": sleeps,
            f"engines take adapters of rank {ENGINE_RANKS[-1]} at most": config.lora is not None
            and config.lora.r > ENGINE_RANKS[-1],
        },
        "ipc": {
            "engines copy from the memory of one training process (--processes 1)": layout.world
            > 1,
            "a worker of a wide engine cannot open another device's memory": is_wide,
            "an engine is on another device than the trainer (engine.count=1 leaves one)": has_other_devices,
        },
    }
    sync = config.engine.sync
    for reason, holds in reasons[sync].items():
        if holds:
            raise ConfigError(f"engine.sync={sync} cannot be used here: {reason}; leave it out")


def _check_shared_memory(config: RunConfig, machine: Machine, known: FactsOf) -> None:
    facts = known(config.model)
    if facts is None or machine.shm_bytes is None:
        return
    num_versions = 2 if config.engine.hosts else 1
    needed = num_versions * facts.num_params * config.value_bytes
    if needed > machine.shm_bytes:
        gib = max(8, math.ceil(1.1 * needed / GIB))
        raise ConfigError(
            f"/dev/shm must hold the policy's weights: {needed / GIB:.2f} GiB; "
            f"{machine.shm_bytes / GIB:.2f} GiB are free; make it larger, e.g. docker run --shm-size={gib}g"
        )
