"""Divide the devices of a run: how many an engine spans, and the memory of engines and trainer on each.

The workers of an engine divide the attention heads of its model (tensor parallelism: Megatron-LM, arXiv 1909.08053).
A slot is a block of as many neighbouring devices as the widest engine spans. A model with narrower engines has several
of them on every slot, so all widths must divide the widest.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from ycore.config.schema import LoraSettings, RunConfig, TuneConfig
from ycore.config.trl_arguments import BatchPlan, TuneBatch, derive_batch, micro_batch_sizes
from ycore.engine.commands import split_evenly
from ycore.errors import ConfigError, ModelError
from ycore.launch.layout import Layout, Machine, Site, layout_of, planned_site
from ycore.models.model_facts import ModelFacts, facts_of, model_config
from ycore.placement.placement import ROLLOUT
from ycore.plan.devices import GIB
from ycore.plan.memory import (
    ASLEEP_BYTES,
    HOST_SHARE,
    MAX_ENGINES_ON_CPU,
    NO_TRAINER,
    EngineNeed,
    Strategy,
    TrainerMemory,
    trainer_memory,
    usual_length,
    workload_of,
)
from ycore.plan.sharing import (
    DeviceSharing,
    SharingOption,
    share_device,
    share_unknown,
    sharing_options,
    usable_bytes,
)
from ycore.scoring.scorers import own_teachers, served_models
from ycore.scoring.scoring import ServedModel

FactsOf = Callable[[str], ModelFacts | None]
"""The sizes of a model by its name; None where they are not known before it is fetched."""

_UNUSUAL_KEYS = {"quantization_config", "kv_lora_rank"}
"""Keys of a config.json whose weights have fewer bytes a value, or whose attention has other sizes."""
PROMPT_TOKENS = 512  # tokens of KV cache for a sequence's prompt; longer prompts wait for room
MAX_SEQS = 256
MAX_SEQS_ON_CPU = 32  # of a scorer or an evaluation, where more are hardly faster


class Slot(NamedTuple):
    """A block of neighbouring devices, or a share of the cores, here or on a host."""

    cores: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    host: str = ""

    def parts(self, count: int) -> list["Slot"]:
        shares = zip(
            split_evenly(self.cores, count), split_evenly(self.devices, count), strict=True
        )
        return [Slot(cores, devices, self.host) for cores, devices in shares]


class Arrangement(NamedTuple):
    """The models that a machine serves, with their widths, its slots, and how engines share its devices, if any."""

    site: Site
    models: list[ServedModel]
    slots: list[Slot]
    sharing: DeviceSharing | None

    @property
    def engines_by_slot(self) -> list[int]:
        """How many engines of each model are on a slot."""
        width = slot_width(self.models)
        return [width // model.width for model in self.models]


def facts_here(location: str, *, name: str | None = None) -> ModelFacts | None:
    """Return the facts of a model whose config.json is here or well known; None for weights of an unusual form.

    `name`: its name in messages, where that is not its location.
    """
    # The engine reads an unusual config.json.
    with suppress(ModelError):
        config = model_config(location, ask=False)
        return (
            None if config.keys() & _UNUSUAL_KEYS else facts_of(config, name=name or location)
        )
    return None


def slot_width(models: Sequence[ServedModel]) -> int:
    """Return the number of devices of a slot."""
    return max(model.width for model in models)


def max_sequences(
    config: RunConfig, site: Site, role: str, *, num_policy: int, num_engines: int
) -> int:
    """Return vLLM's `max_num_seqs` of an engine: a round's completions at once, and scorers that keep up with them.

    An evaluation has no rounds: its engines write as many at once as they do well.

    Args:
        num_policy: engines of the policy on this machine.
        num_engines: engines of this engine's model on this machine.
    """
    usual = MAX_SEQS if site.machine.devices else MAX_SEQS_ON_CPU
    num_sequences = config.engine.args.get("max_num_seqs")
    if not isinstance(num_sequences, int):
        evaluates = config.algorithm == "eval"
        group_size = config.num_samples if evaluates else config.group_size
        num_writing = num_policy * site.layout.num_machines
        share = math.ceil(config.prompts_per_step * group_size / num_writing)
        num_sequences = max(usual if evaluates else 1, min(MAX_SEQS, share))
    if role == ROLLOUT:
        return num_sequences
    return min(math.ceil(num_sequences * num_policy / num_engines), usual)


def fit_devices(config: RunConfig, machine: Machine) -> RunConfig:
    """Return the config with what it leaves open chosen by the devices' memory: sharding, micro-batch, sync.

    It is the first of ddp, zero2 and zero3 of which weights, gradients and optimizer fit and leave room for engines,
    and the largest micro-batch up to the usual one that fits beside them. On cores, and where a size is not known,
    nothing is changed.

    Raises:
        ConfigError: weights, gradients and optimizer alone are more than a device holds, or leave engines no room.
    """
    policy = facts_here(config.model)
    if not machine.devices or policy is None or config.algorithm == "eval":
        return config
    engine = config.engine
    if engine.sync == "auto" and not engine.hosts and _needs_ipc(config, machine, policy):
        engine = engine.model_copy(update={"sync": "ipc"})
        config = config.model_copy(update={"engine": engine})
    if machine.device_bytes is None or config.replay is not None:
        return config
    room = usable_bytes(machine.device_bytes, machine.free_bytes) - ASLEEP_BYTES
    shardings = [config.accelerate]
    if config.accelerate is None and config.processes != 1:
        shardings += ["zero2", "zero3"]

    def trainer_of(candidate: RunConfig) -> TrainerMemory:
        return _training_memory(candidate, layout_of(candidate, machine), policy, facts_here)[0]

    candidates = [
        (candidate, trainer_of(candidate))
        for name in shardings
        for candidate in _with_micro_batches(config, machine, name)
    ]
    fits = [candidate for candidate, trainer in candidates if trainer.peak <= room]
    # What activations take is not certain: of the first sharding that holds the rest, the smallest micro-batch may run.
    smallest = {
        candidate.accelerate: candidate
        for candidate, trainer in candidates
        if trainer.held <= room
    }
    for candidate in [*fits, *smallest.values()]:
        if _leaves_room(candidate, machine):
            return candidate
    fitting = (
        words
        for words, changed in _changes(config).items()
        if trainer_of(changed).held <= room and _leaves_room(changed, machine)
    )
    way_out = next(fitting, None)
    if smallest and way_out is None:
        return next(
            iter(smallest.values())
        )  # the check of its engines says why they do not fit
    takes = "leaves its engines too little on each device"
    if not smallest:
        size_gib = trainer_of(config).held / GIB
        takes = f"holds {size_gib:.1f} GiB on each device before any activations"
    raise ConfigError(
        f"training {config.model} {takes}, and {room / GIB:.1f} of its {machine.device_bytes / GIB:.1f} GiB can be used; "
        f"take {way_out or 'a smaller model, or larger or more devices'}"
    )


def _leaves_room(config: RunConfig, machine: Machine) -> bool:
    """Whether engines have room on the devices, and the host for what leaves them; True of a run without engines."""
    if config.engine.kind == "transformers":
        return True
    site = planned_site(config, machine)
    slots_of(config, site)  # too many are an error of their own
    with suppress(ConfigError):
        arrange(config, site, facts_here)
        return True
    return False


def _needs_ipc(config: RunConfig, machine: Machine, policy: ModelFacts) -> bool:
    """Whether /dev/shm has no room for the policy's weights, or the host beside frozen ones, and one device does all."""
    size = policy.num_params * config.value_bytes
    host_bytes = HOST_SHARE * (machine.host_bytes or math.inf)
    is_small = min(machine.shm_bytes or math.inf, host_bytes / 2) < size
    return is_small and len(machine.devices) == 1 and config.processes == 1


def _with_micro_batches(
    config: RunConfig, machine: Machine, sharding: str | None
) -> list[RunConfig]:
    """Return the sharded config with each micro-batch that it may take, the usual one first."""
    config = config.model_copy(update={"accelerate": sharding})
    world = layout_of(config, machine).world
    _, *smaller = micro_batch_sizes(config, world_size=world, on_cpu=False)
    named = [config.trl | {"per_device_train_batch_size": size} for size in smaller]
    return [config, *(config.model_copy(update={"trl": trl}) for trl in named)]


def _changes(config: RunConfig) -> dict[str, RunConfig]:
    """Return what takes less of a device, by the option."""
    changes: dict[str, dict[str, Any]] = {}
    if config.processes != 1:
        changes |= {f"--accelerate {name}": {"accelerate": name} for name in ("zero2", "zero3")}
    if config.lora is None:
        changes["LoRA (leave --full out)"] = {"lora": LoraSettings()}
    elif config.quantize is None:
        changes["--quantize 4bit"] = {"quantize": "4bit"}
    return {words: config.model_copy(update=change) for words, change in changes.items()}


def rank_strategy(
    config: RunConfig | TuneConfig, layout: Layout, batch: BatchPlan | TuneBatch
) -> Strategy:
    """Return how the ranks train, without what engines add."""
    checkpointing = config.trl.get("gradient_checkpointing", not batch.on_cpu)
    return Strategy(
        layout.world,
        1,
        layout.sharding,
        batch.per_device_train_batch_size,
        checkpointing=bool(checkpointing),
        replicas=layout.replicas,
    )


def _training_memory(
    config: RunConfig, layout: Layout, policy: ModelFacts, known: FactsOf
) -> tuple[TrainerMemory, list[SharingOption]]:
    """Return the memory of a rank, and the ways in which it can share its device."""
    batch = derive_batch(config, world_size=layout.world, on_cpu=False)
    strategy = rank_strategy(config, layout, batch)
    teachers = [facts for facts in map(known, own_teachers(config)) if facts is not None]
    work = replace(workload_of(config, policy), teachers=tuple(teachers))
    return trainer_memory(work, strategy), sharing_options(work, strategy)


class RunMemory:
    """The memory of a run on devices. Example: `RunMemory(config, site, known).share(models, num_slots=8)`."""

    def __init__(self, config: RunConfig, site: Site, known: FactsOf) -> None:
        self._config = config
        self._site = site
        self._known = known
        self.options: list[SharingOption] = [(False, "none")]
        self._trainer = NO_TRAINER
        policy = known(config.model)
        if site.trains and site.apart is None:
            if policy is None:
                self.options += [(True, "none"), (True, "optimizer")]
            else:
                memory = _training_memory(config, site.layout, policy, known)
                self._trainer, self.options = memory
        self.options = _allowed_options(self.options, config)

    def with_widths(self) -> list[ServedModel]:
        """Return the models to serve with the width of their engines: as declared, or the fewest devices on which one fits.

        ConfigError where a declared width does not work on this machine.
        """
        machine = self._site.engine_machine
        models = served_models(self._config)
        placed = [self._with_width(model, models) for model in models]
        slot = slot_width(placed)
        for model in placed:
            if slot % model.width:
                raise ConfigError(
                    f"a slot has as many {machine.parts[1]} as the widest engine spans, {slot}, and engines of "
                    f"{model.name} span {model.width}, which does not divide that; set tensor_parallel of "
                    f"{model.name} to 1 or {slot}"
                )
        return placed

    def _with_width(self, model: ServedModel, models: Sequence[ServedModel]) -> ServedModel:
        facts = self._known(model.name)
        machine = self._site.engine_machine
        max_width = self._max_width()
        must_divide = bool(machine.devices) and self._config.engine.count == "auto"
        widths = [
            width
            for width in range(1, max_width + 1)
            if not (must_divide and max_width % width)
            and (width == 1 or facts is None or not facts.undivided(width))
        ]
        wanted = model.tensor_parallel
        if wanted == "auto":
            models_by_width = (replace(model, width=width) for width in widths)
            fitting = (
                placed for placed in models_by_width if self._has_room(placed, facts, models)
            )
            return next(fitting, replace(model, width=widths[-1]))
        if wanted not in widths:
            heads = facts.undivided(wanted) if facts is not None else ""
            kind = machine.parts[1]
            rule = f"does not divide the {heads or f'{max_width} {kind}'}"
            if wanted > max_width:
                rule = f"is more than the {max_width} {kind} that an engine can span here"
            near = min(widths, key=lambda width: (abs(width - wanted), width))
            raise ConfigError(
                f"{model.option('tensor_parallel')} {wanted} {rule}; the nearest that works is {near}"
            )
        return replace(model, width=wanted)

    def _max_width(self) -> int:
        machine = self._site.engine_machine
        count = self._config.engine.count
        if machine.is_sliced:
            return 1
        return max(1, len(machine.parts[0]) // (1 if count == "auto" else max(1, count)))

    def _has_room(
        self, model: ServedModel, facts: ModelFacts | None, models: Sequence[ServedModel]
    ) -> bool:
        """Whether a device has room for an engine of the model, beside those that must be awake with it.

        True where sizes are not known.
        """
        machine = self._site.engine_machine
        engine = self._config.engine
        if facts is None or machine.device_bytes is None:
            return True
        if engine.gpu_memory_utilization == "auto":
            sleeps, offload = self.options[-1]
            trainer = self._trainer.resting.get(offload, 0.0) if sleeps else self._trainer.peak
            room = usable_bytes(machine.device_bytes, machine.free_bytes) - trainer
        else:
            room = engine.gpu_memory_utilization * machine.device_bytes
        num_sharing = 1
        if model.role != ROLLOUT:
            # The scorers of a role share the device, or all scorers where no engine sleeps.
            all_share = engine.sleep is False or self._config.algorithm == "eval"
            num_sharing = sum(
                other.role == model.role or (all_share and other.role != ROLLOUT)
                for other in models
            )
        need = self._engine_need(model, facts, num_policy=1, num_engines=1)
        return need.least <= room / num_sharing

    def share(self, models: Sequence[ServedModel], *, num_slots: int) -> DeviceSharing:
        """Decide who sleeps, what leaves the device, and each engine's share; ConfigError where one does not fit."""
        machine = self._site.engine_machine
        utilization = self._config.engine.gpu_memory_utilization
        share = None if utilization == "auto" else utilization
        device_bytes = machine.device_bytes
        needs: dict[str, list[EngineNeed]] = {}
        width = slot_width(models)
        num_engines = [num_slots * (width // model.width) for model in models]
        for model, count in zip(models, num_engines, strict=True):
            facts = self._known(model.name)
            if device_bytes is None or facts is None:
                num_models = Counter(model.role for model in models)
                return share_unknown(num_models, self.options, share=share)
            need = self._engine_need(model, facts, num_policy=num_engines[0], num_engines=count)
            needs.setdefault(model.role, []).append(need)
        assert device_bytes is not None
        sharing = share_device(
            needs,
            self._trainer,
            self.options,
            device_bytes=device_bytes,
            free_bytes=machine.free_bytes,
            share=share,
        )
        self._check_host(sharing)
        return sharing

    def _check_host(self, sharing: DeviceSharing) -> None:
        """Check that the host has room for what leaves the devices, and for the weights of a sync by files."""
        machine = self._site.engine_machine
        ranks = self._site.layout.local
        resting = self._trainer.resting
        away = ranks * (resting["none"] - resting[sharing.offload])
        policy = self._known(self._config.model)
        if not away or policy is None or machine.host_bytes is None:
            return
        by_files = self._config.engine.sync != "ipc"
        files = by_files * policy.num_params * self._config.value_bytes
        room = HOST_SHARE * machine.host_bytes
        if away + files > room:
            raise ConfigError(
                f"host memory must hold {away / GIB:.1f} GiB of {ranks} ranks during a round and {files / GIB:.1f} of "
                f"weights in /dev/shm, and {room / GIB:.1f} of this machine's can be used; take fewer --processes, a "
                "smaller model, or a machine with more memory"
            )

    def _engine_need(
        self, model: ServedModel, facts: ModelFacts, *, num_policy: int, num_engines: int
    ) -> EngineNeed:
        """Return what an engine needs; the numbers count this machine's engines of the policy and of this model."""
        config = self._config
        num_sequences = max_sequences(
            config, self._site, model.role, num_policy=num_policy, num_engines=num_engines
        )
        new_tokens = config.max_tokens + model.max_new_tokens
        max_len = model.max_model_len or usual_length(
            facts.context_length, new_tokens=new_tokens
        )
        mean_len = min(max_len, PROMPT_TOKENS + new_tokens)
        return EngineNeed(
            facts, config.value_bytes, model.width, num_sequences, mean_len, max_len
        )


def _allowed_options(options: list[SharingOption], config: RunConfig) -> list[SharingOption]:
    """Return the options that the user allows. Where the offload that is wanted is not there, the deepest is left."""
    engine = config.engine
    allowed = [option for option in options if engine.sleep in ("auto", option[0])] or options
    sleeping = [option for option in allowed if option[0]]
    if engine.offload == "auto" or not sleeping:
        return allowed
    wanted = [option for option in allowed if option[1] == engine.offload]
    return wanted or [max(sleeping, key=options.index)]


def arrange(config: RunConfig, site: Site, known: FactsOf) -> Arrangement:
    """Return what a machine serves and where; ConfigError where it has no room."""
    memory = RunMemory(config, site, known)
    models = memory.with_widths()
    slots = slots_of(config, site, slot_width(models))
    shares = bool(site.machine.devices and slots)
    sharing = memory.share(models, num_slots=len(slots)) if shares else None
    return Arrangement(site, models, slots, sharing)


def slots_of(config: RunConfig, site: Site, width: int = 1) -> list[Slot]:
    """Divide the machine into `engine.count` slots: `width` devices each, or even shares of the cores.

    By default all devices are in one; of a CPU there are two, or as many as there are ranks, where it has the cores.
    """
    machine = site.engine_machine
    parts, kind = machine.parts
    max_count = len(parts) // width
    wanted = config.engine.count
    if wanted != "auto":
        count = wanted
    elif machine.devices:
        count = max_count
    else:
        count = min(max_count, max(site.layout.local, MAX_ENGINES_ON_CPU))
    if count > max_count:
        in_slots = f", of which a slot has {width}" if width > 1 else ""
        raise ConfigError(
            f"engine.count {count} is more than the {len(parts)} {kind} here{in_slots}; lower it"
        )
    if not count:  # the engines are on other machines
        return []
    if not machine.devices:
        return [Slot(cores) for cores in split_evenly(machine.cores, count)]
    blocks = split_evenly(machine.devices[: count * width], count)
    return [Slot(devices=devices) for devices in blocks]
