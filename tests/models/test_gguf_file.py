"""A model's folder as a GGUF file, read back by readers that are not ours: transformers', and llama.cpp itself.

xllamacpp brings llama.cpp as a binary wheel. Both write with temperature 0, so the texts must be equal; a bfloat16
forward of another library may choose the other of two tokens that are as likely, which is rare and counted.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import write_tiny_model
from ycore.errors import ModelError
from ycore.models.gguf_file import check_exportable, write_gguf

QUESTIONS = [f"{n} + {m} =" for n in (1, 3, 5, 7, 9) for m in (2, 4, 6, 8)]
# transformers reads no size of a head, so qwen3 has its default here.
KINDS = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 128}),
}


def write_random_model(folder: Path, kind: str, *, only_ascii: bool = False) -> Path:
    """A model of random weights with a byte-level tokenizer and different numbers of query and key heads.

    Args:
        only_ascii: it writes no byte that is only a part of a letter, which programs print each in their own way.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = [
        letter
        for letter in pre_tokenizers.ByteLevel.alphabet()
        if not only_ascii or letter.isascii() or letter in "ĠĊ"
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|begin|>", "<|end|>"], initial_alphabet=alphabet
    )
    backend.train_from_iterator(
        [f"{question} and some words" for question in QUESTIONS], trainer
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>"
    )
    name, more = KINDS[kind]
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(tokenizer)}
    config = getattr(transformers, name)(
        **sizes,
        **heads,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=kind != "qwen2",
        **more,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():  # large enough that the choice of a token is clear
        weight.data = (
            (torch.randn_like(weight) * 0.3 + (weight.ndim == 1)).to(torch.bfloat16).float()
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_the_same_weights_back(kind: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file = write_random_model(tmp_path / "model", kind), tmp_path / "model.gguf"
    write_gguf(folder, file, name="random")
    assert not list(tmp_path.glob(".*"))
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for question in QUESTIONS:
        ids = tokenizer(question, return_tensors="pt").input_ids
        with torch.no_grad():
            assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-4)


def test_ycore_reads_it_back_with_the_same_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from ycore.models.fetch import convert

    folder, file = write_random_model(tmp_path / "model", "llama"), tmp_path / "model.gguf"
    write_gguf(folder, file, name="random")
    (tmp_path / "back").mkdir()
    convert("gguf", file, tmp_path / "back")
    original, reread = (
        AutoTokenizer.from_pretrained(tmp_path / name) for name in ("model", "back")
    )
    assert [original(text).input_ids for text in QUESTIONS] == [
        reread(text).input_ids for text in QUESTIONS
    ]


def greedy(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for ids in prompts:
        input_ids = torch.tensor([ids])
        written = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=num_tokens,
            do_sample=False,
        )
        outputs.append(written[0, len(ids) :].tolist())
    return outputs


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_writes_the_same_answers(kind: str, tmp_path: Path) -> None:
    import xllamacpp
    from transformers import AutoTokenizer

    folder, file = (
        write_random_model(tmp_path / "model", kind, only_ascii=True),
        tmp_path / "model.gguf",
    )
    write_gguf(folder, file, name="random")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    same = same_answers(
        xllamacpp, folder, file, [tokenizer(text).input_ids for text in QUESTIONS]
    )
    assert (
        same >= len(QUESTIONS) - 4
    )  # random weights: two tokens are about as likely once in a hundred


def same_answers(
    xllamacpp: Any, folder: Path, file: Path, prompts: list[list[int]], *, num_tokens: int = 12
) -> int:
    """How many prompts both runtimes answer with the same text."""
    from transformers import AutoTokenizer

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.n_parallel = str(file), 512, False, 1
    params.cpuparams.n_threads = 2
    server, same, tokenizer = xllamacpp.Server(params), 0, AutoTokenizer.from_pretrained(folder)
    for ids, expected in zip(prompts, greedy(folder, prompts, num_tokens), strict=True):
        request = {
            "prompt": ids,
            "n_predict": num_tokens,
            "temperature": 0.0,
            "cache_prompt": False,
        }
        response = server.handle_completions(request)
        same += response["choices"][0]["text"] == tokenizer.decode(
            expected, skip_special_tokens=True
        )
    return same


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model_type": "gemma3"},
            "is a gemma3 model, and GGUF is written of llama, qwen2, qwen3",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "scales its positions"),
        ({"model_type": "qwen3_moe"}, "is a qwen3_moe model"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError, match=said) as caught:
        check_exportable(folder)
    assert "--format merged" in str(caught.value)


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    with pytest.raises(ModelError, match="no byte-level BPE"):
        write_gguf(folder, tmp_path / "model.gguf", name="tiny")
    assert not (tmp_path / "model.gguf").exists()
