"""`python -m ycore.models.gguf SRC DST`: turn a GGUF file into a folder that every tool can load.

A process of its own, because it needs torch and transformers and the memory of a whole model, and the command that
asks for it should not. What transformers reads from GGUF is kept, but for two things that it gets wrong and that
no later step would notice: the end-of-text token, and how a byte-pair tokenizer splits text before it merges.

The metadata of a GGUF file, read in a fraction of a second.

Not here: the cache that keeps the result (`fetch`, `cache`).
"""

import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ycore.errors import ModelError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_STRING = 1 << 26
_MAX_ITEMS = 1 << 24


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata by key. Arrays are left out but for their length (`sizes`), except those asked for by name."""

    values: dict[str, Any]
    sizes: dict[str, int]

    @property
    def context_length(self) -> int | None:
        value = self.values.get(f"{self.values.get('general.architecture')}.context_length")
        return int(value) if value else None

    @property
    def chat_template(self) -> str | None:
        return self.values.get("tokenizer.chat_template")


def read_header(path: Path, *, arrays: tuple[str, ...] = ()) -> GgufHeader:
    """Read the metadata of `path`; a file that is not GGUF, or is cut short, is refused."""
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ModelError(f"{path} is not a GGUF file (it does not begin with 'GGUF'); download or export it again")
        try:
            return _read(file, arrays)
        except (struct.error, UnicodeDecodeError, EOFError, KeyError) as problem:
            raise ModelError(f"{path} is a damaged GGUF file ({problem}); download or export it again") from None


def _read(file: BinaryIO, arrays: tuple[str, ...]) -> GgufHeader:
    (version,) = _unpack(file, "I")
    if version not in (2, 3):
        raise EOFError(f"version {version}; 2 and 3 can be read")
    _num_tensors, num_values = _unpack(file, "QQ")
    header = GgufHeader(values={}, sizes={})
    for _ in range(num_values):
        key = _string(file)
        (kind,) = _unpack(file, "I")
        if kind == _ARRAY:
            items = _array(file)
            header.sizes[key] = len(items)
            if key in arrays:
                header.values[key] = items
        else:
            header.values[key] = _value(file, kind)
    return header


def _array(file: BinaryIO) -> list[Any]:
    kind, count = _unpack(file, "IQ")
    if count > _MAX_ITEMS:
        raise EOFError(f"an array of {count} values")
    if kind in _SCALARS:
        return list(_unpack(file, f"{count}{_SCALARS[kind]}"))
    return [_value(file, kind) for _ in range(count)]


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        return _array(file)
    return _unpack(file, _SCALARS[kind])[0]


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    if length > _MAX_STRING:
        raise EOFError(f"a text of {length} bytes")
    return _bytes(file, length).decode()


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    layout = "<" + layout
    return struct.unpack(layout, _bytes(file, struct.calcsize(layout)))


def _bytes(file: BinaryIO, length: int) -> bytes:
    data = file.read(length)
    if len(data) != length:
        raise EOFError("it is cut short")
    return data


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_RULE = "gpt-2"
_DIGITS_RULE = "smollm"
SPLITS: dict[str, str | None] = {
    _GPT2_RULE: None,
    _DIGITS_RULE: None,
    "llama-bpe": _WORDS % "{1,3}",
    "qwen2": _WORDS % "",
}
"""How byte-pair tokenizers split text, by GGUF's `tokenizer.ggml.pre`; None is the splitting of GPT-2."""

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
_PROBE = "Is 12 + 345 = 357?  Yes,  it's\n\n  so: `x = y_1`. Ünïcödé 東京!"


def check_tokenizer(path: Path, header: GgufHeader) -> None:
    """Refuse, before anything is loaded, a file whose text splitting is unknown: it would train on other tokens."""
    rule = header.values.get("tokenizer.ggml.pre", _GPT2_RULE)
    if "tokenizer.ggml.tokens" not in header.sizes:
        raise ModelError(
            f"{path} carries no tokenizer; use the model's folder with config.json and safetensors instead"
        )
    if header.values.get("tokenizer.ggml.model") == "gpt2" and rule not in SPLITS:
        raise ModelError(
            f"{path} splits text by the rule {rule!r}, and the rules known here are {', '.join(SPLITS)}; "
            "use the model's folder with config.json and safetensors instead"
        )


def convert(source: Path, folder: Path) -> None:
    """Write bfloat16 safetensors, tokenizer and generation config of `source` into `folder`."""
    header = read_header(source, arrays=("tokenizer.ggml.tokens",))
    check_tokenizer(source, header)
    tokenizer = _tokenizer(source, header)
    model = _plain_model(source)
    _set_special_ids(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _check_saved(source, folder, tokenizer)


def _check_saved(source: Path, folder: Path, tokenizer: Any) -> None:
    """transformers may load a family's own tokenizer in place of the saved one: its tokens must be the same."""
    from transformers import AutoTokenizer

    again = AutoTokenizer.from_pretrained(folder)
    if again(_PROBE).input_ids != tokenizer(_PROBE).input_ids or again.eos_token_id != tokenizer.eos_token_id:
        raise ModelError(f"{source}: its tokenizer is another one once saved; use the model's own folder")


def _tokenizer(source: Path, header: GgufHeader) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # transformers 5.17 takes the beginning-of-text token for the end-of-text one, whatever it is told above.
    for name, token in _special_tokens(header).items():
        setattr(tokenizer, name, token)
    tokenizer.clean_up_tokenization_spaces = False
    if header.values.get("tokenizer.ggml.model") == "gpt2":
        _set_splitting(tokenizer.backend_tokenizer, header.values.get("tokenizer.ggml.pre", _GPT2_RULE))
    decoded = str(tokenizer.decode(tokenizer(_PROBE, add_special_tokens=False).input_ids))
    if decoded.strip() != _PROBE:
        raise ModelError(f"{source}: its tokenizer does not give text back ({decoded!r}); use the model's own folder")
    return tokenizer


def _special_tokens(header: GgufHeader) -> dict[str, str]:
    tokens = header.values["tokenizer.ggml.tokens"]
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: header.values.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    chosen = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    turn_end = next((end for end in _TURN_ENDS if end in (header.chat_template or "") and end in tokens), None)
    if turn_end is not None:
        chosen["eos_token"] = turn_end  # a chat model that ends on another token never stops
    return chosen


def _set_splitting(backend: Any, rule: str) -> None:
    from tokenizers import Regex, decoders, pre_tokenizers

    words = SPLITS[rule]
    steps: list[Any] = []
    if rule == _DIGITS_RULE:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if words is not None:
        steps.append(pre_tokenizers.Split(Regex(words), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()


def _plain_model(source: Path) -> Any:
    """A model of the plain class with the file's weights: what transformers loads from GGUF cannot be saved."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    config = AutoConfig.for_model(**settings)
    with torch.device("meta"):
        model: Any = type(loaded)(config)
    model.to(torch.bfloat16).to_empty(device="cpu").tie_weights()
    missing, unexpected = model.load_state_dict(loaded.state_dict(), strict=False)
    if missing or unexpected:
        raise ModelError(f"{source}: weights that do not fit {type(loaded).__name__}: {missing or unexpected}")
    return model


def _set_special_ids(model: Any, tokenizer: Any) -> None:
    """Generation ends on the tokenizer's own end, and on the file's where that is another one."""
    ends = {tokenizer.eos_token_id, model.config.eos_token_id} - {None}
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.pad_token_id = tokenizer.pad_token_id
        config.eos_token_id = sorted(ends) if len(ends) > 1 else tokenizer.eos_token_id


def main() -> int:
    """The child process: one `error:` line for what the file cannot give."""
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        convert(source, folder)
    except ModelError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
