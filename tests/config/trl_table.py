"""Writes ycore's table of TRL's fields from the installed TRL: `python -m tests.config.trl_table`.

The table holds what each field takes: its type, its default, the words that TRL allows, and a number's limits where
they are plain.
"""

import dataclasses
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ycore.config.algorithms import ALGORITHMS, Algorithm
from ycore.config.trl_fields import BASE, TABLE

_NOT_NEGATIVE, _POSITIVE, _COUNT = {"ge": 0}, {"gt": 0}, {"ge": 1}
_SHARE = {"ge": 0, "le": 1}
LIMITS: Mapping[str, Mapping[str, Any]] = {
    # optimizer and data
    **dict.fromkeys(
        ("learning_rate", "weight_decay", "warmup_steps", "max_grad_norm"), _NOT_NEGATIVE
    ),
    **dict.fromkeys(
        ("neftune_noise_alpha", "router_aux_loss_coef", "dataloader_num_workers"), _NOT_NEGATIVE
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), _SHARE),
    **dict.fromkeys(("adam_epsilon", "logging_steps"), _POSITIVE),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), _COUNT),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "steps_per_generation", "precompute_ref_batch_size"),
        _COUNT,
    ),
    **dict.fromkeys(
        ("save_total_limit", "torch_empty_cache_steps", "max_length", "pad_to_multiple_of"),
        _COUNT,
    ),
    **dict.fromkeys(
        ("dataloader_prefetch_factor", "dataset_num_proc", "ddp_bucket_cap_mb", "ddp_timeout"),
        _COUNT,
    ),
    # sampling
    "temperature": _NOT_NEGATIVE,  # 0 in an evaluation; `config.schema` refuses it where a policy learns
    "repetition_penalty": _POSITIVE,
    "top_p": {"gt": 0, "le": 1},
    "top_k": {"ge": -1},
    "min_p": _SHARE,
    **dict.fromkeys(
        ("num_completions_to_print", "num_iterations", "ref_model_sync_steps"), _COUNT
    ),
    # losses
    **dict.fromkeys(
        ("beta", "epsilon", "epsilon_high", "off_policy_mask_threshold"), _NOT_NEGATIVE
    ),
    **dict.fromkeys(
        ("vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"), _NOT_NEGATIVE
    ),
    **dict.fromkeys(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        _NOT_NEGATIVE,
    ),
    **dict.fromkeys(
        ("desirable_weight", "undesirable_weight", "center_rewards_coefficient"), _NOT_NEGATIVE
    ),
    **dict.fromkeys(
        ("vllm_importance_sampling_clip_min", "max_tool_calling_iterations"), _NOT_NEGATIVE
    ),
    **dict.fromkeys(
        ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"), _POSITIVE
    ),
    **dict.fromkeys(
        ("delta", "sapo_temperature_neg", "sapo_temperature_pos", "discopop_tau"), _POSITIVE
    ),
    **dict.fromkeys(("top_entropy_quantile", "ref_model_mixup_alpha", "ld_alpha"), _SHARE),
    "label_smoothing": {"ge": 0, "le": 0.5},
}

CHOICES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    BASE: {"include_num_input_tokens_seen": ("all", "non_padding", "no"), "pad_to_multiple_of": ("auto",)},
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


def trl_class(algorithm: Algorithm) -> Any:
    """TRL's config class of an algorithm."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    module = f"trl.experimental.{algorithm.name}" if algorithm.experimental else "trl"
    return getattr(importlib.import_module(module), algorithm.trl_config)


def build_table() -> dict[str, Any]:
    """The table of the installed TRL: each class's own fields, and those of `TrainingArguments` once."""
    import transformers
    import trl

    base = dict(_rows(transformers.TrainingArguments))
    fields = {BASE: base}
    for algorithm in ALGORITHMS.values():
        rows = _rows(trl_class(algorithm))
        fields[algorithm.trl_config] = {
            field: row for field, row in rows if base.get(field) != row
        }
    return {"trl": trl.__version__, "transformers": transformers.__version__, "fields": fields}


def _rows(config_class: type[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    hints = get_type_hints(config_class)
    choices = {**CHOICES[BASE], **CHOICES.get(config_class.__name__, {})}
    choices["report_to"] = ("none", "all", *INTEGRATION_TO_CALLBACK)
    for field in dataclasses.fields(config_class):
        hint = hints[field.name]
        members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = dict.fromkeys(kind for kind in map(_kind, members) if kind)
        if "dict" in kinds and field.name not in _PATHS:
            kinds.pop("str", None)
        default = field.default_factory() if callable(field.default_factory) else field.default
        words = [word for member in members for word in _words(member)]
        words = words or list(choices.get(field.name, ()))
        row = {
            "type": " | ".join(kinds),
            "default": default.value if isinstance(default, Enum) else default,
        }
        row |= {"choices": words} if words else {}
        yield field.name, row | ({"limits": LIMITS[field.name]} if field.name in LIMITS else {})


def _is_enum(member: Any) -> bool:
    return isinstance(member, type) and issubclass(member, Enum)


def _words(member: Any) -> tuple[str, ...]:
    """The words that an enumeration or a literal of an annotation allows."""
    if _is_enum(member):
        return tuple(item.value for item in member)
    values = get_args(member) if get_origin(member) is Literal else ()
    return tuple(value for value in values if isinstance(value, str))


def _kind(member: Any) -> str | None:
    """A member of an annotation in the table's words; None where no option could give such a value."""
    if member is NoneType:
        return "None"
    origin = get_origin(member) or member
    if origin is list:
        return "list[float]" if get_args(member) == (float,) else "list[str]"
    return (
        "str"
        if _words(member)
        else origin.__name__
        if origin in (bool, int, float, str, dict)
        else None
    )


def table_text(table: Mapping[str, Any]) -> str:
    """JSON with one field a line, so that a change of TRL is read line by line."""
    classes = [
        f'  "{name}": {{\n'
        + ",\n".join(
            f"   {json.dumps(field)}: {json.dumps(row)}" for field, row in rows.items()
        )
        + "\n  }"
        for name, rows in table["fields"].items()
    ]
    versions = "".join(
        f' "{package}": "{table[package]}",\n' for package in ("trl", "transformers")
    )
    return "{\n" + versions + ' "fields": {\n' + ",\n".join(classes) + "\n }\n}\n"


if __name__ == "__main__":
    TABLE.write_text(table_text(build_table()), encoding="utf-8")
