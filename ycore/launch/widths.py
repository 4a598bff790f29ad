"""How many devices an engine spans, its width: as declared, or the fewest on which its model fits.

The workers of an engine divide the attention heads of its model (tensor parallelism: Megatron-LM, arXiv 1909.08053).
A slot is a block of as many neighbouring devices as the widest engine spans. A model with narrower engines has several
of them on every slot, so all widths must divide the widest.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ycore.config.schema import RunConfig
from ycore.errors import ConfigError, ModelError
from ycore.launch.device_memory import FactsOf, RunMemory
from ycore.launch.layout import Machine
from ycore.launch.scoring_models import ServedModel
from ycore.plan.model_facts import ModelFacts, facts_of, model_config

_UNUSUAL = {"quantization_config", "kv_lora_rank"}  # fewer bytes a value; other sizes of the attention


def facts_here(location: str, *, name: str | None = None) -> ModelFacts | None:
    """Of a model whose config.json is on this machine, or is well known, and whose weights have the usual form.

    `name`: what messages call it, where that is not its location.
    """
    with suppress(ModelError, ValueError, TypeError, OverflowError):  # an unusual config.json is the engine's to read
        config = model_config(location, ask=False)
        return None if config.keys() & _UNUSUAL else facts_of(config, name=name or location)
    return None


def slot_width(models: Sequence[ServedModel]) -> int:
    """The devices of a slot."""
    return max(model.width for model in models)


def with_widths(
    models: Sequence[ServedModel], config: RunConfig, machine: Machine, known: FactsOf, memory: RunMemory
) -> list[ServedModel]:
    """The models with the widths of their engines; ConfigError where a declared one does not work on this machine."""
    count, fills_all = config.engine.count, bool(machine.devices) and config.engine.count == "auto"
    most = 1 if machine.is_sliced else max(1, len(machine.parts[0]) // (1 if count == "auto" else count))
    whole = [width for width in range(1, most + 1) if not fills_all or most % width == 0]
    found = []
    for model in models:
        facts = known(model.name)
        works = [width for width in whole if width == 1 or facts is None or not facts.undivided(width)]
        if model.tensor_parallel == "auto":
            fewest = (width for width in works if memory.has_room(replace(model, width=width), facts, models))
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
                f"{model.name} span {model.width}, which does not divide that; set tensor_parallel of {model.name} "
                f"to 1 or {slot}"
            )
    return found


def _refusal(
    model: ServedModel, width: int, facts: ModelFacts | None, works: Sequence[int], machine: Machine, *, most: int
) -> ConfigError:
    parts, kind = machine.parts
    nearest = min(works, key=lambda other: (abs(other - width), other))
    if facts is not None and (size := facts.undivided(width)):
        rule = f"does not divide the {size} of {facts.name}"
    elif width > most:
        rule = f"is more than the {most} {kind} that an engine can span here"
    else:
        rule = f"does not divide the {len(parts)} {kind} of this machine"
    return ConfigError(f"{model.option('tensor_parallel')} {width} {rule}; the nearest that works is {nearest}")
