"""The models that a run serves, the policy, judges, reward models and teachers, and whether each can score the run."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from ycore.config.schema import RewardConfig, RunConfig, Width
from ycore.engine.commands import EngineSpec
from ycore.engine.judge_engine import key_header
from ycore.engine.kinds import VLLM, EngineKind
from ycore.errors import ConfigError, ModelError, RewardError
from ycore.judge.agreement import agreement_of
from ycore.judge.declaration import POLICY_BASE, Judge, Served
from ycore.judge.sources import (
    JUDGE_PREFIX,
    RewardModel,
    Teacher,
    is_agreement,
    is_judge,
    is_reward_model,
    is_teacher,
    judge_of,
    model_name,
    require_columns,
    reward_model_of,
    teacher_of,
)
from ycore.models.folder import read_settings
from ycore.models.names import ModelPlan, resolve_model
from ycore.placement.placement import (
    JUDGE,
    REWARD_MODEL,
    ROLLOUT,
    TEACHER,
    check_placement,
    in_order,
    parse_placement,
)

_ANSWER_S = 20.0
_WITHOUT_ENGINES = "install vLLM, or hold it in the trainer: --set distill.divergence=reverse-kl"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with engines on every slot: the policy, or one that scores for the reward sources at these positions.

    `width` and `engines` follow from the machine (`device_memory`, `engines`).
    """

    role: str
    name: str
    sources: tuple[int, ...] = ()
    max_model_len: int | None = None  # tokens; None is the model's own context
    max_new_tokens: int = 0  # what a scorer writes after the policy's completion
    tensor_parallel: Width = "auto"
    width: int = 1  # devices that one of its engines spans
    engines: tuple[EngineSpec, ...] = ()  # slot by slot, as many on each

    def option(self, key: str) -> str:
        """Return the name of a setting of its engines, for messages."""
        return f"engine.{key}" if self.role == ROLLOUT else f"{key} of {self.name}"


def served_models(config: RunConfig) -> list[ServedModel]:
    """Return the policy, then every model that scores this run in an engine of ycore's.

    Judges that use the same model share its engines. A judge with a `base_url` needs none.
    """
    engine = config.engine
    policy = ServedModel(
        ROLLOUT,
        config.model,
        max_model_len=engine.max_model_len,
        tensor_parallel=engine.tensor_parallel,
    )
    models: dict[tuple[str, str], ServedModel] = {(ROLLOUT, config.model): policy}
    for source, spec in enumerate(config.rewards):
        for model in _scoring_models(spec, source, config):
            key = (model.role, model.name)
            models[key] = _merge(models[key], model) if key in models else model
    return list(models.values())


def _scoring_models(spec: RewardConfig, source: int, config: RunConfig) -> list[ServedModel]:
    """Return the models that score for one reward in an engine of ycore's."""
    if is_judge(spec):
        judge = judge_of(spec)
        if judge.base_url is not None:
            return []
        return [
            ServedModel(
                JUDGE,
                model_name(judge, config),
                (source,),
                max_model_len=judge.max_model_len,
                max_new_tokens=judge.max_tokens,
                tensor_parallel=judge.tensor_parallel,
            )
        ]
    declared: RewardModel | Teacher
    if is_reward_model(spec):
        role = REWARD_MODEL
        declared = reward_model_of(spec)
        names = declared.models
    elif is_teacher(spec) and not config.teaches_exactly and teacher_of(spec).base_url is None:
        role = TEACHER
        declared = teacher_of(spec)
        names = (declared.model,)
    else:
        return []
    return [
        ServedModel(
            role,
            name,
            (source,),
            max_model_len=declared.max_model_len,
            tensor_parallel=declared.tensor_parallel,
        )
        for name in names
    ]


def own_teachers(config: RunConfig) -> list[str]:
    """Return the teachers that every rank of the trainer holds itself."""
    if not config.teaches_exactly:
        return []
    return [teacher_of(spec).model for spec in config.rewards if is_teacher(spec)]


def check_run_placement(
    config: RunConfig, models: Sequence[ServedModel], *, num_slots: int | None = None
) -> None:
    """Check that the models' roles can be placed on `num_slots`, None where these are not known yet; else ConfigError."""
    placement = parse_placement(config.placement)
    roles = in_order([model.role for model in models])
    check_placement(
        placement, roles=roles, num_slots=sum(placement.shares) if num_slots is None else num_slots
    )


def check_scorers(config: RunConfig, columns: Sequence[str], *, engine: EngineKind) -> list[str]:
    """Describe each judge, reward model and teacher in a line; UserError where one cannot score this run."""
    lines = []
    for spec in config.rewards:
        if is_judge(spec):
            name = spec.reward.removeprefix(JUDGE_PREFIX)
            judge = judge_of(spec)
            require_columns(name, judge, columns)
            lines.append(f"judge {name}: {_check_judge(f'judge {name}', judge, config, engine)}")
        elif is_agreement(spec):
            judge = agreement_of(spec)
            require_columns(spec.reward, judge, columns)
            lines.append(
                f"{spec.reward}: the policy is the judge, pairwise, verdict by {judge.verdict.kind}"
            )
        elif is_reward_model(spec):
            way_out = "score with a function: --reward FILE.py:FUNCTION"
            for model in reward_model_of(spec).models:
                name = f"reward model {model}"
                plan = _served(name, model, config, engine, f"install vLLM, or {way_out}")
                if plan.config is not None:
                    _check_classifier(model, plan.config)
                lines.append(f"{name}: {plan.note}, one number a completion")
        elif is_teacher(spec):
            lines.append(_check_teacher(teacher_of(spec), config, engine))
    return lines


def _check_teacher(teacher: Teacher, config: RunConfig, engine: EngineKind) -> str:
    name = f"teacher {teacher.model}"
    is_exact = config.teaches_exactly
    policy = resolve_model(config.model, trust_remote_code=config.trust_remote_code)
    if teacher.base_url is not None:
        if is_exact:
            raise ConfigError(
                f"{name}: distill.divergence={config.teacher_divergence} needs the teacher's weights, and it is at "
                f"{teacher.base_url}; leave distill.divergence out, or base_url"
            )
        _check_key(name, teacher)
        if policy.ready and policy.folder is not None:
            check_tokens_at(policy.folder, teacher)
        return f"{name}: at {teacher.base_url}, the probability of each token"
    plan = _served(name, teacher.model, config, VLLM if is_exact else engine, _WITHOUT_ENGINES)
    if plan.ready and plan.folder is not None and policy.ready and policy.folder is not None:
        check_same_tokens(policy.folder, plan.folder, name=teacher.model)
    score = "the probability of each token"
    if is_exact:
        score = f"{config.teacher_divergence}, exact, in the trainer"
    return f"{name}: {plan.note}, {score}"


def check_teachers(config: RunConfig, policy: Path, fetch: Callable[[str], Path]) -> None:
    """Check that teachers have the policy's tokenizer; else ConfigError. `fetch` makes a model's name its folder."""
    for teacher in map(teacher_of, filter(is_teacher, config.rewards)):
        if teacher.base_url is None:
            check_same_tokens(policy, fetch(teacher.model), name=teacher.model)
        else:
            check_tokens_at(policy, teacher)


def _merge(first: ServedModel, second: ServedModel) -> ServedModel:
    """Return one model for the sources of both, with the longer lengths and the larger width."""
    lengths = [first.max_model_len, second.max_model_len]
    widths = [width for width in (first.tensor_parallel, second.tensor_parallel) if width != "auto"]
    return replace(
        first,
        sources=first.sources + second.sources,
        max_model_len=None if None in lengths else max(filter(None, lengths)),
        max_new_tokens=max(first.max_new_tokens, second.max_new_tokens),
        tensor_parallel=max(widths, default="auto"),
    )


def _check_key(name: str, served: Served) -> None:
    if served.api_key_env is not None and not os.environ.get(served.api_key_env):
        raise RewardError(
            f"{name}: the environment variable {served.api_key_env} (api_key_env) is not set; export it"
        )


def _check_judge(name: str, judge: Judge, config: RunConfig, engine: EngineKind) -> str:
    mode = f"{judge.mode}, verdict by {judge.verdict.kind}"
    if judge.base_url is not None:
        _check_key(name, judge)
        return f"{judge.model} at {judge.base_url}, {mode}"
    model = model_name(judge, config)
    plan = _served(name, model, config, engine, "give it a base_url, or install vLLM")
    if plan.has_chat_template is False:
        raise ModelError(
            f"{name} is asked in chats, and {model} has no chat template; take an instruct model"
        )
    if judge.max_model_len and plan.context_length and judge.max_model_len > plan.context_length:
        raise RewardError(
            f"{name}: max_model_len is {judge.max_model_len}, and its model has {plan.context_length}; lower it"
        )
    weights = "the policy's base weights" if judge.model == POLICY_BASE else f"{model}, {plan.note}"
    return f"{weights}, {mode}"


def _served(
    name: str, model: str, config: RunConfig, engine: EngineKind, way_out: str
) -> ModelPlan:
    if not engine.has_servers:
        raise ConfigError(
            f"{name} runs in a vLLM engine, and this run generates with {engine.name}; {way_out}"
        )
    try:
        return resolve_model(model, trust_remote_code=config.trust_remote_code)
    except ModelError as problem:
        raise ModelError(f"{name}: {problem}") from None


def _check_classifier(name: str, model_config: Mapping[str, Any]) -> None:
    """Check that a model's config.json is that of a sequence classifier with one label, which vLLM can serve."""
    architectures = [str(architecture) for architecture in model_config.get("architectures") or []]
    if not any(
        architecture.endswith("ForSequenceClassification") for architecture in architectures
    ):
        raise ModelError(
            f"rm:{name} must be a sequence classifier with one label (...ForSequenceClassification); its architectures "
            f"are {', '.join(architectures) or 'none'}; train one with TRL's RewardTrainer, or use the model as a "
            "judge: --reward judge:FILE.yaml"
        )
    # transformers has two by default.
    num_labels = model_config.get("num_labels") or len(model_config.get("id2label") or {}) or 2
    if num_labels != 1:
        raise ModelError(
            f"rm:{name} must give one number, and has {num_labels} labels; take a model with num_labels=1"
        )
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return
    # By the text of vLLM's registry: importing vLLM takes many seconds.
    registry = (Path(spec.origin).parent / "model_executor" / "models" / "registry.py").read_text(
        encoding="utf-8"
    )
    for architecture in architectures:
        base = architecture.removesuffix("ForSequenceClassification")
        if not any(
            f'"{base}{kind}"' in registry
            for kind in ("ForSequenceClassification", "ForCausalLM", "Model")
        ):
            raise ModelError(
                f"vLLM has no {architecture}, so it cannot serve rm:{name}; take a classifier on a decoder that vLLM "
                "has (Llama, Qwen2, Qwen3, Gemma, ...), or score with a function that loads it: --reward FILE.py:NAME"
            )


def check_same_tokens(policy: Path, teacher: Path, *, name: str) -> None:
    """Check that two tokenizers give every token the same id: a teacher is asked for the policy's ids."""
    ours = _token_ids(policy)
    theirs = _token_ids(teacher)
    if ours is None or theirs is None or ours == theirs:
        return
    differing = {token for token, _ in ours.items() ^ theirs.items()}
    token = min(differing, key=lambda token: ours.get(token, len(ours)))
    raise ConfigError(
        f"teacher {name} has another tokenizer than the policy: {token!r} is {ours.get(token, 'no token')} in the "
        f"policy's and {theirs.get(token, 'no token')} in the teacher's; take a teacher of the same family of models"
    )


def _sample_text(tokenizer: Any) -> str:
    """Return a text of 256 tokens from all over the vocabulary, and of the first added tokens."""
    step = max(1, tokenizer.get_vocab_size() // 256)
    ids = list(range(0, tokenizer.get_vocab_size(), step))[:256]
    added = sorted(tokenizer.get_added_tokens_decoder().items())[:64]
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text + "".join(token.content for _, token in added)


def check_tokens_at(policy: Path, teacher: Teacher) -> None:
    """Check that a teacher's address reads a text as the same tokens as the policy's tokenizer; else ConfigError."""
    from tokenizers import Tokenizer

    file = policy / "tokenizer.json"
    if teacher.base_url is None or not file.is_file():
        return
    name = f"teacher {teacher.model}"
    tokenizer = Tokenizer.from_file(str(file))
    text = _sample_text(tokenizer)
    ours = tokenizer.encode(text, add_special_tokens=False).ids
    address = teacher.base_url.rstrip("/").removesuffix("/v1")
    body = {"model": teacher.model, "prompt": text, "add_special_tokens": False}
    try:
        answer = httpx.post(
            f"{address}/tokenize",
            json=body,
            headers=key_header(teacher, name=name),
            timeout=_ANSWER_S,
        )
        theirs = answer.raise_for_status().json()["tokens"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as problem:
        raise ConfigError(
            f"{name}: {address}/tokenize gives no tokens to compare with the policy's ({problem}); "
            "base_url is that of a vLLM server, with /v1"
        ) from None
    if ours != theirs:
        pairs = enumerate(zip(ours, theirs, strict=False))
        place = next((place for place, (mine, other) in pairs if mine != other), 0)
        token = tokenizer.id_to_token(ours[place])
        raise ConfigError(
            f"{name} at {teacher.base_url} has another tokenizer than the policy: {token!r} is "
            f"{ours[place]} in the policy's, and it reads {theirs[place : place + 1]}; take one of the same family"
        )


def _token_ids(folder: Path) -> Mapping[str, int] | None:
    """Return every token's id of a tokenizer.json; None where the folder has none of its own."""
    tokenizer = read_settings(folder / "tokenizer.json")
    vocab = tokenizer.get("model", {}).get("vocab")
    if isinstance(vocab, list):  # Unigram's: pairs of a token and its score
        vocab = {piece[0]: place for place, piece in enumerate(vocab)}
    if vocab is None:
        return None
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    return {**vocab, **added}
