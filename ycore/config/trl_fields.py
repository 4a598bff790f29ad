"""The fields of TRL's config classes as options: what each takes, and a value of the right type or a refusal.

TRL's config classes as their source spells them: fields, types, defaults and help, read without importing anything.

Not here: reading TRL's source (`trl_source`) and which fields ycore keeps for itself (`owned`).

    fields_of("GRPOConfig")["beta"]                        TrlField(name="beta", type="float", default=0.0, ...)
    coerce(fields_of("GRPOConfig")["bf16"], "false")       False
"""

import ast
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ycore.errors import ConfigError, nearest


class _Computed:
    """The default of a field that its class computes; only the installed class knows it."""

    def __repr__(self) -> str:
        return "computed"


COMPUTED: Final = _Computed()


@dataclass(frozen=True, slots=True)
class SourceField:
    """One field as it is written: the annotation unparsed, and the default where it is a literal."""

    name: str
    annotation: str
    default: Any
    help: str
    owner: str


@cache
def package_folder(package: str) -> Path:
    """Where an installed top-level package lies; it is found, not imported."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(f"the package {package!r} is not installed; `ycore env` says how to mend it")
    return Path(spec.origin).parent


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def read_fields(class_name: str) -> dict[str, SourceField]:
    """Every field of a TRL config class, its bases' first, in the order and with the overriding of dataclasses."""
    return _fields_of_class(_file_of_config(class_name), class_name)


@cache
def read_enum(name: str) -> tuple[str, ...]:
    """The values of one of transformers' enums that annotate its training arguments; empty for anything else."""
    for file in ("trainer_utils.py", "training_args.py", "debug_utils.py"):
        node = _class(_tree(package_folder("transformers") / file), name)
        if node is not None and any(isinstance(base, ast.Name) and base.id.endswith("Enum") for base in node.bases):
            return tuple(_enum_values(node))
    return ()


@cache
def read_reporters() -> tuple[str, ...]:
    """The names that `report_to` knows."""
    tree = _tree(package_folder("transformers") / "integrations" / "integration_utils.py")
    for node in tree.body:
        if isinstance(node, ast.Assign) and _is_name(node.targets[0], "INTEGRATION_TO_CALLBACK"):
            keys = node.value.keys if isinstance(node.value, ast.Dict) else []
            return tuple(str(ast.literal_eval(key)) for key in keys if key is not None)
    return ()


def _file_of_config(class_name: str) -> Path:
    folder = package_folder("trl")
    for file in [*sorted(folder.glob("trainer/*_config.py")), *sorted(folder.glob("experimental/*/*_config.py"))]:
        if f"\nclass {class_name}(" in file.read_text(encoding="utf-8"):
            return file
    raise ConfigError(f"the installed TRL has no config class {class_name}; `ycore env` shows the version ycore needs")


def _fields_of_class(file: Path, class_name: str) -> dict[str, SourceField]:
    node = _class(_tree(file), class_name)
    if node is None:
        raise ConfigError(f"{file.name} defines no class {class_name}; `ycore env` shows the versions ycore needs")
    fields: dict[str, SourceField] = {}
    for base in node.bases:
        if isinstance(base, ast.Name):
            fields |= _fields_of_class(_file_of_base(file, base.id), base.id)
    fields |= {field.name: field for field in _own_fields(node)}
    return fields


def _file_of_base(file: Path, name: str) -> Path:
    """Where a base class comes from, by the import that brought it."""
    if name == "TrainingArguments":
        return package_folder("transformers") / "training_args.py"
    for node in _tree(file).body:
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            parent = file.parents[node.level - 1] if node.level else package_folder("trl").parent
            target = parent.joinpath(*node.module.split("."))
            return target.with_suffix(".py") if target.with_suffix(".py").exists() else _file_of_config(name)
    return file


def _own_fields(node: ast.ClassDef) -> Iterator[SourceField]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            annotation = ast.unparse(statement.annotation)
            if not annotation.startswith("ClassVar"):
                default, text = _default_and_help(statement.value)
                yield SourceField(statement.target.id, annotation, default, text, node.name)


def _default_and_help(value: ast.expr | None) -> tuple[Any, str]:
    if not (isinstance(value, ast.Call) and _is_name(value.func, "field")):
        return _literal(value), ""
    keywords = {keyword.arg: keyword.value for keyword in value.keywords}
    metadata = _literal(keywords.get("metadata"))
    text = str(metadata["help"]) if isinstance(metadata, dict) and "help" in metadata else ""
    factory = keywords.get("default_factory")
    if factory is not None:
        return ([] if _is_name(factory, "list") else {} if _is_name(factory, "dict") else COMPUTED), text
    return _literal(keywords.get("default")), text


def _literal(value: ast.expr | None) -> Any:
    try:
        return COMPUTED if value is None else ast.literal_eval(value)
    except ValueError:
        return COMPUTED


def _class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    found = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return next(found, None)


def _enum_values(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            yield str(statement.value.value)


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


_SIMPLE_KINDS = ("None", "bool", "int", "float", "str", "list", "dict")
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")

# Plain `str` in TRL's annotations, checked there only once a model is loaded; a test holds these to its trainer.
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "include_num_input_tokens_seen": ("all", "non_padding", "no"),
    "pad_to_multiple_of": ("auto",),
}

# The same where another class has a field of that name.
_CHOICES_OF: Mapping[str, Mapping[str, tuple[str, ...]]] = {
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

# What a YAML `true` or `no` means where TRL wants a word.
_BOOL_WORDS: Mapping[str, tuple[str, str]] = {"scale_rewards": ("group", "none")}

# For these a text is a path; for every other mapping a text must be JSON.
_PATHS = ("accelerator_config", "deepspeed", "fsdp_config")


@dataclass(frozen=True, slots=True)
class _Range:
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False

    def holds(self, value: float) -> bool:
        return (value > self.low if self.open_low else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        low = f"{'greater than' if self.open_low else 'at least'} {self.low:g}"
        return low if self.high == math.inf else f"{low} and at most {self.high:g}"


_NOT_NEGATIVE, _POSITIVE, _COUNT = _Range(0), _Range(0, open_low=True), _Range(1)
_RANGES: Mapping[str, _Range] = {
    **dict.fromkeys(
        ("learning_rate", "weight_decay", "warmup_steps", "max_grad_norm", "beta", "epsilon"), _NOT_NEGATIVE
    ),
    **dict.fromkeys(("temperature", "repetition_penalty", "adam_epsilon", "logging_steps", "delta"), _POSITIVE),
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"), _COUNT),
    **dict.fromkeys(("num_iterations", "save_total_limit", "torch_empty_cache_steps"), _COUNT),
    **dict.fromkeys(("min_p", "top_entropy_quantile", "ref_model_mixup_alpha"), _Range(0, 1)),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), _Range(0, 1)),
    **dict.fromkeys(("max_length", "per_device_eval_batch_size", "precompute_ref_batch_size"), _COUNT),
    **dict.fromkeys(("desirable_weight", "undesirable_weight", "center_rewards_coefficient"), _NOT_NEGATIVE),
    "label_smoothing": _Range(0, 0.5),
    "top_p": _Range(0, 1, open_low=True),
    "top_k": _Range(-1),
}


@dataclass(frozen=True, slots=True)
class TrlField:
    """One field of a TRL config class: `default` is `COMPUTED` where only the installed class knows it."""

    name: str
    type: str
    default: Any
    help: str
    owner: str
    kinds: frozenset[str]
    choices: tuple[str, ...]

    @property
    def is_flag(self) -> bool:
        """Whether `--name` alone may stand for true."""
        return "bool" in self.kinds

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")


@cache
def fields_of(class_name: str) -> Mapping[str, TrlField]:
    """Every field of the TRL config class `class_name`, by name, in TRL's order."""
    return MappingProxyType({name: _trl_field(source) for name, source in read_fields(class_name).items()})


def coerce(field: TrlField, value: Any) -> Any:
    """The value in the field's own type, from the text of a command line or a value of a YAML file."""
    try:
        converted = _from_text(field, value.strip()) if isinstance(value, str) else _from_value(field, value)
    except ValueError:
        raise ConfigError(_refusal(field, value)) from None
    _check_choice(field, converted)
    _check_number(field, converted)
    return converted


def _trl_field(source: SourceField) -> TrlField:
    members = [member.strip() for member in source.annotation.split("|")]
    kinds = frozenset(kind for kind in (member.split("[")[0] for member in members) if kind in _SIMPLE_KINDS)
    choices = tuple(value for member in members for value in read_enum(member)) or _choices(source)
    if source.name == "report_to":
        choices = ("none", "all", *read_reporters())
    annotation = source.annotation
    return TrlField(source.name, annotation, source.default, source.help, source.owner, kinds, choices)


def _choices(source: SourceField) -> tuple[str, ...]:
    own = _CHOICES_OF.get(source.owner, {})
    return own[source.name] if source.name in own else _CHOICES.get(source.name, ())


def _from_text(field: TrlField, text: str) -> Any:
    word, kinds = text.lower(), field.kinds
    if text in field.choices:
        return text
    if word in ("none", "null", "") and "None" in kinds:
        return None
    if "bool" in kinds and word in (*_TRUE, *_FALSE):
        return word in _TRUE
    if word in ("true", "false") and field.name in _BOOL_WORDS:
        return _from_value(field, word == "true")
    if ("dict" in kinds and text.startswith("{")) or ("list" in kinds and text.startswith("[")):
        return _from_value(field, json.loads(text))
    if "list" in kinds and ("," in text or "str" not in kinds):
        return _from_value(field, [part.strip() for part in text.split(",")])
    if "int" in kinds or "float" in kinds:
        return _number(field, text)
    if "str" in kinds and ("dict" not in kinds or field.name in _PATHS):
        return text
    raise ValueError


def _number(field: TrlField, text: str) -> Any:
    for kind, convert in (("int", int), ("float", float)):
        if kind in field.kinds:
            try:
                return convert(text)
            except ValueError:
                continue
    if "str" in field.kinds:
        return text
    raise ValueError


def _from_value(field: TrlField, value: Any) -> Any:
    kinds = field.kinds
    if isinstance(value, bool) and "bool" not in kinds:
        return _word_of_bool(field, value)
    if isinstance(value, float) and "float" not in kinds and "int" in kinds and value.is_integer():
        return int(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and not kinds & {"int", "float"}:
        return _from_text(field, str(value))
    if isinstance(value, list) and "list" in kinds:
        return [_list_item(field, item) for item in value]
    kind = "None" if value is None else type(value).__name__
    if kind in kinds or (kind == "int" and "float" in kinds):
        return value
    raise ValueError


def _word_of_bool(field: TrlField, value: bool) -> str:
    """YAML reads `no` and `none`-like words as booleans; give the field its word back."""
    if field.name in _BOOL_WORDS:
        return _BOOL_WORDS[field.name][0 if value else 1]
    if not value and "no" in field.choices:
        return "no"
    raise ValueError


def _list_item(field: TrlField, item: Any) -> Any:
    if "list[float]" in field.type:
        return float(item)
    if isinstance(item, str):
        return item
    raise ValueError


def _check_choice(field: TrlField, value: Any) -> None:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str) and field.choices and item not in field.choices:
            known = ", ".join(field.choices)
            raise ConfigError(f"{field.name} is one of {known}; it is {item!r}{nearest(item, field.choices, limit=1)}")


def _check_number(field: TrlField, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not math.isfinite(value):
        raise ConfigError(f"{field.name} must be a finite number; it is {value}{_example(field)}")
    limits = _RANGES.get(field.name)
    if limits is not None and not limits.holds(value):
        raise ConfigError(f"{field.name} must be {limits}; it is {value:g}{_example(field)}")


def _refusal(field: TrlField, value: Any) -> str:
    words = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}
    words |= {"list": "a comma list", "dict": "JSON like '{\"key\": 1}'", "None": "none"}
    usual = [words[kind] for kind in ("bool", "int", "float", "str", "list", "dict", "None") if kind in field.kinds]
    if field.choices:
        usual = [", ".join(field.choices)]
    return f"{field.name} takes {' or '.join(usual)}; it is {value!r}{_example(field)}"


def _example(field: TrlField) -> str:
    return "" if field.default is COMPUTED else f"; TRL's default is {field.default!r}"
