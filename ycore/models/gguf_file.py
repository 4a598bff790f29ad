"""Write a model's folder as one GGUF file, for llama.cpp and what is built on it: `write_gguf`.

Tensor names and metadata are those of llama.cpp's own converter. Its Llama rotates neighbouring values of a head, where
transformers rotates its halves, so the rows of the query and key weights change places.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ycore.errors import ModelError
from ycore.models.convert import PROBE, SPLITTING, set_splitting
from ycore.run.work import Work, working
from ycore.types import JsonObject, Record

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""transformers' `model_type` -> GGUF's `general.architecture`."""

_INSTEAD = "export it with --format merged, and convert that folder with llama.cpp's convert_hf_to_gguf.py"
_NORMAL = 1
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5


def check_exportable(folder: Path) -> JsonObject:
    """Return the folder's config; ModelError where its model cannot be written as GGUF."""
    config: JsonObject = json.loads((folder / "config.json").read_text())
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(
            f"{folder} is a {kind} model, and GGUF is written of {known}; {_INSTEAD}"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ModelError(
            f"{folder} scales its positions ({rope}), which is not written to GGUF; {_INSTEAD}"
        )
    return config


def write_gguf(folder: Path, file: Path, *, name: str) -> None:
    """Write the model in `folder`, matrices in bfloat16 and the rest in float32; ModelError where it cannot be."""
    import gguf
    from transformers import AutoTokenizer

    config = check_exportable(folder)
    arch = ARCHITECTURES[config["model_type"]]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    partial = file.with_name(f".{file.name}")
    writer = gguf.GGUFWriter(partial, arch)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _add_sizes(writer, config)
    _add_tokenizer(writer, tokenizer, folder, size=config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    num_bytes = sum(part.stat().st_size for part in folder.glob("*.safetensors"))
    with working(f"converting {name}", total=num_bytes, unit="MB") as work:
        for tensor, values in _tensors(folder, config, work):
            written = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
            if written is None:
                raise ModelError(
                    f"{folder} has the weight {tensor}, which GGUF's {arch} has not; {_INSTEAD}"
                )
            if values.ndim == 1:
                writer.add_tensor(written, values)
            else:
                kind = gguf.GGMLQuantizationType.BF16
                writer.add_tensor(written, gguf.quants.quantize(values, kind), raw_dtype=kind)
    with working(f"writing {file}"):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()
    partial.replace(file)


def _add_sizes(writer: Any, config: Record) -> None:
    heads = config["num_attention_heads"]
    width = config["hidden_size"]
    head_size = config.get("head_dim") or width // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(
        float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    )
    writer.add_vocab_size(config["vocab_size"])


def _tensors(folder: Path, config: Record, work: Work) -> Iterator[tuple[str, Any]]:
    """Yield every weight with transformers' name as a float32 array, its rows in llama.cpp's order."""
    import torch
    from safetensors import safe_open

    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    for part in sorted(folder.glob("*.safetensors")):
        with safe_open(part, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 -- it is no mapping
                saved = weights.get_tensor(name)
                work.add(saved.nbytes)
                values = saved.to(torch.float32)
                is_query = ".q_proj." in name
                is_key = ".k_proj." in name
                if config["model_type"] == "llama" and (is_query or is_key):
                    count = heads if is_query else kv_heads
                    halves = values.reshape(
                        count, 2, values.shape[0] // count // 2, *values.shape[1:]
                    )
                    values = halves.swapaxes(1, 2).reshape(values.shape)
                if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                    continue
                yield name, values.contiguous().numpy()


def _add_tokenizer(writer: Any, tokenizer: Any, folder: Path, *, size: int) -> None:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    if backend["model"]["type"] != "BPE" or "ByteLevel" not in json.dumps(
        backend["pre_tokenizer"]
    ):
        raise ModelError(
            f"the tokenizer of {folder} is no byte-level BPE, and no other is written to GGUF; {_INSTEAD}"
        )
    words = {number: token for token, number in tokenizer.get_vocab().items()}
    added = {number: token.special for number, token in tokenizer.added_tokens_decoder.items()}
    kinds = [_UNUSED if n not in words else _NORMAL for n in range(size)]
    for number, is_special in added.items():
        if number >= size:
            continue  # the model has no embedding of it, so it is never written
        kinds[number] = _CONTROL if is_special else _USER_DEFINED
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in backend["model"]["merges"]
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_splitting_of(tokenizer, folder))
    writer.add_token_list([words.get(number, f"[unused{number}]") for number in range(size)])
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    for name in ("bos", "eos", "pad", "unk"):
        token_id = getattr(tokenizer, f"{name}_token_id")
        if token_id is not None and token_id < size:
            getattr(writer, f"add_{name}_token_id")(token_id)
    ids = tokenizer("a").input_ids
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(str(tokenizer.chat_template))


def _splitting_of(tokenizer: Any, folder: Path) -> str:
    """Return GGUF's name of the rule by which the tokenizer splits text: the one that gives the same tokens."""
    wanted = tokenizer(PROBE, add_special_tokens=False).input_ids
    for rule in SPLITTING:
        backend = copy.deepcopy(tokenizer.backend_tokenizer)
        set_splitting(backend, rule)
        if backend.encode(PROBE, add_special_tokens=False).ids == wanted:
            return rule
    raise ModelError(
        f"the tokenizer of {folder} splits text by a rule that GGUF has no name for here; {_INSTEAD}"
    )
