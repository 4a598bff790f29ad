"""Random models of a hundred thousand parameters that see, of each family that vLLM's engines serve, for tests."""

import json
import string
from pathlib import Path
from typing import Any

from ycore_docs.digit_models import IMAGE_TOKEN, processor_of, vision_config

from tests.tiny_model import tiny_tokenizer, write_tiny_model

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_QWENS_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
}
_QWENS = {
    "Qwen2_5_VL": (
        {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        {"mrope_section": [4, 6, 6]},
    ),
    "Qwen3VL": (
        {"patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        {"mrope_section": [6, 5, 5], "mrope_interleaved": True},
    ),
}


def write_tiny_vision_model(folder: Path, family: str = "llava") -> Path:
    """Write a model with a few tokens a picture, in the layout of its family on the hub; `family` is a `model_type`."""
    if family == "llava":
        return _write_llava(folder)
    kind, tokenizer, config, processor, image_processor = _PARTS[family]()
    _write_weights(folder, kind, config)
    tokenizer.save_pretrained(folder)
    files = {
        "processor_config.json": {"processor_class": f"{kind}Processor", **processor},
        "preprocessor_config.json": {
            "image_processor_type": f"{kind}ImageProcessor",
            **image_processor,
        },
    }
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values))
    return folder


def _write_weights(folder: Path, kind: str, config: Any) -> None:
    """Write random weights so large that pictures matter, and norms and zeros that are none."""
    import torch
    import transformers

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(folder)


def _write_llava(folder: Path) -> Path:
    """`write_tiny_model` with eyes: a SigLIP tower that sees 8 x 8 pixels, and a projector; 4 tokens a picture."""
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
    sizes = {**_TOWER, "image_size": 8, "patch_size": 4}
    tower = SiglipVisionConfig(**sizes, vision_use_head=False)
    text = AutoConfig.from_pretrained(folder, vocab_size=len(tokenizer))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration(
            vision_config(text, tower, tokenizer.convert_tokens_to_ids(IMAGE_TOKEN))
        )
    model.save_pretrained(folder)
    template = _template("<|{{ message['role'] }}|>", IMAGE_TOKEN, "<|end|>", "<|assistant|>")
    processor_of(tower, tokenizer, template).save_pretrained(folder)
    return folder


def _template(start: str, image: str, end: str, answer: str) -> str:
    return (
        "{% for message in messages %}"
        + start
        + "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for block in message['content'] %}"
        + "{% if block['type'] == 'image' %}"
        + image
        + "{% else %}{{ block['text'] }}{% endif %}{% endfor %}{% endif %}"
        + end
        + "{% endfor %}{% if add_generation_prompt %}"
        + answer
        + "{% endif %}"
    )


def _ends(tokenizer: Any) -> dict[str, Any]:
    return {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }


def _text(tokenizer: Any, **more: Any) -> dict[str, Any]:
    return {**_TEXT, "vocab_size": len(tokenizer), **_ends(tokenizer), **more}


def _common(tokenizer: Any) -> dict[str, Any]:
    return {"tie_word_embeddings": True, "dtype": "float32", **_ends(tokenizer)}


def _qwen(kind: str) -> tuple[Any, ...]:
    """M-RoPE, pictures of any size, a token for four patches."""
    import transformers
    from tokenizers.pre_tokenizers import ByteLevel

    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = transformers.Qwen2Tokenizer(vocab=letters, merges=[], eos_token="<|im_end|>")
    marks = [f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")]
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", *marks]},
        replace_extra_special_tokens=False,
    )
    tokenizer.chat_template = _template(
        "<|im_start|>{{ message['role'] }}\n",
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|im_end|>\n",
        "<|im_start|>assistant\n",
    )
    tower, rope = _QWENS[kind]
    rope = {"rope_type": "default", "rope_theta": 1e4, **rope}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    config = getattr(transformers, f"{kind}Config")(
        text_config=_text(tokenizer, rope_parameters=rope),
        vision_config={**_QWENS_TOWER, **tower},
        **dict(zip(names, tokenizer.convert_tokens_to_ids(marks), strict=True)),
        **_common(tokenizer),
    )
    patch = config.vision_config.patch_size
    image_processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 16 * patch**2, "longest_edge": 64 * patch**2},
    }
    return kind, tokenizer, config, {}, image_processor


def _gemma3() -> tuple[Any, ...]:
    """Tokens of a picture that see each other, lines around them, a window in every other layer."""
    import transformers

    ends = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "\n", "\n\n", "\n\n\n", "\n\n\n\n")
    letters = string.digits + string.ascii_letters + string.punctuation + "▁"
    tokenizer = transformers.GemmaTokenizer(
        vocab={token: number for number, token in enumerate([*ends, *letters])},
        merges=[("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n")],
        eos_token="<end_of_turn>",
        extra_special_tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    )
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<start_of_turn>"]}, replace_extra_special_tokens=False
    )
    tokenizer.chat_template = "{{ bos_token }}" + _template(
        "<start_of_turn>{{ message['role'] }}\n",
        "<start_of_image>",
        "<end_of_turn>\n",
        "<start_of_turn>model\n",
    )
    layers = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3Config(
        text_config=_text(
            tokenizer, query_pre_attn_scalar=32, sliding_window=64, layer_types=layers
        ),
        vision_config={
            **_TOWER,
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
        },
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
        **_common(tokenizer),
    )
    return (
        "Gemma3",
        tokenizer,
        config,
        {"image_seq_length": 4},
        {"size": {"height": 32, "width": 32}},
    )


def _idefics(kind: str) -> tuple[Any, ...]:
    """Pictures cut in tiles of 32 x 32 pixels, and the whole one beside them; 4 tokens each."""
    import transformers

    tokenizer = tiny_tokenizer(chat=False)
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    marks = ["<fake_token_around_image>", IMAGE_TOKEN, "<global-img>", "<end_of_utterance>"]
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [*marks, *tiles]}, replace_extra_special_tokens=False
    )
    tokenizer.eos_token = "<end_of_utterance>"
    tokenizer.chat_template = _template(
        "{{ message['role'] }}:", IMAGE_TOKEN, "<end_of_utterance>\n", "assistant:"
    )
    config = getattr(transformers, f"{kind}Config")(
        text_config=_text(tokenizer, model_type="llama", tie_word_embeddings=True),
        vision_config=_TOWER,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        scale_factor=2,
        **_common(tokenizer),
    )
    sides = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    return kind, tokenizer, config, {"image_seq_len": 4}, sides


_PARTS = {
    "qwen2_5_vl": lambda: _qwen("Qwen2_5_VL"),
    "qwen3_vl": lambda: _qwen("Qwen3VL"),
    "gemma3": _gemma3,
    "idefics3": lambda: _idefics("Idefics3"),
    "smolvlm": lambda: _idefics("SmolVLM"),
}
FAMILIES = ("llava", *_PARTS)
