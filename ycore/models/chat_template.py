"""Render chats by a folder's own template, without transformers, whose import takes seconds: for plans."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from ycore.errors import ConfigError
from ycore.models.folder import read_settings

_SPARE_NAME = re.compile("pad|reserved|unused|extra|dummy|placeholder", re.IGNORECASE)
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


def check_padding(folder: Path, pad_token: str | None) -> None:
    """ConfigError where a reward model would pad with the token that ends a conversation, for lack of a spare one.

    A tokenizer whose class may bring an unknown token, which the files do not name, passes: the trainer sees it.

    Args:
        pad_token: The user's own.
    """
    template = ChatTemplate.of(folder)
    tokens, end = template.tokens, template.eos_token
    pad = pad_token or tokens.get("pad_token", end)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ends_chat = pad == end or template.render(turns, add_generation_prompt=False).endswith(pad)
    if not pad or not ends_chat:
        return
    if pad_token is not None:
        raise pads_its_end(pad)
    settings = read_settings(folder / "tokenizer_config.json")
    tokenizer = read_settings(folder / "tokenizer.json")
    of_class = str(settings.get("tokenizer_class") or "PreTrainedTokenizerFast")
    if not tokenizer or not ("unk_token" in settings or of_class.startswith("PreTrained")):
        return
    added = [
        *tokenizer.get("added_tokens", ()),
        *settings.get("added_tokens_decoder", {}).values(),
    ]
    spare = spare_token(
        [token["content"] for token in added if token.get("special")],
        ends={pad, end},
        template=str(template.source),
        unknown=tokens.get("unk_token"),
        begin=tokens.get("bos_token"),
    )
    if spare is None:
        raise pads_its_end(pad)


def pads_its_end(pad_token: str) -> ConfigError:
    return ConfigError(
        f"a reward model is read at the last token that is no padding, and {pad_token!r} both pads and ends a "
        "conversation; name another token of the tokenizer, which ends none, e.g. --pad-token '<unk>', or take a model "
        "whose tokenizer has a spare one"
    )


def spare_token(
    special: Sequence[str],
    *,
    ends: Collection[str],
    template: str,
    unknown: str | None,
    begin: str | None,
) -> str | None:
    """Return a token that may pad: the unknown one, one that is named so, or one that no template writes.

    Args:
        special: The tokenizer's special tokens.
        ends: The tokens that may end a text or a conversation.
    """
    unused = [token for token in special if token not in template]
    named = [token for token in unused if _SPARE_NAME.search(token)]
    candidates = [token for token in (unknown, *named, *unused) if token not in (None, begin)]
    return next((token for token in candidates if token not in ends), None)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise ValueError(message)
