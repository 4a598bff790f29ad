"""The fields of TRL's config classes as options: what each takes, and a value of the right type or a refusal.

    fields_of("GRPOConfig")["beta"]                    TrlField(name="beta", type="float", default=0.0, choices=())
    coerce(fields_of("GRPOConfig")["bf16"], "false")   False

They are read from `trl_fields.json`, because importing TRL takes seconds. After a change of the pinned TRL,
`python -m ycore.config.trl_fields` writes that table again; a test compares it with the installed TRL.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from ycore.config.algorithms import ALGORITHMS
from ycore.errors import ConfigError, nearest

TABLE = Path(__file__).with_suffix(".json")
_BASE = "TrainingArguments"


@dataclass(frozen=True, slots=True)
class TrlField:
    """One field of a TRL config class. `type` is in the words of the table, such as `int | str | None`."""

    name: str
    type: str
    default: Any
    choices: tuple[str, ...] = ()

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
    classes = _table()["fields"]
    if class_name not in classes:
        raise ConfigError(f"{TABLE.name} has no {class_name}; write it again with `python -m ycore.config.trl_fields`")
    rows = {**classes[_BASE], **classes[class_name]}
    return MappingProxyType(
        {name: TrlField(name, row["type"], row["default"], tuple(row.get("choices", ()))) for name, row in rows.items()}
    )


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


# -- values --------------------------------------------------------------------------------------------------------

_TYPES: Mapping[str, Any] = {
    "None": None,
    "int": int,
    "float": float,
    "list[float]": list[float],
    "list[str]": list[str],
    "dict": dict[str, Any],
    "str": str,
}
"""In the order in which a value is tried; `bool` is taken as it is."""

_NOT_NEGATIVE, _POSITIVE, _COUNT = {"ge": 0}, {"gt": 0}, {"ge": 1}
_SHARE = {"ge": 0, "le": 1}
RANGES: Mapping[str, Mapping[str, Any]] = {
    # optimizer and data
    **dict.fromkeys(("learning_rate", "weight_decay", "warmup_steps", "max_grad_norm"), _NOT_NEGATIVE),
    **dict.fromkeys(("neftune_noise_alpha", "router_aux_loss_coef", "dataloader_num_workers"), _NOT_NEGATIVE),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), _SHARE),
    **dict.fromkeys(("adam_epsilon", "logging_steps"), _POSITIVE),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), _COUNT),
    **dict.fromkeys(("gradient_accumulation_steps", "steps_per_generation", "precompute_ref_batch_size"), _COUNT),
    **dict.fromkeys(("save_total_limit", "torch_empty_cache_steps", "max_length", "pad_to_multiple_of"), _COUNT),
    **dict.fromkeys(("dataloader_prefetch_factor", "dataset_num_proc", "ddp_bucket_cap_mb", "ddp_timeout"), _COUNT),
    # sampling
    **dict.fromkeys(("temperature", "repetition_penalty"), _POSITIVE),
    "top_p": {"gt": 0, "le": 1},
    "top_k": {"ge": -1},
    "min_p": _SHARE,
    **dict.fromkeys(("num_completions_to_print", "num_iterations", "ref_model_sync_steps"), _COUNT),
    # losses
    **dict.fromkeys(("beta", "epsilon", "epsilon_high", "off_policy_mask_threshold"), _NOT_NEGATIVE),
    **dict.fromkeys(("vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"), _NOT_NEGATIVE),
    **dict.fromkeys(("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"), _NOT_NEGATIVE),
    **dict.fromkeys(("desirable_weight", "undesirable_weight", "center_rewards_coefficient"), _NOT_NEGATIVE),
    **dict.fromkeys(("vllm_importance_sampling_clip_min", "max_tool_calling_iterations"), _NOT_NEGATIVE),
    **dict.fromkeys(("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"), _POSITIVE),
    **dict.fromkeys(("delta", "sapo_temperature_neg", "sapo_temperature_pos", "discopop_tau"), _POSITIVE),
    **dict.fromkeys(("top_entropy_quantile", "ref_model_mixup_alpha", "ld_alpha"), _SHARE),
    "label_smoothing": {"ge": 0, "le": 0.5},
}

_BOUNDS = {"ge": "at least", "gt": "greater than", "le": "at most"}
_BOUND_ERRORS = ("greater_than", "greater_than_equal", "less_than_equal")

_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")

# What a YAML `true` or `no` means where TRL wants a word.
_WORDS_OF_BOOL: Mapping[str, Mapping[bool, str]] = {"scale_rewards": {True: "group", False: "none"}}


def coerce(field: TrlField, value: Any) -> Any:
    """The value in the field's own type.

    Args:
        value: the text of a command line, or a value of a YAML file.

    Raises:
        ConfigError: the value has another type, is out of range, or is none of the choices.
    """
    from pydantic import ValidationError

    parsed = _parse(field, value.strip()) if isinstance(value, str) else value
    if isinstance(parsed, bool):
        return parsed if field.is_flag else _word_of(field, parsed)
    if isinstance(parsed, str) and parsed in field.choices:
        return parsed
    for kind in _TYPES:
        if kind in field.kinds:
            try:
                converted = _validate(field, kind, parsed)
            except ValidationError as problem:
                _check_number(field, value, problem.errors(include_url=False)[0]["type"])
            else:
                _check_choices(field, converted)
                return converted
    raise _refusal(field, value)


def _validate(field: TrlField, kind: str, value: Any) -> Any:
    from pydantic import ConfigDict, Field, TypeAdapter

    limits = RANGES.get(field.name, {}) if kind in ("int", "float") else {}
    limited: Any = Annotated[_TYPES[kind], Field(**limits)]
    config = ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=True)
    return TypeAdapter(limited, config=config).validate_python(value)


def _parse(field: TrlField, text: str) -> Any:
    """The text of a command line as what a YAML file would hold for this field."""
    word, kinds = text.lower(), field.kinds
    if text in field.choices:
        return text
    if word in ("none", "null", "") and "None" in kinds:
        return None
    if field.is_flag and word in (*_TRUE, *_FALSE):
        return word in _TRUE
    if word in ("true", "false") and field.name in _WORDS_OF_BOOL:
        return word == "true"
    is_list = "list[str]" in kinds or "list[float]" in kinds
    if ("dict" in kinds and text.startswith("{")) or (is_list and text.startswith("[")):
        try:
            return json.loads(text)
        except ValueError:
            raise _refusal(field, text) from None
    return [part.strip() for part in text.split(",")] if is_list and ("," in text or "str" not in kinds) else text


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
            raise ConfigError(f"{field.name} is one of {known}; it is {item!r}{nearest(item, field.choices, limit=1)}")


def _check_number(field: TrlField, value: Any, error_type: str) -> None:
    """Refuse a number that is one, but not a possible one."""
    rule = "a finite number" if error_type == "finite_number" else ""
    if error_type in _BOUND_ERRORS:
        rule = " and ".join(f"{_BOUNDS[bound]} {limit:g}" for bound, limit in RANGES[field.name].items())
    if rule:
        raise ConfigError(f"{field.name} must be {rule}; it is {value}; TRL's default is {field.default!r}")


def _refusal(field: TrlField, value: Any) -> ConfigError:
    words = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}
    words |= {"list[float]": "a comma list", "list[str]": "a comma list", "dict": "JSON like '{\"key\": 1}'"}
    taken = [text for kind, text in (words | {"None": "none"}).items() if kind in field.kinds]
    usual = ", ".join(field.choices) if field.choices else " or ".join(taken)
    return ConfigError(f"{field.name} takes {usual}; it is {value!r}; TRL's default is {field.default!r}")


# -- the table -----------------------------------------------------------------------------------------------------

CHOICES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    _BASE: {"include_num_input_tokens_seen": ("all", "non_padding", "no"), "pad_to_multiple_of": ("auto",)},
    "GRPOConfig": {
        "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
        "scale_rewards": ("group", "batch", "none"),
        "importance_sampling_level": ("token", "sequence"),
        "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
        "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    },
    "SFTConfig": {
        "loss_type": ("nll", "dft", "chunked_nll"),
        "packing_strategy": ("bfd", "bfd_split", "wrapped"),
        "truncation_mode": ("keep_start", "keep_end"),
    },
    "DPOConfig": {
        "loss_type": (
            "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
            "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
        ),
        "f_divergence_type": ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"),
        "truncation_mode": ("keep_start", "keep_end"),
    },
    "KTOConfig": {"loss_type": ("kto", "apo_zero_unpaired")},
}  # fmt: skip
"""The words of fields that TRL annotates as `str` and checks only once a model is loaded."""

_PATHS = ("accelerator_config", "deepspeed", "fsdp_config")
"""Mappings whose text is a path; the text of every other mapping is JSON."""


def build_table() -> dict[str, Any]:
    """The table of the installed TRL: each class's own fields, and those of `TrainingArguments` once."""
    import transformers
    import trl

    base = dict(_rows(transformers.TrainingArguments))
    fields = {_BASE: base}
    for name in dict.fromkeys(row.trl_config for row in ALGORITHMS.values()):
        fields[name] = {field: row for field, row in _rows(getattr(trl, name)) if base.get(field) != row}
    return {"trl": trl.__version__, "transformers": transformers.__version__, "fields": fields}


def _rows(config_class: type[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    hints = get_type_hints(config_class)
    choices = {**CHOICES[_BASE], **CHOICES.get(config_class.__name__, {})}
    choices["report_to"] = ("none", "all", *INTEGRATION_TO_CALLBACK)
    for field in dataclasses.fields(config_class):
        hint = hints[field.name]
        members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = dict.fromkeys(kind for kind in map(_kind, members) if kind)
        if "dict" in kinds and field.name not in _PATHS:
            kinds.pop("str", None)
        default = field.default_factory() if callable(field.default_factory) else field.default
        words = [item.value for member in members if _is_enum(member) for item in member]
        words = words or list(choices.get(field.name, ()))
        row = {"type": " | ".join(kinds), "default": default.value if isinstance(default, Enum) else default}
        yield field.name, row | ({"choices": words} if words else {})


def _is_enum(member: Any) -> bool:
    return isinstance(member, type) and issubclass(member, Enum)


def _kind(member: Any) -> str | None:
    """A member of an annotation in the table's words; None where no option could give such a value."""
    if member is NoneType:
        return "None"
    origin = get_origin(member) or member
    if origin is list:
        return "list[float]" if get_args(member) == (float,) else "list[str]"
    return "str" if _is_enum(member) else origin.__name__ if origin in (bool, int, float, str, dict) else None


def table_text(table: Mapping[str, Any]) -> str:
    """JSON with one field a line, so that a change of TRL is read line by line."""
    classes = [
        f'  "{name}": {{\n'
        + ",\n".join(f"   {json.dumps(field)}: {json.dumps(row)}" for field, row in rows.items())
        + "\n  }"
        for name, rows in table["fields"].items()
    ]
    versions = "".join(f' "{package}": "{table[package]}",\n' for package in ("trl", "transformers"))
    return "{\n" + versions + ' "fields": {\n' + ",\n".join(classes) + "\n }\n}\n"


if __name__ == "__main__":
    TABLE.write_text(table_text(build_table()), encoding="utf-8")
