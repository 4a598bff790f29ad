"""Where a model's config.json comes from: a file, a folder, the hub's local copy, a small table, or the hub.

The table holds the sizes of well-known models, as their config.json files on the hub give them, so that a plan needs
no network and no account.

What a model's config.json says of its cost: parameters by kind, and the sizes that memory and time follow from.

Not here: what follows from them (`facts`).
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ycore.errors import ModelError, nearest
from ycore.models.hub import ANSWER_WITHIN_S, ask_hub, cached_snapshot
from ycore.models.names import BUILTIN

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_BIASED = ("qwen2", "qwen2_moe")  # these have biases on queries, keys and values without saying so in their config
_NORMED_HEADS = ("qwen3", "qwen3_moe")  # and these a norm over every query's and key's head


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes under the names of config.json; `intermediate_size` is one expert's where there are experts."""

    name: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    context_length: int | None = None
    num_experts: int = 1
    num_experts_per_token: int = 1
    attention_bias: bool = False
    head_norms: bool = False

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def attention_params(self) -> int:
        """Of one layer: queries, keys, values, output, and their biases."""
        biases = self.query_size + 2 * self.kv_size if self.attention_bias else 0
        return self.hidden_size * (2 * self.query_size + 2 * self.kv_size) + biases

    @property
    def expert_params(self) -> int:
        """Of one MLP or expert: gate, up, down."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def head_params(self) -> int:
        """The output projection onto the vocabulary."""
        return self.vocab_size * self.hidden_size

    @property
    def layer_params(self) -> int:
        """Everything in one layer, all experts and their router and the norms included."""
        router = self.hidden_size * self.num_experts if self.num_experts > 1 else 0
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.head_norms else 0)
        return self.attention_params + self.num_experts * self.expert_params + router + norms

    @property
    def num_params(self) -> int:
        """Every weight once."""
        embeddings = self.head_params * (1 if self.tied else 2)
        return embeddings + self.num_hidden_layers * self.layer_params + self.hidden_size

    @property
    def linear_params(self) -> int:
        """Weights that one token is multiplied with in the layers, experts not chosen left out, and the head."""
        active = self.attention_params + self.num_experts_per_token * self.expert_params
        return self.num_hidden_layers * active

    @property
    def kv_values(self) -> int:
        """Numbers that one token leaves in the KV cache: a key and a value in every layer."""
        return 2 * self.num_hidden_layers * self.kv_size

    def lora_params(self, rank: int) -> int:
        """Adapters of this rank on every linear layer but the head (arXiv 2106.09685, section 4.1; `all-linear`).

        Experts get none: transformers keeps them in one tensor, which is no linear layer.
        """
        attention = 2 * (self.hidden_size + self.query_size) + 2 * (self.hidden_size + self.kv_size)
        mlp = 3 * (self.hidden_size + self.intermediate_size) if self.num_experts == 1 else 0
        return self.num_hidden_layers * rank * (attention + mlp)


def facts_of(config: Mapping[str, Any], *, name: str) -> ModelFacts:
    """The facts in a config.json; ModelError where a size is missing."""
    nested = config.get("text_config")
    text: Mapping[str, Any] = {**config, **nested} if isinstance(nested, Mapping) else config
    heads = _size(text, "num_attention_heads", name)
    hidden = _size(text, "hidden_size", name)
    experts = next((int(text[key]) for key in _EXPERTS if text.get(key)), 1)
    inner = text.get("moe_intermediate_size") if experts > 1 else None
    kind = str(text.get("model_type", ""))
    return ModelFacts(
        name=name,
        hidden_size=hidden,
        num_hidden_layers=_size(text, "num_hidden_layers", name),
        num_attention_heads=heads,
        num_key_value_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
        intermediate_size=int(inner or _size(text, "intermediate_size", name)),
        vocab_size=_size(text, "vocab_size", name),
        tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        context_length=text.get("max_position_embeddings"),
        num_experts=experts,
        num_experts_per_token=int(text.get("num_experts_per_tok") or 1) if experts > 1 else 1,
        attention_bias=bool(text.get("attention_bias")) or kind in _BIASED,
        head_norms=kind in _NORMED_HEADS,
    )


def _size(config: Mapping[str, Any], key: str, name: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(
            f"the plan needs {key} of {name}, and its config.json has {value!r}; only text decoders can be planned"
        )
    return value


_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
           "vocab_size", "tie_word_embeddings", "max_position_embeddings", "model_type")  # fmt: skip

_SIZES: dict[str, tuple[int, int, int, int, int, int, bool, int, str]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": (576, 1536, 30, 9, 3, 49152, True, 8192, "llama"),
    "HuggingFaceTB/SmolLM2-360M-Instruct": (960, 2560, 32, 15, 5, 49152, True, 8192, "llama"),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": (2048, 8192, 24, 32, 32, 49152, True, 8192, "llama"),
    "Qwen/Qwen2.5-0.5B-Instruct": (896, 4864, 24, 14, 2, 151936, True, 32768, "qwen2"),
    "Qwen/Qwen2.5-1.5B-Instruct": (1536, 8960, 28, 12, 2, 151936, True, 32768, "qwen2"),
    "Qwen/Qwen2.5-3B-Instruct": (2048, 11008, 36, 16, 2, 151936, True, 32768, "qwen2"),
    "Qwen/Qwen2.5-7B-Instruct": (3584, 18944, 28, 28, 4, 152064, False, 32768, "qwen2"),
    "Qwen/Qwen2.5-14B-Instruct": (5120, 13824, 48, 40, 8, 152064, False, 32768, "qwen2"),
    "Qwen/Qwen2.5-32B-Instruct": (5120, 27648, 64, 40, 8, 152064, False, 32768, "qwen2"),
    "Qwen/Qwen2.5-72B-Instruct": (8192, 29568, 80, 64, 8, 152064, False, 32768, "qwen2"),
    "Qwen/Qwen3-0.6B": (1024, 3072, 28, 16, 8, 151936, True, 40960, "qwen3"),
    "Qwen/Qwen3-1.7B": (2048, 6144, 28, 16, 8, 151936, True, 40960, "qwen3"),
    "Qwen/Qwen3-4B": (2560, 9728, 36, 32, 8, 151936, True, 40960, "qwen3"),
    "Qwen/Qwen3-8B": (4096, 12288, 36, 32, 8, 151936, False, 40960, "qwen3"),
    "Qwen/Qwen3-14B": (5120, 17408, 40, 40, 8, 151936, False, 40960, "qwen3"),
    "Qwen/Qwen3-32B": (5120, 25600, 64, 64, 8, 151936, False, 40960, "qwen3"),
    "Qwen/Qwen3-30B-A3B": (2048, 6144, 48, 32, 4, 151936, False, 40960, "qwen3_moe"),
    "meta-llama/Llama-2-7b-hf": (4096, 11008, 32, 32, 32, 32000, False, 4096, "llama"),
    "meta-llama/Llama-3.2-1B-Instruct": (2048, 8192, 16, 32, 8, 128256, True, 131072, "llama"),
    "meta-llama/Llama-3.2-3B-Instruct": (3072, 8192, 28, 24, 8, 128256, True, 131072, "llama"),
    "meta-llama/Llama-3.1-8B-Instruct": (4096, 14336, 32, 32, 8, 128256, False, 131072, "llama"),
    "meta-llama/Llama-3.1-70B-Instruct": (8192, 28672, 80, 64, 8, 128256, False, 131072, "llama"),
    "mistralai/Mistral-7B-Instruct-v0.3": (4096, 14336, 32, 32, 8, 32768, False, 32768, "mistral"),
}
_QWEN3 = {"head_dim": 128}  # not hidden_size / num_attention_heads in this family
_MORE: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-30B-A3B": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}


def known_models() -> list[str]:
    return sorted(_SIZES)


def known_config(name: str) -> dict[str, Any] | None:
    """The table's config of a model, by its hub id, its base's, or its last part; None where it has none."""
    wanted = BUILTIN[name].hub_id if name in BUILTIN else name
    for hub_id, sizes in _SIZES.items():
        if wanted.lower() in _spellings(hub_id):
            config: dict[str, Any] = dict(zip(_FIELDS, sizes, strict=True))
            return config | (_QWEN3 if config["model_type"].startswith("qwen3") else {}) | _MORE.get(hub_id, {})
    return None


def model_facts(name: str) -> ModelFacts:
    """The facts of a model; ModelError where no config is to be had. No weights are looked at."""
    path = Path(os.path.expanduser(name))
    if path.suffix == ".json" and path.is_file():
        return facts_of(_read(path), name=name)
    if path.is_dir():
        return facts_of(_read(path / "config.json"), name=name)
    snapshot = cached_snapshot(BUILTIN[name].hub_id if name in BUILTIN else name) if name.count("/") < 2 else None
    if snapshot is not None and (snapshot / "config.json").is_file():
        return facts_of(_read(snapshot / "config.json"), name=name)
    known = known_config(name)
    return facts_of(known if known is not None else _from_hub(name), name=name)


def _spellings(hub_id: str) -> set[str]:
    plain = hub_id.lower()
    base = plain.removesuffix("-instruct")
    return {plain, base, plain.rpartition("/")[2], base.rpartition("/")[2]}


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelError(f"the plan reads a model's config.json, and there is no {path}; give a folder that has one")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ModelError(f"{path} cannot be read as JSON ({problem}); download the model again") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(config).__name__}; give a model's config.json")
    return config


def _from_hub(name: str) -> dict[str, Any]:
    answer = ask_hub(lambda api: _download(api, name)) if name.count("/") == 1 else None
    if answer is not None and answer.state == "here":
        return _read(Path(str(answer.info)))
    why = f" ({answer.problem})" if answer is not None and answer.problem else ""
    raise ModelError(
        f"no config of {name!r} to plan with: no folder, not in the local cache, and not from the hub{why}"
        + (nearest(name, [*_SIZES, *BUILTIN]) or "; give a folder or a config.json")
    )


def _download(api: Any, name: str) -> str:
    """The hub's config.json; asked for by a question that is not repeated first, since downloads try for a minute."""
    api.model_info(name, timeout=ANSWER_WITHIN_S)
    return str(api.hf_hub_download(name, "config.json"))
