"""Render chats by a folder's own template, without transformers, whose import takes seconds: for plans."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from ycore.models.folder import read_settings

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
