"""The test model loads like a real one, and its tokenizer gives back every character."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_model import write_tiny_model


def test_it_loads_and_generates(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert (
        tokenizer.pad_token_id != tokenizer.eos_token_id == model.generation_config.eos_token_id
    )

    chat = [{"role": "user", "content": "3 + 4 = ?\n\tno tab"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|user|>3 + 4 = ?\n<unk>no tab<|end|><|assistant|>"
    written = model.generate(torch.tensor([ids]), max_new_tokens=4, min_new_tokens=4)
    assert written.shape == (1, len(ids) + 4)


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    weights = [
        load_file(write_tiny_model(tmp_path / str(number), seed=seed) / "model.safetensors")
        for number, seed in enumerate((1, 1, 2))
    ]
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(weights[0][name], weights[1][name])
    assert not torch.equal(weights[0][name], weights[2][name])


def test_without_chat_there_is_no_template(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", chat=False)
    assert AutoTokenizer.from_pretrained(folder).chat_template is None
