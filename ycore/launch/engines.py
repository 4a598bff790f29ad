"""Plan a run's engines: which kind, how many, and on which cores or devices.

Rollouts, judges, reward models and teachers are served alike. Every slot (some devices, or a share of the cores) has a
rollout engine, and beside it one engine of each model that scores; several, where one does not span the whole slot.
"""

import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ycore.config.algorithms import FAMILIES
from ycore.config.schema import BaseConfig, RunConfig
from ycore.engine.commands import EngineSpec, kv_cache_gib
from ycore.engine.kinds import REPLAY, EngineKind, choose_kind
from ycore.errors import ConfigError
from ycore.launch.device_memory import (
    PROMPT_TOKENS,
    Arrangement,
    FactsOf,
    arrange,
    facts_here,
    max_sequences,
)
from ycore.launch.layout import ONE_RANK, Site, machine_of
from ycore.models.fetch import fetch_model
from ycore.models.names import context_length, resolve_model
from ycore.placement.placement import JUDGE, ROLLOUT
from ycore.plan.memory import usual_length
from ycore.plan.sharing import DeviceSharing
from ycore.run.files import RunFolder, read_json
from ycore.run.reports import RUN_MARKER
from ycore.run.text import Say
from ycore.scoring.scoring import ServedModel

Fetch = Callable[[str], Path]
"""Returns the local folder of a model's name."""

Numbers = defaultdict[str, Iterator[int]]


@dataclass(frozen=True)
class EnginePlan:
    """The kind of engine, and the models to serve: the policy first, none for a kind without servers."""

    kind: EngineKind
    max_model_len: int
    choice: str  # the kind and its engines, in words
    served: tuple[ServedModel, ...] = ()
    num_slots: int = 0
    sharing: DeviceSharing | None = None  # of this machine's devices

    @property
    def engines(self) -> tuple[EngineSpec, ...]:
        """The rollout engines."""
        return self.served[0].engines if self.served else ()

    def all_engines(self, *, with_policy: bool) -> list[EngineSpec]:
        """Return the engines to start; answers that are given already need none of the policy."""
        models = self.served if with_policy else self.served[1:]
        return [engine for model in models for engine in model.engines]

    @property
    def sleeps(self) -> bool:
        """Whether the engines share their devices by sleeping."""
        return self.sharing is not None and self.sharing.sleeps

    @property
    def note(self) -> str:
        """The plan in a line for the user."""
        scorers = [engine.name for model in self.served[1:] for engine in model.engines]
        notes = [f"{self.choice}, beside {', '.join(scorers)}" if scorers else self.choice]
        if self.sharing is not None:
            notes.append(self.sharing.line)
        return "; ".join(notes)

    def as_json(self) -> dict[str, Any]:
        """Return the content of engines.json, which the trainer reads."""
        return {
            "kind": self.kind.name,
            "engines": [engine.name for engine in self.engines],
            "away": [engine.name for engine in self.engines if engine.host],
            "sleeps": self.sleeps,
            "offload": "none" if self.sharing is None else self.sharing.offload,
            "num_slots": self.num_slots,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.engines[0].max_num_seqs if self.engines else None,
            "scorers": [
                {
                    "role": scorer.role,
                    "sources": list(scorer.sources),
                    "engines": [engine.name for engine in scorer.engines],
                    "model": str(scorer.engines[0].model.resolve()),
                    "max_model_len": scorer.engines[0].max_model_len,
                }
                for scorer in self.served[1:]
            ],
        }


def fetch_for_run(name: str, *, config: BaseConfig, folder: RunFolder, say: Say) -> Path:
    """Return a model's local folder. A process that makes or converts it carries the run's marker, and ends with it."""
    if config.algorithm in FAMILIES:
        return Path(name).expanduser()
    model = resolve_model(name, trust_remote_code=config.trust_remote_code)
    say(f"model {name}: {model.note}")
    os.environ[RUN_MARKER] = folder.run_id
    try:
        return fetch_model(model, log=folder.log("model"))
    finally:
        del os.environ[RUN_MARKER]


def plan_engines(config: RunConfig, site: Site, *, fetch: Fetch) -> EnginePlan:
    """Plan every engine of this machine."""
    model_config = read_json(fetch(config.model) / "config.json")
    length = model_length(
        config.engine.max_model_len,
        model_config,
        option="engine.max_model_len",
        new_tokens=config.max_tokens,
    )
    if config.replay is None or config.teaches_exactly:
        from ycore.scoring.model_scorers import check_teachers

        check_teachers(config, fetch(config.model), fetch)
    if config.replay is not None:
        from ycore.scoring.model_scorers import check_replayed_tokens

        replayed = RunFolder(Path(config.replay).expanduser())
        if replayed.engines.is_file():
            before = Path(read_json(replayed.engines)["model"])
            check_replayed_tokens(fetch(config.model), before)
        return EnginePlan(
            REPLAY,
            length,
            f"reading the rounds of {config.replay} from its journal: no generation",
        )
    family = str(model_config.get("model_type")) if "vision_config" in model_config else None
    kind, note = choose_kind(config.engine.kind, family=family)
    if not kind.has_servers:
        return EnginePlan(kind, length, note)
    if config.given_pairs:
        note = f"scoring the answers of each row with {kind.name}"

    def known(name: str) -> Any:
        return facts_here(str(fetch(name)), name=name)

    arrangements = arrange_all(config, site, known)
    num_slots = sum(len(served.slots) for served in arrangements)
    numbers: Numbers = defaultdict(itertools.count)
    by_machine = [
        _with_engines(config, arrangement, fetch, numbers, num_slots=num_slots)
        for arrangement in arrangements
    ]
    served = (
        replace(models[0], engines=tuple(itertools.chain(*(model.engines for model in models))))
        for models in zip(*by_machine, strict=True)
    )
    policies = filter(None, (models[0].engines for models in by_machine))
    return EnginePlan(
        kind,
        length,
        f"{note}: {' and '.join(map(_describe, policies))}",
        tuple(served),
        num_slots,
        arrangements[0].sharing,
    )


def _with_engines(
    config: RunConfig,
    arrangement: Arrangement,
    fetch: Fetch,
    numbers: Numbers,
    *,
    num_slots: int,
) -> tuple[ServedModel, ...]:
    """Return the models with an engine of each on every slot, or several where one does not span the whole slot.

    Args:
        numbers: Of the engines, by role.
        num_slots: Those of all machines.
    """
    site, models, slots, sharing = arrangement
    served: list[ServedModel] = []
    for model, count in zip(models, arrangement.engines_by_slot, strict=True):
        same_role = [other for other in served if other.role == model.role]
        parts = [part for slot in slots for part in slot.parts(count)]
        spec = _engine_spec(
            model,
            config,
            arrangement,
            fetch(model.name),
            num_policy=num_slots * arrangement.engines_by_slot[0],
            num_engines=num_slots * count,
        )
        if sharing is not None:
            share = sharing.shares[model.role][len(same_role)]
            spec = replace(spec, gpu_memory_utilization=share, sleeps=sharing.sleeps)
        # `judge-2`, `judge-3`: of one role, the engines of several models are numbered through.
        names = (f"{model.role.replace('_', '-')}-{number}" for number in numbers[model.role])
        engines = [
            replace(
                spec,
                name=name,
                socket=site.folder.socket(name),
                cores=part.cores,
                devices=part.devices,
                host=part.host,
            )
            for part, name in zip(parts, names, strict=False)
        ]
        served.append(replace(model, engines=tuple(engines)))
    return tuple(served)


def _name_elsewhere(model: ServedModel) -> str:
    """Return the name by which another machine finds the model."""
    folder = Path(model.name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model.name


def arrange_all(config: RunConfig, site: Site, known: FactsOf) -> list[Arrangement]:
    """Return what this machine serves, and each host of `engine.hosts`."""
    return [arrange(config, site, known), *arrange_hosts(config, known)]


def arrange_hosts(config: RunConfig, known: FactsOf) -> Iterator[Arrangement]:
    """Yield what each host of `engine.hosts` serves, with all of its devices or cores."""
    settings = config.engine.model_copy(
        update={"count": "auto", "devices": "shared", "sleep": False}
    )
    folder = RunFolder(Path(config.output))
    for host in config.engine.hosts:
        site = Site(folder, ONE_RANK, machine_of(host), trains=False)
        arrangement = arrange(config.model_copy(update={"engine": settings}), site, known)
        slots = [slot._replace(host=host) for slot in arrangement.slots]
        yield arrangement._replace(slots=slots)


def model_length(
    requested: int | None, model_config: Mapping[str, Any], *, option: str, new_tokens: int = 0
) -> int:
    """Return the longest prompt plus completion in tokens; ConfigError where the model's context is shorter than asked."""
    context = context_length(dict(model_config))
    if requested is None:
        return usual_length(context, new_tokens=new_tokens)
    if context and requested > context:
        raise ConfigError(f"{option} {requested} is more than the model's {context}; lower it")
    return requested


def _engine_spec(
    model: ServedModel,
    config: RunConfig,
    arrangement: Arrangement,
    folder: Path,
    *,
    num_policy: int,
    num_engines: int,
) -> EngineSpec:
    """Return the settings that all engines of a model on a machine share."""
    site = arrangement.site
    settings = read_json(folder / "config.json")
    is_policy = model.role == ROLLOUT
    sends_adapters = is_policy and config.engine.sync == "adapter"
    spec = EngineSpec(
        name="",
        model=folder,
        model_name=_name_elsewhere(model),
        has_neighbours=len(arrangement.models) > 1,
        socket=Path(),
        temporary=site.folder.temporary,
        run_id=site.folder.run_id,
        dtype="float32" if config.dtype == "float32" else "bfloat16",
        max_model_len=model_length(
            model.max_model_len,
            settings,
            option=model.option("max_model_len"),
            new_tokens=config.max_tokens + model.max_new_tokens,
        ),
        max_num_seqs=max_sequences(
            config, site, model.role, num_policy=num_policy, num_engines=num_engines
        ),
        seed=config.seed,
        tensor_parallel=model.width,
        trust_remote_code=config.trust_remote_code,
        deterministic=config.deterministic,
        role=model.role,
        variables=tuple(config.engine.environment),
        arguments=tuple(config.engine.args.items()) if is_policy else (),
        sees=model.role in (ROLLOUT, JUDGE) and "vision_config" in settings,
        lora_rank=config.lora.r if config.lora and sends_adapters else 0,
    )
    if site.machine.devices:  # there, vLLM sizes its cache by itself
        return spec
    if is_policy and config.engine.memory_gib:
        return replace(spec, memory_gib=config.engine.memory_gib)
    mean_len = PROMPT_TOKENS + config.max_tokens + model.max_new_tokens
    num_tokens = spec.max_num_seqs * min(spec.max_model_len, mean_len)
    memory_gib = kv_cache_gib(
        settings,
        max(num_tokens, spec.max_model_len),
        bytes_per_value=config.value_bytes,
        tensor_parallel=model.width,
    )
    return replace(spec, memory_gib=memory_gib)


def _describe(engines: Sequence[EngineSpec]) -> str:
    """Describe the engines of one machine."""
    first = engines[0]
    words = "1 engine" if len(engines) == 1 else f"{len(engines)} engines"
    if first.devices:
        devices = [device for engine in engines for device in engine.devices]
        words += f" on device{'s' if len(devices) > 1 else ''} {', '.join(devices)}"
    else:
        num_cores = len(first.cores)
        words += f" on {num_cores} CPU core{'s' if num_cores > 1 else ''}"
        words += " each" if len(engines) > 1 else ""
    if first.tensor_parallel > 1:
        words += f", tensor parallel over {first.tensor_parallel}"
    return words + (f" of {first.host}" if first.host else "")
