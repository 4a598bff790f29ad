"""Random models of a hundred thousand parameters that trainer and engine load like any other, for tests and checks."""

import json
import string
from pathlib import Path
from typing import Any

_SPECIAL = ("<unk>", "<pad>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny_model(folder: Path, *, seed: int = 0, chat: bool = True) -> Path:
    """Write a two-layer Llama with one token per character into `folder`, and return `folder`.

    `seed` decides the weights; `chat` gives the tokenizer a chat template.
    """
    # Llama and not Qwen2: for Qwen2, transformers puts that family's tokenizer in place of the one saved here.
    return _write(folder, "llama", seed, chat=chat, tie_word_embeddings=True)


_SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT = {  # vLLM's kernels take a latent of 576 values alone
    "q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}  # fmt: skip
_YARN = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
_MULTIPLIERS = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": _EXPERTS | {"head_dim": 32, "norm_topk_prob": True},
    "qwen3_next": _EXPERTS | _LINEAR | {"head_dim": 32, "norm_topk_prob": True, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": _LINEAR | {"head_dim": 32},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16},
    "gemma3_text": _SLIDING | {"head_dim": 32, "query_pre_attn_scalar": 32},
    "mistral": {"sliding_window": None},
    "mixtral": _LOCAL_EXPERTS | {"sliding_window": None},
    "phi3": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo2": {},
    "olmo3": _SLIDING,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granite": _MULTIPLIERS,
    "granitemoe": _MULTIPLIERS | _LOCAL_EXPERTS,
    "glm4": {"head_dim": 32, "attention_bias": True},
    "glm4_moe": _ROUTED_EXPERTS | {"head_dim": 32},
    "gpt_oss": _SLIDING | _LOCAL_EXPERTS | {"head_dim": 32},
    "deepseek_v2": _ROUTED_EXPERTS | _LATENT | {"topk_method": "greedy"},
    "deepseek_v3": _ROUTED_EXPERTS | _LATENT | _YARN | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}  # fmt: skip
"""The sizes of a small model by its `model_type`, beside those that all have."""


def write_tiny_family(folder: Path, family: str, *, seed: int = 0) -> Path:
    """Write a model of two layers of one of the `FAMILIES` into `folder`, and return `folder`.

    Its weights are large, so that its distributions are far from flat.
    """
    return _write(folder, family, seed, chat=True, initializer_range=0.15, **FAMILIES[family])


def _write(folder: Path, family: str, seed: int, *, chat: bool, **sizes: Any) -> Path:
    import torch
    import transformers

    tokenizer = tiny_tokenizer(chat)
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **sizes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # zeros, until something is learned
                buffer.normal_(std=0.1)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class CodedConfig(LlamaConfig):
    model_type = "coded"


class CodedModel(LlamaForCausalLM):
    config_class = CodedConfig
"""


def write_coded_model(folder: Path) -> Path:
    """Write the tiny Llama as a family of its own, whose Python code comes with the model."""
    write_tiny_model(folder)
    (folder / "coded.py").write_text(_CODE)
    classes = {"AutoConfig": "coded.CodedConfig", "AutoModelForCausalLM": "coded.CodedModel"}
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "coded", "architectures": ["CodedModel"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tiny_tokenizer(chat: bool) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = string.digits + string.ascii_letters + string.punctuation + " \n"
    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *letters))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<|end|>",
        additional_special_tokens=list(_SPECIAL[3:]),
        clean_up_tokenization_spaces=False,
    )
    if chat:
        tokenizer.chat_template = _TEMPLATE
    return tokenizer
