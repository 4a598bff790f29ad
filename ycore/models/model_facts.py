"""Read the sizes in a model's config.json, from which its costs follow: from a file, a folder, or the hub.

models.json has the configs of well-known models, as the hub has them, so that a plan of these needs no network.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ycore.errors import ModelError, nearest
from ycore.models.convert import is_adapter
from ycore.models.names import (
    ANSWER_WITHIN_S,
    BUILTIN,
    ask_hub,
    base_name,
    cached_snapshot,
    read_settings,
)
from ycore.types import JsonObject, Record

KNOWN_CONFIGS: Mapping[str, JsonObject] = json.loads(
    Path(__file__).with_name("models.json").read_text()
)
"""By hub id."""

_KNOWN_IDS = {
    name.lower(): model_id
    for hub_id in KNOWN_CONFIGS
    for model_id in (hub_id, hub_id.removesuffix("-Instruct"))
    for name in (model_id, model_id.rpartition("/")[2])
}
"""Hub ids of these models and their base models, by the whole id or its last part in lower case."""

_SIZES = ("num_attention_heads", "hidden_size", "num_hidden_layers", "vocab_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Model types with weights that their config.json does not mention.
_BIASED = ("qwen2", "qwen2_moe")  # biases on queries, keys and values
_NORMED_HEADS = ("qwen3", "qwen3_moe")  # a norm over every query's and key's head
_GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # a gate as large as the queries


@dataclass(frozen=True)
class ModelFacts:
    """Sizes under the names of config.json; with experts, `intermediate_size` is that of one expert.

    Attributes:
        attention_params: Weights of one layer's attention, the mean of all layers.
        kv_values: Values that one token leaves in the KV cache: a key and a value a layer (arXiv 2309.06180, section
            3), or what both are made of (arXiv 2405.04434, section 2.1).
        shared_size: Columns of the experts that work on every token.
        dense_layers: Layers without experts, of `dense_size` columns.
    """

    name: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    attention_params: int
    kv_values: int
    context_length: int | None = None
    num_experts: int = 1
    num_experts_per_token: int = 1
    shared_size: int = 0
    dense_layers: int = 0
    dense_size: int = 0
    head_norms: bool = False

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def expert_params(self) -> int:
        """Gate, up and down of one MLP or expert."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def head_params(self) -> int:
        """The output projection onto the vocabulary."""
        return self.vocab_size * self.hidden_size

    @property
    def layer_params(self) -> int:
        """One layer with all experts, their router, and the norms."""
        router = self.hidden_size * self.num_experts if self.num_experts > 1 else 0
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.head_norms else 0)
        return self.attention_params + self._mlp_params(self.num_experts) + router + norms

    @property
    def num_params(self) -> int:
        """All weights; tied embeddings count once."""
        embeddings = self.head_params * (1 if self.tied else 2)
        return (
            embeddings + self._in_layers(self.layer_params, self.num_experts) + self.hidden_size
        )

    @property
    def linear_params(self) -> int:
        """Weights of all layers that one token is multiplied with: of experts the chosen ones; without the head."""
        active = self.attention_params + self._mlp_params(self.num_experts_per_token)
        return self._in_layers(active, self.num_experts_per_token)

    def _mlp_params(self, num_experts: int) -> int:
        """Count the weights of these experts and of the shared ones in a layer."""
        return num_experts * self.expert_params + 3 * self.hidden_size * self.shared_size

    def _in_layers(self, layer: int, num_experts: int) -> int:
        """Sum up all layers, each as large as `layer`; some have one dense MLP in place of so many experts."""
        less = self._mlp_params(num_experts) - 3 * self.hidden_size * self.dense_size
        return self.num_hidden_layers * layer - self.dense_layers * less

    def undivided(self, width: int) -> str:
        """Return the size that so many workers of an engine cannot divide; empty where there is none."""
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads
        if heads % width:
            return f"{heads} attention heads"
        if max(kv_heads, width) % min(
            kv_heads, width
        ):  # with fewer KV heads than workers, several have the same one
            return f"{kv_heads} KV heads"
        return (
            f"{self.intermediate_size} columns of an MLP"
            if self.intermediate_size % width
            else ""
        )

    def lora_params(self, rank: int) -> int:
        """Count LoRA parameters on every linear layer but the head (arXiv 2106.09685, section 4.1; PEFT's `all-linear`).

        Experts get none: transformers keeps them in one tensor, which is no linear layer.
        """
        attention = 2 * (self.hidden_size + self.query_size) + 2 * (
            self.hidden_size + self.kv_size
        )
        mlp = 3 * (self.hidden_size + self.intermediate_size) if self.num_experts == 1 else 0
        return self.num_hidden_layers * rank * (attention + mlp)


def facts_of(config: Record, *, name: str) -> ModelFacts:
    """Read the sizes in a config.json, of a multimodal model in its `text_config`; ModelError where one is missing."""
    try:
        return _read_facts(config, name)
    except (KeyError, TypeError, ValueError, ArithmeticError) as problem:
        why = f"has no {problem.args[0]}" if isinstance(problem, KeyError) else problem
        raise ModelError(
            f"a plan is made of the sizes in config.json, and in that of {name}: {why!s:.200}; write it there, or take a "
            "text decoder that has it"
        ) from None


def _read_facts(config: Record, name: str) -> ModelFacts:
    nested = config.get("text_config")
    text: Record = {**config, **nested} if isinstance(nested, Mapping) else config
    sizes = [int(text[key]) for key in _SIZES]
    if min(sizes) < 1:
        raise ValueError(f"{', '.join(_SIZES)}: {sizes}")
    heads, hidden, layers, vocab = sizes
    experts = next((int(text[key]) for key in _EXPERTS if text.get(key)), 1)
    inner = int(
        (experts > 1 and text.get("moe_intermediate_size")) or text["intermediate_size"]
    )
    kind = str(text.get("model_type", ""))
    head_dim = int(text.get("head_dim") or hidden // heads)
    if text.get("kv_lora_rank"):
        head_dim = int(text["qk_nope_head_dim"]) + int(text["qk_rope_head_dim"])
    attention, cached = _attention(text, kind, heads, head_dim)
    # A latent of keys and values is one for all heads.
    kv_heads = 1 if text.get("kv_lora_rank") else int(text.get("num_key_value_heads") or heads)
    shared = int(text.get("n_shared_experts") or 0) * inner
    return ModelFacts(
        name=name,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        vocab_size=vocab,
        tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        attention_params=attention,
        kv_values=cached,
        context_length=text.get("max_position_embeddings"),
        num_experts=experts,
        num_experts_per_token=int(text.get("num_experts_per_tok") or 1) if experts > 1 else 1,
        shared_size=int(text.get("shared_expert_intermediate_size") or shared),
        dense_layers=int(text.get("first_k_dense_replace") or 0) if experts > 1 else 0,
        dense_size=int(text.get("intermediate_size") or 0),
        head_norms=kind in _NORMED_HEADS,
    )


def _attention(text: Any, kind: str, heads: int, head_dim: int) -> tuple[int, int]:
    """Return `attention_params` and `kv_values` of these sizes."""
    hidden = text["hidden_size"]
    layers = text["num_hidden_layers"]
    queries = heads * head_dim
    if rank := text.get("kv_lora_rank"):  # multi-head latent attention (arXiv 2405.04434)
        narrow = text.get("q_lora_rank")
        query_params = narrow * (hidden + queries) if narrow else hidden * queries
        latent = rank + text["qk_rope_head_dim"]
        key_params = hidden * latent + rank * heads * (
            text["qk_nope_head_dim"] + text["v_head_dim"]
        )
        return query_params + key_params + heads * text["v_head_dim"] * hidden, layers * latent
    keys = (text.get("num_key_value_heads") or heads) * head_dim
    biases = queries + 2 * keys if text.get("attention_bias") or kind in _BIASED else 0
    full = hidden * ((3 if kind in _GATED else 2) * queries + 2 * keys) + biases
    if not (linear_heads := text.get("linear_num_value_heads")):
        return full, 2 * layers * keys
    # Gated DeltaNet (arXiv 2412.06464) in all layers but some.
    linear_keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    linear_values = linear_heads * text["linear_value_head_dim"]
    linear = hidden * (2 * linear_keys + 3 * linear_values + 2 * linear_heads)
    kinds = text.get("layer_types") or ["full_attention"] * (layers // 4)
    num_full = kinds.count("full_attention")
    return linear + num_full * (full - linear) // layers, 2 * num_full * keys


def hub_id_of(name: str) -> str:
    """Return the hub id of a short name, e.g. `Qwen/Qwen3-8B` for `Qwen3-8B`; other names as they are."""
    if "/" in name or name in BUILTIN or Path(name).expanduser().exists():
        return name
    return _KNOWN_IDS.get(name.lower(), name)


def known_config(name: str) -> JsonObject | None:
    """Return the config in models.json of a hub id, its base model's id, or its last part; None where there is none."""
    wanted = BUILTIN[name].hub_id if name in BUILTIN else name
    known_id = _KNOWN_IDS.get(wanted.lower())
    return KNOWN_CONFIGS.get(known_id or "") or KNOWN_CONFIGS.get(f"{known_id}-Instruct")


def model_facts(name: str) -> ModelFacts:
    """Return the sizes of a config.json, a model's folder, a built-in name or a hub id; ModelError if none can be read."""
    return facts_of(model_config(name), name=name)


def model_config(name: str, *, ask: bool = True) -> JsonObject:
    """Return a model's config.json, from the hub only where it may be asked."""
    path = Path(os.path.expanduser(name))
    if path.suffix == ".json" and path.is_file():
        return _read(path)
    if is_adapter(path) and (base := base_name(path)):
        return model_config(base, ask=ask)
    if path.is_dir():
        return _read(path / "config.json")
    if known := known_config(
        name
    ):  # first: to look into the hub's cache, its client must be imported
        return known
    if name.count("/") < 2 and (snapshot := cached_snapshot(name)):
        return model_config(str(snapshot), ask=ask)
    return _from_hub(name, ask=ask)


def sighted_family(name: str) -> str | None:
    """Return the `model_type` of a model that reads pictures, where its config is on this machine."""
    with suppress(ModelError):
        config = model_config(name, ask=False)
        return str(config.get("model_type")) if "vision_config" in config else None
    return None


def _read(path: Path) -> JsonObject:
    if not path.is_file():
        raise ModelError(
            f"a plan reads a model's config.json, and {path} does not exist; give a folder that has one"
        )
    return read_settings(path)


def _from_hub(name: str, *, ask: bool) -> JsonObject:
    answer = ask_hub(lambda api: _download(api, name)) if ask and name.count("/") == 1 else None
    if answer and answer.state == "here":
        return _read(Path(str(answer.info)))
    why = f" ({answer.problem})" if answer and answer.problem else ""
    raise ModelError(
        f"no config of {name!r} found: it is no folder, not in the local cache, and not on the hub{why}"
        + (nearest(name, [*KNOWN_CONFIGS, *BUILTIN]) or "; give a folder or a config.json")
    )


def _download(api: Any, name: str) -> str:
    """Download the config.json. `model_info` comes first: it fails at once, while a download retries for a minute."""
    api.model_info(name, timeout=ANSWER_WITHIN_S)
    return str(api.hf_hub_download(name, "config.json"))
