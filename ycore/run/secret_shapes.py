"""What is a secret: by the name that a value has, by the shape of the value, by its place in a text or a URL.

Names end in a word such as `password`. `token` and `key` alone say little (`eos_token`, `sort_key`): they count after a
word such as `hub` or `api`, and where the value looks drawn at random. What stays of a text shows what was hidden.
"""

import re
from collections.abc import Sequence
from typing import Any

HIDDEN = "***"

_ALWAYS = re.compile(
    r"(?:password|passwd|passphrase|secrets?|credentials?|apikey|authtoken|accesstoken|authorization)$"
)
_OF_SERVICES = re.compile(
    r"hub|access|auth|api|bearer|hf|face|session|refresh|id|security|github|gh|gitlab|slack|bot|wandb|client|user|oauth"
    r"|personal|private|secret|login|jwt|deploy|service|account|comet|mlflow|neptune|app|webhook|discord|telegram|openai"
    r"|anthropic|google|azure|aws|npm|pypi|docker|registry|upload|admin|sas|vault|csrf|signing|encryption|ssh|master"
    r"|license|storage|subscription|shared|judge"
)
_IN_URLS = (["key"], ["sig"], ["signature"], ["auth"], ["code"], ["pwd"])  # last words
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

_RANDOM = r"(?=[\w-]*\d)[\w-]"
_SHAPES = re.compile(
    rf"(?<![A-Za-z0-9])(?:(hf_|sk-|gh[pousr]_|r8_|gsk_|xai-|nvapi-|npm_|pypi-|dckr_pat_){_RANDOM}{{16,}}"
    rf"|(hf_|sk-)[A-Za-z]{{24,}}|(github_pat_|glpat-|wandb_v1_){_RANDOM}{{16,}}|(xox[abeprs]-)[\w-]{{10,}}"
    r"|(AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z])|(AIza)[\w-]{30,}|(eyJ)[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"
    r"|(hooks\.slack\.com/services/)[\w/]{16,})"
)
_BEARER = re.compile(r"\b(Bearer|Basic) +[\w.~+/-]{16,}=*", re.IGNORECASE)
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?=-----END|\Z)", re.DOTALL)
# A password may hold `/` and `@` although it should not, so a user with a password ends at the last `@`.
_USERINFO = re.compile(r"(?<=://)(?:[^\s/:@\"']*:[^\s\"']*|[^\s/@\"']+)@")
_PARAMETER = re.compile(r"([?&;#])([\w.%-]+)=([^&;#\s\"'<>]+)")
_ASSIGNMENT = re.compile(r"([\w.-]+)(=|[\"'] ?: ?[\"'])([^\s\"'&;,]+)")

_SHOWN_PART = re.compile(
    r"://\*\*\*@|[=\"']\*\*\*|(?:Bearer|Basic) \*\*\*|(?:\b(?:hf|gh[pousr]|r8|gsk|npm|\w+_pat|wandb_v1)_"
    r"|\b(?:sk|xai|nvapi|pypi|glpat|xox\w)-|AKIA|ASIA|AIza|eyJ|services/|KEY-----)\*\*\*",
    re.IGNORECASE,
)


def is_secret(name: str, value: Any = None) -> bool:
    """Whether the value of this name (of a setting, an option, a variable) is one to hide."""
    words = [word.lower() for word in _WORDS.findall(name.rpartition(".")[2].rstrip("0123456789_"))]
    if not words:
        return False
    *before, last = words
    if _ALWAYS.search(last) or (last == "pwd" and before) or words in (["token"], ["jwt"], ["dsn"]):
        return True
    if last == "id" and before[-2:] == ["access", "key"]:
        return True
    if last not in ("token", "tokens", "key", "auth"):
        return False
    return (bool(before) and _OF_SERVICES.fullmatch(before[-1]) is not None) or (
        isinstance(value, str) and looks_random(value)
    )


def looks_random(text: str) -> bool:
    letters, digits = (sum(map(kind, text)) for kind in (str.isalpha, str.isdigit))
    return len(text) >= 20 and letters >= 3 and digits >= 3 and re.fullmatch(r"[\w.~+/=-]+", text) is not None


def redact_text(text: str) -> str:
    """`text` with what is secret in it replaced; all of it, where it is a token as a whole."""
    if text.isspace() or text == HIDDEN:
        return text
    if _SHAPES.fullmatch(text):
        return HIDDEN
    text = _USERINFO.sub(f"{HIDDEN}@", text)
    in_url = "://" in text
    text = _PARAMETER.sub(lambda found: _hide(found, also=_IN_URLS if in_url else ()), text)
    text = _ASSIGNMENT.sub(lambda found: f"{found[1]}{found[2]}{_shown(found[1], found[3])}", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    text = _PRIVATE_KEY.sub(rf"\1{HIDDEN}", text)
    return _SHAPES.sub(lambda found: f"{next(filter(None, found.groups()))}{HIDDEN}", text)


def has_hidden_part(text: str) -> bool:
    """Whether `redact_text` has replaced something in this text."""
    return text == HIDDEN or _SHOWN_PART.search(text) is not None


def _hide(found: re.Match[str], *, also: Sequence[list[str]]) -> str:
    mark, name, value = found.groups()
    return f"{mark}{name}={HIDDEN if _WORDS.findall(name.lower())[-1:] in also else _shown(name, value)}"


def _shown(name: str, value: str) -> str:
    return HIDDEN if is_secret(name, value) else value
