"""What a model's config.json says of its cost: parameters by kind, and the sizes that memory and time follow from.

A decoder of the Llama kind is assumed (attention with grouped keys, a gated MLP, RMSNorm), with experts where the
config has some: that is every text model that ycore trains today. `num_params` is exact for those families.

Not here: where the config comes from (`known`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ycore.errors import ModelError

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
