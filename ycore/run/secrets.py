"""Secrets: tokens, keys and passwords become `***` in what a run writes, and reach only the process that trains.

They cross in one environment variable of that process, which it removes when it has read it. A secret is known by its
name, by the shape of its value, or by its place in a text or a URL. Names end in a word such as `password`. `token` and
`key` alone say little (`eos_token`, `sort_key`): they count after a word such as `hub` or `api`, and where the value
looks drawn at random. What stays of a text shows what was hidden.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

from ycore.errors import ConfigError
from ycore.run.files import RunFolder, read_json
from ycore.types import JsonObject, Record

VARIABLE = "YCORE_SECRETS"
"""JSON: `[[path, value], ...]`, a path being the keys and list indices that lead to the value."""

Path = tuple[str | int, ...]

HIDDEN = "***"

# Last words that name a secret whatever stands before them.
_ALWAYS = re.compile(
    r"(?:password|passwd|passphrase|secrets?|credentials?|apikey|authtoken|accesstoken|authorization)$"
)
# Words before `token`, `tokens`, `key` and `auth` that make these a secret: hub_token, api_key.
_OF_SERVICES = re.compile(
    r"""(?x)
    access | api | auth | bearer | bot | client | csrf | deploy | encryption | id | jwt | license | login | master
    | oauth | personal | private | refresh | registry | sas | secret | security | service | account | app | admin
    | session | shared | signing | ssh | storage | subscription | upload | user | vault | webhook | judge
    | anthropic | aws | azure | comet | discord | docker | face | gh | github | gitlab | google | hf | hub | mlflow
    | neptune | npm | openai | pypi | slack | telegram | wandb
    """
)
_IN_URLS = (["key"], ["sig"], ["signature"], ["auth"], ["code"], ["pwd"])  # last words
# The words of `hubToken`, `HUB_TOKEN` and `hub-token`; digits are a word too.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

_RANDOM = r"(?=[\w-]*\d)[\w-]"
# Tokens by how they begin, which is shown, and what follows.
_SHAPES = re.compile(
    rf"""(?x)
    (?<![A-Za-z0-9])
    (?:
        (hf_|sk-|gh[pousr]_|r8_|gsk_|xai-|nvapi-|npm_|pypi-|dckr_pat_){_RANDOM}{{16,}}
        | (hf_|sk-)[A-Za-z]{{24,}}
        | (github_pat_|glpat-|wandb_v1_){_RANDOM}{{16,}}
        | (xox[abeprs]-)[\w-]{{10,}}                                                # of Slack
        | (AKIA|ASIA)[0-9A-Z]{{16}}(?![0-9A-Za-z])                                  # of AWS
        | (AIza)[\w-]{{30,}}                                                        # of Google
        | (eyJ)[\w-]{{8,}}\.eyJ[\w-]{{8,}}\.[\w-]*                                  # JSON Web Tokens
        | (hooks\.slack\.com/services/)[\w/]{{16,}}
    )
    """
)
_BEARER = re.compile(r"\b(Bearer|Basic) +[\w.~+/-]{16,}=*", re.IGNORECASE)
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?=-----END|\Z)", re.DOTALL)
# `user:password@` and `token@` in a URL. A password may hold `/` and `@` although it should not, so a user with a
# password ends at the last `@`.
_USERINFO = re.compile(r"(?<=://)(?:[^\s/:@\"']*:[^\s\"']*|[^\s/@\"']+)@")
# `?name=value` and `&name=value`.
_PARAMETER = re.compile(r"([?&;#])([\w.%-]+)=([^&;#\s\"'<>]+)")
# `name=value` and `"name": "value"`.
_ASSIGNMENT = re.compile(r"([\w.-]+)(=|[\"'] ?: ?[\"'])([^\s\"'&;,]+)")

# The places of a text in which `redact_text` leaves `***`.
_SHOWN_PART = re.compile(
    r"""(?xi)
    ://\*\*\*@
    | [=\"']\*\*\*
    | (?:Bearer|Basic)[ ]\*\*\*
    | (?:
        \b(?:hf|gh[pousr]|r8|gsk|npm|\w+_pat|wandb_v1)_
        | \b(?:sk|xai|nvapi|pypi|glpat|xox\w)-
        | AKIA | ASIA | AIza | eyJ | services/ | KEY-----
    )\*\*\*
    """
)


def is_secret(name: str, value: Any = None) -> bool:
    """Whether the value of this name (of a setting, an option, a variable) is one to hide."""
    words = [
        word.lower() for word in _WORDS.findall(name.rpartition(".")[2].rstrip("0123456789_"))
    ]
    if not words:
        return False
    *before, last = words
    if (
        _ALWAYS.search(last)
        or (last == "pwd" and before)
        or words in (["token"], ["jwt"], ["dsn"])
    ):
        return True
    if last == "id" and before[-2:] == ["access", "key"]:
        return True
    if last not in ("token", "tokens", "key", "auth"):
        return False
    return (bool(before) and _OF_SERVICES.fullmatch(before[-1]) is not None) or (
        isinstance(value, str) and looks_random(value)
    )


def looks_random(text: str) -> bool:
    letters = sum(map(str.isalpha, text))
    digits = sum(map(str.isdigit, text))
    return (
        len(text) >= 20
        and letters >= 3
        and digits >= 3
        and re.fullmatch(r"[\w.~+/=-]+", text) is not None
    )


def redact_text(text: str) -> str:
    """Return `text` with its secrets replaced; all of it, where it is a token as a whole."""
    if text.isspace() or text == HIDDEN:
        return text
    if _SHAPES.fullmatch(text):
        return HIDDEN
    text = _USERINFO.sub(f"{HIDDEN}@", text)
    in_url = "://" in text
    text = _PARAMETER.sub(lambda match: _hide(match, also=_IN_URLS if in_url else ()), text)
    text = _ASSIGNMENT.sub(
        lambda match: f"{match[1]}{match[2]}{_redacted(match[1], match[3])}", text
    )
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    text = _PRIVATE_KEY.sub(rf"\1{HIDDEN}", text)
    return _SHAPES.sub(lambda match: f"{next(filter(None, match.groups()))}{HIDDEN}", text)


def has_hidden_part(text: str) -> bool:
    """Whether `redact_text` has replaced something in this text."""
    return text == HIDDEN or _SHOWN_PART.search(text) is not None


def _hide(match: re.Match[str], *, also: Sequence[list[str]]) -> str:
    mark, name, value = match.groups()
    if _WORDS.findall(name.lower())[-1:] in also:
        value = HIDDEN
    return f"{mark}{name}={_redacted(name, value)}"


def _redacted(name: str, value: str) -> str:
    return HIDDEN if is_secret(name, value) else value


def redact(value: Any) -> Any:
    """Return `value` with every secret in it replaced, whatever it is nested in."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if _hides(key, item) else redact(item) for key, item in value.items()
        }
    if isinstance(value, Sequence):
        return [redact(item) for item in value]
    return value


def _hides(key: Any, item: Any) -> bool:
    return item is not None and not isinstance(item, bool) and is_secret(str(key), item)


def redact_command(command: Sequence[str]) -> list[str]:
    """Return a command line with its secrets replaced: `--hub-token X`, `--hub-token=X`, `--set trl.hub_token=X`."""
    redacted: list[str] = []
    option = ""  # the next word is its value
    for word in command:
        name, equals, value = word.partition("=")
        if option and is_secret(option, word):
            redacted.append(HIDDEN)
        elif equals and is_secret(name, value):
            redacted.append(f"{name}={HIDDEN}")
        else:
            redacted.append(redact_text(word))
        option = word if word.startswith("-") and not equals else ""
    return redacted


def secrets_environment(config: Record) -> dict[str, str]:
    """Return the variable that gives a worker what run.json hides of these settings (JSON values), if anything."""
    hidden = []
    for path, redacted in _leaves(redact(config)):
        value = _at(config, path)
        if value != redacted:
            hidden.append((path, value))
    return {VARIABLE: json.dumps(hidden)} if hidden else {}


def load_config(folder: RunFolder) -> JsonObject:
    """Return the settings in run.json with their secrets put back, where the launcher passed them to this process."""
    config: JsonObject = read_json(folder.config)["config"]
    for path, value in json.loads(os.environ.pop(VARIABLE, "[]")):
        _at(config, path[:-1])[path[-1]] = value
    return config


def check_secrets(config: Record) -> None:
    """Raise ConfigError, with the option to give again, where settings of a run.json have `***` for a secret."""
    for path, value in _leaves(config):
        if isinstance(value, str) and has_hidden_part(value):
            name = ".".join(map(str, path))
            keys = path[1:] if path[0] == "trl" else path
            option = f"--set {name}=..."
            if len(keys) == 1:
                option = f"--{str(keys[0]).replace('_', '-')}"
            raise ConfigError(f"run.json does not keep {name}, a secret; give {option} again")


def _at(config: Any, path: Path) -> Any:
    return reduce(getitem, path, config)


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value
