"""From a step's keys to the configuration of its run, by the same rules as the command's recipe.

Not here: the rules (`config.overrides`), and the checks that need a disk, which the commands own.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ycore.config.kinds import RUN, AnyConfig, is_tuning, kind_of, tune_kind
from ycore.config.overrides import resolve_as
from ycore.errors import RunError, UserError
from ycore.pipeline.declaration import PAIRS, Pipeline
from ycore.pipeline.steps import Step

_SETS: Mapping[str, Mapping[str, str]] = {"rloo": {"preset": "rloo"}}
"""What a command says by its name."""


def config_of(step: Step, pipeline: Pipeline) -> AnyConfig:
    """The step's run; a UserError that names the stage where a key or a value cannot be."""
    algorithm = "eval" if step.command == PAIRS else step.command
    fields = kind_of(algorithm).config.model_fields
    recipe = {key: value for key, value in pipeline.defaults.items() if key in fields} | dict(step.keys)
    own = {"algorithm": algorithm, "output": str(step.folder), **_SETS.get(algorithm, {})}
    with in_stage(step):
        if is_tuning(algorithm):
            return resolve_as(tune_kind(algorithm), recipe=recipe, options=own)
        return resolve_as(RUN, recipe=recipe, options=own)


def stood_in(step: Step) -> Step | None:
    """The step with models that are not made yet replaced by what they begin from; None where that cannot be."""
    missing = {path: origin for path, origin in step.stands_for.items() if not Path(path).exists()}
    known = {path: origin for path, origin in missing.items() if origin is not None}
    if len(known) < len(missing):
        return None
    return replace(step, keys=_swapped(step.keys, known))


@contextmanager
def in_stage(step: Step) -> Iterator[None]:
    """Puts the stage's name before the message of an error that is raised inside."""
    try:
        yield
    except (UserError, RunError) as error:
        raise type(error)(f"stage {step.name}: {error}") from error


def _swapped(value: Any, paths: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for path, other in paths.items():
            value = other if value == path else value
        return value
    if isinstance(value, Mapping):
        return {key: _swapped(item, paths) for key, item in value.items()}
    return [_swapped(item, paths) for item in value] if isinstance(value, list) else value
