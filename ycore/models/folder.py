"""Check a model folder without loading it, and render chats by its own template, without transformers: for plans.

Whether weights fit their config is for transformers, whose import takes seconds.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ycore.errors import ModelError
from ycore.run.files import MAX_SETTINGS_BYTES, check_regular, parse_json, read_regular

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


def inspect_folder(folder: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    """Return the folder's config.json after all checks; ModelError with the first thing missing or damaged."""
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"the model folder {folder} has no config.json; give a folder that model.save_pretrained(...) wrote"
        )
    config = read_settings(folder / "config.json")
    tokenizer_config = read_settings(folder / "tokenizer_config.json")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"the model folder {folder} has no tokenizer ({', '.join(_TOKENIZER_FILES[:3])}); "
            "save one into it with tokenizer.save_pretrained(...)"
        )
    for name, settings in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
    ):
        refuse_remote_code(str(folder / name), settings, trust_remote_code)
    _check_weights(folder)
    return config


def refuse_remote_code(name: str, settings: dict[str, Any], trusted: bool) -> None:
    """Raise ModelError where a model's settings name Python code to run, and the user does not trust the model."""
    if "auto_map" in settings and not trusted:
        raise ModelError(
            f"{name} asks to run Python code that comes with the model (`auto_map`); "
            "read that code, then pass --trust-remote-code, or take another model"
        )


def context_length(config: dict[str, Any]) -> int | None:
    """Return the most tokens, prompt and completion together, that the model was made for; None if unknown."""
    nested = config.get("text_config")
    for settings in (config, nested if isinstance(nested, dict) else {}):
        for key in _CONTEXT_KEYS:
            if type(settings.get(key)) is int and settings[key] > 0:
                return int(settings[key])
    return None


def read_settings(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; {} where there is no file."""
    if not path.exists():
        return {}
    try:
        content = parse_json(read_regular(path, max_bytes=MAX_SETTINGS_BYTES))
    except (ValueError, OSError) as problem:
        raise ModelError(
            f"{path} cannot be read as JSON ({problem}); download or save the model again"
        ) from None
    if not isinstance(content, dict):
        raise ModelError(
            f"{path} must hold a JSON object, not {type(content).__name__}; save the model again"
        )
    return content


def _check_weights(folder: Path) -> None:
    index = read_settings(folder / "model.safetensors.index.json")
    listed = index.get("weight_map", {})
    if not isinstance(listed, dict) or not all(
        isinstance(name, str) for name in listed.values()
    ):
        raise ModelError(
            f"the index of {folder} does not map weights to files; download or save the model again"
        )
    absent = sorted(name for name in set(listed.values()) if not os.path.isfile(folder / name))
    if absent:
        named = ", ".join(name[:200] for name in absent[:5])
        named += f" and {len(absent) - 5} more" if absent[5:] else ""
        raise ModelError(
            f"the model folder {folder} lacks {named}, which its index names; download it again"
        )
    weights = sorted(folder.glob("*.safetensors"))
    for path in weights:
        try:
            check_regular(path)
            with safe_open(path, framework="np"):
                pass  # it compares the file's length with its header, so that a partial download is found at once
        except ValueError as problem:
            raise ModelError(
                f"{path} cannot be read ({problem}); download or save it again"
            ) from None
        except SafetensorError as problem:
            reason = f"is not a whole safetensors file ({problem}); download or save it again"
            with path.open("rb") as file:
                if file.read(8) == b"version ":
                    reason = (
                        "is a Git LFS pointer, not weights; run `git lfs pull` in its folder"
                    )
            raise ModelError(f"{path} {reason}") from None
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles and not weights:
        raise ModelError(
            f"the model folder {folder} has its weights in pickle files only ({pickles[0]}), which can run code when "
            "loaded; convert them: load the model with transformers where you trust it and save_pretrained(...) it"
        )
    if not weights:
        raise ModelError(
            f"the model folder {folder} has no weights (*.safetensors); download or save the model again"
        )


# -- its chat template -------------------------------------------------------------------------------------------------


_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """The chat template of a model's folder; ValueError where it refuses a chat.

    Example: `ChatTemplate.of(folder).render(turns, add_generation_prompt=True)`.
    """

    def __init__(self, source: str | None, tokens: Mapping[str, str]) -> None:
        self.eos_token = tokens.get("eos_token", "")
        self.tokens = tokens
        self.source = source

    @classmethod
    def of(cls, folder: Path) -> "ChatTemplate":
        settings = read_settings(folder / "tokenizer_config.json")
        source = settings.get("chat_template")
        if (file := folder / "chat_template.jinja").is_file():
            source = file.read_text(encoding="utf-8")
        elif (file := folder / "chat_template.json").is_file():
            source = read_settings(file).get("chat_template")
        if isinstance(source, list):
            source = next(
                (item["template"] for item in source if item["name"] == "default"), None
            )
        named = {**read_settings(folder / "special_tokens_map.json"), **settings}
        tokens = {
            name: token["content"] if isinstance(token, Mapping) else str(token)
            for name in _TOKENS
            if (token := named.get(name)) is not None
        }
        return cls(source, tokens)

    def render(
        self,
        turns: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        **arguments: Any,
    ) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._compiled.render(
                messages=list(turns),
                add_generation_prompt=add_generation_prompt,
                **{"tools": None, "documents": None, **self.tokens, **arguments},
            )
        except (TemplateError, TypeError, ValueError) as problem:
            raise ValueError(str(problem)) from None
        return text

    @cached_property
    def _compiled(self) -> Any:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        # transformers' own tag, which marks what the assistant wrote
        source = re.sub(r"(\{%-?\s*)generation(\s*-?%\})", r"\1if true\2", self.source or "")
        source = re.sub(r"(\{%-?\s*)endgeneration(\s*-?%\})", r"\1endif\2", source)
        return environment.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise ValueError(message)
