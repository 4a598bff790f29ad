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
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer(chat)
    # Llama and not Qwen2: for Qwen2, transformers puts that family's tokenizer in place of the one saved here.
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
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
