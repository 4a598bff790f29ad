"""Secrets kept out of what a run writes: tokens, keys and passwords become `***`.

Not here: passing secrets on. They belong in the environment, where the libraries that need them look for themselves.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"

_NAME = re.compile(
    r"(?:hub|access|auth|api|bearer|hf)_?tokens?$|api_?key$|secret(?:_?key)?$|passw(?:or)?d$", re.IGNORECASE
)
_VALUE = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,})")
_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def redact(value: Any) -> Any:
    """`value` with every secret in it replaced, whatever it is nested in."""
    if isinstance(value, str):
        return _USERINFO.sub(HIDDEN, _VALUE.sub(HIDDEN, value))
    if isinstance(value, Mapping):
        return {key: _under(str(key), item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [redact(item) for item in value]
    return value


def redact_command(command: Sequence[str]) -> list[str]:
    """A command line with its secrets replaced: `--hub-token X`, `--hub-token=X`, `--set trl.hub_token=X`."""
    shown: list[str] = []
    hide_next = False
    for word in command:
        name, equals, _ = word.partition("=")
        secret = _is_secret(name)
        if hide_next:
            shown.append(HIDDEN)
        elif secret and equals:
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(redact(word))
        hide_next = secret and not equals and word.startswith("-")
    return shown


def _under(name: str, value: Any) -> Any:
    if value is not None and _is_secret(name):
        return HIDDEN
    return redact(value)


def _is_secret(name: str) -> bool:
    return _NAME.search(name.replace("-", "_")) is not None
