"""How many devices an engine spans, its width: as declared, or the fewest on which its model fits.

The workers of an engine divide the attention heads of its model (tensor parallelism: Megatron-LM, arXiv 1909.08053).
A slot is a block of as many neighbouring devices as the widest engine spans. A model with narrower engines has several
of them on every slot, so all widths must divide the widest.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from ycore.config.schema import RunConfig, Width
from ycore.errors import ConfigError, ModelError
from ycore.launch.device_memory import FactsOf, RunMemory
from ycore.launch.layout import Machine
from ycore.launch.scoring_models import ScoringModel
from ycore.placement.placement import ROLLOUT
from ycore.plan.memory import least_engine
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


def served_models(config: RunConfig, scorers: Sequence[ScoringModel]) -> list[tuple[str, str, int]]:
    """Role and name of every model that has an engine on each slot, and how many share an engine's part of a device.

    Those of a role share it, or all scorers where no engine sleeps.
    """
    sleeps = config.engine.sleep is not False and config.algorithm != "eval"
    sharing = [sum(other.role == one.role or not sleeps for other in scorers) for one in scorers]
    return [(ROLLOUT, config.model, 1), *((one.role, one.name, n) for one, n in zip(scorers, sharing, strict=True))]


@dataclass(frozen=True, slots=True)
class Widths:
    """The width of the policy's engines, and of those of each model that scores, by its role and name."""

    policy: int = 1
    scorers: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def slot(self) -> int:
        """The devices of a slot."""
        return max([self.policy, *self.scorers.values()])

    def of(self, role: str, name: str) -> int:
        return self.policy if role == ROLLOUT else self.scorers.get((role, name), 1)


def run_widths(
    config: RunConfig, machine: Machine, scorers: Sequence[ScoringModel], known: FactsOf, memory: RunMemory
) -> Widths:
    """The width of every model of a run; ConfigError where a declared one does not work on this machine."""
    options = [("engine.tensor_parallel", config.engine.tensor_parallel)]
    options += [(f"tensor_parallel of {one.name}", one.tensor_parallel) for one in scorers]
    models = served_models(config, scorers)

    def fewest(facts: ModelFacts | None, works: Sequence[int], scorer: ScoringModel | None, sharing: int) -> int:
        """The fewest devices on which vLLM has room for the model; the most where none are enough."""
        room = memory.room(machine, sharing=sharing)
        if facts is None or room is None:
            return 1
        needs = {width: least_engine(memory.need(facts, width, scorer, [1, 1])) for width in works}
        return next((width for width in works if needs[width] <= room), works[-1])

    policy, *others = [
        _width(what, declared, known(name), config, machine, partial(fewest, scorer=scorer, sharing=sharing))
        for (what, declared), (_, name, sharing), scorer in zip(options, models, [None, *scorers], strict=True)
    ]
    found = Widths(policy, {(one.role, one.name): width for one, width in zip(scorers, others, strict=True)})
    for role, name, _ in models:
        if found.slot % (width := found.of(role, name)):
            raise ConfigError(
                f"a slot has as many {machine.parts[1]} as the widest engine spans, {found.slot}, and engines of "
                f"{name} span {width}, which does not divide that; set tensor_parallel of {name} to 1 or {found.slot}"
            )
    return found


def _width(
    what: str,
    declared: Width,
    facts: ModelFacts | None,
    config: RunConfig,
    machine: Machine,
    fewest: Callable[[ModelFacts | None, Sequence[int]], int],
) -> int:
    (parts, kind), count = machine.parts, config.engine.count
    most = 1 if machine.is_sliced else max(1, len(parts) // (1 if count == "auto" else count))
    whole = [width for width in range(1, most + 1) if not machine.devices or count != "auto" or most % width == 0]
    works = [width for width in whole if width == 1 or facts is None or not facts.undivided(width)]
    if declared == "auto":
        return fewest(facts, works)
    if declared in works:
        return declared
    nearest = min(works, key=lambda width: (abs(width - declared), width))
    if facts is not None and (size := facts.undivided(declared)):
        rule = f"does not divide the {size} of {facts.name}"
    elif declared > most:
        rule = f"is more than the {most} {kind} that an engine can span here"
    else:
        rule = f"does not divide the {len(parts)} {kind} of this machine"
    raise ConfigError(f"{what} {declared} {rule}; the nearest that works is {nearest}")
