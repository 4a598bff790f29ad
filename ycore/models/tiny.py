"""Random models of a hundred thousand parameters that trainer and engine load like any other, for tests and checks."""

import string
from pathlib import Path
from typing import Any

_SPECIAL = ("<unk>", "<pad>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_VISION_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for block in message['content'] %}{% if block['type'] == 'image' %}<image>"
    "{% else %}{{ block['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IMAGE_TOKEN = "<image>"


def write_tiny_model(folder: Path, *, seed: int = 0, chat: bool = True) -> Path:
    """Write a two-layer Llama with one token per character into `folder`, and return `folder`.

    `seed` decides the weights; `chat` gives the tokenizer a chat template.
    """
    tokenizer = _tokenizer(chat)
    _model(seed, _text_config(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_tiny_vision_model(folder: Path, *, seed: int = 0) -> Path:
    """The same with eyes, a LLaVA of 4 tokens a picture: a SigLIP tower that sees 8 x 8 pixels, and a projector."""
    from transformers import LlavaProcessor, SiglipVisionConfig

    tokenizer = _tokenizer(chat=False)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]}, replace_extra_special_tokens=False)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tower = SiglipVisionConfig(**sizes, image_size=8, patch_size=4, vision_use_head=False)
    config = vision_config(_text_config(tokenizer), tower, tokenizer.convert_tokens_to_ids(IMAGE_TOKEN))
    _model(seed, config).save_pretrained(folder)
    LlavaProcessor(
        image_processor=image_processor(tower),
        tokenizer=tokenizer,
        patch_size=tower.patch_size,
        vision_feature_select_strategy="full",
        image_token=IMAGE_TOKEN,
        chat_template=_VISION_TEMPLATE,
    ).save_pretrained(folder)
    return folder


def vision_config(text: Any, tower: Any, image_token_id: int) -> Any:
    """A LLaVA's config: a language model that reads what a SigLIP tower and two linear layers make of a picture."""
    from transformers import LlavaConfig

    return LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_id=image_token_id,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        image_seq_length=(tower.image_size // tower.patch_size) ** 2,
        tie_word_embeddings=True,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
        dtype="float32",
    )


def image_processor(tower: Any) -> Any:
    """What makes a picture the pixels of a SigLIP tower: its side, -1 to 1. By Pillow, so that it needs no other
    library. LLaVA's processor wants a `crop_size`."""
    from transformers import SiglipImageProcessorPil

    size = {"height": tower.image_size, "width": tower.image_size}
    return SiglipImageProcessorPil(size=size, crop_size=size)


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


def _text_config(tokenizer: Any) -> Any:
    from transformers import LlamaConfig

    # Llama and not Qwen2: for Qwen2, transformers puts that family's tokenizer in place of the one saved here.
    return LlamaConfig(
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


def _model(seed: int, config: Any) -> Any:
    import torch
    from transformers import LlamaForCausalLM, LlavaForConditionalGeneration

    kind = LlavaForConditionalGeneration if config.model_type == "llava" else LlamaForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(config)
