"""The fields of TRL's config classes as options: what each takes, and a value of the right type or a refusal.

    fields_of("GRPOConfig")["beta"]                    TrlField(name="beta", type="float", default=0.0, choices=())
    coerce(fields_of("GRPOConfig")["bf16"], "false")   False

They are read from `trl_fields.json`, because importing TRL takes seconds. After a change of the pinned TRL,
`python -m tests.config.trl_table` writes that table again; a test compares it with the installed TRL.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from ycore.errors import ConfigError, nearest

TABLE = Path(__file__).with_suffix(".json")
BASE = "TrainingArguments"


@dataclass(frozen=True, slots=True)
class TrlField:
    """One field of a TRL config class. `type` is in the words of the table, such as `int | str | None`."""

    name: str
    type: str
    default: Any
    choices: tuple[str, ...] = ()
    limits: Mapping[str, float] = dataclass_field(default_factory=dict)
    """Bounds of a number in pydantic's words: `ge`, `gt`, `le`."""

    @property
    def kinds(self) -> list[str]:
        return self.type.split(" | ")

    @property
    def is_flag(self) -> bool:
        """Whether `--name` alone means true."""
        return "bool" in self.kinds

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")


@cache
def fields_of(class_name: str) -> Mapping[str, TrlField]:
    """Every field of the TRL config class `class_name`, by name, in TRL's order."""
    classes = json.loads(TABLE.read_text(encoding="utf-8"))["fields"]
    if class_name not in classes:
        raise ConfigError(
            f"{TABLE.name} has no {class_name}; write it again with `python -m tests.config.trl_table`"
        )
    fields = {}
    for name, row in {**classes[BASE], **classes[class_name]}.items():
        choices = tuple(row.get("choices", ()))
        fields[name] = TrlField(
            name, row["type"], row["default"], choices, row.get("limits", {})
        )
    return MappingProxyType(fields)


_TYPES: Mapping[str, Any] = {
    "None": None,
    "int": int,
    "float": float,
    "list[float]": list[float],
    "list[str]": list[str],
    "dict": dict[str, Any],
    "str": str,
}
"""Types in the order in which a value is tried; a `bool` is taken unchanged."""

_BOUNDS = {"ge": "at least", "gt": "greater than", "le": "at most"}

# What a YAML `true` or `no` means where TRL wants a word.
_WORDS_OF_BOOL: Mapping[str, Mapping[bool, str]] = {
    "scale_rewards": {True: "group", False: "none"}
}


def coerce(field: TrlField, value: Any) -> Any:
    """The text of a command line, or a value of a YAML file, in the field's own type; ConfigError where it has none."""
    from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

    config = ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=True)
    parsed = _parse(field, value.strip()) if isinstance(value, str) else value
    if isinstance(parsed, bool):
        return parsed if field.is_flag else _word_of(field, parsed)
    if isinstance(parsed, str) and parsed in field.choices:
        return parsed
    for kind in _TYPES:
        if kind in field.kinds:
            limits: Any = field.limits if kind in ("int", "float") else {}
            limited: Any = Annotated[_TYPES[kind], Field(**limits)]
            try:
                converted = TypeAdapter(limited, config=config).validate_python(parsed)
            except ValidationError as problem:
                _check_number(field, value, problem.errors(include_url=False)[0]["type"])
            else:
                _check_choices(field, converted)
                return converted
    raise _refusal(field, value)


def _parse(field: TrlField, text: str) -> Any:
    """The text of a command line as what a YAML file would hold for this field."""
    word, kinds = text.lower(), field.kinds
    if text in field.choices:
        return text
    if word in ("none", "null", "") and "None" in kinds:
        return None
    if field.is_flag and word in ("true", "yes", "on", "false", "no", "off"):
        return word in ("true", "yes", "on")
    if word in ("true", "false") and field.name in _WORDS_OF_BOOL:
        return word == "true"
    is_list = "list[str]" in kinds or "list[float]" in kinds
    if ("dict" in kinds and text.startswith("{")) or (is_list and text.startswith("[")):
        try:
            return json.loads(text)
        except ValueError:
            raise _refusal(field, text) from None
    return (
        [part.strip() for part in text.split(",")]
        if is_list and ("," in text or "str" not in kinds)
        else text
    )


def _word_of(field: TrlField, value: bool) -> str:
    """YAML reads `no` and `none`-like words as booleans; give the field its word back."""
    if field.name in _WORDS_OF_BOOL:
        return _WORDS_OF_BOOL[field.name][value]
    if not value and "no" in field.choices:
        return "no"
    raise _refusal(field, value)


def _check_choices(field: TrlField, value: Any) -> None:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str) and field.choices and item not in field.choices:
            known = ", ".join(field.choices)
            raise ConfigError(
                f"{field.name} is one of {known}; it is {item!r}{nearest(item, field.choices, limit=1)}"
            )


def _check_number(field: TrlField, value: Any, error_type: str) -> None:
    """Refuse a number that is one, but not a possible one."""
    rule = "a finite number" if error_type == "finite_number" else ""
    if error_type in ("greater_than", "greater_than_equal", "less_than_equal"):
        rule = " and ".join(
            f"{_BOUNDS[bound]} {limit:g}" for bound, limit in field.limits.items()
        )
    if rule:
        raise ConfigError(
            f"{field.name} must be {rule}; it is {value}; TRL's default is {field.default!r}"
        )


def _refusal(field: TrlField, value: Any) -> ConfigError:
    words = {
        "bool": "true or false",
        "int": "a whole number",
        "float": "a number",
        "str": "text",
    }
    words |= {
        "list[float]": "a comma list",
        "list[str]": "a comma list",
        "dict": "JSON like '{\"key\": 1}'",
    }
    taken = [text for kind, text in (words | {"None": "none"}).items() if kind in field.kinds]
    usual = ", ".join(field.choices) if field.choices else " or ".join(taken)
    return ConfigError(
        f"{field.name} takes {usual}; it is {value!r}; TRL's default is {field.default!r}"
    )
