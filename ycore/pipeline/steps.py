"""From a declaration to steps in a row: loops unrolled, folders given, references replaced by paths. Pure.

`${STAGE.model}`, `${STAGE.dataset}` and `${STAGE.output}` are what a stage makes: of its latest run, so that in a loop
an earlier stage is this round's and a later one the last round's. `${round}` counts a loop's rounds from 1, and
`${model}` is the policy as it is by then. A stage without `model` begins from that policy, too.

Not here: what a stage does with its keys (`config`), and running it (`run`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ycore.errors import ConfigError, nearest
from ycore.pipeline.declaration import PAIRS, TRAINS_A_POLICY, Compare, Loop, Pipeline, Stage
from ycore.run_folder.paths import RunFolder

PAIRS_FILE = "pairs.jsonl"
_REFERENCE = re.compile(r"\$\{([^}]*)\}")


@dataclass(frozen=True, slots=True)
class Step:
    """One run of one stage.

    `stands_for` has every path in `keys` that an earlier step makes: the model it began from, which can be checked in
    its place until it is there, or None where nothing can.
    """

    name: str
    command: str
    keys: Mapping[str, Any]
    folder: Path
    stands_for: Mapping[str, str | None] = field(default_factory=dict)
    compare: Compare = "best-worst"

    @property
    def makes(self) -> dict[str, str]:
        """What a later stage can name, and where it lies."""
        made = {"output": str(self.folder)}
        if self.command == PAIRS:
            made["dataset"] = str(self.folder / PAIRS_FILE)
        elif self.command in TRAINS_A_POLICY or self.command == "reward":
            made["model"] = str(RunFolder(self.folder).model)
        return made


def steps_of(pipeline: Pipeline) -> list[Step]:
    """Every run of the pipeline, in its order; ConfigError for a reference to what is not there by then."""
    expansion = _Expansion(pipeline)
    return [expansion.step(stage, count) for stage, count in _runs(pipeline)]


def _runs(pipeline: Pipeline) -> Iterator[tuple[Stage, int | None]]:
    for entry in pipeline.stages:
        if isinstance(entry, Loop):
            for count in range(1, entry.repeat + 1):
                yield from ((stage, count) for stage in entry.stages)
        else:
            yield entry, None


class _Expansion:
    """What is there by now: the latest run of every stage, and the policy."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._latest: dict[str, Step] = {}
        self._policy = pipeline.model
        self._origins: dict[str, str | None] = {}
        self._used: set[str] = set()

    def step(self, stage: Stage, count: int | None) -> Step:
        name = stage.name if count is None else f"{stage.name}-{count}"
        self._used = set()
        keys = self._replaced(dict(stage.keys), stage, count)
        if "model" not in keys:
            if self._policy is None:
                raise ConfigError(f"stage {stage.name}: it has no model, and no stage before it makes one; say model:")
            keys["model"] = self._policy
            self._used.add(self._policy)
        folder = Path(self._pipeline.output) / name
        inputs = {path: self._origins[path] for path in sorted(self._used) if path in self._origins}
        step = Step(name, stage.command, keys, folder, inputs, stage.compare)
        self._remember(stage, step)
        return step

    def _remember(self, stage: Stage, step: Step) -> None:
        self._latest[stage.name] = step
        model = str(step.keys["model"])
        for kind, path in step.makes.items():
            is_policy = kind == "model" and step.command in TRAINS_A_POLICY
            self._origins[path] = self._origins.get(model, model) if is_policy else None
            if is_policy:
                self._policy = path

    def _replaced(self, value: Any, stage: Stage, count: int | None) -> Any:
        if value == "${round}" and count is not None:
            return count  # a number stays one
        if isinstance(value, str):
            return _REFERENCE.sub(lambda match: self._noted(match[1].strip(), stage, count), value)
        if isinstance(value, Mapping):
            return {key: self._replaced(item, stage, count) for key, item in value.items()}
        return [self._replaced(item, stage, count) for item in value] if isinstance(value, list) else value

    def _noted(self, reference: str, stage: Stage, count: int | None) -> str:
        meant = self._meant(reference, stage, count)
        self._used.add(meant)
        return meant

    def _meant(self, reference: str, stage: Stage, count: int | None) -> str:
        said = f"stage {stage.name}: ${{{reference}}}"
        if reference == "round":
            if count is None:
                raise ConfigError(f"{said} counts the rounds of a loop, and this stage is in none")
            return str(count)
        if reference == "model":
            if self._policy is None:
                raise ConfigError(f"{said}: there is no model by then; say model: at the top of the file")
            return self._policy
        name, _, kind = reference.partition(".")
        if name not in self._latest:
            way_out = nearest(name, self._latest) or f"; by then there are {', '.join(self._latest) or 'no stages'}"
            raise ConfigError(f"{said} names no stage that has run by then{way_out}")
        made = self._latest[name].makes
        if kind not in made:
            raise ConfigError(f"{said}: a {self._latest[name].command} stage makes {', '.join(made)}; say one of them")
        return made[kind]
