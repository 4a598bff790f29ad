"""A YAML file that a person wrote, read as a mapping; whatever is wrong with it in one line.

Not here: what its keys mean (`recipes`, `judging.loading`).
"""

from pathlib import Path
from typing import Any

from ycore.errors import ConfigError, UserError, nearest

SUFFIXES = (".yaml", ".yml")


def read_yaml_file(file: Path, *, what: str, way_out: str, error: type[UserError] = ConfigError) -> str:
    """The text of a file; `what` it is, e.g. `recipe`, and a `way_out` where there is none stand in the error."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = [path.name for path in file.parent.glob("*") if path.suffix in SUFFIXES]
        raise error(f"no such {what} file: {file}{nearest(file.name, siblings, limit=1) or f'; {way_out}'}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"the {what} {file} cannot be read as text: {problem}") from None


def parse_yaml(text: str, *, what: str, example: str, error: type[UserError] = ConfigError) -> dict[str, Any]:
    """The keys of a text; `what` it is, e.g. `the recipe quickstart`, and an `example` of a key stand in the error."""
    import yaml

    try:
        told = yaml.safe_load(text)
    except yaml.MarkedYAMLError as problem:
        line = f", line {problem.problem_mark.line + 1}" if problem.problem_mark else ""
        raise error(f"{what}{line}: not YAML: {problem.problem or problem.context}") from None
    except yaml.YAMLError as problem:
        raise error(f"{what} is not YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(told, dict) or not all(isinstance(key, str) for key in told):
        kind = "empty" if told is None else f"a {type(told).__name__}"
        raise error(f"{what} must be a mapping of keys such as `{example}: ...`; it is {kind}")
    return told
