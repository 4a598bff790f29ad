"""A random model of a hundred thousand parameters that sees, for tests."""

from pathlib import Path
from typing import Any

from tests.tiny_model import write_tiny_model
from ycore.models.sighted import IMAGE_TOKEN, processor_of, vision_config

_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for block in message['content'] %}{% if block['type'] == 'image' %}<image>"
    "{% else %}{{ block['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny_vision_model(folder: Path) -> Path:
    """`write_tiny_model` with eyes, a LLaVA of 4 tokens a picture: a SigLIP tower that sees 8 x 8 pixels, and a
    projector."""
    import torch
    from transformers import (
        AutoConfig,
        AutoTokenizer,
        LlavaForConditionalGeneration,
        SiglipVisionConfig,
    )

    write_tiny_model(folder, chat=False)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [IMAGE_TOKEN]}, replace_extra_special_tokens=False
    )
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    tower = SiglipVisionConfig(**sizes, image_size=8, patch_size=4, vision_use_head=False)
    text = AutoConfig.from_pretrained(folder, vocab_size=len(tokenizer))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration(
            vision_config(text, tower, tokenizer.convert_tokens_to_ids(IMAGE_TOKEN))
        )
    model.save_pretrained(folder)
    processor_of(tower, tokenizer, _TEMPLATE).save_pretrained(folder)
    return folder
