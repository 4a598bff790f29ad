"""The engines of judges and reward models: which models a run scores with, checked, and one engine of each on a slot.

A scorer's engine lies where the slot's rollout engine does, on the same cores or device: whose turn it is there is
decided request by request (`controller.dispatch`). Judges that share a model share its engines.

The placement that a run asks for, against the roles and slots that it has, and what it means here.

Every engine of a run as a process to start: its name, role, socket, command, environment and cores.

Not here: the rollout engines (`engines`), the commands (`roles.judge`, `roles.reward_model`), addresses that a user
gives, which have no engine.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ycore.config.schema import RunConfig
from ycore.engine.commands import (
    EngineSpec,
    check_classifier,
    engine_command,
    engine_environment,
    kv_cache_gib,
)
from ycore.errors import ConfigError, ModelError, RewardError
from ycore.judge.declaration import POLICY_BASE, Judge
from ycore.judge.sources import (
    JUDGE_PREFIX,
    REWARD_MODEL_PREFIX,
    RewardModel,
    is_judge,
    is_reward_model,
    judge_of,
    require_columns,
    reward_model_of,
)
from ycore.models.folder import context_length
from ycore.models.names import ModelPlan, resolve_model
from ycore.placement.placement import JUDGE, REWARD_MODEL, ROLLOUT, check_placement, in_order, parse_placement
from ycore.run.paths import RunFolder

_LONGEST = 4096  # tokens, where neither the declaration nor the model asks for less
_ALLOWANCE = 512  # tokens of KV cache kept for a question beside the completion in it
_MOST_SEQUENCES = 32
_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class ScoringModel:
    """A model that scores, and the places of the reward sources that it serves; `None` length is the model's own."""

    role: str
    name: str
    sources: tuple[int, ...]
    max_model_len: int | None
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class ScorerPlan:
    """The engines of one such model, slot by slot."""

    role: str
    sources: tuple[int, ...]
    max_model_len: int
    engines: tuple[EngineSpec, ...]

    @property
    def note(self) -> str:
        """Example: `judge-0 and judge-1 beside`."""
        return " and ".join(engine.name for engine in self.engines) + " beside"

    def told(self) -> dict[str, Any]:
        """What the trainer must know, for `engines.json`."""
        return {
            "role": self.role,
            "sources": list(self.sources),
            "engines": [engine.name for engine in self.engines],
            "model": str(self.engines[0].model.resolve()),
            "max_model_len": self.max_model_len,
        }


def scoring_models(config: RunConfig) -> list[ScoringModel]:
    """Every model that this run needs an engine of for scoring, each once."""
    found: dict[tuple[str, str], ScoringModel] = {}
    for source, spec in enumerate(config.rewards):
        if is_judge(spec):
            judge = judge_of(spec)
            if judge.base_url is not None:
                continue
            name = config.model if judge.model == POLICY_BASE else judge.model
            one = ScoringModel(JUDGE, name, (source,), judge.max_model_len, judge.max_tokens)
        elif is_reward_model(spec):
            declared = reward_model_of(spec)
            one = ScoringModel(REWARD_MODEL, declared.model, (source,), declared.max_model_len, 0)
        else:
            continue
        key = (one.role, one.name)
        found[key] = _both(found[key], one) if key in found else one
    return list(found.values())


def check_scorers(config: RunConfig, columns: Sequence[str], *, engine: str) -> list[str]:
    """A line for each judge and reward model; a UserError where one cannot score this run. Starts and loads nothing."""
    lines = []
    for spec in config.rewards:
        if is_judge(spec):
            name = spec.reward.removeprefix(JUDGE_PREFIX)
            judge = judge_of(spec)
            require_columns(name, judge, columns)
            lines.append(f"judge {name}: {_checked_judge(name, judge, config, engine=engine)}")
        elif is_reward_model(spec):
            name = spec.reward.removeprefix(REWARD_MODEL_PREFIX)
            lines.append(f"reward model {name}: {_checked_reward_model(reward_model_of(spec), config, engine=engine)}")
    return lines


def plan_scorers(
    config: RunConfig, folder: RunFolder, slots: Sequence[EngineSpec], *, fetch: Callable[[str], Path]
) -> list[ScorerPlan]:
    """An engine of every scoring model on every slot, given by its rollout engine; `fetch` makes a model a folder."""
    from ycore.run.files import read_json

    plans: list[ScorerPlan] = []
    models = scoring_models(config) if slots else []
    for number, model in enumerate(models):
        path = fetch(model.name)
        model_config = read_json(path / "config.json")
        first = len(slots) * sum(earlier.role == model.role for earlier in models[:number])
        length = _length(model, model_config)
        engines = tuple(
            _engine(f"{model.role.replace('_', '-')}-{first + slot}", beside, model, path, folder, length=length)
            for slot, beside in enumerate(slots)
        )
        memory = _memory_gib(model, model_config, engines[0], config) if engines[0].on_cpu else 1
        # All models at once beside the trainer, or, where engines sleep, the models of one role at a time.
        together = [other for other in models if other.role == model.role or not engines[0].sleeps]
        share = config.engine.gpu_memory_utilization / len(together)
        engines = tuple(replace(one, memory_gib=memory, gpu_memory_utilization=share) for one in engines)
        plans.append(ScorerPlan(model.role, model.sources, length, engines))
    return plans


def _engine(
    name: str, beside: EngineSpec, model: ScoringModel, path: Path, folder: RunFolder, *, length: int
) -> EngineSpec:
    return replace(
        beside,
        name=name,
        model=path,
        socket=folder.socket(name),
        max_model_len=length,
        max_num_seqs=min(beside.max_num_seqs, _MOST_SEQUENCES),
    )


def _both(one: ScoringModel, other: ScoringModel) -> ScoringModel:
    lengths = (one.max_model_len, other.max_model_len)
    longest = None if None in lengths else max(length for length in lengths if length is not None)
    new = max(one.max_new_tokens, other.max_new_tokens)
    return replace(one, sources=one.sources + other.sources, max_model_len=longest, max_new_tokens=new)


def _length(model: ScoringModel, model_config: Mapping[str, Any]) -> int:
    context = context_length(dict(model_config))
    if model.max_model_len is None:
        return min(context or _LONGEST, _LONGEST)
    if context and model.max_model_len > context:
        raise ConfigError(f"max_model_len {model.max_model_len} of {model.name} is more than its {context}; lower it")
    return model.max_model_len


def _memory_gib(model: ScoringModel, model_config: Mapping[str, Any], engine: EngineSpec, config: RunConfig) -> int:
    tokens = min(engine.max_model_len, _ALLOWANCE + config.max_tokens + model.max_new_tokens)
    tokens = max(engine.max_num_seqs * tokens, engine.max_model_len)
    return kv_cache_gib(model_config, tokens, bytes_per_value=_BYTES[engine.dtype])


def _checked_judge(name: str, judge: Judge, config: RunConfig, *, engine: str) -> str:
    how = f"{judge.mode}, verdict by {judge.verdict.kind}"
    if judge.base_url is not None:
        if judge.api_key_env is not None and not os.environ.get(judge.api_key_env):
            raise RewardError(
                f"judge {name}: the environment variable {judge.api_key_env} (api_key_env) is not set; export it"
            )
        return f"{judge.model} at {judge.base_url}, {how}"
    _require_vllm(f"judge {name}", engine, "give it a base_url, or install vLLM")
    wanted = config.model if judge.model == POLICY_BASE else judge.model
    plan = _resolved(f"judge {name}", wanted, config)
    if plan.has_chat_template is False:
        raise ModelError(f"judge {name} is asked in chats, and {wanted} has no chat template; take an instruct model")
    if judge.max_model_len and plan.context_length and judge.max_model_len > plan.context_length:
        raise RewardError(
            f"judge {name}: max_model_len is {judge.max_model_len}, and its model has {plan.context_length}; lower it"
        )
    told = "the policy's base weights" if judge.model == POLICY_BASE else f"{wanted}, {plan.note}"
    return f"{told}, {how}"


def _checked_reward_model(declared: RewardModel, config: RunConfig, *, engine: str) -> str:
    name = f"reward model {declared.model}"
    _require_vllm(name, engine, "install vLLM, or score with a function: --reward FILE.py:FUNCTION")
    plan = _resolved(name, declared.model, config)
    if plan.config is not None:
        check_classifier(declared.model, plan.config)
        _require_architecture(declared.model, plan.config)
    return f"{plan.note}, one number a completion"


def _resolved(what: str, model: str, config: RunConfig) -> ModelPlan:
    try:
        return resolve_model(model, trust_remote_code=config.trust_remote_code)
    except ModelError as problem:
        raise ModelError(f"{what}: {problem}") from None


def _require_vllm(what: str, engine: str, way_out: str) -> None:
    if engine == "transformers":
        raise ConfigError(f"{what} runs in a vLLM engine, and this run generates with {engine}; {way_out}")


def _require_architecture(name: str, model_config: Mapping[str, Any]) -> None:
    """Whether vLLM knows the architecture, by the text of its list: nothing of vLLM is imported for it."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return
    known = (Path(spec.origin).parent / "model_executor" / "models" / "registry.py").read_text(encoding="utf-8")
    for architecture in model_config.get("architectures") or []:
        base = str(architecture).removesuffix("ForSequenceClassification")
        if not any(f'"{base}{kind}"' in known for kind in ("ForSequenceClassification", "ForCausalLM", "Model")):
            raise ModelError(
                f"vLLM has no {architecture}, so it cannot serve rm:{name}; take a classifier on a decoder that vLLM "
                "knows (Llama, Qwen2, Qwen3, Gemma, ...), or score with a function that loads it: --reward FILE.py:NAME"
            )


def check_run_placement(config: RunConfig, *, num_slots: int | None = None) -> None:
    """ConfigError where it cannot be had; `num_slots` are a controller's, None where they are not known yet."""
    roles = in_order([ROLLOUT, *(model.role for model in scoring_models(config))])
    wanted = parse_placement(config.placement)
    check_placement(wanted, roles=roles, num_slots=sum(wanted.shares) if num_slots is None else num_slots)


def placing_notes(engines: Sequence[EngineSpec], scorers: Sequence[ScorerPlan]) -> list[str]:
    """How the engines share their slots, in a few words; nothing where there is nothing to share."""
    if any(engine.sleeps for engine in engines):
        return ["asleep while others use the device"]
    if scorers and engines[0].on_cpu:
        return ["none of which sleeps, as vLLM cannot on a CPU: placement moves requests alone"]
    return []


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """One engine; started again, it is the same."""

    name: str
    role: str
    socket: Path
    command: tuple[str, ...]
    environment: dict[str, str]
    cores: tuple[int, ...] | None
    device: str | None = None
    sleeps: bool = False


def engine_processes(engines: Sequence[EngineSpec], scorers: Sequence[ScorerPlan]) -> list[EngineProcess]:
    """The rollout engines, then the others, slot by slot within a model."""
    told = [(ROLLOUT, engine) for engine in engines]
    told += [(plan.role, engine) for plan in scorers for engine in plan.engines]
    return [
        EngineProcess(
            name=engine.name,
            role=role,
            socket=engine.socket,
            command=tuple(engine_command(engine, role)),
            environment=engine_environment(engine, has_neighbours=bool(scorers)),
            cores=engine.cores,
            device=engine.device,
            sleeps=engine.sleeps,
        )
        for role, engine in told
    ]
