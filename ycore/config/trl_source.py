"""TRL's config classes as their source spells them: fields, types, defaults and help, read without importing anything.

Not here: what a value may be (`trl_fields`). Importing TRL takes seconds and torch; parsing three files takes
a tenth of one, so that a wrong option is refused at once.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ycore.errors import ConfigError


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
