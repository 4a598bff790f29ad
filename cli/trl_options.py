"""Options that the command does not declare: each is a field of TRL's config, by TRL's name with dashes or underscores.

Not here: what a field's value may be (`ycore.config.trl_fields`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ycore.errors import ConfigError, nearest

# What other trainers call things, for those who come from them.
_FAMILIAR: Mapping[str, str] = {
    "--lr": "--learning-rate",
    "--batch-size": "--prompts-per-step",
    "--epochs": "--steps",
    "--kl-coef": "--beta",
    "--max-new-tokens": "--max-tokens",
    "--max-length": "--max-tokens",
    "--model-name-or-path": "--model",
    "--dataset-name": "--dataset",
    "--dataset-train-split": "--set",
    "--reward-funcs": "--reward",
    "--config": "--recipe",
}


def trl_options(arguments: Sequence[str], *, declared: Iterable[str], trl_class: str = "GRPOConfig") -> dict[str, Any]:
    """The values of undeclared options, still as text; a ConfigError names the nearest option to an unknown one."""
    from ycore.config.trl_fields import fields_of

    known = list(declared)
    fields = fields_of(trl_class) if arguments else {}
    values: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        option, equals, text = token.partition("=")
        if not option.startswith("-") or option == "--":
            raise ConfigError(f"{token!r} is not an option; a value follows its option, e.g. --steps 100")
        name = option.lstrip("-").replace("-", "_")
        if not equals and name not in fields and name.startswith("no_") and _is_flag(fields, name[3:]):
            values[name[3:]] = False
        elif name not in fields or not option.startswith("--"):
            raise _unknown(option, [*known, *(field.option for field in fields.values())])
        elif equals:
            values[name] = text
        elif rest and not rest[0].startswith("--"):
            values[name] = rest.pop(0)
        elif _is_flag(fields, name):
            values[name] = True
        else:
            raise ConfigError(f"{option} needs a value; TRL's default is {fields[name].default!r}")
    return values


def _is_flag(fields: Mapping[str, Any], name: str) -> bool:
    return name in fields and bool(fields[name].is_flag)


def _unknown(option: str, known: Iterable[str]) -> ConfigError:
    known = list(known)
    familiar = _FAMILIAR.get(option)
    familiar = familiar if familiar in known else None
    hint = f"; did you mean {familiar!r}?" if familiar else nearest(option, known, limit=1)
    return ConfigError(f"no option {option}{hint}")
