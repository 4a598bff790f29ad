"""A reward model as a scorer, or several that are combined."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ycore.config.schema import RewardConfig, RunConfig
from ycore.engine.vllm_engine import VllmRewardModel
from ycore.errors import ModelError
from ycore.judge.question import break_special_tokens, special_tokens
from ycore.judge.sources import RewardModel, is_reward_model, reward_model_of
from ycore.placement.placement import REWARD_MODEL
from ycore.run.tasks import together
from ycore.scoring.scoring import (
    PendingGroup,
    RequestMeter,
    Scorer,
    ScorerContext,
    ServedModel,
    TextOf,
    plain_text,
    plan_served_model,
    text_of,
)
from ycore.types import Prompt, Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardModelMeter(RequestMeter):
    kind = "reward_model"


class EnsembleMember(NamedTuple):
    """A model of an ensemble; its `engines` are slot by slot."""

    engines: Sequence[VllmRewardModel]
    encode: Callable[[Prompt, str], list[int]]
    max_model_len: int


@dataclass(eq=False)
class RewardModelScorer(Scorer):
    """An `rm:` reward: a model, or an ensemble, that is asked for a number as each completion ends."""

    kind = "reward model"
    name: str
    reward_model: RewardModel
    members: Sequence[EnsembleMember]
    _: KW_ONLY
    meter: RewardModelMeter
    text_of: TextOf = plain_text

    def __post_init__(self) -> None:
        self.engines = [engine for member in self.members for engine in member.engines]

    @classmethod
    def handles(cls, spec: RewardConfig) -> bool:
        return is_reward_model(spec)

    @classmethod
    def models(cls, spec: RewardConfig, config: RunConfig) -> list[ServedModel]:
        declared = reward_model_of(spec)
        return [
            ServedModel(
                REWARD_MODEL,
                name,
                max_model_len=declared.max_model_len,
                tensor_parallel=declared.tensor_parallel,
            )
            for name in declared.models
        ]

    @classmethod
    def check_models(cls, spec: RewardConfig, config: RunConfig, *, engine: str) -> list[str]:
        way_out = "install vLLM, or score with a function: --reward FILE.py:FUNCTION"
        lines = []
        for model in reward_model_of(spec).models:
            label = f"reward model {model}"
            plan = plan_served_model(label, model, config, engine=engine, way_out=way_out)
            if plan.config is not None:
                _check_classifier(model, plan.config)
            lines.append(f"{label}: {plan.note}, one number a completion")
        return lines

    @classmethod
    def build(cls, spec: RewardConfig, source: int, context: ScorerContext) -> Scorer:
        members = [
            EnsembleMember(
                context.servers(model, VllmRewardModel),
                reward_model_encoder(context.tokenizer(model)),
                model.max_model_len,
            )
            for model in context.models_of(source)
        ]
        return cls(
            context.names[source],
            reward_model_of(spec),
            members,
            meter=context.meter(RewardModelMeter),
            text_of=text_of(spec),
        )

    async def score_one(self, group: PendingGroup, index: int) -> Score:
        text = self.text_of(await group.tasks_G[index])
        inputs = [(member, member.encode(group.draw.prompt, text)) for member in self.members]
        if any(len(token_ids) > member.max_model_len for member, token_ids in inputs):
            return self.masked("longer than its context")
        async with group.turn(REWARD_MODEL) as slot:
            with self.meter.timed():
                logits = await together(
                    [slot.pick(member.engines).logit(token_ids) for member, token_ids in inputs]
                )
            slot.num_tokens = sum(len(token_ids) for _, token_ids in inputs)
        self.meter.tokens += slot.num_tokens
        if not all(map(math.isfinite, logits)):
            return self.masked("its answer is no finite number")
        return Score(self.reward_model.reward(*logits))


def reward_model_encoder(
    tokenizer: "PreTrainedTokenizerBase",
) -> Callable[[Prompt, str], list[int]]:
    """Return a function from a prompt and a completion to the token ids that TRL's trainers give a reward model.

    A chat goes through the reward model's own chat template. A text is followed by the end token, as in TRL's
    RewardTrainer. Special tokens that the policy spelled out are broken up, so that it cannot end its own turn.
    """
    special = special_tokens(tokenizer)

    def encode(prompt: Prompt, completion: str) -> list[int]:
        completion = break_special_tokens(completion, special)
        if isinstance(prompt.content, str):
            text = prompt.content + completion
            end = str(tokenizer.eos_token or "")
            if not (end and text.endswith(end)):
                text += end
        else:
            answer = {"role": "assistant", "content": completion}
            text = str(tokenizer.apply_chat_template([*prompt.content, answer], tokenize=False))
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return encode


def _check_classifier(name: str, model_config: Mapping[str, Any]) -> None:
    """ModelError unless a config.json is that of a sequence classifier with one label, which vLLM can serve."""
    architectures = [str(architecture) for architecture in model_config.get("architectures") or []]
    suffix = "ForSequenceClassification"
    if not any(architecture.endswith(suffix) for architecture in architectures):
        raise ModelError(
            f"rm:{name} must be a sequence classifier with one label (...ForSequenceClassification); its architectures "
            f"are {', '.join(architectures) or 'none'}; train one with TRL's RewardTrainer, or use the model as a "
            "judge: --reward judge:FILE.yaml"
        )
    # transformers' default is 2
    num_labels = model_config.get("num_labels") or len(model_config.get("id2label") or {}) or 2
    if num_labels != 1:
        raise ModelError(
            f"rm:{name} must give one number, and has {num_labels} labels; take a model with num_labels=1"
        )
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return
    # Read the text of vLLM's registry: importing vLLM takes many seconds.
    registry_file = Path(vllm.origin).parent / "model_executor" / "models" / "registry.py"
    registry = registry_file.read_text(encoding="utf-8")
    for architecture in architectures:
        base = architecture.removesuffix(suffix)
        if not any(f'"{base}{end}"' in registry for end in (suffix, "ForCausalLM", "Model")):
            raise ModelError(
                f"vLLM has no {architecture}, so it cannot serve rm:{name}; take a classifier on a decoder that vLLM "
                "has (Llama, Qwen2, Qwen3, Gemma, ...), or score with a function that loads it: --reward FILE.py:NAME"
            )
