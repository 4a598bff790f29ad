"""Convert built-in GGUF files and adapters to folders: `python -m ycore.models.convert ASKED_BY KIND SOURCE FOLDER [BASE]`.

It is a process because it loads torch, transformers and a whole model. Of a GGUF file, transformers reads two things
wrong that no later step would notice: the end-of-text token, and how a byte-pair tokenizer splits text before it
merges.
"""

import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

ADAPTER_CONFIG = "adapter_config.json"

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How byte-pair tokenizers split text, by GGUF's `tokenizer.ggml.pre`; None is the splitting of GPT-2.
SPLITTING = {"gpt-2": None, "smollm": None, "llama-bpe": _WORDS % "{1,3}", "qwen2": _WORDS % ""}

_SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
"""transformers' names of special tokens, and GGUF's."""
PROBE = "Is 12 + 345 = 357?  Yes,  it's\n\n  so: `x = y_1`. Ünïcödé 東京!"


def is_adapter(folder: Path) -> bool:
    """Tell whether the folder holds a LoRA adapter and not a whole model."""
    return os.path.isfile(folder / ADAPTER_CONFIG) and not os.path.isfile(
        folder / "config.json"
    )


def main() -> int:
    """Run in the child process; the last line of output is `error: ...` where the conversion failed."""
    kind, *paths = sys.argv[1:]
    try:
        if kind == "gguf":
            _convert_gguf(*map(Path, paths))
        else:
            trusts = kind == "adapter-with-code"
            _merge_adapter(*map(Path, paths), trust_remote_code=trusts)
    except (OSError, ValueError, RuntimeError) as problem:
        traceback.print_exc()
        print(f"error: {' '.join(str(problem).split())}", file=sys.stderr)
        return 1
    return 0


def language_model_class(sees: bool) -> Any:
    """Return the class of transformers that loads a model that writes text, by whether it reads pictures."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def _merge_adapter(
    source: Path, folder: Path, base: Path, *, trust_remote_code: bool = False
) -> None:
    """Write adapter and base as one model, in the base's dtype, with the adapter's tokenizer or else the base's."""
    from peft import PeftModel
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
    model_class = language_model_class(hasattr(config, "vision_config"))
    model = model_class.from_pretrained(base, dtype="auto", trust_remote_code=trust_remote_code)
    model = PeftModel.from_pretrained(model, source)
    _merge_untied(model).save_pretrained(folder)
    prepared = source if (source / "tokenizer_config.json").is_file() else base
    tokenizer = AutoTokenizer.from_pretrained(prepared, trust_remote_code=trust_remote_code)
    tokenizer.save_pretrained(folder)
    for pattern in ("*processor_config.json", "chat_template.*"):
        for file in prepared.glob(pattern):
            shutil.copy(file, folder)


def _merge_untied(model: Any) -> Any:
    """Merge the adapter into its base, whose output layer gets a weight of its own where the merged two differ.

    While embedding and output layer are one tensor, an adapter of one of them would be merged into both.
    """
    import torch

    embedding = model.get_base_model().get_input_embeddings()
    tied = getattr(embedding, "base_layer", embedding).weight
    for module in list(model.modules())[::-1]:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter is tied and module is not getattr(embedding, "base_layer", embedding):
                setattr(module, name, torch.nn.Parameter(parameter.detach().clone()))
    merged = model.merge_and_unload()
    head = merged.get_output_embeddings()
    if torch.equal(head.weight, merged.get_input_embeddings().weight):
        merged.tie_weights()
    else:
        merged.config.tie_word_embeddings = False
        merged.config.get_text_config().tie_word_embeddings = False
    return merged


def _convert_gguf(source: Path, folder: Path) -> None:
    """Write bfloat16 safetensors, tokenizer and generation config of `source` into `folder`."""
    tokenizer = _tokenizer(source)
    model = _plain_model(source)
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.pad_token_id = tokenizer.pad_token_id
        config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(source: Path) -> Any:
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    fields = GGUFReader(source).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    # transformers 5.17 takes the beginning-of-text token for the end-of-text one.
    for name, key in _SPECIAL.items():
        if (field := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            setattr(tokenizer, name, tokens[field.contents()])
    tokenizer.clean_up_tokenization_spaces = False
    set_splitting(tokenizer.backend_tokenizer, fields["tokenizer.ggml.pre"].contents())
    return tokenizer


def set_splitting(backend: Any, rule: str) -> None:
    from tokenizers import Regex, decoders, pre_tokenizers

    words = SPLITTING[rule]
    steps: list[Any] = []
    if rule == "smollm":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if words is not None:
        steps.append(pre_tokenizers.Split(Regex(words), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()


def _plain_model(source: Path) -> Any:
    """Copy the file's weights into a model of the plain class: what transformers loads from GGUF cannot be saved."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16
    )
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    config = AutoConfig.for_model(**settings)
    with torch.device("meta"):
        model: Any = type(loaded)(config)
    model.to(torch.bfloat16).to_empty(device="cpu").tie_weights()
    model.load_state_dict(loaded.state_dict())
    return model


if __name__ == "__main__":
    from ycore.sandbox.stage import end_with_parent

    end_with_parent()
    if os.getppid() != int(sys.argv.pop(1)):
        sys.exit("whoever asked for this conversion is gone")
    sys.exit(main())
