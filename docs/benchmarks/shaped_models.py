"""Models of a given size with random weights, and prompts for them. The cost of a step does not depend on the text.

The tokenizer is SmolLM2's, so that the vocabulary has a realistic size. Random weights hardly ever produce an end
token, so every completion has as many tokens as allowed.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's sizes, as its config.json names them."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int


SHAPES: Mapping[str, Shape] = {
    "30m": Shape(320, 896, 14, 5, 5),
    "135m": Shape(576, 1536, 30, 9, 3),
    "360m": Shape(960, 2560, 32, 15, 5),
    "1b": Shape(2048, 8192, 18, 32, 8),
}


def write_model(name: str, folder: Path, *, tokenizer: Path, seed: int = 0) -> Path:
    """Write a random Llama of the shape `name` in bfloat16 in `folder`, with the tokenizer of the folder `tokenizer`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    base: dict[str, Any] = json.loads((tokenizer / "config.json").read_text())
    shape = SHAPES[name]
    config = LlamaConfig(
        **{field: getattr(shape, field) for field in Shape.__slots__},
        head_dim=64,
        vocab_size=base["vocab_size"],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=base["eos_token_id"],
        bos_token_id=base["bos_token_id"],
        pad_token_id=base["pad_token_id"],
        dtype="bfloat16",
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for file in TOKENIZER_FILES:
        shutil.copy(tokenizer / file, folder / file)
    return folder


def write_prompts(file: Path, *, num: int = 64) -> Path:
    """Write prompts of about the same length."""
    rows = [
        {
            "prompt": f"What is {100 + n} plus {200 + n}? Say the number, and then how you found it."
        }
        for n in range(num)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
