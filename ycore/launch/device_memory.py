"""Who shares the devices of a run, and how: how many an engine spans, and what it and the trainer's rank have of one.

The workers of an engine divide the attention heads of its model (tensor parallelism: Megatron-LM, arXiv 1909.08053).
A slot is a block of as many neighbouring devices as the widest engine spans. A model with narrower engines has several
of them on every slot, so all widths must divide the widest.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ycore.config.batch import derive_batch
from ycore.config.schema import RunConfig
from ycore.errors import ConfigError, ModelError
from ycore.launch.layout import Machine, Site
from ycore.launch.scoring_models import own_teachers
from ycore.placement.placement import ROLLOUT
from ycore.plan.memory import NO_TRAINER, EngineNeed, TrainerMemory, trainer_memory
from ycore.plan.model_facts import ModelFacts, facts_of, model_config
from ycore.plan.sharing import (
    DeviceSharing,
    SharingOption,
    share_device,
    share_unknown,
    sharing_options,
    usable_bytes,
)
from ycore.plan.workload import Strategy, workload_of
from ycore.scoring.scoring import ServedModel

FactsOf = Callable[[str], ModelFacts | None]
"""The sizes of a model by its name; None where they are not known before it is fetched."""

_UNUSUAL = {
    "quantization_config",
    "kv_lora_rank",
}  # fewer bytes a value; other sizes of the attention
MAX_MODEL_LEN = 4096  # tokens, where neither the user nor the model asks for less
PROMPT_TOKENS = 512  # tokens of KV cache for a sequence's prompt; longer prompts wait for room
MAX_ROLLOUT_SEQS = 256
MAX_SCORER_SEQS = 32
_LOGITS = 10  # bytes of a logit where a preflight computes log-probabilities: bfloat16, float32, and their log-softmax


def facts_here(location: str, *, name: str | None = None) -> ModelFacts | None:
    """Of a model whose config.json is on this machine, or is well known, and whose weights have the usual form.

    `name`: what messages call it, where that is not its location.
    """
    with suppress(
        ModelError, ValueError, TypeError, OverflowError
    ):  # an unusual config.json is the engine's to read
        config = model_config(location, ask=False)
        return None if config.keys() & _UNUSUAL else facts_of(config, name=name or location)
    return None


def slot_width(models: Sequence[ServedModel]) -> int:
    """The devices of a slot."""
    return max(model.width for model in models)


def sequences_at_once(
    config: RunConfig, role: str, *, num_policy: int, num_engines: int, num_machines: int
) -> int:
    """Of one engine. All completions of a round are written at once, unless the user says how many, and scored as fast.

    Args:
        num_policy: engines of the policy on this machine.
        num_engines: those of the engine's own model.
    """
    written = config.engine.args.get("max_num_seqs")
    if not isinstance(written, int):
        each = config.num_samples if config.algorithm == "eval" else config.group_size
        share = math.ceil(config.prompts_per_step * each / (num_policy * num_machines))
        written = max(1, min(MAX_ROLLOUT_SEQS, share))
    return (
        written
        if role == ROLLOUT
        else min(math.ceil(written * num_policy / num_engines), MAX_SCORER_SEQS)
    )


class RunMemory:
    """The memory of a run on devices. Example: `RunMemory(config, site, known).share(models, num_slots=8)`."""

    def __init__(self, config: RunConfig, site: Site, known: FactsOf) -> None:
        self._config, self._site, self._known = config, site, known
        policy = known(config.model)
        self.options: list[SharingOption] = [(False, "none")]
        self._trainer = NO_TRAINER
        if policy is not None and config.algorithm != "eval":
            self._trainer = (
                self._of_training(policy) if site.trains else _of_preflight(policy, config)
            )
        elif site.trains and config.algorithm != "eval":
            self.options += [(True, "none"), (True, "optimizer")]
        self.options = _as_asked(self.options, config)

    def _of_training(self, policy: ModelFacts) -> TrainerMemory:
        config, layout = self._config, self._site.layout
        size = derive_batch(
            config, world_size=layout.world, on_cpu=False
        ).per_device_train_batch_size
        checkpointing = bool(config.trl.get("gradient_checkpointing", True))
        strategy = Strategy(layout.world, 1, layout.sharding, size, checkpointing=checkpointing)
        teachers = [facts for facts in map(self._known, own_teachers(config)) if facts is not None]
        work = replace(workload_of(config, policy), teachers=tuple(teachers))
        self.options = sharing_options(work, strategy)
        return trainer_memory(work, strategy)

    def with_widths(self, models: Sequence[ServedModel]) -> list[ServedModel]:
        """The models, each with the devices that one of its engines spans: as declared, or the fewest on which it fits.

        ConfigError where a declared width does not work on this machine.
        """
        machine, count = self._site.machine, self._config.engine.count
        fills_all = bool(machine.devices) and count == "auto"
        most = (
            1
            if machine.is_sliced
            else max(1, len(machine.parts[0]) // (1 if count == "auto" else count))
        )
        whole = [width for width in range(1, most + 1) if not fills_all or most % width == 0]
        found = []
        for model in models:
            facts = self._known(model.name)
            works = [
                width
                for width in whole
                if width == 1 or facts is None or not facts.undivided(width)
            ]
            if model.tensor_parallel == "auto":
                fewest = (
                    width
                    for width in works
                    if self._has_room(replace(model, width=width), facts, models)
                )
                found.append(replace(model, width=next(fewest, works[-1])))
            elif model.tensor_parallel in works:
                found.append(replace(model, width=model.tensor_parallel))
            else:
                raise _refusal(model, model.tensor_parallel, facts, works, machine, most=most)
        slot = slot_width(found)
        for model in found:
            if slot % model.width:
                raise ConfigError(
                    f"a slot has as many {machine.parts[1]} as the widest engine spans, {slot}, and engines of "
                    f"{model.name} span {model.width}, which does not divide that; set tensor_parallel of "
                    f"{model.name} to 1 or {slot}"
                )
        return found

    def _has_room(
        self, model: ServedModel, facts: ModelFacts | None, models: Sequence[ServedModel]
    ) -> bool:
        """Whether a device has room for an engine of the model, beside those of `models` that are awake with it at
        least; True where sizes are not known."""
        machine, engine = self._site.machine, self._config.engine
        if facts is None or machine.device_bytes is None:
            return True
        if engine.gpu_memory_utilization == "auto":
            sleeps, offload = self.options[-1]
            beside = self._trainer.resting.get(offload, 0.0) if sleeps else self._trainer.peak
            room = usable_bytes(machine.device_bytes, machine.free_bytes) - beside
        else:
            room = engine.gpu_memory_utilization * machine.device_bytes
        sharing = 1
        if (
            model.role != ROLLOUT
        ):  # the scorers of a role share the device, or all scorers where no engine sleeps
            all_share = engine.sleep is False or self._config.algorithm == "eval"
            sharing = sum(
                one.role == model.role or (all_share and one.role != ROLLOUT) for one in models
            )
        return self._need(model, facts, num_policy=1, num_engines=1).least <= room / sharing

    def share(self, models: Sequence[ServedModel], *, num_slots: int) -> DeviceSharing:
        """Who sleeps, what leaves the device, and each engine's share; ConfigError where an engine does not fit."""
        machine, told = self._site.machine, self._config.engine.gpu_memory_utilization
        device_bytes, share = machine.device_bytes, None if told == "auto" else told
        needs: dict[str, list[EngineNeed]] = {}
        num_engines = [
            num_slots * (max(one.width for one in models) // model.width) for model in models
        ]
        for model, count in zip(models, num_engines, strict=True):
            facts = self._known(model.name)
            if device_bytes is None or facts is None:
                num_models = Counter(one.role for one in models)
                return share_unknown(num_models, self.options, share=share)
            need = self._need(model, facts, num_policy=num_engines[0], num_engines=count)
            needs.setdefault(model.role, []).append(need)
        assert device_bytes is not None

        def shared(trainer: TrainerMemory) -> DeviceSharing:
            return share_device(
                needs,
                trainer,
                self.options,
                device_bytes=device_bytes,
                free_bytes=machine.free_bytes,
                share=share,
            )

        try:
            return shared(self._trainer)
        except ConfigError:
            if self._site.trains or self._trainer is NO_TRAINER:
                raise
            return replace(
                shared(NO_TRAINER), has_trainer=False
            )  # a preflight then computes on the host

    def _need(
        self, model: ServedModel, facts: ModelFacts, *, num_policy: int, num_engines: int
    ) -> EngineNeed:
        """Of an engine; the numbers are those of this machine, of the policy's engines and of this model's."""
        config = self._config
        at_once = sequences_at_once(
            config, model.role, num_policy=num_policy, num_engines=num_engines,
            num_machines=self._site.layout.num_machines,
        )  # fmt: skip
        new = config.max_tokens + model.max_new_tokens
        longest = model.max_model_len or min(facts.context_length or MAX_MODEL_LEN, MAX_MODEL_LEN)
        size = 4 if config.dtype == "float32" else 2
        return EngineNeed(
            facts, size, model.width, at_once, min(longest, PROMPT_TOKENS + new), longest
        )


def _refusal(
    model: ServedModel,
    width: int,
    facts: ModelFacts | None,
    works: Sequence[int],
    machine: Machine,
    *,
    most: int,
) -> ConfigError:
    parts, kind = machine.parts
    nearest = min(works, key=lambda other: (abs(other - width), other))
    if facts is not None and (size := facts.undivided(width)):
        rule = f"does not divide the {size} of {facts.name}"
    elif width > most:
        rule = f"is more than the {most} {kind} that an engine can span here"
    else:
        rule = f"does not divide the {len(parts)} {kind} of this machine"
    return ConfigError(
        f"{model.option('tensor_parallel')} {width} {rule}; the nearest that works is {nearest}"
    )


def _of_preflight(policy: ModelFacts, config: RunConfig) -> TrainerMemory:
    """A model that only computes log-probabilities, one sequence at a time."""
    work = workload_of(config, policy)
    states = trainer_memory(work, Strategy(1, 1)).parts
    weights = float(policy.num_params * work.bytes_per_value)
    logits = float(_LOGITS * policy.vocab_size * (work.prompt_tokens + work.max_tokens))
    parts: Mapping[str, float] = {
        "weights": weights,
        "logits": logits,
        "libraries": states["libraries"],
    }
    return TrainerMemory(parts, {"none": weights + states["libraries"]}, 0.0)


def _as_asked(options: list[SharingOption], config: RunConfig) -> list[SharingOption]:
    """Those that the user allows; what is asked for and is not among them is as deep as there is."""
    engine = config.engine
    kept = [strategy for strategy in options if engine.sleep in ("auto", strategy[0])] or options
    if engine.offload != "auto" and any(strategy[0] for strategy in kept):
        asked = [strategy for strategy in kept if strategy[1] == engine.offload]
        kept = asked or [max((strategy for strategy in kept if strategy[0]), key=options.index)]
    return kept
