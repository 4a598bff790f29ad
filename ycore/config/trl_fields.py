"""The fields of TRL's config classes as options: what each takes, and a value of the right type or a refusal.

    fields_of("GRPOConfig")["beta"].default            0.0
    coerce(fields_of("GRPOConfig")["bf16"], "false")   False

They are read from `trl_fields.json`, because importing TRL takes seconds. After a change of the pinned TRL,
`python -m tests.config.trl_table` writes that table again; a test compares it with the installed TRL.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union

from ycore.errors import ConfigError, must_be
from ycore.types import Record

TABLE = Path(__file__).with_suffix(".json")
BASE = "TrainingArguments"


class TrlField(NamedTuple):
    """One field of a TRL config class. `type` is in the words of the table, such as `int | str | None`."""

    name: str
    type: str
    default: Any
    choices: tuple[str, ...]
    limits: Record
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
    fields = {}
    for name, row in {**classes[BASE], **classes[class_name]}.items():
        choices = tuple(row.get("choices", ()))
        fields[name] = TrlField(
            name, row["type"], row["default"], choices, row.get("limits", {})
        )
    return fields


OWN_DEFAULTS: Record = {
    "logging_steps": 1,  # TRL's 10 leaves short runs without a curve
    "report_to": "none",
    "save_total_limit": 2,
    "disable_tqdm": True,
}
"""ycore's defaults of fields for which TRL has others."""


@cache
def familiar_options() -> Record:
    """The words that ycore has for options of other trainers, and for fields of TRL's that it does not take."""
    import yaml

    loaded: Record = yaml.safe_load(
        TABLE.with_name("familiar_options.yaml").read_text(encoding="utf-8")
    )
    return loaded


_WORDS_OF_BOOL = {"scale_rewards": {True: "group", False: "none"}}
"""Words of TRL's that YAML reads as `true` or `false`; elsewhere `no` is the word `no`."""


def coerce(field: TrlField, value: Any) -> Any:
    """The text of a command line, or a value of a YAML file, in the field's own type; ConfigError where it has none."""
    from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

    parsed = _parse(field, value.strip()) if isinstance(value, str) else value
    if isinstance(parsed, bool) and not field.is_flag:
        parsed = _WORDS_OF_BOOL.get(field.name, {False: "no"}).get(parsed, str(parsed))
    word: Any = Literal[field.choices] if field.choices else str
    limits = Field(**field.limits)
    types = {
        "None": None,
        "bool": Annotated[bool, Field(strict=True)],
        "int": Annotated[int, limits],
        "float": Annotated[float, limits],
        "list[float]": list[float],
        "list[str]": list[word],
        "dict": dict[str, Any],
        "str": word,
    }
    annotation: Any = Union[tuple(types[kind] for kind in field.kinds)]  # noqa: UP007
    config = ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=True)
    try:
        return TypeAdapter(annotation, config=config).validate_python(parsed)
    except ValidationError as problem:
        rule = must_be(field.name, problem.errors(include_url=False))
        if "dict" in field.kinds:
            rule += "; a mapping is JSON, such as '{\"key\": 1}'"
        elif not rule.endswith("?"):
            rule += f"; TRL's default is {field.default!r}"
        raise ConfigError(rule) from None


def _parse(field: TrlField, text: str) -> Any:
    """The text of a command line as what a YAML file would hold for this field."""
    word = text.lower()
    kinds = field.kinds
    is_list = "list[str]" in kinds or "list[float]" in kinds
    if text in field.choices:
        return [text] if is_list and "str" not in kinds else text
    if word in ("none", "null", "") and "None" in kinds:
        return None
    if field.is_flag and word in ("true", "yes", "on", "false", "no", "off"):
        return word in ("true", "yes", "on")
    if word in ("true", "false") and field.name in _WORDS_OF_BOOL:
        return word == "true"
    if ("dict" in kinds and text.startswith("{")) or (is_list and text.startswith("[")):
        with suppress(ValueError, RecursionError):
            return json.loads(text)
    return (
        [part.strip() for part in text.split(",")]
        if is_list and ("," in text or "str" not in kinds)
        else text
    )
