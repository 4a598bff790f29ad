"""Random models of a hundred thousand parameters that trainer and engine load like any other, for tests and checks."""

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
    return _write(folder, "Llama", seed, chat=chat, tie_word_embeddings=True)


def write_tiny_mixture(folder: Path, *, seed: int = 0) -> Path:
    """Write a Qwen3-MoE of two layers with four experts each into `folder`, and return `folder`."""
    return _write(
        folder,
        "Qwen3Moe",
        seed,
        chat=True,
        tie_word_embeddings=False,
        moe_intermediate_size=32,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )


def _write(folder: Path, family: str, seed: int, *, chat: bool, **sizes: Any) -> Path:
    import torch
    import transformers

    tokenizer = _tokenizer(chat)
    config = getattr(transformers, f"{family}Config")(
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
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(chat: bool) -> Any:
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
