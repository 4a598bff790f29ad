"""Plan a run's engines: which kind, how many, and on which cores or devices.

Rollouts, judges and reward models are served alike. Every slot (some devices, or a share of the cores) has a rollout
engine, and beside it one engine of each model that scores; several, where one does not span the whole slot.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ycore.config.schema import RunConfig
from ycore.engine.commands import EngineSpec, kv_cache_gib, split_evenly
from ycore.errors import ConfigError
from ycore.launch.device_memory import MAX_MODEL_LEN, PROMPT_TOKENS, RunMemory, scored_at_once, sequences_at_once
from ycore.launch.layout import Site
from ycore.launch.scoring_models import scoring_models
from ycore.launch.widths import Widths, facts_here, run_widths
from ycore.models.folder import context_length
from ycore.placement.placement import ROLLOUT
from ycore.plan.model_facts import ModelFacts
from ycore.plan.sharing import Sharing
from ycore.run.files import read_json
from ycore.run.paths import RunFolder

Kind = Literal["vllm", "transformers", "replay"]
Fetch = Callable[[str], Path]
"""Makes a model's name its local folder."""

_MAX_ENGINES_ON_CPU = 2
_INSTALL_VLLM = "pip install 'ycore[cpu]' (or 'ycore[gpu]')"


class Slot(NamedTuple):
    """A block of neighbouring devices, or a share of the cores."""

    cores: tuple[int, ...] | None
    devices: tuple[str, ...] = ()

    def parts(self, count: int) -> list["Slot"]:
        if self.cores is None:
            return [Slot(None, devices) for devices in split_evenly(self.devices, count)]
        return [Slot(cores) for cores in split_evenly(self.cores, count)]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model in one role. `sources` are the positions of the reward sources that it scores for."""

    engines: tuple[EngineSpec, ...]  # slot by slot, as many on each; never empty
    sources: tuple[int, ...] = ()

    @property
    def role(self) -> str:
        return self.engines[0].role

    def as_json(self) -> dict[str, Any]:
        """A scorer in engines.json."""
        return {
            "role": self.role,
            "sources": list(self.sources),
            "engines": [engine.name for engine in self.engines],
            "model": str(self.engines[0].model.resolve()),
            "max_model_len": self.engines[0].max_model_len,
        }


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Where completions come from, and the models to serve: the policy first, none without vLLM."""

    kind: Kind
    max_model_len: int
    how: str
    served: tuple[ServedModel, ...] = ()
    sharing: Sharing | None = None  # of devices

    @property
    def engines(self) -> tuple[EngineSpec, ...]:
        """The rollout engines."""
        return self.served[0].engines if self.served else ()

    @property
    def num_slots(self) -> int:
        widest = max((model.engines[0].tensor_parallel for model in self.served), default=1)
        return sum(engine.tensor_parallel for engine in self.engines) // widest

    @property
    def sleeps(self) -> bool:
        """Whether the engines share their devices by sleeping."""
        return any(engine.sleeps for engine in self.engines)

    @property
    def note(self) -> str:
        """The plan in a line for the user."""
        scorers = [engine.name for model in self.served[1:] for engine in model.engines]
        notes = [f"{self.how}, beside {', '.join(scorers)}" if scorers else self.how]
        if self.sharing is not None:
            notes.append(self.sharing.line)
        elif scorers and self.engines[0].on_cpu:
            notes.append("no engine sleeps (vLLM cannot on a CPU), so placement only routes requests")
        return "; ".join(notes)

    def as_json(self) -> dict[str, Any]:
        """What the trainer reads in engines.json."""
        return {
            "kind": self.kind,
            "engines": [engine.name for engine in self.engines],
            "num_slots": self.num_slots,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.engines[0].max_num_seqs if self.engines else None,
            "scorers": [model.as_json() for model in self.served[1:]],
            **({"sleeps": True} if self.sleeps else {}),
            **({"offload": self.sharing.offload} if self.sharing is not None and self.sleeps else {}),
            **({"on_host": True} if self.sharing is not None and not self.sharing.has_trainer else {}),
        }


def is_vllm_installed() -> bool:
    return find_spec("vllm") is not None


def choose_kind(requested: str, *, vllm_installed: bool) -> tuple[Kind, str]:
    """What generates on this machine, by `engine.kind`, and a note about it; ConfigError where vLLM is missing."""
    if requested == "transformers":
        return "transformers", "generating with transformers in the trainer's process, as requested"
    if vllm_installed:
        return "vllm", "generating with vLLM"
    if requested == "vllm":
        raise ConfigError(
            f"engine.kind is vllm, and vLLM is not installed; {_INSTALL_VLLM}, or set engine.kind=transformers"
        )
    return "transformers", f"vLLM is not installed, so transformers generates, which is slower; {_INSTALL_VLLM}"


def plan_engines(config: RunConfig, site: Site, *, fetch: Fetch) -> EnginePlan:
    """Plan every engine of this machine."""
    model = fetch(config.model)
    model_config = read_json(model / "config.json")
    length = model_length(config.engine.max_model_len, model_config, option="engine.max_model_len")
    if config.replay is not None:
        return EnginePlan("replay", length, f"reading the rounds of {config.replay} from its journal: no generation")
    kind, how = choose_kind(config.engine.kind, vllm_installed=is_vllm_installed())
    if kind == "transformers":
        return EnginePlan(kind, length, how)
    scorers = scoring_models(config)

    def known(name: str) -> ModelFacts | None:
        return facts_here(str(fetch(name)), name=name)

    memory = RunMemory(config, site, scorers, known)
    widths = run_widths(config, site.machine, scorers, known, memory)
    slots = slots_of(config, site, widths.slot)
    sharing = memory.share(widths.of, num_slots=len(slots)) if site.machine.devices else None
    parts = [part for slot in slots for part in slot.parts(widths.slot // widths.policy)]
    spec = EngineSpec(
        name="",
        model=model,
        socket=Path(),
        temporary=site.folder.temporary,
        run_id=site.folder.run_id,
        dtype="float32" if config.dtype == "float32" else "bfloat16",
        max_model_len=length,
        max_num_seqs=sequences_at_once(config, len(parts) * site.layout.num_machines),
        seed=config.seed,
        devices=parts[0].devices,
        tensor_parallel=widths.policy,
        gpu_memory_utilization=0.0 if sharing is None else sharing.shares[ROLLOUT][0],
        sleeps=sharing is not None and sharing.sleeps,
        trust_remote_code=config.trust_remote_code,
        has_neighbours=bool(scorers),
        variables=tuple(config.engine.environment),
        arguments=tuple(config.engine.args.items()),
    )
    spec = replace(spec, memory_gib=config.engine.memory_gib or _memory_gib(spec, model_config, config.max_tokens))
    rollouts = _on(parts, spec, ROLLOUT, site.folder)
    served = plan_scorers(config, site.folder, rollouts, slots=slots, widths=widths, sharing=sharing, fetch=fetch)
    where = f"{how}: {_describe(parts, widths.policy)}"
    return EnginePlan(kind, length, where, (ServedModel(rollouts), *served), sharing)


def plan_scorers(
    config: RunConfig,
    folder: RunFolder,
    rollouts: Sequence[EngineSpec],
    *,
    slots: Sequence[Slot],
    widths: Widths,
    sharing: Sharing | None,
    fetch: Fetch,
) -> list[ServedModel]:
    """Engines of every scoring model on every slot, beside its rollout engines."""
    planned: list[ServedModel] = []
    models = scoring_models(config) if rollouts else []
    for model in models:
        path = fetch(model.name)
        model_config = read_json(path / "config.json")
        parts = [part for slot in slots for part in slot.parts(widths.slot // widths.of(model.role, model.name))]
        earlier = [one for one in planned if one.role == model.role]
        spec = replace(
            rollouts[0],
            model=path,
            max_model_len=model_length(model.max_model_len, model_config, option=f"max_model_len of {model.name}"),
            max_num_seqs=scored_at_once(rollouts[0].max_num_seqs, len(rollouts), len(parts)),
            tensor_parallel=widths.of(model.role, model.name),
            gpu_memory_utilization=0.0 if sharing is None else sharing.shares[model.role][len(earlier)],
            has_neighbours=True,
            arguments=(),
        )
        spec = replace(spec, memory_gib=_memory_gib(spec, model_config, config.max_tokens + model.max_new_tokens))
        first = sum(len(one.engines) for one in earlier)
        planned.append(ServedModel(_on(parts, spec, model.role, folder, first=first), model.sources))
    return planned


def model_length(requested: int | None, model_config: Mapping[str, Any], *, option: str) -> int:
    """Longest prompt plus completion in tokens: as requested, else the model's context, 4096 at most."""
    context = context_length(dict(model_config))
    if requested is None:
        return min(context or MAX_MODEL_LEN, MAX_MODEL_LEN)
    if context and requested > context:
        raise ConfigError(f"{option} {requested} is more than the model's {context}; lower it")
    return requested


def _on(
    parts: Sequence[Slot], spec: EngineSpec, role: str, folder: RunFolder, *, first: int = 0
) -> tuple[EngineSpec, ...]:
    """One engine of a model on every part of a slot, named after its role: `judge-2`, `judge-3`."""
    names = [f"{role.replace('_', '-')}-{number}" for number in range(first, first + len(parts))]
    return tuple(
        replace(spec, role=role, name=name, socket=folder.socket(name), cores=part.cores, devices=part.devices)
        for name, part in zip(names, parts, strict=True)
    )


def slots_of(config: RunConfig, site: Site, width: int = 1) -> list[Slot]:
    """The machine in `engine.count` parts: `width` devices each, or even shares of the cores.

    By default all devices are in one; of a CPU there are two, or as many as there are ranks, where it has the cores.
    """
    count, machine, least = config.engine.count, site.machine, site.layout.local
    parts, kind = machine.parts
    most = len(parts) // width
    wanted = most if machine.devices else min(most, max(least, _MAX_ENGINES_ON_CPU))
    number = wanted if count == "auto" else count
    if number > most:
        each = f", of which a slot has {width}" if width > 1 else ""
        raise ConfigError(f"engine.count {number} is more than the {len(parts)} {kind} here{each}; lower it")
    if machine.devices:
        return [Slot(None, machine.devices[first : first + width]) for first in range(0, number * width, width)]
    return [Slot(cores) for cores in machine.split_cores(number)]


def _memory_gib(engine: EngineSpec, model_config: Mapping[str, Any], new_tokens: int) -> int:
    """KV cache of one engine on a CPU, in GiB; on a device vLLM sizes it by itself."""
    if not engine.on_cpu:
        return 1
    num_bytes = 4 if engine.dtype == "float32" else 2
    tokens = engine.max_num_seqs * min(engine.max_model_len, PROMPT_TOKENS + new_tokens)
    return kv_cache_gib(
        model_config,
        max(tokens, engine.max_model_len),
        bytes_per_value=num_bytes,
        tensor_parallel=engine.tensor_parallel,
    )


def _describe(parts: Sequence[Slot], width: int) -> str:
    engines = "1 engine" if len(parts) == 1 else f"{len(parts)} engines"
    over = f", tensor parallel over {width}" if width > 1 else ""
    if parts[0].cores is None:
        devices = [device for part in parts for device in part.devices]
        return f"{engines} on device{'s' if len(devices) > 1 else ''} {', '.join(devices)}{over}"
    num_cores = len(parts[0].cores)
    return f"{engines} on {num_cores} CPU core{'s' if num_cores > 1 else ''}{' each' if len(parts) > 1 else ''}{over}"
