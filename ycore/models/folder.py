"""What a model folder must hold, looked at without loading it.

Not here: whether its weights fit its config; transformers says that when it loads them.
"""

import json
from pathlib import Path
from typing import Any

from ycore.errors import ModelError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


def inspect_folder(folder: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    """The folder's config.json, after every check; the first thing that is wrong is a ModelError."""
    if not (folder / "config.json").is_file():
        raise ModelError(_without_config(folder))
    config = read_json(folder / "config.json")
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"the model folder {folder} has no tokenizer ({', '.join(_TOKENIZER_FILES[:3])}); "
            "save one into it with tokenizer.save_pretrained(...)"
        )
    for name, settings in (("config.json", config), ("tokenizer_config.json", tokenizer_config)):
        if "auto_map" in settings and not trust_remote_code:
            raise ModelError(
                f"{folder / name} asks to run Python code that comes with the model (`auto_map`); "
                "read that code, then pass --trust-remote-code, or take another model"
            )
    _check_weights(folder)
    return config


def has_chat_template(folder: Path) -> bool:
    """Whether the folder's tokenizer can write a conversation as text."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    return bool(read_json(folder / "tokenizer_config.json").get("chat_template"))


def context_length(config: dict[str, Any]) -> int | None:
    """The longest prompt plus completion that the model was made for, where its config says it."""
    nested = config.get("text_config")
    for settings in (config, nested if isinstance(nested, dict) else {}):
        for key in _CONTEXT_KEYS:
            if isinstance(settings.get(key), int):
                return int(settings[key])
    return None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; an absent file is an empty one."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as problem:
        raise ModelError(f"{path} cannot be read as JSON ({problem}); download or save the model again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(content).__name__}; save the model again")
    return content


def _without_config(folder: Path) -> str:
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs:
        return f"the folder {folder} has no config.json but GGUF files; name one of them: {folder / ggufs[0]}"
    return f"the model folder {folder} has no config.json; give a folder that model.save_pretrained(...) wrote"


def _check_weights(folder: Path) -> None:
    index = read_json(folder / "model.safetensors.index.json")
    named = set(index.get("weight_map", {}).values())
    absent = sorted(name for name in named if not (folder / name).is_file())
    if absent:
        raise ModelError(
            f"the model folder {folder} lacks {', '.join(absent)}, which its index names; download it again"
        )
    weights = sorted(folder.glob("*.safetensors"))
    for path in weights:
        _check_safetensors(path)
    if weights:
        return
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"the model folder {folder} has its weights in pickle files only ({pickles[0]}), which can run code when "
            "loaded; convert them: load the model with transformers where you trust it and save_pretrained(...) it"
        )
    raise ModelError(f"the model folder {folder} has no weights (*.safetensors); download or save the model again")


def _check_safetensors(path: Path) -> None:
    """A safetensors file says how long it is: a partial download is found without reading its weights."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise ModelError(f"{path} is a Git LFS pointer, not weights; run `git lfs pull` in its folder")
        length = int.from_bytes(start, "little")
        try:
            header = json.loads(file.read(length)) if len(start) == 8 and length < size else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise ModelError(f"{path} is not a safetensors file; download or save it again")
    ends = (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ModelError(f"{path} has {size} bytes where its header says {expected}; download or save it again")
