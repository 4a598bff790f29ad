"""What a machine cannot run: one check for a dry run, a launch, and each way that `ycore plan` lists.

The bounds on memory are the certain part of the plan's formulas: what does not pass must fail, while what passes may
still run out of memory.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from ycore.config.batch import BatchPlan, derive_batch
from ycore.config.learner_rules import check_learner
from ycore.config.schema import RunConfig
from ycore.engine.commands import check_arguments
from ycore.engine.kinds import EngineKind, choose_kind
from ycore.errors import ConfigError
from ycore.launch import engines
from ycore.launch.device_memory import FactsOf, facts_here, slot_width
from ycore.launch.layout import Layout, Machine, Site, check_deepspeed, layout_of, on_machine
from ycore.launch.scoring_models import ServedModel, check_run_placement, served_models
from ycore.models.names import sighted_family
from ycore.placement.placement import REWARD_MODEL
from ycore.plan.devices import GIB, Fleet
from ycore.plan.memory import engine_weight_bytes
from ycore.plan.model_facts import ModelFacts
from ycore.plan.sharing import DeviceSharing
from ycore.run.paths import RunFolder


def check_run(
    config: RunConfig, site: Site, *, known: FactsOf = facts_here, vllm: bool | None = None
) -> DeviceSharing | None:
    """ConfigError where the site's machine cannot run the config: ranks, slots, placement, batch, memory.

    Returns how engines and trainer share devices, where both are on some. `vllm`: whether it is installed there.
    """
    batch = None
    if config.algorithm != "eval":
        batch = derive_batch(config, world_size=site.layout.world, on_cpu=not site.machine.devices)
    family = sighted_family(config.model)
    kind, _ = choose_kind(config.engine.kind, family=family, is_installed=vllm)
    if config.sampling.max_staleness and batch is not None:
        _check_ahead(config, batch, kind)
    if config.eval_while_training:
        _check_evaluation(config, site.layout, kind)
    if config.sampling.oversample > 1 and not kind.has_servers:
        rule = f"with --oversample engines give back what they have begun, and {kind.name} does not"
        raise ConfigError(f"{rule}; leave it out, or {_INSTALL}")
    if config.engine.drafts and (family or not kind.can_draft):
        rule = "engine.drafts is of vLLM's engines, and of models that read text only"
        raise ConfigError(f"{rule}; leave it out")
    if config.replay is not None:
        check_run_placement(config, served_models(config))
        return None
    if config.deterministic and site.layout.world > 1:
        rule = "ranks share out the draws as they become free, so --deterministic is for one"
        raise ConfigError(f"{rule}, not {site.layout.world}; take --processes 1")
    if not kind.has_servers:
        _check_in_process(config, site, kind)
        check_run_placement(config, served_models(config))
        return None
    check_arguments(config.engine.args)
    models, slots, sharing = engines.arrange(config, site, known)
    check_run_placement(config, models, num_slots=len(slots))
    asked = {_AHEAD: config.sampling.max_staleness, _MEASURES: config.eval_while_training}
    for rule in (
        rule
        for rule, is_asked in asked.items()
        if is_asked and sharing is not None and sharing.sleeps
    ):
        option = rule.split()[1]
        raise ConfigError(
            f"{rule}, and here engines and trainer take turns on a device; leave {option} out, or say "
            "--set engine.sleep=false where both fit"
        )
    if config.engine.sync != "merged":
        _check_sync(config, site, models, slots, sharing)
    if not site.machine.devices:
        _check_host(config, site.machine, len(slots), models, known)
    in_files = config.engine.sync == "merged" or (
        config.engine.sync == "ipc" and not site.machine.devices
    )
    if config.algorithm != "eval" and config.sync_every and in_files:
        _check_shared_memory(config, site.machine, known)
    return sharing


_INSTALL = "install vLLM (pip install 'ycore[cpu]' or 'ycore[gpu]')"
_AHEAD = "with --max-staleness 1 engines write the next round while the trainer trains"
_MEASURES = "with --eval-while-training engines measure one step's policy while the trainer computes the next step"


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


def _check_evaluation(config: RunConfig, layout: Layout, kind: EngineKind) -> None:
    """ConfigError where engines have no time to measure while the trainer trains, or would hold up its weights."""
    if not kind.has_servers:
        rule = f"{_MEASURES}, and {kind.name} writes with the trainer's own model"
        raise ConfigError(f"{rule}; leave --eval-while-training out, or {_INSTALL}")
    if config.sampling.max_staleness:
        raise ConfigError(
            f"{_MEASURES}, and with --max-staleness 1 they write the next round; leave one of them out"
        )
    if layout.uses_deepspeed:
        raise ConfigError(
            f"{_MEASURES}, and DeepSpeed changes the weights within the backward pass, before the best model could be "
            "saved; leave --eval-while-training out, or take another --accelerate"
        )


def _check_in_process(config: RunConfig, site: Site, kind: EngineKind) -> None:
    if (how := config.engine.sync) != "merged":
        raise ConfigError(
            f"engine.sync={how} cannot be used here: {kind.name} is sent no weights; leave it out"
        )
    if config.deterministic:
        rule = f"{kind.name} writes the requests that wait together from one seed, and which do depends on the machine"
        raise ConfigError(f"{rule}; leave --deterministic out, or {_INSTALL}")
    if site.layout.shards_weights:
        rule = f"{kind.name} generates with the trainer's own weights, which no rank has whole under zero3 or fsdp2"
        raise ConfigError(f"{rule}; {_INSTALL}, or take --accelerate zero2")


def check_described(config: RunConfig, fleet: Fleet, *, known: FactsOf = facts_here) -> None:
    """The same on described devices, or on cores of this machine, with what is installed here."""
    check_learner(config)
    device, machine = fleet.device, described(fleet)
    config = on_machine(config, machine)
    layout = layout_of(config, machine)
    if device.on_cpu:
        check_deepspeed(config, layout)
    site = Site(RunFolder(Path(config.output)), layout, machine)
    check_run(config, site, known=known, vllm=None if device.on_cpu else True)


def described(fleet: Fleet) -> Machine:
    device, count = fleet.device, fleet.count
    if device.on_cpu:
        cores = tuple(range(count))
        return Machine(
            cores, (), host_bytes=device.memory_bytes, cores_have_bfloat16=device.has_bfloat16
        )
    devices = tuple(map(str, range(count)))
    old = () if device.has_bfloat16 else (device.name,)
    return Machine(
        tuple(range(count)), devices, device_bytes=device.memory_bytes, without_bfloat16=old
    )


def _weights(role: str, facts: ModelFacts, config: RunConfig) -> float:
    """Bytes of an engine's weights on a device; a reward model has a score in place of the output head."""
    head = facts.head_params if role == REWARD_MODEL and not facts.tied else 0
    whole = engine_weight_bytes(facts, _value_bytes(config), tensor_parallel=1)
    return whole * (1 - head / facts.num_params)


def _value_bytes(config: RunConfig) -> int:
    return 4 if config.dtype == "float32" else 2


def _check_host(
    config: RunConfig,
    machine: Machine,
    num_slots: int,
    models: Sequence[ServedModel],
    known: FactsOf,
) -> None:
    """On a CPU the engines of all roles and slots stay up."""
    weights = {
        f"{model.role} {model.name}": _weights(model.role, facts, config)
        * (slot_width(models) // model.width)
        for model in models
        if (facts := known(model.name))
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


def _check_sync(
    config: RunConfig,
    site: Site,
    models: Sequence[ServedModel],
    slots: Sequence[engines.Slot],
    sharing: DeviceSharing | None,
) -> None:
    own, on_others = site.machine.devices[:1], {device for slot in slots for device in slot.devices}
    reasons: dict[str, dict[str, bool]] = {
        "adapter": {
            "all weights are trained (--full)": config.lora is None,
            "the trainer's base is quantised, and the engine's is not": config.quantize is not None,
            "zero3 and fsdp2 cut up the base, whose sums are compared": site.layout.shards_weights,
            "workers of a wide engine divide the adapters": models[0].width > 1,
            "engines that sleep drop their base (engine.sleep)": sharing is not None
            and sharing.sleeps,
        },
        "ipc": {
            "engines copy from the memory of one training process (--processes 1)": site.layout.world
            > 1,
            "a worker of a wide engine cannot open another device's memory": models[0].width > 1,
            "an engine is on another device than the trainer (engine.count=1 leaves one)": not on_others
            <= {*own},
        },
    }
    for reason, holds in reasons[config.engine.sync].items():
        if holds:
            raise ConfigError(
                f"engine.sync={config.engine.sync} cannot be used here: {reason}; leave it out"
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
