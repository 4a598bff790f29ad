"""A pipeline as it is declared: stages by name, each a command with its keys, or a loop of stages.

    model: smollm2-135m                 what the first stage begins from
    stages:
      sft:                              a stage called like its command needs no `command`
        dataset: chats.jsonl
      rounds:
        repeat: 3                       a loop: its stages, so many times
        stages:
          pairs: {dataset: prompts.jsonl, rewards: [exact_answer]}
          dpo: {dataset: "${pairs.dataset}"}

From a declaration to steps in a row: loops unrolled, folders given, references replaced by paths. Pure.

Not here: what a reference means and which folder a stage gets (`steps`), what a command's keys may be (`config`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ycore.config.schema import METHODS, RunConfig
from ycore.errors import ConfigError, nearest
from ycore.run.paths import RunFolder

PAIRS = "pairs"
"""The stage kind that is no command: completions are written and scored, and the best and worst become a pair."""

Compare = Literal["best-worst", "all"]

COMMANDS: tuple[str, ...] = (*METHODS, *get_args(RunConfig.model_fields["algorithm"].annotation), PAIRS)
TRAINS_A_POLICY = frozenset(COMMANDS) - {"reward", "eval", PAIRS}

_TOP = ("description", "model", "output", "defaults", "stages")
_OWNED = ("output", "algorithm", "recipe", "resume")


@dataclass(frozen=True, slots=True)
class Stage:
    """One command; `keys` are those of its recipe, references still in them."""

    name: str
    command: str
    keys: Mapping[str, Any]
    compare: Compare = "best-worst"
    """For `pairs`: the best with the worst of a prompt, or every two that differ."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Stages that run one after another, `repeat` times."""

    name: str
    repeat: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """`defaults` are keys for every stage whose command knows them."""

    model: str | None
    output: str
    defaults: Mapping[str, Any]
    stages: tuple[Stage | Loop, ...]


def is_pipeline(recipe: Mapping[str, Any]) -> bool:
    """Whether a recipe's keys are a pipeline's, not one run's."""
    return "stages" in recipe


def parse_pipeline(told: Mapping[str, Any], *, name: str) -> Pipeline:
    """The declaration in a YAML file's keys; ConfigError with the place of what is wrong in it."""
    _known_keys(told, _TOP, "a pipeline")
    stages = tuple(_entry(str(key), value) for key, value in _mapping(told.get("stages"), "stages").items())
    if not stages:
        raise ConfigError("a pipeline needs stages; e.g. stages: {sft: {dataset: chats.jsonl}}")
    names = [stage.name for entry in stages for stage in (entry.stages if isinstance(entry, Loop) else (entry,))]
    for stage in names:
        if names.count(stage) > 1:
            raise ConfigError(f"stage {stage}: there are two of this name; references would not know which")
    return Pipeline(
        model=None if told.get("model") is None else str(told["model"]),
        output=str(told.get("output") or f"runs/{name}"),
        defaults=_mapping(told.get("defaults") or {}, "defaults"),
        stages=stages,
    )


def with_sets(told: Mapping[str, Any], sets: Mapping[str, Any]) -> dict[str, Any]:
    """The keys with `--set` on top; `sft.steps=5` finds its stage wherever it stands."""
    merged = {**told, "stages": dict(_mapping(told.get("stages"), "stages"))}
    for key, value in sets.items():
        first, dot, rest = key.partition(".")
        if not dot and first in _TOP:
            merged[first] = value
        elif first == "defaults":
            merged["defaults"] = _put(merged.get("defaults") or {}, rest.split("."), value)
        else:
            merged["stages"] = _set_in_stages(merged["stages"], first, rest, value)
    return merged


def _set_in_stages(stages: Mapping[str, Any], name: str, rest: str, value: Any) -> dict[str, Any]:
    found = dict(stages)
    if name in found and rest:
        return {**found, name: _put(found[name] or {}, rest.split("."), value)}
    loops = {key: entry for key, entry in found.items() if isinstance(entry, Mapping) and "stages" in entry}
    for key, loop in loops.items():
        if name in loop["stages"] and rest:
            return {**found, key: {**loop, "stages": _set_in_stages(loop["stages"], name, rest, value)}}
    known = [*found, *(inner for loop in loops.values() for inner in loop["stages"])]
    way_out = nearest(name, known) or f"; the stages are {', '.join(known)}"
    said = f"{name}.{rest}" if rest else name
    raise ConfigError(f"--set {said}: say STAGE.KEY=VALUE, of a stage that there is{way_out}")


def _put(keys: Any, path: list[str], value: Any) -> Any:
    """The keys with one of them replaced; a number is a place in a list."""
    if isinstance(keys, list):
        if not path[0].isdigit() or int(path[0]) >= len(keys):
            raise ConfigError(f"--set: there is no element {path[0]!r}; the list has {len(keys)}, counted from 0")
        place = int(path[0])
        return [*keys[:place], _put(keys[place], path[1:], value) if path[1:] else value, *keys[place + 1 :]]
    before = dict(keys) if isinstance(keys, Mapping) else {}
    return {**before, path[0]: _put(before.get(path[0]) or {}, path[1:], value) if path[1:] else value}


def _entry(name: str, value: Any) -> Stage | Loop:
    keys = _mapping({} if value is None else value, f"stage {name}")
    if "stages" not in keys:
        return _stage(name, keys)
    _known_keys(keys, ("repeat", "stages"), f"loop {name}")
    repeat = keys.get("repeat")
    if not isinstance(repeat, int) or isinstance(repeat, bool) or repeat < 1:
        raise ConfigError(f"loop {name}: repeat must be a whole number of rounds, 1 or more; it is {repeat!r}")
    inner = _mapping(keys["stages"], f"loop {name}: stages")
    if not inner:
        raise ConfigError(f"loop {name}: it needs stages")
    return Loop(name, repeat, tuple(_stage(str(key), value or {}) for key, value in inner.items()))


def _stage(name: str, value: Any) -> Stage:
    keys = dict(_mapping(value, f"stage {name}"))
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"stage {name!r}: a name is letters, digits, - and _; it becomes a folder's")
    command = str(keys.pop("command", name))
    if command not in COMMANDS:
        way_out = nearest(command, COMMANDS) or f"; e.g. {name}: {{command: sft, ...}}"
        raise ConfigError(f"stage {name}: its command is one of {', '.join(COMMANDS)}; it is {command!r}{way_out}")
    for key in _OWNED:
        if key in keys:
            raise ConfigError(f"stage {name}: {key} is the pipeline's own; take it out")
    compare: Any = keys.pop("compare", "best-worst") if command == PAIRS else "best-worst"
    if compare not in get_args(Compare):
        raise ConfigError(f"stage {name}: compare is {' or '.join(get_args(Compare))}; it is {compare!r}")
    return Stage(name, command, keys, compare)


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} must be a mapping of keys; it is {value!r}")
    return dict(value)


def _known_keys(told: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    for key in told:
        if key not in known:
            raise ConfigError(f"{what} has no key {key}{nearest(str(key), known) or '; known are ' + ', '.join(known)}")


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
